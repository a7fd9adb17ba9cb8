"""The store on one machine's disk: LMDB, which several worker processes may share.

Every process has one writer thread. It makes all requests that wait in one transaction and commits it with one sync,
and then answers them all; whoever comes meanwhile is in the next. LMDB lets one process write at a time, and readers
see the last commit, whoever is writing. A commit is complete on the disk or not there at all, so that a crash needs no
repair.

The format is described in `format.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import lmdb
import numpy as np

from service.buffers.changes import Add, Create, Restore
from service.buffers.lmdb.environment import disk_is_full, translated
from service.buffers.lmdb.format import MARK_SIZE, WRITER, digest_of, microseconds
from service.buffers.lmdb.opening import open_environment
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.slots import Slots
from service.buffers.lmdb.transaction import MOST_EXPIRED, LmdbTransaction, Remembered
from service.buffers.lmdb.value_writer import Kept
from service.buffers.perform import Outcome, Request, perform
from service.buffers.record import Key, Known, Record, Snapshot, name_buffer, unknown
from service.buffers.store import KEY_SECONDS, MOST_BUFFERS, Allocate, Committed, told, uncounted
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull

logger = logging.getLogger(__name__)

MOST_IN_BATCH = 1024
"""The most requests of one transaction."""

GATHER_SECONDS, MANY = 0.0003, 4
"""After a batch of at least so many requests, how long the writer waits for as many again: one sync for all is worth
more than an early start, which leaves half of them for the next."""

NOBODY = b"nobody"
"""In place of the mark, before a process has written."""

IDLE_SECONDS = 1.0
"""How long the writer waits for requests before it looks for what has expired."""


class _Job(NamedTuple):
    request: Request
    done: Future[Outcome]


class _UndoneError(Exception):
    """A request failed after it had changed something, so that its transaction must go."""

    def __init__(self, job: _Job, error: Exception) -> None:
        self.job, self.error = job, error


class LmdbStore:
    """The environment in the directory `path`, made if it is not there, for at most `max_bytes` of data.

    Raises `StoreFailed` if it cannot be opened, is damaged, or comes from a newer version.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        allocate: Allocate = np.empty,
        key_seconds: float = KEY_SECONDS,
        clock: Callable[[], float] = time.time,
        committed: Committed = uncounted,
        max_buffers: int = MOST_BUFFERS,
    ) -> None:
        self._committed, self._max_buffers = committed, max_buffers
        self._env = open_environment(path, max_bytes=max_bytes)
        self._allocate, self._key_seconds, self._clock = allocate, key_seconds, clock
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed, self._lock = False, threading.Lock()
        self._next_check = 0.0
        self._known = Remembered()
        self._kept = Kept()
        self._mark = NOBODY
        self._room_made = NOBODY  # after which transaction
        self._given_back = 0  # bytes that the values took when that was done last
        self._writer = threading.Thread(target=self._write, name="gradserve-writer", daemon=True)
        self._writer.start()

    def submit(self, request: Request) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        with self._lock:
            if self._closed:
                done.set_exception(StoreFailed("The store is closed"))
            else:
                self._queue.put(_Job(request, done))
        return done

    def record(self, name: str) -> Record:
        with self._env.reading() as txn:
            return self._alive(txn, name)

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, *, strict: bool = False
    ) -> list[Record]:
        found: list[Record] = []
        now = self._clock()
        with self._env.reading() as txn:
            for record in Reader(self._env, txn).records(prefix, after, strict=strict):
                if limit is not None and len(found) == limit:
                    break
                if record.lives(now):
                    found.append(record)
        return found

    def read(self, names: Sequence[str], epoch: int | None = None) -> list[Snapshot]:
        snapshots = []
        with self._env.reading() as txn, np.errstate(all="ignore"):
            reader = Reader(self._env, txn)
            for name in names:
                record = self._alive(txn, name)
                closed = None if epoch is None else record.kept(epoch)
                value = record.value if closed is None else closed.value
                try:
                    loaded = reader.values.load(record.spec, value, self._allocate)
                except BufferCorrupt as error:
                    name_buffer(error, name, one_of_many=True)
                    raise
                snapshots.append(Snapshot(record, loaded, closed))
        return snapshots

    def recall(self, key: Key) -> Known | None:
        with self._env.reading() as txn:
            return Reader(self._env, txn).known(digest_of(key), self._oldest_key())

    def generation(self) -> int:
        return self._env.generation()

    def size(self) -> tuple[int, int]:
        with self._env.reading() as txn:
            reader = Reader(self._env, txn)
            return reader.entries()["buffers"], reader.used()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._writer.join()
        self._env.close()

    def _alive(self, txn: Any, name: str) -> Record:
        record = Reader(self._env, txn).get(name)
        if record is None or not record.lives(self._clock()):
            raise unknown(name)
        return record

    def _oldest_key(self) -> int:
        return microseconds(self._clock() - self._key_seconds)

    # ----- the writer thread -----

    def _write(self) -> None:
        batch: list[_Job | None] = []
        with np.errstate(all="ignore"):
            while None not in batch:
                try:
                    batch = [self._queue.get(timeout=IDLE_SECONDS)]
                except Empty:
                    self._tidy_up()
                    continue
                batch += [self._queue.get() for _ in range(min(self._queue.qsize(), MOST_IN_BATCH))]
                self._make([job for job in batch if job is not None and job.done.set_running_or_notify_cancel()])
                if len(batch) >= MANY:
                    time.sleep(GATHER_SECONDS)

    def _make(self, jobs: list[_Job]) -> None:
        """Make the requests, as many as possible in one transaction, and answer them."""
        while jobs:
            try:
                start = time.perf_counter()
                answers = self._with_room(jobs)
            except _UndoneError as undone:
                undone.job.done.set_exception(told(undone.error))
                jobs = [job for job in jobs if job is not undone.job]
                self._make(jobs[: len(jobs) // 2])  # by halves: were all to fail, each would be tried a few times only
                jobs = jobs[len(jobs) // 2 :]
            except Exception as error:
                if len(jobs) == 1:
                    jobs[0].done.set_exception(told(translated(error, self._env.path, self._env.max_bytes)))
                    return
                for job in jobs:  # together they are too much, perhaps, or one of them is at fault
                    self._make([job])
                return
            else:
                reached("committed")
                self._committed(len(jobs), time.perf_counter() - start)
                for job, answer in zip(jobs, answers, strict=True):
                    if isinstance(answer, Outcome):
                        job.done.set_result(answer)
                    else:
                        job.done.set_exception(answer)
                return

    def _with_room(self, jobs: list[_Job]) -> list[Outcome | GradserveError]:
        """`_transact`, and once more if there was no room for it and there may be now."""
        try:
            return self._transact(jobs)
        except Exception as error:
            if not (self._is_full(error) and self._make_room()):
                raise
        return self._transact(jobs)

    def _is_full(self, error: Exception) -> bool:
        cause = error.error if isinstance(error, _UndoneError) else error
        return isinstance(translated(cause, self._env.path, self._env.max_bytes), StoreFull)

    def _make_room(self) -> bool:
        """Remove what has expired, and let the next transaction take what was freed. Whether there may be more room.

        What a transaction frees is there for the second after it, and one that fails does not count as one. So a store
        where nobody else commits would stay full.
        """
        now = self._clock()
        try:
            killed = self._env.check_readers()  # they held what was freed
            with self._env.reading() as txn:
                due = Reader(self._env, txn).anything_due(self._oldest_key(), now)
                made = not due and txn.get(WRITER, default=b"", db=self._env.meta) == self._room_made
            if made:
                return self._give_back() or killed
            if due:
                self._clear(now)
            disk_full = disk_is_full(self._env.path)
            for _ in range(1 + disk_full):  # the second gives back what the last request has freed
                with self._changing() as changes:
                    if disk_full:
                        changes.give_back()
                    changes.finish(now)
                    changes.writes += 1  # so that it leaves a mark, and counts
            self._room_made = self._mark
        except (lmdb.Error, OSError, GradserveError):
            return False  # what there was no room for says so
        return True

    def _give_back(self) -> bool:
        """Give a full disk what is free by now, or was written in vain. Whether that was anything."""
        before = self._env.file.size()
        if before == self._given_back or not disk_is_full(self._env.path):
            return False
        with self._env.writing() as txn:
            Slots(self._env, txn).give_back()
        self._given_back = self._env.file.size()
        return self._given_back < before

    def _transact(self, jobs: list[_Job]) -> list[Outcome | GradserveError]:
        answers: list[Outcome | GradserveError] = []
        now = self._clock()
        with self._changing() as changes:
            for job in jobs:
                before = changes.writes - changes.expired
                try:
                    answers.append(perform(changes, job.request, now))
                except GradserveError as error:
                    if changes.writes - changes.expired > before:
                        raise _UndoneError(job, error) from None
                    answers.append(told(error))
                reached("made")
            most = 2 * len(jobs) + 8  # more than the requests can add
            changes.forget_keys(most)
            if now > self._next_check:
                self._next_check, most = now + IDLE_SECONDS, MOST_EXPIRED
                self._env.check_readers()
            changes.remove_expired(now, min(most, MOST_EXPIRED))
            changes.finish(now)
            if any(map(_has_grown, jobs, answers)):
                changes.check_room()
            reached("before commit")
        return answers

    @contextmanager
    def _changing(self) -> Iterator[LmdbTransaction]:
        """A transaction, committed on leaving. It knows what those before it left, unless others came between."""
        kept = self._kept
        self._kept = Kept()  # until this is committed
        with self._env.writing() as txn:
            others = txn.get(WRITER, default=b"", db=self._env.meta) != self._mark
            if others:
                self._known.clear()
                kept.clear()
            changes = LmdbTransaction(
                self._env,
                txn,
                self._allocate,
                self._oldest_key(),
                self._known,
                kept,
                self._max_buffers,
                lambda: reached("chunk"),
            )
            if others:
                changes.check_counts(closely=self._mark == NOBODY)
            yield changes
            if changes.writes:
                self._env.check_files()
                mark = os.urandom(MARK_SIZE)
                txn.put(WRITER, mark, db=self._env.meta)
        self._kept = kept
        if changes.writes:
            self._mark = mark
            self._known.remember(changes.changed)

    def _clear(self, now: float) -> bool:
        """Remove some of what has expired: as much as there is room to. Whether that was anything."""
        for most in (500, 20, 1):
            try:
                with self._changing() as changes:
                    changes.forget_keys(most)
                    changes.remove_expired(now, min(most, MOST_EXPIRED))
                    changes.finish(now)
                return changes.writes > 0
            except lmdb.MapFullError:  # a transaction writes anew what it takes something out of
                continue
        return False

    def _tidy_up(self) -> None:
        """Forget what has expired, in small transactions, until there is nothing, or something else to do."""
        try:
            more = True
            while more and self._queue.empty():
                with self._env.reading() as txn:
                    if not Reader(self._env, txn).anything_due(self._oldest_key(), self._clock()):
                        return
                more = self._clear(self._clock())
        except (lmdb.Error, OSError, GradserveError):
            pass  # a full disk, say; whoever adds next is told
        except Exception:  # the writer must live, whatever this was
            logger.exception("Cannot clean up the store in %s", self._env.path)


def _has_grown(job: _Job, answer: Outcome | GradserveError) -> bool:
    """Whether the request has added something; to repeat it, or to find that nothing is to be done, needs no room."""
    if isinstance(answer, GradserveError) or answer.replayed:
        return False
    made = {name for name, receipt in answer.receipts.items() if receipt.get("created", receipt.get("updated"))}
    return any(isinstance(one, (Create, Add, Restore)) and one.name in made for one in job.request.changes)


def reached(point: str) -> None:
    """Where a test may kill the process."""
