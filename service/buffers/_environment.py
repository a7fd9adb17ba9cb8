"""The LMDB environment of a store, and what a transaction reads in it.

Format 1, in the databases of the environment:

    meta     b"format" -> the number of the format, as text; b"last_id" -> the last id given, and b"slots" ->
             the number of slots, 8 bytes each; b"writer" -> a mark of the last transaction; b"count:" and a
             namespace -> how many buffers it has, 8 bytes, if the mark has `MARK_SIZE` bytes: versions that do not
             count leave a shorter one
    buffers  name -> a `Record` as JSON, sealed
    values   id of a value, 8 bytes -> its elements and b"i", or its chunks: slot and checksum, 8 bytes each, what waits
             to be added as JSON, the length of that, 4 bytes, and b"c"; sealed
    free     number of the transaction that freed them, 8 bytes, a number, 4 bytes -> slots, 8 bytes each
    keys     digest of caller and key -> time, fingerprint, receipts, ids of buffers, and, unless an earlier version
             wrote it, states of the buffers that the request was computed from, as JSON, sealed
    times    time, 8 bytes, number of a transaction, 8 bytes -> the digests of the keys that it stored
    deadlines  time, 8 bytes, name -> nothing: when to see whether a buffer has expired

Keys are big-endian, times microseconds since 1970, numbers in chunks and entries little-endian. What is sealed ends
with its XXH3 checksum, seeded by where it belongs. The file `values` beside the environment holds the chunks of large
values (`_values.py`, `_slots.py`); a file `format` tells that all was complete once.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb
import numpy as np
import orjson
import xxhash

from service.buffers._slots import CHUNK, NUMBER, SlotFile, slot_count, store_full
from service.buffers._values import ValueReader, opened, seal
from service.buffers.names import namespace_of
from service.buffers.store import Closed, Key, Known, Record, spec_of
from service.errors import BufferCorrupt, StoreFailed, StoreFull

FORMAT = 1

MAP_MARGIN = 64 << 20
"""Bytes of LMDB's map beyond twice the limit: to forget something, LMDB first needs room."""

DATABASES = ("buffers", "values", "free", "keys", "times", "deadlines")

WRITER = b"writer"
"""Where in `meta` each transaction leaves a mark: while it is its own, what the writer remembers is true."""

MARK_SIZE = 24
"""Bytes of the mark. A transaction that finds another size counts the buffers anew."""

COUNT = b"count:"
"""What the names of the counts in `meta` begin with; those of namespaces follow."""

