"""The writer thread of a store: it makes all requests that wait in one transaction, and commits them with one sync.

Requests that come meanwhile are in the next transaction. LMDB lets one process write at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import takewhile

import lmdb
import numpy as np

from service.buffers import failpoints, perform
from service.buffers.batches import Batches
from service.buffers.lmdb.caches import WriterState
from service.buffers.lmdb.drafts import Draft
from service.buffers.lmdb.environment import Environment, UnsyncedError, as_client_error, disk_is_full
from service.buffers.lmdb.format import microseconds
from service.buffers.lmdb.reader import reading
from service.buffers.lmdb.slots import Slots
from service.buffers.lmdb.submissions import Answer, Submission, UndoneError, folds
from service.buffers.lmdb.transaction import MOST_CLOSED, MOST_EXPIRED, LmdbTransaction
from service.buffers.perform import Outcome, Request
from service.buffers.room import UNLIMITED
from service.buffers.store import Committed, after_commit, settle, without_traceback
from service.errors import GradserveError, StoreFailed, StoreFull

logger = logging.getLogger(__name__)

MOST_IN_BATCH = 1024
"""Requests in a transaction, at most."""

MOST_BYTES_IN_BATCH = 1 << 27
"""The work of a transaction of one namespace: little more than a second on a slow disk, for which others wait once."""

LARGE_BATCH = 4
"""After this many requests in one transaction as many are likely to come again, and the writer waits for them."""

GATHER_SECONDS = 0.0003
"""How long the writer waits for them: without this half of them come too late for the next sync."""

LONG_SECONDS = 0.02
"""A namespace rests after a transaction that took longer."""

IDLE_SECONDS = 1.0
"""How long the writer waits for a request before it looks for what has expired."""

MOST_FORGOTTEN = 500
"""Expired keys that a transaction deletes before the next request is made."""


class Writer:
    """The writer thread. It begins at once, and ends with `close`."""

    def __init__(
        self,
        env: Environment,
        state: WriterState,
        *,
        key_seconds: float,
        clock: Callable[[], float],
        committed: Committed,
    ) -> None:
        self._env, self._state = env, state
        self._key_seconds, self._clock, self._committed = key_seconds, clock, committed
        self._batches: Batches[Submission] = Batches(
            lambda one: one.work(state.records),
            most=MOST_IN_BATCH,
            most_bytes=MOST_BYTES_IN_BATCH,
            long_seconds=LONG_SECONDS,
        )
        self._closing, self._next_check = False, 0.0
        self._next_due = math.inf  # as far as this process knows: another may set an earlier deadline
        with suppress(GradserveError), reading(env) as reader:
            self._next_due = reader.first_due()
        self._room_made = 0  # the transaction that made room last
        self._given_back = 0  # bytes that `values` took after free slots were given back last
        self._thread = threading.Thread(target=self._run, name="gradserve-writer", daemon=True)
        self._thread.start()

    def submit(self, request: Request, namespace: str) -> Future[Outcome]:
        """Put the request of a namespace into the queue. The future has its result once the request is on the disk."""
        done: Future[Outcome] = Future()
        if not self._batches.put(Submission(request, namespace, done)):
            done.set_exception(StoreFailed("The store is closed"))
        return done

    def close(self) -> bool:
        """Finish what was submitted, and end the thread. Return False if this was done before."""
        self._closing = True
        was_open = self._batches.close()
        self._thread.join()
        return was_open

    def oldest_key(self) -> int:
        """Return the time in microseconds up to which keys have expired."""
        return microseconds(self._clock() - self._key_seconds)

    def _run(self) -> None:
        with np.errstate(all="ignore"):
            while (batch := self._batches.take(self._patience())) is not None:
                if not batch:
                    self._tidy_up()
                    continue
                began = time.monotonic()
                self._make([one for one in batch if one.begin(closing=self._closing)])
                self._batches.charge(time.monotonic() - began)
                if len(batch) >= LARGE_BATCH:
                    time.sleep(GATHER_SECONDS)

    def _patience(self) -> float:
        """Return how long to wait for a request: until a step is due."""
        return min(IDLE_SECONDS, max(0.0, self._next_due - self._clock()))

    def _make(self, submissions: list[Submission]) -> None:
        """Make the requests in as few transactions as possible, and answer them."""
        while submissions:
            try:
                start = time.perf_counter()
                answers = self._with_room(submissions)
            except UndoneError as undone:
                self._fail(undone.submission, undone.error)
                submissions = [one for one in submissions if one is not undone.submission]
                half = len(submissions) // 2  # if all fail, the writer tries each a few times only
                self._make(submissions[:half])
                submissions = submissions[half:]
            except Exception as error:
                if len(submissions) == 1 or isinstance(error, UnsyncedError):
                    for submission in submissions:
                        self._fail(submission, as_client_error(error, self._env.path, self._env.max_bytes))
                    return
                for submission in submissions:  # there may be no room for all, or one request may be at fault
                    self._make([submission])
                return
            else:
                made = [*zip(submissions, answers, strict=False)]
                with after_commit():
                    failpoints.hit("committed")
                    self._committed(sum(one.is_ended_by(each) for one, each in made), time.perf_counter() - start)
                for submission, answer in made:
                    self._answer(submission, answer)
                submissions = submissions[len(answers) :]

    def _answer(self, submission: Submission, answer: Answer) -> None:
        if isinstance(answer, Outcome):
            settle(submission.done, answer)
        elif isinstance(answer, Draft):
            self._make_later(submission._replace(draft=answer))
        else:
            self._fail(submission, answer)

    def _fail(self, submission: Submission, error: Exception) -> None:
        submission.done.set_exception(without_traceback(error))
        for forgetting in submission.forgetting():
            self._make_later(forgetting)

    def _make_later(self, submission: Submission) -> None:
        """Make the request in a transaction after this one; at once if the store closes."""
        if not self._batches.put(submission):
            self._make([submission])

    def _with_room(self, submissions: list[Submission]) -> list[Answer]:
        """Make the first requests, and try once more if there was no room and there may be room now."""
        try:
            return self._transact(submissions)
        except Exception as error:
            cause = error.error if isinstance(error, UndoneError) else error
            is_full = isinstance(as_client_error(cause, self._env.path, self._env.max_bytes), StoreFull)
            if not (is_full and self._make_room()):
                raise
        return self._transact(submissions)

    def _transact(self, submissions: list[Submission]) -> list[Answer]:
        answers: list[Answer] = []
        now, room = self._clock(), UNLIMITED
        with self._changing() as changes:
            changes.most_bytes = self._batches.most_now()
            if now >= self._next_due:
                changes.close_due(now, MOST_CLOSED)
                self._next_due = changes.first_due()
            for submission in takewhile(lambda _: changes.loaded_bytes <= perform.MAX_CHANGED_BYTES, submissions):
                before = changes.writes - changes.expired
                try:
                    answer, most = submission.make(changes, now, self._env.max_bytes)
                    answers.append(answer)
                    room = min(room, most)
                except GradserveError as error:
                    if changes.writes - changes.expired > before:
                        raise UndoneError(submission, error) from None
                    answers.append(without_traceback(error))
                failpoints.hit("made")
            most = 2 * len(submissions) + 8  # more than the requests can add
            others = min(most, MOST_EXPIRED)
            if now > self._next_check:
                self._next_check, others = now + IDLE_SECONDS, MOST_EXPIRED
                self._env.check_readers()
            changes.tidy_up(now, most, others)
            changes.finish(now)
            if room < UNLIMITED:
                changes.check_room(room)
            failpoints.hit("before commit")
        return answers

    @contextmanager
    def _changing(self) -> Iterator[LmdbTransaction]:
        """Begin a transaction, which is committed on leaving. The caches are empty if another process wrote since."""
        state = self._state
        try:
            with self._env.writing() as txn:
                changes = LmdbTransaction(self._env, txn, state, self.oldest_key())
                if txn.id() != state.last + 1:
                    state.forget()
                    if not state.last:
                        changes.check_counts()
                yield changes
                if changes.writes:
                    self._env.check_files()
                number = txn.id()
        except BaseException:
            state.values.clear()  # the transaction that failed has changed them where they are
            raise
        if changes.writes:
            with after_commit():
                state.records.remember(changes.changed)
                state.last = number
                self._next_due = min(self._next_due, changes.next_due)
                for fold in folds(changes.to_fold):
                    self._batches.put(fold)  # a store that closes leaves it to its next life

    # ----- room -----

    def _make_room(self) -> bool:
        """Remove what has expired, and make freed slots reusable. Return whether there may be more room.

        Slots are reusable two transactions after the one that freed them, and a transaction that fails does not count.
        So a full store would stay full if no other process commits.
        """
        now = self._clock()
        try:
            killed = self._env.check_readers()  # they held freed slots
            with reading(self._env) as reader:
                due = reader.anything_due(self.oldest_key(), now)
            if not due and self._env.generation() == self._room_made:
                return self._give_back() or killed
            if due:
                self._clear(now)
            disk_full = disk_is_full(self._env.path)
            for _ in range(1 + disk_full):  # the second transaction gives back what the last request freed
                with self._changing() as changes:
                    if disk_full:
                        changes.values.slots.give_back()
                    changes.advance()
                    changes.finish(now)
            self._room_made = self._state.last
        except (lmdb.Error, OSError, GradserveError):
            return False  # the request that found no room gets the error
        return True

    def _give_back(self) -> bool:
        """Give free slots back to a full disk. Return whether that was any room."""
        before = self._env.file.disk_bytes()
        if before == self._given_back or not disk_is_full(self._env.path):
            return False
        with self._env.writing() as txn:
            Slots(self._env, txn).give_back()
        self._given_back = self._env.file.disk_bytes()
        return self._given_back < before

    def _clear(self, now: float) -> bool:
        """Remove some of what has expired, and close some of what is due. Return whether that was anything."""
        with self._changing() as changes:
            changes.close_due(now, MOST_CLOSED)
            changes.tidy_up(now, MOST_FORGOTTEN, MOST_EXPIRED)
            changes.finish(now)
            failpoints.hit("before commit")
        failpoints.hit("committed")
        return changes.writes > 0

    def _tidy_up(self) -> None:
        """Remove what has expired, and close what is due, in small transactions, until a request comes."""
        self._next_due = math.inf  # after an error the next try follows when the writer has been idle
        try:
            more = True
            while more:
                with reading(self._env) as reader:
                    self._next_due = reader.first_due()
                    if not reader.anything_due(self.oldest_key(), self._clock()):
                        return
                more = self._clear(self._clock()) and self._batches.are_empty
        except (lmdb.Error, OSError, GradserveError):
            pass  # a full disk, for example: the next request gets the error
        except Exception:  # the writer thread must go on, whatever this is
            logger.exception("gradserve cannot tidy up the store in %s", self._env.path)
