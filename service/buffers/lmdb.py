"""The store on one machine's disk: LMDB, which several worker processes may share.

Every process has one writer thread. It makes all requests that wait in one transaction and commits it with one sync,
and then answers them all; whoever comes meanwhile is in the next. LMDB lets one process write at a time, and readers
see the last commit, whoever is writing. A commit is complete on the disk or not there at all, so that a crash needs no
repair.

Format 1, in the databases of the environment:

    meta     b"format" -> the number of the format, as text; b"last_value" -> the last id of a value, 8 bytes
    buffers  name -> a `Record` as JSON, sealed
    values   id of a value, 8 bytes, number of a chunk, 4 bytes -> its elements, sealed; a chunk holds CHUNK bytes
    keys     digest of caller and key -> time, fingerprint, receipts as JSON, sealed
    times    time, 8 bytes, number of a transaction, 8 bytes -> the digests of the keys that it stored
    deadlines  time, 8 bytes, name -> nothing: when to see whether a buffer has expired

Integers are big-endian, times microseconds since 1970, numbers in chunks little-endian. What is sealed ends with its
XXH3 checksum, seeded by where it belongs. A file `format` beside the environment tells that it was complete once.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import lmdb
import numpy as np
import orjson
import xxhash

from service.buffers.store import (
    Allocate,
    Array,
    Closed,
    Gradient,
    Key,
    Known,
    Outcome,
    Receipt,
    Record,
    Request,
    Snapshot,
    Spec,
    add_piece,
    perform,
    spec_of,
    unknown,
)
from service.dtypes import DType
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull

FORMAT = 1

SEAL = 8
"""Bytes of a checksum."""

CHUNK = (1 << 18) - 16 - SEAL
"""Bytes of a value in a chunk: with the seal and LMDB's head it fills 16 pages, a run that is easily found."""

MOST_IN_BATCH = 1024
"""The most requests of one transaction."""

IDLE_SECONDS = 1.0
"""How long the writer waits for requests before it looks for what has expired."""

KEY_SECONDS = 24 * 3600.0

DATABASES = ("buffers", "values", "keys", "times", "deadlines")

