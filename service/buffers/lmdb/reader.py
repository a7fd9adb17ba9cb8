"""What a transaction reads in an LMDB store."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from service.buffers.graphs import unpack_older
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import CLOCK, COUNT, DATABASES, DUE, NUMBER, TIME, microseconds, name_of, with_prefix
from service.buffers.lmdb.keys import KeyReader
from service.buffers.lmdb.pages import BEHIND, faults_of
from service.buffers.lmdb.pushes import PushReader
from service.buffers.lmdb.slots import CHUNK_BYTES, slots_in, stored_number
from service.buffers.lmdb.values import ValueReader
from service.buffers.names import BufferName, graphs_of
from service.buffers.packed import SEAL_BYTES, unpack_record
from service.buffers.record import Record
from service.errors import BufferCorrupt

T = TypeVar("T")


class Reader:
    """The state of a store that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn
        self.values, self.keys, self.pushes = ValueReader(env, txn), KeyReader(env, txn), PushReader(env, txn)

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
        found = self._between(self._env.buffers, start, stop, unpack_record)
        return (record for _, record in found if record is not None)

    def names_in(self, start: bytes, stop: bytes) -> Iterator[BufferName]:
        """Yield the names of the buffers whose keys lie from `start` up to, but without, `stop`."""
        with self._txn.cursor(db=self._env.buffers) as cursor:
            if cursor.set_range(start):
                keys = map(bytes, cursor.iternext(values=False))
                yield from map(name_of, itertools.takewhile(lambda key: key < stop, keys))

    def sound_records(self, prefix: str = "") -> Iterator[tuple[BufferName, Record | None]]:
        """Yield the buffers whose joined names begin with the prefix: name and record, None if that is damaged."""
        found = self._between(self._env.buffers, prefix.encode(), prefix.encode() + BEHIND, unpack_record)
        if self._env.older_graphs is None:
            return found
        graphs = self._between(self._env.older_graphs, b"", BEHIND, unpack_older)
        older = ((BufferName(graphs_of(name.namespace), name.name), record) for name, record in graphs)
        return itertools.chain(found, older)

    def _between(
        self, database: Any, start: bytes, stop: bytes, unpack: Callable[[BufferName, memoryview], T]
    ) -> Iterator[tuple[BufferName, T | None]]:
        """Yield what has keys from `start` up to, but without, `stop`: name and content, None if it is damaged."""
        with self._txn.cursor(db=database) as cursor:
            if not cursor.set_range(start):
                return
            for key, sealed in cursor:
                if bytes(key) >= stop:
                    return
                name = name_of(key)
                try:
                    yield name, unpack(name, sealed)
                except BufferCorrupt:
                    yield name, None

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

    def entries(self) -> dict[str, int]:
        """Return the number of entries of each database."""
        return {name: self._txn.stat(getattr(self._env, name))["entries"] for name in DATABASES}

    def anything_due(self, oldest_key: int, now: float) -> bool:
        """Return whether a key has expired, the deadline of a buffer or a push is over, or an epoch is due."""
        for db, limit in ((self._env.outcomes, oldest_key), (self._env.deadlines, microseconds(now))):
            with self._txn.cursor(db=db) as cursor:
                if is_due(cursor, limit):
                    return True
        return self.pushes.anything_due(now) or self.first_due() <= now

    def first_due(self) -> float:
        """Return when the first running epoch is due, in seconds since 1970; infinity if none is."""
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