DIGEST_SIZE = 16
TIME = struct.Struct(">Q")
KEY_HEAD = struct.Struct(">Q16s")


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
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(path),
                map_size=2 * max_bytes + MAP_MARGIN,
                max_dbs=8,
                max_readers=1024,
                meminit=False,
                readonly=readonly,
                mode=0o600,
            )
        except (lmdb.Error, OSError) as error:
            raise StoreFailed(f"The store in {path} cannot be opened: {error}") from None
        try:
            self._open(readonly)
            self.file = SlotFile(path / "values", readonly=readonly)
            if not (readonly or mark.exists()):
                mark.write_text(f"{FORMAT}\n")
                _sync_directory(path)
        except (lmdb.Error, OSError) as error:
            self._env.close()
            raise StoreFailed(f"The store in {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def _open(self, readonly: bool) -> None:
        self._check_length()
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

    def _check_length(self) -> None:
        """Raise `StoreFailed` if the end of data.mdb is missing: to read there would kill the process.

        A file may be short without harm, as pages at its end that were never used are never written. So what is short
        is judged by a copy, which is given its full length and read as a whole. The file itself is left alone: another
        process may be writing to it.
        """
        info, size = self._env.info(), (self.path / "data.mdb").stat().st_size
        expected = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        if not info["last_txnid"] or size >= expected:
            return
        try:
            with TemporaryDirectory(dir=self.path if os.access(self.path, os.W_OK) else None) as place:
                self._env.copy(place)
                os.truncate(Path(place) / "data.mdb", expected)
                copy = Environment(Path(place), max_bytes=self.max_bytes)
                try:
                    copy.walk()
                finally:
                    copy.close()
        except (lmdb.Error, BufferCorrupt, StoreFailed, struct.error) as error:
            if os.strerror(errno.ENOSPC) in str(error):
                raise StoreFailed(
                    f"There is no room to see whether the store in {self.path} is whole: {error}"
                ) from None
            raise StoreFailed(f"The store in {self.path} is cut short: data.mdb has {size} bytes ({error})") from None

    def walk(self) -> None:
        """Read everything. Raises lmdb.Error, `BufferCorrupt` or struct.error where pages are missing."""
        with self._env.begin(write=True) as txn:
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
            raise translated(error, self.path, self.max_bytes) from None

    def writing(self) -> Any:
        """A transaction that writes, committed on leaving unless an exception is raised."""
        return self._env.begin(write=True, buffers=True)

    def generation(self) -> int:
        """The number of the last transaction that was committed. Raises `StoreFailed` where LMDB fails."""
        try:
            with self._env.begin() as txn:  # what info() tells may not be visible yet
                return int(txn.id())
        except lmdb.Error as error:
            raise translated(error, self.path, self.max_bytes) from None

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
        return None if sealed is None else unpacked(name, sealed)

    def records(self, prefix: str = "", after: str = "", *, strict: bool = False) -> Iterator[Record]:
        """The buffers in the order of their names: with this prefix, behind `after`.

        Those that are damaged are left out, or, if `strict`, raise `BufferCorrupt`.
        """
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
                    try:
                        record = unpacked(name, sealed)
                    except BufferCorrupt:
                        if strict:
                            raise
                        continue  # whoever asks for it is told
                    yield record

    def damaged_keys(self) -> int:
        """How many idempotency keys are not as they were stored."""
        with self._txn.cursor(db=self._env.keys) as cursor:
            return sum(opened(sealed, seed_of(bytes(digest))) is None for digest, sealed in cursor)

    def recall(self, digest: bytes, oldest: int) -> Known | None:
        """What is stored with a key, unless it is older than `oldest`."""
        sealed = self._txn.get(digest, db=self._env.keys)
        if sealed is None:
            return None
        data = opened(sealed, seed_of(digest))
        if data is None:
            raise BufferCorrupt("What is stored with this Idempotency-Key is damaged on the disk")
        stored, fingerprint = KEY_HEAD.unpack_from(data)
        receipts, ids, *sources = orjson.loads(data[KEY_HEAD.size :])
        return Known(fingerprint, receipts, ids, tuple(*sources)) if stored > oldest else None

    def sound_records(self) -> Iterator[tuple[str, Record | None]]:
        """Every buffer's name, with the buffer if it is not damaged."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            for found, sealed in cursor:
                name = bytes(found).decode(errors="replace")
                try:
                    yield name, unpacked(name, sealed)
                except BufferCorrupt:
                    yield name, None

    def is_counted(self) -> bool:
        """Whether the last that wrote keeps the counts of buffers."""
        return len(self._txn.get(WRITER, default=b"", db=self._env.meta)) == MARK_SIZE

    def counts(self) -> dict[str, int]:
        """How many buffers each namespace has by its count."""
        counts = {}
        with self._txn.cursor(db=self._env.meta) as cursor:
            found = cursor.set_range(COUNT)
            while found and bytes(cursor.key()).startswith(COUNT):
                counts[bytes(cursor.key()[len(COUNT) :]).decode()] = TIME.unpack(cursor.value())[0]
                found = cursor.next()
        return counts

    def counted_anew(self) -> dict[str, int]:
        """How many buffers each namespace has, all of them looked at."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            names = (bytes(found).decode(errors="replace") for found in cursor.iternext(values=False))
            return Counter(map(namespace_of, names))

    def value_ids(self) -> list[int]:
        """The ids of all values."""
        with self._txn.cursor(db=self._env.values) as cursor:
            return [TIME.unpack(found)[0] for found in cursor.iternext(values=False)]

    def free_slots(self) -> list[int]:
        """The slots that nothing refers to."""
        with self._txn.cursor(db=self._env.free) as cursor:
            return [slot for found in cursor.iternext(keys=False) for slot in np.frombuffer(found, "<i8").tolist()]

    def taken(self) -> int:
        """Bytes of the pages in use and of all slots."""
        pages = 0
        for name in DATABASES:
            stat = self._txn.stat(getattr(self._env, name))
            pages += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return pages + slot_count(self._env, self._txn) * CHUNK

    def used(self) -> int:
        """Bytes of the pages and slots in use."""
        with self._txn.cursor(db=self._env.free) as cursor:
            free = sum(len(found) // NUMBER.size for found in cursor.iternext(keys=False))
        return self.taken() - free * CHUNK

    def entries(self) -> dict[str, int]:
        """How many entries the databases have."""
        return {name: self._txn.stat(getattr(self._env, name))["entries"] for name in DATABASES}

    def anything_due(self, oldest_key: int, now: float) -> bool:
        """Whether a key or a buffer has expired, or must be looked at."""
        for db, limit in ((self._env.times, oldest_key), (self._env.deadlines, microseconds(now))):
            with self._txn.cursor(db=db) as cursor:
                if is_due(cursor, limit):
                    return True
        return False


def _is_full(path: Path) -> bool:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < 4 << 20


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def is_due(cursor: Any, limit: int) -> bool:
    """Whether the first entry, to which the cursor moves, has a time up to `limit`."""
    return bool(cursor.first()) and bool(TIME.unpack_from(cursor.key())[0] <= limit)


def microseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e6))


def digest_of(key: Key) -> bytes:
    return hashlib.blake2b(f"{key.caller}\0{key.text}".encode(), digest_size=DIGEST_SIZE).digest()


def seed_of(text: bytes) -> int:
    return xxhash.xxh3_64_intdigest(text)


def packed(record: Record) -> bytes:
    fields = [
        orjson.Fragment(record.spec.text),
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
    return seal(orjson.dumps(fields), seed_of(record.name.encode()))


def unpacked(name: str, sealed: memoryview) -> Record:
    data = opened(sealed, seed_of(name.encode()))
    if data is None:
        raise BufferCorrupt(f"What is stored of the buffer {name!r} is damaged on the disk", buffer=name)
    fields: list[Any] = orjson.loads(data)
    spec, *state, closed = fields
    return Record(name, spec_of(spec), *[*state, tuple(Closed(*one) for one in closed)])


def translated(error: Exception, path: Path, max_bytes: int) -> Exception:
    """What a failure of LMDB's is to a client."""
    if isinstance(error, lmdb.MapFullError):
        return store_full(max_bytes)
    if isinstance(error, (lmdb.Error, OSError)):
        # LMDB calls a write that came short an input/output error.
        suspected = os.strerror(errno.EIO) in str(error) and _is_full(path)
        if suspected or os.strerror(errno.ENOSPC) in str(error):
            return StoreFull(f"The disk of the store in {path} is full; nothing was changed")
        return StoreFailed(f"The store in {path} failed: {error}")
    return error