_DIGEST_SIZE = 16
_CHUNK_KEY = struct.Struct(">QI")
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
    """The environment in the directory `path`, made if it is not there, of at most `max_bytes`.

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
        self._closed = False
        self._next_deadline_check = 0.0
        self._writer = threading.Thread(target=self._write, name="gradserve-writer", daemon=True)
        self._writer.start()

    def submit(self, request: Request) -> Future[Outcome]:
        done: Future[Outcome] = Future()
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
        with self._env.reading() as txn:
            reader = Reader(self._env, txn)
            for name in names:
                record = self._alive(txn, name)
                closed = None if epoch is None else record.kept(epoch)
                value = record.value if closed is None else closed.value
                snapshots.append(Snapshot(record, reader.load(record.spec, value, self._allocate), closed))
        return snapshots

    def recall(self, key: Key) -> Known | None:
        with self._env.reading() as txn:
            return Reader(self._env, txn).recall(_digest(key), self._oldest_key())

    def generation(self) -> int:
        return self._env.generation()

    def close(self) -> None:
        if not self._closed:
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
        while True:
            try:
                job = self._queue.get(timeout=IDLE_SECONDS)
            except Empty:
                self._tidy_up()
                continue
            batch = [job] + [self._queue.get() for _ in range(min(self._queue.qsize(), MOST_IN_BATCH))]
            self._make([job for job in batch if job is not None and job.done.set_running_or_notify_cancel()])
            if None in batch:
                return

    def _make(self, jobs: list[_Job]) -> None:
        """Make the requests, as many as possible in one transaction, and answer them."""
        while jobs:
            try:
                answers = self._transact(jobs)
            except _UndoneError as undone:
                undone.job.done.set_exception(undone.error)
                jobs = [job for job in jobs if job is not undone.job]
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
        with self._env.writing() as txn:
            changes = _Transaction(self._env, txn, self._allocate, self._oldest_key())
            for job in jobs:
                before = changes.writes
                try:
                    answers.append(perform(changes, job.request, now))
                except GradserveError as error:
                    if changes.writes > before:
                        raise _UndoneError(job, error) from None
                    answers.append(error)
                reached("made")
            changes.finish(now)
            changes.forget_keys(2 * len(jobs) + 8)
            if now > self._next_deadline_check:
                self._next_deadline_check = now + IDLE_SECONDS
                changes.remove_expired(now, 1)
            reached("before commit")
        return answers

    def _tidy_up(self) -> None:
        """Forget what has expired, in small transactions, until there is nothing, or something else to do."""
        try:
            more = True
            while more and self._queue.empty():
                with self._env.reading() as txn:
                    if not Reader(self._env, txn).anything_due(self._oldest_key(), self._clock()):
                        return
                with self._env.writing() as txn:
                    changes = _Transaction(self._env, txn, self._allocate, self._oldest_key())
                    changes.forget_keys(500)
                    changes.remove_expired(self._clock(), 1)
                    more = changes.writes > 0
        except lmdb.Error:
            pass  # a full disk, say; whoever adds next is told


def reached(point: str) -> None:
    """Where a test may kill the process."""


class Environment:
    """An LMDB environment of format 1, its databases, and its transactions."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool = False) -> None:
        self.path = path
        data, mark = path / "data.mdb", path / "format"
        try:
            if readonly and not data.exists():
                raise StoreFailed(f"There is no store in {path}")
            if mark.exists() and (not data.exists() or not data.stat().st_size):
                raise StoreFailed(f"The store in {path} is damaged: data.mdb is missing or empty")
            path.mkdir(parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(path), map_size=max_bytes, max_dbs=8, max_readers=1024, meminit=False, readonly=readonly
            )
        except (lmdb.Error, OSError) as error:
            raise StoreFailed(f"The store in {path} cannot be opened: {error}") from None
        try:
            self._open(readonly)
            if not readonly:
                mark.write_text(f"{FORMAT}\n")
        except lmdb.Error as error:
            self._env.close()
            raise StoreFailed(f"The store in {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def _open(self, readonly: bool) -> None:
        info = self._env.info()
        expected = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        size = (self.path / "data.mdb").stat().st_size
        if info["last_txnid"] and size < expected:
            raise StoreFailed(f"The store in {self.path} is cut short: data.mdb has {size} bytes of {expected}")
        create = not readonly
        if create:
            self._env.reader_check()  # processes that were killed leave their places in the table of readers
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

    buffers: Any
    values: Any
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
        """The number of the last transaction that was committed."""
        last: int = self._env.info()["last_txnid"]
        return last

    def check_readers(self) -> int:
        """Free the places of readers that were killed."""
        freed: int = self._env.reader_check()
        return freed

    def sizes(self) -> dict[str, int]:
        """Bytes: of the map, of the file, and of the pages in use."""
        info, stat = self._env.info(), self._env.stat()
        return {
            "limit": info["map_size"],
            "file": (self.path / "data.mdb").stat().st_size,
            "used": (info["last_pgno"] + 1) * stat["psize"],
        }

    def close(self) -> None:
        """Let go of everything."""
        self._env.close()


class Reader:
    """What a transaction sees, as objects."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn

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
                    yield _unpacked(name, sealed)

    def load(self, spec: Spec, value: int | None, allocate: Allocate) -> Array:
        """A value, in memory of its own."""
        result = allocate(spec.shape, spec.dtype)
        flat = result.reshape(-1)
        if value is None:
            flat[...] = 0
            return result
        for number, start, stop in pieces_of(spec):
            flat[start:stop] = self.chunk(value, number, stop - start, spec.dtype)
        return result

    def chunk(self, value: int, number: int, size: int, dtype: DType) -> Array:
        """The elements of a chunk, in the environment's own memory. Raises `BufferCorrupt`."""
        sealed = self._txn.get(_CHUNK_KEY.pack(value, number), db=self._env.values)
        data = None if sealed is None else _opened(sealed, _seed(value, number))
        if data is None or len(data) != size * dtype.itemsize:
            raise BufferCorrupt(
                f"Chunk {number} of value {value} is damaged on the disk; gradserve doctor tells more. Delete the"
                " buffer and create it again"
            )
        return np.frombuffer(data, dtype)

    def recall(self, digest: bytes, oldest: int) -> Known | None:
        """What is stored with a key, unless it is older than `oldest`."""
        sealed = self._txn.get(digest, db=self._env.keys)
        if sealed is None:
            return None
        data = _opened(sealed, _seed_of(digest))
        if data is None:
            raise BufferCorrupt("What is stored with this Idempotency-Key is damaged on the disk")
        stored, fingerprint = _KEY_HEAD.unpack_from(data)
        return Known(fingerprint, orjson.loads(data[_KEY_HEAD.size :])) if stored > oldest else None

    def sound_records(self) -> Iterator[tuple[str, Record | None]]:
        """Every buffer's name, with the buffer if it is not damaged."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            for found, sealed in cursor:
                name = bytes(found).decode(errors="replace")
                try:
                    yield name, _unpacked(name, sealed)
                except BufferCorrupt:
                    yield name, None

    def chunk_counts(self) -> dict[int, int]:
        """How many chunks each value has."""
        counts: Counter[int] = Counter()
        with self._txn.cursor(db=self._env.values) as cursor:
            for found in cursor.iternext(values=False):
                counts[_CHUNK_KEY.unpack(found)[0]] += 1
        return counts

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

    def __init__(self, env: Environment, txn: Any, allocate: Allocate, oldest_key: int) -> None:
        super().__init__(env, txn)
        self._allocate, self._oldest = allocate, oldest_key
        self._memory = bytearray(CHUNK + SEAL)
        self._digests: list[bytes] = []
        self.writes = 0
        """How much was changed so far."""

    def put(self, record: Record) -> None:
        self.writes += 1
        if record.expires is not None and self.get(record.name) is None:  # later ones are set when this one is due
            self._txn.put(_TIME.pack(_microseconds(record.expires)) + record.name.encode(), b"", db=self._env.deadlines)
        self._txn.put(record.name.encode(), _packed(record), db=self._env.buffers)

    def remove(self, record: Record) -> None:
        self.writes += 1
        self._txn.delete(record.name.encode(), db=self._env.buffers)
        for value in (record.value, *(one.value for one in record.closed)):
            self.free(value)

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        self.writes += 1
        spec, old = record.spec, record.value
        value = self._new_value() if old is None else old
        for number, start, stop in pieces_of(spec):
            piece = gradient.piece(start, stop)
            if piece is None and old is not None and not overwrite:
                continue
            size = (stop - start) * spec.dtype.itemsize
            result = np.frombuffer(self._memory, spec.dtype, stop - start)
            anew = overwrite or piece is None
            total = 0 if anew or old is None else self.chunk(old, number, stop - start, spec.dtype)
            add_piece(spec, result, total, piece, weight, anew)
            data = memoryview(self._memory)[: size + SEAL]
            _seal(data, _seed(value, number))
            self._txn.put(_CHUNK_KEY.pack(value, number), data, db=self._env.values)
            reached("chunk")
        return value

    def free(self, value: int | None) -> None:
        if value is None:
            return
        self.writes += 1
        number = 0
        while self._txn.delete(_CHUNK_KEY.pack(value, number), db=self._env.values):
            number += 1

    def load(self, spec: Spec, value: int | None, allocate: Allocate | None = None) -> Array:
        return super().load(spec, value, allocate or self._allocate)

    def recall(self, key: Any, oldest: int | None = None) -> Known | None:
        return super().recall(_digest(key), self._oldest)

    def remember(self, key: Key, receipts: Mapping[str, Receipt], now: float) -> None:
        self.writes += 1
        digest, stored = _digest(key), _microseconds(now)
        data = bytearray(_KEY_HEAD.pack(stored, key.fingerprint) + orjson.dumps(receipts) + bytes(SEAL))
        _seal(memoryview(data), _seed_of(digest))
        self._txn.put(digest, data, db=self._env.keys)
        self._digests.append(digest)

    def finish(self, now: float) -> None:
        """Store what is stored once for all requests."""
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

    def _new_value(self) -> int:
        last = self._txn.get(b"last_value", db=self._env.meta)
        value: int = 1 + (0 if last is None else _TIME.unpack(last)[0])
        self._txn.put(b"last_value", _TIME.pack(value), db=self._env.meta)
        return value


def pieces_of(spec: Spec) -> Iterator[tuple[int, int, int]]:
    """The chunks of a value: number, first element, and the one after the last."""
    step = CHUNK // spec.dtype.itemsize
    for number in range(math.ceil(spec.size / step)):
        yield number, number * step, min((number + 1) * step, spec.size)


def _is_due(cursor: Any, limit: int) -> bool:
    """Whether the first entry, to which the cursor moves, has a time up to `limit`."""
    return bool(cursor.first()) and bool(_TIME.unpack_from(cursor.key())[0] <= limit)


def _microseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def _digest(key: Key) -> bytes:
    return hashlib.blake2b(f"{key.caller}\0{key.text}".encode(), digest_size=_DIGEST_SIZE).digest()


def _seed(value: int, number: int) -> int:
    return (value << 32 | number) & (1 << 64) - 1


def _seed_of(text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text)


def _seal(data: memoryview, seed: int) -> None:
    data[-SEAL:] = xxhash.xxh3_64_digest(data[:-SEAL], seed)


def _opened(sealed: memoryview, seed: int) -> memoryview | None:
    """What was sealed; None if it is not as it was."""
    data = sealed[:-SEAL]
    return data if xxhash.xxh3_64_digest(data, seed) == bytes(sealed[-SEAL:]) else None


def _packed(record: Record) -> bytearray:
    fields = [
        record.spec.as_json(),
        record.created,
        record.updated,
        record.epoch,
        record.version,
        record.count,
        record.weight,
        record.value,
        [astuple(one) for one in record.closed],
    ]
    data = bytearray(orjson.dumps(fields) + bytes(SEAL))
    _seal(memoryview(data), _seed_of(record.name.encode()))
    return data


def _unpacked(name: str, sealed: memoryview) -> Record:
    data = _opened(sealed, _seed_of(name.encode()))
    if data is None:
        raise BufferCorrupt(f"What is stored of the buffer {name!r} is damaged on the disk", buffer=name)
    fields: list[Any] = orjson.loads(data)
    spec, *state, closed = fields
    return Record(name, spec_of(spec), *[*state, tuple(Closed(*one) for one in closed)])


def _translated(error: Exception, path: Path) -> Exception:
    """What a failure of LMDB's is to a client."""
    if isinstance(error, lmdb.MapFullError):
        return StoreFull(f"The store in {path} has reached GRADSERVE_STORE_BYTES; nothing was changed")
    if isinstance(error, lmdb.Error):
        if os.strerror(28) in str(error):  # ENOSPC
            return StoreFull(f"The disk of the store in {path} is full; nothing was changed")
        return StoreFailed(f"The store in {path} failed: {error}")
    return error
