"""What a transaction reads in an LMDB store."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from service.buffers.lmdb.environment import MARGIN_BYTES, Environment
from service.buffers.lmdb.format import (
    CLOCK,
    COUNT,
    DATABASES,
    DUE,
    NUMBER,
    TIME,
    key_range,
    microseconds,
    name_of,
    older_records,
    with_prefix,
)
from service.buffers.lmdb.keys import KeyReader
from service.buffers.lmdb.pages import BEHIND, faults_of
from service.buffers.lmdb.slots import CHUNK_BYTES, RESERVE_BYTES, disk_full, slots_in, stored_number
from service.buffers.lmdb.values import ValueReader
from service.buffers.names import BufferName
from service.buffers.packed import SEAL_BYTES, sound, unpack_record
from service.buffers.pushes import MAX_STORED_BYTES
from service.buffers.record import Record
from service.buffers.room import store_full
from service.errors import BufferCorrupt

_SIZE = re.compile(rb'\[{"shape":\[(\d+)\]')
"""The beginning of a record whose buffer has one axis."""


class Reader:
    """The state of a store that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn
        self.values, self.keys = ValueReader(env, txn), KeyReader(env, txn)

    def get(self, name: BufferName) -> Record | None:
        """Return the buffer, expired or not. Raises `BufferCorrupt`."""
        sealed = self._txn.get(name.joined.encode(), db=self._env.buffers)
        return None if sealed is None else unpack_record(name, sealed)

    def may_live(self, name: BufferName, now: float) -> bool:
        """Return whether the buffer lives, or is damaged: a client that asks for it gets the error."""
        try:
            record = self.get(name)
        except BufferCorrupt:
            return True
        return record is not None and record.lives(now)

    def record_bytes(self, name: BufferName) -> int:
        """Return how many bytes the buffer's record takes, 0 if there is none."""
        return max(0, len(self._txn.get(name.joined.encode(), default=b"", db=self._env.buffers)) - SEAL_BYTES)

    def records(self, start: bytes, stop: bytes) -> Iterator[Record]:
        """Yield the buffers whose keys lie from `start` up to, but without, `stop`, in the order of their keys.

        Damaged buffers are left out: a client that asks for one gets the error.
        """
        return (record for _, record in sound(self._between(start, stop)) if record is not None)

    def names_in(self, start: bytes, stop: bytes) -> Iterator[BufferName]:
        """Yield the names of the buffers whose keys lie from `start` up to, but without, `stop`."""
        return (name for name, _ in self._between(start, stop))

    def sound_records(self, prefix: str = "") -> Iterator[tuple[BufferName, Record | None]]:
        """Yield the buffers whose joined names begin with the prefix: name and record, None if that is damaged."""
        found = self._between(prefix.encode(), prefix.encode() + BEHIND)
        return sound(itertools.chain(found, older_records(self._txn, self._env.older)))

    def bytes_of(self, namespace: str) -> int:
        """Return the bytes that all buffers of the namespace have by their shapes, those of bool. No seal is checked.

        A damaged record may say anything, so it counts only if it may be true.
        """
        own = self._between(*key_range(namespace, "", ""))
        sizes = (int(found[1]) for _, sealed in own if (found := _SIZE.match(sealed)))
        return sum(size for size in sizes if size <= MAX_STORED_BYTES)

    def _between(self, start: bytes, stop: bytes) -> Iterator[tuple[BufferName, memoryview]]:
        """Yield the name and the stored record of the buffers with keys from `start` up to, but without, `stop`."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            if cursor.set_range(start):
                for key, sealed in itertools.takewhile(lambda entry: bytes(entry[0]) < stop, cursor):
                    yield name_of(key), sealed

    def stored_clock(self) -> bytes:
        """Return what `meta` has of the clock, b"" if it is missing or damaged."""
        sealed = self._txn.get(CLOCK, default=b"", db=self._env.meta)
        return bytes(self._env.unseal(sealed, CLOCK) or b"")

    def adds_up(self) -> bool:
        """Return whether the sums of all counts are right."""
        entries, uses = self.entries(), self.keys.uses().values()
        buffers, keys = sum(self.counts().values()), sum(use.entries for use in uses)
        return buffers == entries["buffers"] and keys == entries["outcomes"]

    def counts(self, prefix: str = "") -> dict[str, int]:
        """Return the stored count of buffers of each namespace with the prefix, 0 if it is damaged."""
        found = with_prefix(self._txn, self._env.meta, COUNT + prefix.encode())
        stored = ((key, self._env.unseal(each, key)) for key, each in found)
        return {key[len(COUNT) :].decode(errors="replace"): int.from_bytes(data or b"", "big") for key, data in stored}

    def count_all(self) -> dict[str, int]:
        """Count the buffers of each namespace."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            return Counter(name_of(key).namespace for key in cursor.iternext(values=False))

    def value_ids(self) -> list[int]:
        """Return the ids of all values."""
        with self._txn.cursor(db=self._env.values) as cursor:
            return [NUMBER.unpack(key)[0] for key in cursor.iternext(values=False)]

    def slot_count(self) -> int:
        """Return the number of slots, free slots included."""
        return stored_number(self._env, self._txn, b"slots")

    def free_slots(self) -> list[int]:
        """Return the slots that no value uses, -1 for some that are lost."""
        with self._txn.cursor(db=self._env.free) as cursor:
            return [slot for entry in cursor for slot in slots_in(self._env, entry).tolist() or [-1]]

    def damaged_pages(self) -> list[str]:
        """Return a line for each damaged page of LMDB."""
        return faults_of(self._env.path / "data.mdb", self._txn, self._txn.stat(self._env.meta)["psize"])

    def pages_in_use(self) -> int:
        """Return the bytes of LMDB's pages in use."""
        size = 0
        for name in DATABASES:
            stat = self._txn.stat(getattr(self._env, name))
            size += (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"]
        return size

    def bytes_in_use(self) -> int:
        """Return the bytes of LMDB's pages in use and of the slots in use, which GRADSERVE_STORE_BYTES limits."""
        with self._txn.cursor(db=self._env.free) as cursor:
            free = sum((len(slots) - SEAL_BYTES) // NUMBER.size for slots in cursor.iternext(keys=False))
        return self.pages_in_use() + (self.slot_count() - free) * CHUNK_BYTES

    def check_room(self, limit: int) -> None:
        """Raise `StoreFull` unless the store stays within `limit`, and LMDB keeps its reserve."""
        at_most = self.pages_in_use() + self.slot_count() * CHUNK_BYTES  # found at once, with the free slots
        is_full = at_most > limit and self.bytes_in_use() > limit
        if is_full or self._env.file_bytes() > 2 * self._env.max_bytes + MARGIN_BYTES:
            raise store_full(self._env.max_bytes)
        reserve = RESERVE_BYTES if limit < self._env.max_bytes else RESERVE_BYTES // 2  # as `room_for` has it
        if not self._env.file.has_room() and self._env.disk_bytes() - self.pages_in_use() < reserve:
            raise disk_full()

    def deadlines_up_to(self, limit: int, most: int, namespace: str | None) -> list[bytes]:
        """Return the first entries of deadlines that are over, of one namespace or of all."""
        deadlines: list[bytes] = []
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            for key in cursor.iternext(values=False):
                if len(deadlines) == most or TIME.unpack_from(key)[0] > limit:
                    break
                if namespace is None or name_of(key[TIME.size :]).namespace == namespace:
                    deadlines.append(bytes(key))
        return deadlines

    def entries(self) -> dict[str, int]:
        """Return the number of entries of each database."""
        return {name: self._txn.stat(getattr(self._env, name))["entries"] for name in DATABASES}

    def anything_due(self, oldest_key: int, now: float) -> bool:
        """Return whether a key has expired, the deadline of a buffer is over, or a step is due."""
        for db, limit in ((self._env.outcomes, oldest_key), (self._env.deadlines, microseconds(now))):
            with self._txn.cursor(db=db) as cursor:
                if is_due(cursor, limit):
                    return True
        return self.first_due() <= now

    def first_due(self) -> float:
        """Return when the first running step is due, in seconds since 1970; infinity if none is."""
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            return float(TIME.unpack_from(cursor.key(), len(DUE))[0] / 1e6) if cursor.set_range(DUE) else math.inf


@contextmanager
def reading(env: Environment) -> Iterator[Reader]:
    """Read the store as it is at one moment. Raises `StoreFailed`."""
    with env.reading() as txn:
        yield Reader(env, txn)


def is_due(cursor: Any, limit: int) -> bool:
    """Move the cursor to the first entry. Return whether its time is up to `limit`."""
    return bool(cursor.first()) and bool(TIME.unpack_from(cursor.key())[0] <= limit)
