"""The values that a transaction changes.

An add to a value that the writer remembers changes it where it is, in memory; the whole value is written all the same.
Any other value is read and checked first.
"""

from __future__ import annotations

import itertools
import math
import sys
from contextlib import suppress
from typing import Any, NamedTuple

import lmdb
import numpy as np
import xxhash

from service.buffers import failpoints
from service.buffers.gradients import Dense, Gradient, add_piece, beside, numbers_of, stored_bytes
from service.buffers.lmdb.caches import CachedValue, ValueCache
from service.buffers.lmdb.format import NUMBER, keep
from service.buffers.lmdb.slots import CHUNK_BYTES, Databases, Slots, stored_number
from service.buffers.lmdb.values import (
    ZEROS,
    Chunk,
    Entry,
    StoredGradient,
    ValueReader,
    add_waiting,
    checksum_of,
    is_sum,
    may_be_sum,
    pieces_of,
)
from service.buffers.packed import SEAL_BYTES
from service.buffers.pushes import Place
from service.buffers.record import Spec
from service.dtypes import WIRE_NAMES, Array
from service.errors import BufferCorrupt
from service.kernels.gather import GatheredRows

INLINE_BYTES = 1 << 16
"""The largest value that LMDB holds itself: a slot, which is four times as large, would be mostly empty."""

LARGEST_CACHED_BYTES = 1 << 22
"""The largest value that the writer remembers: a larger value would push out too many others."""

MOST_WAITING_RATIO = 2.0
"""Gradients that every read takes into memory wait up to this many times the bytes of their value."""

MOST_WAITING_GRADIENTS = 32
"""Gradients that wait for one value: each makes every read, and every later add, a little longer."""

MOST_FOLDED = 4
"""Gradients that a fold adds: its transaction takes about twice as long as with one, and others wait for it."""


class Written(NamedTuple):
    """The value that already has the numbers of an array, and whether the array is its sum with zeros."""

    value: int
    is_sum: bool


