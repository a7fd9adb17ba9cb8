"""The store on one machine's disk: LMDB, which several worker processes may share.

Every process has one writer thread. It makes all requests that wait in one transaction and commits it with one sync,
and then answers them all; whoever comes meanwhile is in the next. LMDB lets one process write at a time, and readers
see the last commit, whoever is writing. A commit is complete on the disk or not there at all, so that a crash needs no
repair.

Format 1, in the databases of the environment:

    meta     b"format" -> the number of the format, as text; b"last_id" -> the last id given, and b"slots" ->
             the number of slots, 8 bytes each; b"writer" -> a mark of the last transaction
    buffers  name -> a `Record` as JSON, sealed
    values   id of a value, 8 bytes -> its elements and b"i", or its chunks: slot and checksum, 8 bytes each, what waits
             to be added as JSON, the length of that, 4 bytes, and b"c"; sealed
    free     number of the transaction that freed them, 8 bytes, a number, 4 bytes -> slots, 8 bytes each
    keys     digest of caller and key -> time, fingerprint, receipts and ids of buffers as JSON, sealed
    times    time, 8 bytes, number of a transaction, 8 bytes -> the digests of the keys that it stored
    deadlines  time, 8 bytes, name -> nothing: when to see whether a buffer has expired

Keys are big-endian, times microseconds since 1970, numbers in chunks and entries little-endian. What is sealed ends
with its XXH3 checksum, seeded by where it belongs. The file `values` beside the environment holds the chunks of large
values (`_values.py`); a file `format` tells that all was complete once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import lmdb
import numpy as np
import orjson
import xxhash

from service.buffers._values import CHUNK, SlotFile, ValueReader, ValueWriter, opened, seal
from service.buffers.store import (
    Add,
    Allocate,
    Array,
    Closed,
    Create,
    Gradient,
    Key,
    Known,
    Outcome,
    Record,
    Request,
    Restore,
    Snapshot,
    Spec,
    perform,
    spec_of,
    unknown,
)
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull

FORMAT = 1

MAP_MARGIN = 64 << 20
"""Bytes of LMDB's map beyond twice the limit: to forget something, LMDB first needs room."""

MOST_IN_BATCH = 1024
"""The most requests of one transaction."""

GATHER_SECONDS, MANY = 0.0003, 4
"""After a batch of at least so many requests, how long the writer waits for as many again: one sync for all is worth
more than an early start, which leaves half of them for the next."""

WRITER = b"writer"
"""Where in `meta` each transaction leaves a mark: while it is its own, what the writer remembers is true."""

MOST_KNOWN = 1 << 14
"""The most records that the writer remembers."""

IDLE_SECONDS = 1.0
"""How long the writer waits for requests before it looks for what has expired."""

KEY_SECONDS = 24 * 3600.0

DATABASES = ("buffers", "values", "free", "keys", "times", "deadlines")

