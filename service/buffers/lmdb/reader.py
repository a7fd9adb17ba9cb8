"""What a transaction reads in an LMDB store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import (
    COUNT,
    DATABASES,
    KEY_HEAD,
    MARK_SIZE,
    TIME,
    WRITER,
    microseconds,
    seed_of,
    unpacked,
)
from service.buffers.lmdb.packs import lists
from service.buffers.lmdb.slots import CHUNK, NUMBER, slot_count
from service.buffers.lmdb.values import ValueReader, opened
from service.buffers.names import namespace_of
from service.buffers.record import Known, Record
from service.errors import BufferCorrupt


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

    def known(self, digest: bytes, oldest: int) -> Known | None:
        """What is stored with a key, unless it is older than `oldest`."""
        sealed = self._txn.get(digest, db=self._env.keys)
        if sealed is None:
            return None
        data = opened(sealed, seed_of(digest))
        if data is None:
            raise BufferCorrupt("The stored outcome of this Idempotency-Key is damaged on the disk")
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

    def slot_count(self) -> int:
        """How many slots there are."""
        return slot_count(self._env, self._txn)

    def free_slots(self) -> list[int]:
        """The slots that nothing refers to."""
        with self._txn.cursor(db=self._env.free) as cursor:
            return [slot for found in cursor.iternext(keys=False) for slot in np.frombuffer(found, "<i8").tolist()]

    def packs(self) -> dict[int, dict[int, int] | None]:
        """By slot that several values may share the ids and the bytes of these values; None: that is damaged."""
        return lists(self._env, self._txn)

    def pages(self) -> int:
        """Bytes of the pages in use."""
        size = 0
        for name in DATABASES:
            stat = self._txn.stat(getattr(self._env, name))
            size += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return size

    def taken(self) -> int:
        """Bytes of the pages in use and of all slots."""
        return self.pages() + self.slot_count() * CHUNK

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


def is_due(cursor: Any, limit: int) -> bool:
    """Whether the first entry, to which the cursor moves, has a time up to `limit`."""
    return bool(cursor.first()) and bool(TIME.unpack_from(cursor.key())[0] <= limit)
