"""Values of buffers that a transaction changes.

The thread that writes remembers the values that it wrote last, and adds to them where they are. They are written whole
all the same; what is forgotten, or was changed by another process, is read and checked.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash

from service.buffers import failpoints
from service.buffers.gradients import Dense, Gradient, add_piece
from service.buffers.lmdb.slots import CHUNK, NUMBER, Databases, Slots
from service.buffers.lmdb.values import (
    SEAL,
    ZEROS,
    Chunk,
    Entry,
    ValueReader,
    Waiting,
    add_waiting,
    chunk_seed,
    pieces_of,
)
from service.buffers.record import Spec
from service.dtypes import NAMES, Array
from service.errors import BufferCorrupt
from service.kernels.gather import GatheredRows

INLINE = 1 << 16
"""Bytes: up to this size LMDB holds a value itself; a slot, which is four times as large, would be mostly empty."""

LARGEST_CACHED_BYTES = 1 << 22
"""The largest value that the writer remembers: a larger one would push out too many others."""

CACHE_BYTES = 1 << 25
"""The writer remembers values of this size together: to read a value again and check it takes a quarter of an add."""

ARRAY_BYTES = 320
"""What Python takes for each value that is remembered, beyond the value's own bytes."""

MOST_WAITING_RATIO = 2.0
"""Sparse gradients may wait up to this many times the bytes of their value: every read adds them on its way."""

MOST_WAITING_GRADIENTS = 32
"""Sparse gradients that may wait for one value: each makes every read, and every later add, a little longer."""


class CachedValue(NamedTuple):
    """A value as the last add left it, flat, and its chunks.

    A small value has no chunks; its array has room for what `Entry.packed` puts behind the value.
    """

    array: Array
    chunks: list[Chunk]


class ValueCache:
    """The values that changed last, by their ids, up to `CACHE_BYTES`."""

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
        """Remember a value, and evict those that changed longest ago if that is too much."""
        self._values[value] = cached
        self._bytes += cached.array.nbytes + ARRAY_BYTES
        while self._bytes > CACHE_BYTES:
            self.take(next(iter(self._values)))

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()
        self._bytes = 0