_DIGEST_SIZE = 16
_TIME = struct.Struct(">Q")
_KEY_HEAD = struct.Struct(">Q16s")


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
    ) -> None:
        self._env = Environment(path, max_bytes=max_bytes)
        self._allocate, self._key_seconds, self._clock = allocate, key_seconds, clock
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed, self._lock = False, threading.Lock()
        self._next_deadline_check = 0.0
        self._known: dict[str, Record | None] = {}
        self._mark = b"nobody"
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

    def records(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[Record]:
        found: list[Record] = []
        now = self._clock()
        with self._env.reading() as txn:
            for record in Reader(self._env, txn).records(prefix, after):
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
                snapshots.append(Snapshot(record, reader.values.load(record.spec, value, self._allocate), closed))
        return snapshots

    def recall(self, key: Key) -> Known | None:
        with self._env.reading() as txn:
            return Reader(self._env, txn).recall(_digest(key), self._oldest_key())

    def generation(self) -> int:
        return self._env.generation()

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
        return _microseconds(self._clock() - self._key_seconds)

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
                answers = self._transact(jobs)
            except _UndoneError as undone:
                undone.job.done.set_exception(undone.error)
                jobs = [job for job in jobs if job is not undone.job]
                self._make(jobs[: len(jobs) // 2])  # by halves: were all to fail, each would be tried a few times only
                jobs = jobs[len(jobs) // 2 :]
            except Exception as error:
                if len(jobs) == 1:
                    jobs[0].done.set_exception(_translated(error, self._env.path))
                    return
                for job in jobs:  # together they are too much, perhaps, or one of them is at fault
                    self._make([job])
                return
            else:
                reached("committed")
                for job, answer in zip(jobs, answers, strict=True):
                    if isinstance(answer, Outcome):
                        job.done.set_result(answer)
                    else:
                        job.done.set_exception(answer)
                return

    def _transact(self, jobs: list[_Job]) -> list[Outcome | GradserveError]:
        answers: list[Outcome | GradserveError] = []
        now = self._clock()
        with self._changing() as changes:
            for job in jobs:
                before = changes.writes
                try:
                    answers.append(perform(changes, job.request, now))
                except GradserveError as error:
                    if changes.writes > before:
                        raise _UndoneError(job, error) from None
                    answers.append(error)
                reached("made")
            changes.forget_keys(2 * len(jobs) + 8)
            if now > self._next_deadline_check:
                self._next_deadline_check = now + IDLE_SECONDS
                changes.remove_expired(now, 1)
                self._env.check_readers()
            changes.finish(now)
            grows = any(isinstance(change, (Create, Add, Restore)) for job in jobs for change in job.request.changes)
            if grows and changes.used() > self._env.max_bytes:
                raise StoreFull(f"The store in {self._env.path} has reached GRADSERVE_STORE_BYTES; nothing was changed")
            reached("before commit")
        return answers

    @contextmanager
    def _changing(self) -> Iterator[_Transaction]:
        """A transaction, committed on leaving. It knows the records of those before it, unless others came between."""
        with self._env.writing() as txn:
            if txn.get(WRITER, default=b"", db=self._env.meta) != self._mark or len(self._known) > MOST_KNOWN:
                self._known.clear()
            changes = _Transaction(self._env, txn, self._allocate, self._oldest_key(), self._known)
            yield changes
            if changes.writes:
                mark = os.urandom(16)
                txn.put(WRITER, mark, db=self._env.meta)
        if changes.writes:
            self._mark = mark
            self._known |= changes.changed

    def _tidy_up(self) -> None:
        """Forget what has expired, in small transactions, until there is nothing, or something else to do."""
        try:
            more = True
            while more and self._queue.empty():
                with self._env.reading() as txn:
                    if not Reader(self._env, txn).anything_due(self._oldest_key(), self._clock()):
                        return
                with self._changing() as changes:
                    changes.forget_keys(500)
                    changes.remove_expired(self._clock(), 1)
                    changes.finish(self._clock())
                more = changes.writes > 0
        except (lmdb.Error, OSError, GradserveError):
            pass  # a full disk, say; whoever adds next is told


def reached(point: str) -> None:
    """Where a test may kill the process."""


class Environment:
    """An LMDB environment of format 1, its databases, and its transactions."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool = False) -> None:
        self.path, self.max_bytes = path, max_bytes
        data, mark = path / "data.mdb", path / "format"
        try:
            if readonly and not data.exists():
                raise StoreFailed(f"There is no store in {path}")
            if mark.exists() and (not data.exists() or not data.stat().st_size):
                raise StoreFailed(f"The store in {path} is damaged: data.mdb is missing or empty")
            path.mkdir(parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(path),
                map_size=2 * max_bytes + MAP_MARGIN,
                max_dbs=8,
                max_readers=1024,
                meminit=False,
                readonly=readonly,
            )
        except (lmdb.Error, OSError) as error:
            raise StoreFailed(f"The store in {path} cannot be opened: {error}") from None
        try:
            self._open(readonly)
            self.file = SlotFile(path / "values", readonly=readonly)
            if not readonly:
                mark.write_text(f"{FORMAT}\n")
                _sync_directory(path)
        except (lmdb.Error, OSError) as error:
            self._env.close()
            raise StoreFailed(f"The store in {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def _open(self, readonly: bool) -> None:
        size = self._pad()
        try:
            self._open_databases(readonly)
            if size is not None:
                self._walk()
        except (lmdb.Error, BufferCorrupt, struct.error) as error:
            if size is None:
                raise
            os.truncate(self.path / "data.mdb", size)
            raise StoreFailed(f"The store in {self.path} is cut short: data.mdb has {size} bytes ({error})") from None

    def _open_databases(self, readonly: bool) -> None:
        create = not readonly
        if create:
            self.check_readers()
        self.meta = self._env.open_db(b"meta", create=create)
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self.meta)
        if found is not None and not (found.isdigit() and int(found) <= FORMAT):
            raise StoreFailed(
                f"The store in {self.path} has format {found.decode(errors='replace')}, but this version of gradserve"
                f" knows formats up to {FORMAT}: use the version that wrote it, or a newer one"
            )
        self.format = FORMAT if found is None else int(found)
        for name in DATABASES:
            setattr(self, name, self._env.open_db(name.encode(), create=create))
        if create and found is None:
            with self._env.begin(write=True) as txn:
                txn.put(b"format", str(FORMAT).encode(), db=self.meta)

    def _pad(self) -> int | None:
        """Give data.mdb its full length, and return how long it was, if that was less.

        Where a map has no file behind it, reading kills the process. A file may be short without harm: pages at the end
        that were never used are never written.
        """
        info, data = self._env.info(), self.path / "data.mdb"
        expected = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        size = data.stat().st_size
        if not info["last_txnid"] or size >= expected:
            return None
        os.truncate(data, expected)
        return size

    def _walk(self) -> None:
        """Read everything. Raises lmdb.Error, `BufferCorrupt` or struct.error where pages are missing."""
        with suppress(lmdb.ReadonlyError), self._env.begin(write=True) as txn:
            txn.put(b"trial", bytes(8 << 20), db=self.meta)  # makes LMDB read its list of free pages
            txn.abort()
        with self._env.begin(buffers=True) as txn:
            for name in DATABASES:
                for _, sealed in txn.cursor(db=getattr(self, name)):
                    bytes(sealed)
            reader = Reader(self, txn)
            for name, record in reader.sound_records():
                if record is None:
                    raise BufferCorrupt(f"the buffer {name!r} is damaged")
                for value in record.values:
                    reader.values.parts_of(value)

    def oldest_reader(self) -> int | None:
        """The number of the transaction whose state the slowest reader sees; None: there are no readers."""
        lines = [line.split() for line in self._env.readers().splitlines()]
        seen = [int(line[2]) for line in lines if len(line) == 3 and line[2].isdigit()]
        return min(seen, default=None)

    def check_readers(self) -> None:
        """Free the places of processes that were killed in the table of readers."""
        self._env.reader_check()

    buffers: Any
    values: Any
    free: Any
    keys: Any
    times: Any
    deadlines: Any

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A transaction that reads. Raises `StoreFailed` where LMDB fails."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise _translated(error, self.path) from None

    def writing(self) -> Any:
        """A transaction that writes, committed on leaving unless an exception is raised."""
        return self._env.begin(write=True, buffers=True)

    def generation(self) -> int:
        """The number of the last transaction that was committed. Raises `StoreFailed` where LMDB fails."""
        try:
            with self._env.begin() as txn:  # what info() tells may not be visible yet
                return int(txn.id())
        except lmdb.Error as error:
            raise _translated(error, self.path) from None

    def sizes(self) -> dict[str, int]:
        """Bytes: the limit of each file, and what of the disk they take."""
        return {
            "limit": self.max_bytes,
            "data.mdb": (self.path / "data.mdb").stat().st_size,
            "values": self.file.size(),
        }

    def close(self) -> None:
        """Let go of everything."""
        self._env.close()
        self.file.close()


class Reader:
    """What a transaction sees, as objects."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn
        self.values = ValueReader(env, txn)

    def get(self, name: str) -> Record | None:
        """The buffer. Raises `BufferCorrupt`."""
        sealed = self._txn.get(name.encode(), db=self._env.buffers)
        return None if sealed is None else _unpacked(name, sealed)

    def records(self, prefix: str = "", after: str = "") -> Iterator[Record]:
        """The buffers in the order of their names: with this prefix, behind `after`."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            if not cursor.set_range(max(prefix, after).encode() or b"\0"):
                return
            for found, sealed in cursor:
                name = bytes(found).decode()
                if not name.startswith(prefix):
                    if name > prefix:
                        return
                    continue
                if name != after:
                    with suppress(BufferCorrupt):  # whoever asks for it is told
                        yield _unpacked(name, sealed)

    def recall(self, digest: bytes, oldest: int) -> Known | None:
        """What is stored with a key, unless it is older than `oldest`."""
        sealed = self._txn.get(digest, db=self._env.keys)
        if sealed is None:
            return None
        data = opened(sealed, _seed_of(digest))
        if data is None:
            raise BufferCorrupt("What is stored with this Idempotency-Key is damaged on the disk")
        stored, fingerprint = _KEY_HEAD.unpack_from(data)
        return Known(fingerprint, *orjson.loads(data[_KEY_HEAD.size :])) if stored > oldest else None

    def sound_records(self) -> Iterator[tuple[str, Record | None]]:
        """Every buffer's name, with the buffer if it is not damaged."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            for found, sealed in cursor:
                name = bytes(found).decode(errors="replace")
                try:
                    yield name, _unpacked(name, sealed)
                except BufferCorrupt:
                    yield name, None

    def value_ids(self) -> list[int]:
        """The ids of all values."""
        with self._txn.cursor(db=self._env.values) as cursor:
            return [_TIME.unpack(found)[0] for found in cursor.iternext(values=False)]

    def free_slots(self) -> list[int]:
        """The slots that nothing refers to."""
        with self._txn.cursor(db=self._env.free) as cursor:
            return [slot for found in cursor.iternext(keys=False) for slot in np.frombuffer(found, "<i8").tolist()]

    def entries(self) -> dict[str, int]:
        """How many entries the databases have."""
        return {name: self._txn.stat(getattr(self._env, name))["entries"] for name in DATABASES}

    def anything_due(self, oldest_key: int, now: float) -> bool:
        """Whether a key or a buffer has expired, or must be looked at."""
        for db, limit in ((self._env.times, oldest_key), (self._env.deadlines, _microseconds(now))):
            with self._txn.cursor(db=db) as cursor:
                if _is_due(cursor, limit):
                    return True
        return False


class _Transaction(Reader):
    """A transaction that writes, as `perform` wants it."""

    def __init__(
        self, env: Environment, txn: Any, allocate: Allocate, oldest_key: int, known: dict[str, Record | None]
    ) -> None:
        super().__init__(env, txn)
        self._allocate, self._oldest, self._known = allocate, oldest_key, known
        self._writer = ValueWriter(env, txn, lambda: reached("chunk"))
        self.changed: dict[str, Record | None] = {}
        """What is to be put: if a record changes again, only the last is."""
        self._digests: list[bytes] = []
        self.writes = 0
        """How much was changed so far."""

    def get(self, name: str) -> Record | None:
        if name in self.changed:
            return self.changed[name]
        if name not in self._known:
            self._known[name] = super().get(name)
        return self._known[name]

    def put(self, record: Record) -> None:
        self.writes += 1
        if record.expires is not None and self.get(record.name) is None:  # later ones are set when this one is due
            self._txn.put(_TIME.pack(_microseconds(record.expires)) + record.name.encode(), b"", db=self._env.deadlines)
        self.changed[record.name] = record

    def remove(self, record: Record) -> None:
        self.writes += 1
        self.changed[record.name] = None
        for value in record.values:
            self.free(value)

    def remove_damaged(self, name: str) -> None:
        self.writes += 1
        self.changed[name] = None

    def new_id(self) -> int:
        self.writes += 1
        return self._writer.new_id()

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        self.writes += 1
        return self._writer.accumulate(record.spec, record.value, gradient, weight, overwrite)

    def free(self, value: int | None) -> None:
        self.writes += 1
        self._writer.free(value)

    def load(self, spec: Spec, value: int | None) -> Array:
        return self._writer.load(spec, value, self._allocate)

    def recall(self, key: Any, oldest: int | None = None) -> Known | None:
        return super().recall(_digest(key), self._oldest)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.writes += 1
        digest, stored = _digest(key), _microseconds(now)
        data = _KEY_HEAD.pack(stored, known.fingerprint) + orjson.dumps([known.receipts, known.ids])
        self._txn.put(digest, seal(data, _seed_of(digest)), db=self._env.keys)
        self._digests.append(digest)

    def used(self) -> int:
        """Bytes of the pages and slots in use, this transaction's included."""
        pages = 0
        for name in DATABASES:
            stat = self._txn.stat(getattr(self._env, name))
            pages += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        total: int = pages + self._writer.slots() * CHUNK
        return total if total <= self._env.max_bytes else total - len(self.free_slots()) * CHUNK

    def finish(self, now: float) -> None:
        """Store what is stored once for all requests, and bring large values to the disk."""
        self._writer.finish()
        for name, record in self.changed.items():
            if record is None:
                self._txn.delete(name.encode(), db=self._env.buffers)
            else:
                self._txn.put(name.encode(), _packed(record), db=self._env.buffers)
        if self._digests:
            when = _TIME.pack(_microseconds(now)) + _TIME.pack(self._txn.id())
            self._txn.put(when, b"".join(self._digests), db=self._env.times)

    def forget_keys(self, most: int) -> None:
        """Forget keys that are older than they need be, up to `most`."""
        with self._txn.cursor(db=self._env.times) as cursor:
            while most > 0 and _is_due(cursor, self._oldest):
                digests = bytes(cursor.value())
                for start in range(0, len(digests), _DIGEST_SIZE):
                    self._forget(digests[start : start + _DIGEST_SIZE])
                cursor.delete()
                most, self.writes = most - len(digests) // _DIGEST_SIZE, self.writes + 1

    def _forget(self, digest: bytes) -> None:
        try:
            used_again = super().recall(digest, self._oldest) is not None
        except BufferCorrupt:
            used_again = False
        if not used_again:
            self._txn.delete(digest, db=self._env.keys)

    def remove_expired(self, now: float, most: int) -> None:
        """Remove buffers that have expired, up to `most`."""
        due: list[bytes] = []
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            while len(due) < most and _is_due(cursor, _microseconds(now)):
                due.append(bytes(cursor.key()[_TIME.size :]))
                cursor.delete()
                self.writes += 1
        for name in due:
            try:
                record = self.get(name.decode())
            except BufferCorrupt:
                continue  # whoever asks for it is told
            if record is None or record.expires is None:
                continue
            if record.lives(now):
                self._txn.put(_TIME.pack(_microseconds(record.expires)) + name, b"", db=self._env.deadlines)
            else:
                self.remove(record)


def _is_full(path: Path) -> bool:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < 4 << 20


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _is_due(cursor: Any, limit: int) -> bool:
    """Whether the first entry, to which the cursor moves, has a time up to `limit`."""
    return bool(cursor.first()) and bool(_TIME.unpack_from(cursor.key())[0] <= limit)


def _microseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(f"{key.caller}\0{key.text}".encode(), digest_size=_DIGEST_SIZE).digest()


def _seed_of(text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text)


def _packed(record: Record) -> bytes:
    fields = [
        record.spec.as_json(),
        record.id,
        record.created,
        record.updated,
        record.epoch,
        record.version,
        record.count,
        record.weight,
        record.value,
        [astuple(one) for one in record.closed],
    ]
    return seal(orjson.dumps(fields), _seed_of(record.name.encode()))


def _unpacked(name: str, sealed: memoryview) -> Record:
    data = opened(sealed, _seed_of(name.encode()))
    if data is None:
        raise BufferCorrupt(f"What is stored of the buffer {name!r} is damaged on the disk", buffer=name)
    fields: list[Any] = orjson.loads(data)
    spec, *state, closed = fields
    return Record(name, spec_of(spec), *[*state, tuple(Closed(*one) for one in closed)])


def _translated(error: Exception, path: Path) -> Exception:
    """What a failure of LMDB's is to a client."""
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(f"The store in {path} has reached GRADSERVE_STORE_BYTES; nothing was changed")
    if isinstance(error, (lmdb.Error, OSError)):
        # LMDB calls a write that came short an input/output error.
        suspected = os.strerror(errno.EIO) in str(error) and _is_full(path)
        if suspected or os.strerror(errno.ENOSPC) in str(error):
            return StoreFull(f"The disk of the store in {path} is full; nothing was changed")
        return StoreFailed(f"The store in {path} failed: {error}")
    return error