class ValueWriter(ValueReader):
    """The values that a transaction changes. `cache` must be cleared if the transaction is not committed."""

    def __init__(self, env: Databases, txn: Any, cache: ValueCache) -> None:
        super().__init__(env, txn)
        self._cache = cache
        self._memory = np.empty(CHUNK_BYTES, np.uint8)  # for a chunk of a value that is not remembered
        self.slots = Slots(env, txn)
        self.written: dict[int, Written] = {}
        """Arrays, by their `id`, that transactions before this one have written: the first use takes the value."""

    def accumulate(self, spec: Spec, old: int | None, gradient: Gradient, weight: float, overwrite: bool) -> int:
        """Add to the value `old`, None for zeros. Return the id of the sum, which replaces the old value."""
        value = self.new_id() if old is None else old
        if spec.nbytes <= INLINE_BYTES:
            self._add_small(spec, value, old, gradient, weight, overwrite)
            return value
        cached = self._cache.take(old)
        entry = self._large(spec, old) if cached is None else Entry(chunks=cached.chunks)
        if isinstance(gradient, GatheredRows) and not overwrite and self._may_wait(spec, entry, gradient):
            entry.waiting.append(self._store(gradient, weight))
        else:
            array = None if cached is None else cached.array
            self._add_to_chunks(spec, value, entry, array, gradient, weight, overwrite)
        self._put(value, entry.pack())
        return value

    def stage(self, spec: Spec, gradient: Gradient) -> Place:
        """Store a gradient. Return its `StoredGradient` without a weight, and whether it is its sum with zeros."""
        is_sum = spec.nbytes > INLINE_BYTES and isinstance(gradient, Dense) and self._is_sum(spec, gradient.array)
        return [*self._store(gradient)[:3], is_sum]

    def _is_sum(self, spec: Spec, array: Array) -> bool:
        if not may_be_sum(spec, array):
            return False
        written = self.written.get(id(array))
        return is_sum(array, 0, array.nbytes) if written is None else written.is_sum

    def staged(self, spec: Spec, place: Place) -> Gradient:
        """Return a staged gradient."""
        return self.gradient(spec, StoredGradient(*place[:3]))

    def add_staged(self, spec: Spec, old: int | None, place: Place, weight: float) -> tuple[int, bool]:
        """Add a staged gradient to the value `old`, None for zeros, and free it. A large gradient is not even read.

        Return the id of the sum, and whether so much waits for it that it should be folded soon.
        """
        stored = StoredGradient(*place[:3])._replace(weight=weight)
        if old is None and weight == 1 and place[3]:
            return stored.ids[0], False
        loaded = 0 if stored.is_streamed(spec) else stored.nbytes
        if spec.nbytes > INLINE_BYTES and self._has_room(spec, entry := self._large(spec, old), loaded):
            value = self.new_id() if old is None else old
            entry.waiting.append(stored)
            self._cache.take(old)
            self._put(value, entry.pack())
            return value, 2 * math.prod(stored.shape) >= spec.size
        value = self.accumulate(spec, old, self.gradient(spec, stored), weight, overwrite=False)
        for each in stored.ids:
            self.free(each)
        return value, False

    def has_waiting(self, value: int) -> bool:
        """Return whether anything waits to be added to a value."""
        return bool(self._entry(value).waiting)

    def fold(self, spec: Spec, value: int, most_bytes: int) -> bool:
        """Add to a large value up to `MOST_FOLDED` gradients that wait for it. Return whether more is to be added.

        At most `most_bytes` of the value change, but at least a chunk; the next fold goes on behind them.
        """
        entry = self._entry(value)
        done = entry.waiting[0].done
        some = [*itertools.takewhile(lambda each: each.done == done, entry.waiting[:MOST_FOLDED])]
        end, waiting = done + max(1, most_bytes // CHUNK_BYTES), self._waiting(spec, some)
        for number, start, stop in itertools.islice(pieces_of(spec), done, end):
            out = self._memory.view(spec.dtype)[: stop - start]
            self._read(value, entry.chunks, number, out)
            if add_waiting(spec, waiting, start, stop, out):
                entry.chunks[number] = self._write(value, number, entry.chunks[number].slot, out.view(np.uint8).data)
        left = entry.waiting[len(some) :]
        if end < len(entry.chunks):
            entry.waiting = [*(each._replace(done=end) for each in some), *left]
        else:
            entry.waiting = some
            self._forget_waiting(entry)
            entry.waiting = left
        self._put(value, entry.pack())
        return bool(entry.waiting)

    def _large(self, spec: Spec, value: int | None) -> Entry:
        """Return the entry of a large value, None for zeros."""
        return Entry(chunks=[ZEROS] * math.ceil(spec.nbytes / CHUNK_BYTES)) if value is None else self._entry(value)

    def _add_small(
        self, spec: Spec, value: int, old: int | None, gradient: Gradient, weight: float, overwrite: bool
    ) -> None:
        cached = self._cache.take(old)
        packed = np.empty(spec.nbytes + 1 + SEAL_BYTES, np.uint8) if cached is None else cached.array  # an `Entry`
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
        cached: Array | None,
        gradient: Gradient,
        weight: float,
        overwrite: bool,
    ) -> None:
        waiting, whole = [] if overwrite else self._waiting(spec, entry.waiting), None
        if isinstance(gradient, Dense) and spec.nbytes <= LARGEST_CACHED_BYTES:
            whole = np.empty(spec.size, spec.dtype) if cached is None else cached
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
            if cached is not None and cached is whole:
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

    def _may_wait(self, spec: Spec, entry: Entry, rows: GatheredRows) -> bool:
        """Return whether to store the rows as they are: they are few, and nobody needs the sum at once."""
        return 2 * rows.grad.nbytes <= spec.nbytes and self._has_room(spec, entry, stored_bytes(rows))

    def _has_room(self, spec: Spec, entry: Entry, nbytes: int) -> bool:
        """Return whether a gradient may wait for the value. A read takes `nbytes` of it into memory."""
        loaded = nbytes + sum([each.nbytes for each in entry.waiting if not each.is_streamed(spec)])
        few = len(entry.waiting) < MOST_WAITING_GRADIENTS and loaded <= MOST_WAITING_RATIO * spec.nbytes
        return few and spec.nonfinite == "allow"

    def _store(self, gradient: Gradient, weight: float = 1.0) -> StoredGradient:
        """Store a gradient as it came."""
        array = numbers_of(gradient)
        ids = [self.store_bytes(each) for each in (*beside(gradient), array)]
        return StoredGradient(ids, array.shape, WIRE_NAMES[array.dtype], weight)

    def store_bytes(self, array: Array) -> int:
        """Store the bytes of an array as a value. Return its id."""
        if (written := self.written.pop(id(array), None)) is not None:
            return written.value
        value = self.new_id()
        self.append(value, array, 0, sys.maxsize)
        return value

    def append(self, value: int, array: Array, done: int, most_bytes: int) -> int:
        """Write the bytes of an array behind the first `done`, which its value has. Return how many it has now.

        These are at most `most_bytes`, but at least a chunk, or all of a small array.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size <= INLINE_BYTES:
            self._put(value, Entry(inline=data.data).pack())
            return data.size
        entry = self._entry(value) if done else Entry()
        first, most = done // CHUNK_BYTES, max(1, most_bytes // CHUNK_BYTES)
        for number in range(first, min(first + most, math.ceil(data.size / CHUNK_BYTES))):
            piece = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            entry.chunks.append(self._write(value, number, -1, piece.data))
        self._put(value, entry.pack())
        return min(len(entry.chunks) * CHUNK_BYTES, data.size)

    def free(self, value: int | None) -> None:
        """Delete a value, None for no value. The slots of a damaged value are lost."""
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
        packed[-SEAL_BYTES:] = xxhash.xxh3_64_digest(packed[:-SEAL_BYTES], value)
        self._txn.put(NUMBER.pack(value), packed, db=self._env.values)

    def _forget_waiting(self, entry: Entry) -> None:
        for value in itertools.chain(*[gradient.ids for gradient in entry.waiting]):
            self.free(value)
        entry.waiting = []

    def _write(self, value: int, number: int, slot: int, data: memoryview) -> Chunk:
        """Write a chunk that was in `slot`, -1 for a new chunk. Return where it is now."""
        slot = self.slots.write(slot, data)
        failpoints.hit("chunk")
        return Chunk(slot, checksum_of(data, value, number))

    def new_id(self) -> int:
        """Return a number that no buffer and no value ever had."""
        value = stored_number(self._env, self._txn, b"last_id") + 1
        if self._txn.get(NUMBER.pack(value), db=self._env.values) is not None:
            raise lmdb.CorruptedError(f"it has a value {value}, but {value - 1} should be the last")
        keep(self._txn, self._env.meta, b"last_id", NUMBER.pack(value))
        return value
