"""The writer thread of a PostgreSQL store: it makes all requests that wait in one transaction, with one commit.

Large gradients are staged before, by a pool of threads: no lock is held while their bytes move.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import numpy as np
from psycopg.errors import CheckViolation

from service.buffers import failpoints
from service.buffers.batches import Batches
from service.buffers.gradients import Gradient
from service.buffers.parts import make
from service.buffers.perform import Outcome, Request, resolved
from service.buffers.postgres.batch import Batch, StagedLostError, Submission, large_arrays, work_of
from service.buffers.postgres.blobs import Blobs
from service.buffers.postgres.changes import Changes, Found
from service.buffers.postgres.compactor import Fold
from service.buffers.postgres.connections import Database
from service.buffers.postgres.deadlines import Deadlines
from service.buffers.postgres.deltas import Turns, nbytes_of
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.failures import retried, survived
from service.buffers.postgres.janitor import Janitor
from service.buffers.postgres.schema import make_partitions
from service.buffers.postgres.statements import MOST_DUE, STAGE
from service.buffers.postgres.transaction import PostgresTransaction, Trial, WritesError
from service.buffers.room import Most
from service.buffers.store import Allocate, Committed, after_commit, settle, without_traceback
from service.engine.pool import Pool
from service.errors import GradserveError, StoreFailed, StoreFull

MOST_IN_BATCH = 48
"""Requests in one transaction. Each key has a lock, and PostgreSQL sets 64 locks aside for each connection."""

MOST_BYTES_IN_BATCH = 64 << 20
"""Bytes after which a transaction takes no more requests: PostgreSQL refuses an array of 1 GB."""

LONG_SECONDS = 0.5
"""A namespace rests after a transaction that took longer: a commit alone may take long over a network."""

STAGING_THREADS = 2
"""Threads that stage gradients: two keep the database busy."""

STAGED_SECONDS = 3600.0
"""How long a staged blob that no transaction took is kept."""


class Writer:
    """The writer thread and the threads that stage. They begin at once, and end with `close`."""

    def __init__(
        self,
        database: Database,
        next_id: Callable[[], int],
        blobs: Blobs,
        *,
        allocate: Allocate,
        key_seconds: float,
        committed: Committed,
        changed: Callable[[], None],
        janitor: Janitor,
        most: Most,
        fold: Callable[[Fold], None],
        turns: Turns,
    ) -> None:
        self._database, self._next_id, self._allocate, self._key_seconds = database, next_id, allocate, key_seconds
        self._committed, self._changed, self._janitor, self._most = committed, changed, janitor, most
        self._fold, self._turns, self._blobs, self._deadlines = fold, turns, blobs, Deadlines(database)
        self._connection: Connection | None = None
        self._marks: list[tuple[bytes, float]] = []
        self._stagers = Pool(STAGING_THREADS)
        self._batches: Batches[Submission] = Batches(
            work_of, most=MOST_IN_BATCH, most_bytes=MOST_BYTES_IN_BATCH, long_seconds=LONG_SECONDS
        )
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="gradserve-writer", daemon=True)
        self._thread.start()

    def submit(self, request: Request, namespace: str) -> Future[Outcome]:
        """Put the request of a namespace into the queue. The future has its result once the request is durable."""
        submission = Submission(request, namespace)
        sources = large_arrays(submission)
        if not sources:
            self._put(submission)
            return submission.done
        with self._lock:
            if self._closed.is_set():
                _refuse(submission)
            else:
                staging = self._stagers.submit(lambda: self._stage_and_queue(submission, sources), namespace)
                staging.add_done_callback(lambda _: _refuse(submission) if staging.cancelled() else None)
        return submission.done

    def _put(self, submission: Submission) -> None:
        if not self._batches.put(submission):
            _refuse(submission)

    def close(self) -> bool:
        """Finish what was submitted, and end the threads. Return False if this was done before.

        Requests whose gradients still wait for a thread are refused.
        """
        with self._lock:
            if self._closed.is_set():
                return False
            self._closed.set()
        self._stagers.close()
        self._batches.close()
        self._thread.join()
        return True

    # ----- staging -----

    def _stage_and_queue(self, submission: Submission, sources: dict[int, Gradient]) -> None:
        if self._is_staged(submission, sources):
            self._put(submission)

    def _is_staged(self, submission: Submission, sources: dict[int, Gradient]) -> bool:
        """Stage the gradients. Return False if that failed: then the request has failed."""
        try:
            retried(lambda: self._stage(submission, sources), self._closed.is_set, since=submission.since)
        except Exception as error:
            submission.done.set_exception(without_traceback(error))
            return False
        return True

    def _stage(self, submission: Submission, sources: dict[int, Gradient]) -> None:
        """Write the gradients, without waiting for the disk: the commit that admits them waits for it.

        Not those of a request that one look sees refused or repeated. If the transaction decides otherwise, it writes
        them.
        """
        submission.staged = {}
        if not self._is_admitted(submission):
            return
        blobs = {key: self._blobs.new(nbytes_of(source)) for key, source in sources.items()}
        sizes = [nbytes_of(source) for source in sources.values()]
        with self._database.transaction(durable=False) as connection:
            connection.exchange([STAGE(STAGED_SECONDS, [*blobs.values()], sizes)])
            self._blobs.write(connection, zip(blobs.values(), sources.values(), strict=True), self._turns)
        submission.staged = blobs
        failpoints.hit("staged")

    def _is_admitted(self, submission: Submission) -> bool:
        """Return whether the request comes so far as to write its gradients."""
        trial = Batch([submission], [])
        with self._database.workers.lend() as connection:
            found = trial.find(self._database, connection, self._key_seconds, locks=False)
        with suppress(StoreFull):
            try:
                assert found is not None
                self._perform(connection, trial, submission, found, Trial)
            except WritesError:
                self._janitor.check_room(submission.request, Outcome({}, is_new=True))
                return True
        return False

    # ----- the writer thread -----

    def _run(self) -> None:
        with np.errstate(all="ignore"):
            while (batch := self._batches.take(self._deadlines.pause)) is not None:
                began = time.monotonic()
                if submissions := [one for one in batch if one.done.set_running_or_notify_cancel()]:
                    self._make(submissions)
                    self._batches.charge(time.monotonic() - began)
                    if not all(one.staged for one in submissions):
                        self._turns.tell()
                if not self._deadlines.pause:
                    self._close_due()
        if self._connection is not None:
            self._connection.close()

    def _close_due(self) -> None:
        self._deadlines.begin()
        with survived("The store closes steps that are due later"):
            with self._connected() as connection:
                submissions = self._deadlines.due(connection)
            if submissions:
                self._make(submissions)
            for submission in submissions:
                submission.done.result()
            if len(submissions) == MOST_DUE:
                self._deadlines.expect(0.0)

    def _make(self, submissions: list[Submission]) -> None:
        """Make the requests in one transaction, and answer them. If that fails, make each in its own transaction."""
        start, batch = time.perf_counter(), Batch(submissions, self._marks)
        try:
            retried(lambda: self._attempt(batch), since=min(one.since for one in submissions))
        except StagedLostError:
            if ready := [one for one in submissions if not one.staged or self._is_staged(one, large_arrays(one))]:
                self._make(ready)
            return
        except Exception as error:
            if len(submissions) > 1 and not (batch.may_be_committed or isinstance(error, StoreFailed)):
                for submission in submissions:
                    self._make([submission])
                return
            for submission in submissions:
                submission.done.set_exception(without_traceback(error))
            return
        with after_commit():
            self._follow(batch, time.perf_counter() - start)
        for submission, answer in zip(submissions, batch.answers, strict=True):
            if isinstance(answer, Outcome):
                settle(submission.done, answer)
            else:
                submission.done.set_exception(answer)

    def _attempt(self, batch: Batch) -> None:
        try:
            with self._connected() as connection:
                self._transact(connection, batch)
        except CheckViolation:
            make_partitions(self._database, batch.now)
            self._attempt(batch)

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        """Yield the writer's connection. After an error it is closed, which undoes everything."""
        connection = self._connection
        if is_new := connection is None or connection.closed:
            connection = self._connection = self._database.connect()
        try:
            if is_new:
                self._database.check_standby(connection)  # else each attempt would leave a backend that waits for it
            yield connection
        except BaseException:
            connection.close()
            raise

    def _transact(self, connection: Connection, batch: Batch) -> None:
        found = batch.find(self._database, connection, self._key_seconds)
        if found is not None:
            batch.changes = Changes()
            batch.answers = [self._perform(connection, batch, one, found) for one in batch.submissions]
            failpoints.hit("made")
            if batch.changes.blobs:
                self._blobs.write(connection, batch.changes.blobs.items())
            batch.write(self._database, connection, found)

    def _follow(self, batch: Batch, seconds: float) -> None:
        """Do what follows a commit."""
        failpoints.hit("committed")
        if batch.changes:
            self._changed()
        dues = [stored.record.due for stored in batch.changes.records.values() if stored is not None]
        if due := min(filter(None, dues), default=None):
            self._deadlines.expect(due - batch.now)
        for fold in batch.changes.folds:
            self._fold(fold)
        self._committed(len(batch.submissions), seconds)

    def _perform(
        self,
        connection: Connection,
        batch: Batch,
        submission: Submission,
        found: Found,
        kind: type[PostgresTransaction] = PostgresTransaction,
    ) -> Outcome | GradserveError:
        txn = kind(
            connection,
            found,
            batch.changes,
            submission.staged,
            self._next_id,
            self._blobs,
            self._allocate,
            self._most,
            batch.now,
            self._janitor,
        )
        try:
            request = resolved(txn, submission.request, submission.namespace)
            outcome = make(txn, request, submission.namespace, batch.now)
            self._janitor.check_room(request, outcome)
        except GradserveError as error:
            return without_traceback(error)
        batch.changes.merge(txn.changes)
        return outcome


def _refuse(submission: Submission) -> None:
    submission.done.set_exception(StoreFailed("The store is closed"))