class ValueWriter(ValueReader):
    """Values that a transaction changes.

    What is in `cache` is true if no other process wrote since; clear it unless the transaction is committed.
    """

    def __init__(self, env: Databases, txn: Any, cache: ValueCache) -> None:
        super().__init__(env, txn)
        self._cache = cache
        self._memory = np.empty(CHUNK, np.uint8)
        self.slots = Slots(env, txn)

    def accumulate(self, spec: Spec, old: int | None, gradient: Gradient, weight: float, overwrite: bool) -> int:
        """Add to the value `old`. Return the id of the result, the only one from now on."""
        value = self.new_id() if old is None else old
        if spec.nbytes <= INLINE:
            self._add_small(spec, value, old, gradient, weight, overwrite)
            return value
        cached, array = self._cache.take(old), None
        if cached is not None:
            array, entry = cached.array, Entry(chunks=cached.chunks)
        elif old is None:
            entry = Entry(chunks=[ZEROS] * math.ceil(spec.nbytes / CHUNK))
        else:
            entry = self._entry(old)
        if isinstance(gradient, GatheredRows) and self._may_wait(spec, entry, gradient, overwrite):
            entry.waiting.append(self._store_rows(gradient, weight))
        else:
            self._add_to_chunks(spec, value, entry, array, gradient, weight, overwrite)
        self._put(value, entry.packed())
        return value

    def _add_small(
        self, spec: Spec, value: int, old: int | None, gradient: Gradient, weight: float, overwrite: bool
    ) -> None:
        cached = self._cache.take(old)
        packed = np.empty(spec.nbytes + 1 + SEAL, np.uint8) if cached is None else cached.array
        packed[spec.nbytes] = ord("i")
        result = packed[: spec.nbytes].view(spec.dtype)
        piece = gradient.piece(0, spec.size) if spec.size else np.empty(0, spec.dtype)
        total: Array | int = 0
        if old is not None and not overwrite:
            total = self._inline(spec, old) if cached is None else result
        if piece is None and not overwrite:
            result[...] = total
        else:
            add_piece(spec, result, total, piece, weight, overwrite)
        self._put(value, packed.data)
        self._cache.put(value, CachedValue(packed, []))

    def _add_to_chunks(
        self,
        spec: Spec,
        value: int,
        entry: Entry,
        known: Array | None,
        gradient: Gradient,
        weight: float,
        overwrite: bool,
    ) -> None:
        waiting, whole = [] if overwrite else self._waiting(spec, entry), None
        if isinstance(gradient, Dense) and spec.nbytes <= LARGEST_CACHED_BYTES:
            whole = np.empty(spec.size, spec.dtype) if known is None else known
        spare = self._memory.view(spec.dtype)
        for number, start, stop in pieces_of(spec):
            piece = gradient.piece(start, stop)
            slot = entry.chunks[number].slot
            if overwrite and piece is None:
                self.slots.free(slot)
                entry.chunks[number] = ZEROS
                continue
            out = spare[: stop - start] if whole is None else whole[start:stop]
            total: Array | int = 0
            if known is not None and known is whole:
                total = out
            elif not overwrite and (slot >= 0 or waiting):
                self._read(value, entry.chunks, number, out)
                if not add_waiting(spec, waiting, start, stop, out) and piece is None:
                    continue
                total = out
            elif piece is None:
                continue
            if piece is not None:
                add_piece(spec, out, total, piece, weight, overwrite)
            entry.chunks[number] = self._write(value, number, slot, out.view(np.uint8).data)
        if whole is not None:
            self._cache.put(value, CachedValue(whole, entry.chunks))
        self._forget_waiting(entry)

    def _may_wait(self, spec: Spec, entry: Entry, rows: GatheredRows, overwrite: bool) -> bool:
        """Whether the rows are better written as they are: they are few, and the result need not be looked at."""
        waiting = sum(one.nbytes for one in entry.waiting) + rows.grad.nbytes + 16 * len(rows.grad)
        few = 2 * rows.grad.nbytes <= spec.nbytes and len(entry.waiting) < MOST_WAITING_GRADIENTS
        return few and not overwrite and spec.nonfinite == "allow" and waiting <= MOST_WAITING_RATIO * spec.nbytes

    def _store_rows(self, gradient: GatheredRows, weight: float) -> Waiting:
        rows = gradient.grad
        ids = [self._store_bytes(array) for array in (gradient.index, rows)]
        return Waiting(ids[0], ids[1], len(rows), rows.shape[1], NAMES[rows.dtype], weight)

    def _store_bytes(self, array: Array) -> int:
        value, data = self.new_id(), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size <= INLINE:
            self._put(value, Entry(inline=data.data).packed())
            return value
        starts = range(0, data.size, CHUNK)
        pieces = [data[start : start + CHUNK].data for start in starts]
        written = [self._write(value, number, -1, piece) for number, piece in enumerate(pieces)]
        self._put(value, Entry(chunks=written).packed())
        return value

    def free(self, value: int | None) -> None:
        """Forget a value. The slots of a damaged value are lost."""
        if value is None:
            return
        self._cache.take(value)
        with suppress(BufferCorrupt):
            entry = self._entry(value)
            self._forget_waiting(entry)
            for chunk in entry.chunks:
                self.slots.free(chunk.slot)
        self._txn.delete(NUMBER.pack(value), db=self._env.values)

    def _put(self, value: int, packed: memoryview) -> None:
        packed[-SEAL:] = xxhash.xxh3_64_digest(packed[:-SEAL], value)
        self._txn.put(NUMBER.pack(value), packed, db=self._env.values)

    def _forget_waiting(self, entry: Entry) -> None:
        for one in entry.waiting:
            self.free(one.index_id)
            self.free(one.rows_id)
        entry.waiting = []

    def _write(self, value: int, number: int, slot: int, data: memoryview) -> Chunk:
        """Write a chunk that was in `slot`: where it is now, and its checksum."""
        slot = self.slots.write(slot, data)
        failpoints.hit("chunk")
        return Chunk(slot, xxhash.xxh3_64_intdigest(data, chunk_seed(value, number)))

    def new_id(self) -> int:
        """A number that was never given before."""
        last = self._txn.get(b"last_id", db=self._env.meta)
        value: int = 1 + (0 if last is None else NUMBER.unpack(last)[0])
        self._txn.put(b"last_id", NUMBER.pack(value), db=self._env.meta)
        return value
