"""What the writer thread remembers from one transaction to the next, so that it need not read it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from service.buffers.lmdb.values import Chunk
from service.buffers.names import BufferName
from service.buffers.record import Record
from service.buffers.room import Most
from service.buffers.store import Allocate
from service.dtypes import Array

MOST_RECORDS = 1 << 14
"""Buffers that the writer remembers: each takes about 2 KB, all of them 32 MB."""

MOST_BYTES_OF_RECORDS = 6 << 20
"""Bytes of their records in the store: names of contributors and closed steps take up to 12 times as much here."""

MOST_BYTES_OF_VALUES = 1 << 25
"""All values that the writer remembers: to read a value again and check it takes a quarter of an add."""

ARRAY_BYTES = 320
"""What Python takes for each of these values beside its elements."""


class RecordCache(dict[BufferName, Record | None]):
    """Records as the last transactions saw and left them, None for no buffer. Too many are all forgotten at once."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = 0

    def remember(self, records: Mapping[BufferName, Record | None]) -> None:
        """Replace the records of these names."""
        for name, record in records.items():
            old = self.get(name)
            self._bytes += (record.packed_bytes if record else 0) - (old.packed_bytes if old else 0)
            self[name] = record
        if len(self) > MOST_RECORDS or self._bytes > MOST_BYTES_OF_RECORDS:
            self.clear()

    def clear(self) -> None:
        super().clear()
        self._bytes = 0


class CachedValue(NamedTuple):
    """A value as the last add left it, flat, and its chunks.

    A small value has no chunks; its array has room for what `Entry.pack` puts behind the elements.
    """

    array: Array
    chunks: list[Chunk]


class ValueCache:
    """The values that changed last, by their ids."""

    def __init__(self) -> None:
        self._values: dict[int, CachedValue] = {}
        self._bytes = 0

    def take(self, value: int | None) -> CachedValue | None:
        """Remove a value and return it, for the caller to change; None if it is not here."""
        cached = self._values.pop(value, None) if value is not None else None
        if cached is not None:
            self._bytes -= cached.array.nbytes + ARRAY_BYTES
        return cached

    def put(self, value: int, cached: CachedValue) -> None:
        """Remember a value. Evict the values that changed longest ago if all take more than `MOST_BYTES_OF_VALUES`."""
        self._values[value] = cached
        self._bytes += cached.array.nbytes + ARRAY_BYTES
        while self._bytes > MOST_BYTES_OF_VALUES:
            self.take(next(iter(self._values)))

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0


@dataclass
class WriterState:
    """The caches of the writer thread, and the settings of the store that its transactions need.

    The caches are true while the last transaction of the store is `last`, of this process; 0 before its first.
    """

    allocate: Allocate
    most: Most
    records: RecordCache = field(default_factory=RecordCache)
    values: ValueCache = field(default_factory=ValueCache)
    last: int = 0

    def forget(self) -> None:
        """Empty the caches."""
        self.records.clear()
        self.values.clear()
