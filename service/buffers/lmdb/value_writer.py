"""Values of buffers that a transaction changes.

The thread that writes remembers the values that it wrote last, and adds to them where they are. They are written whole
all the same; what is forgotten, or was changed by another process, is read and checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash

from service.buffers.gradients import Dense, Gradient, add_piece
from service.buffers.lmdb.packs import Lonely, Packs
from service.buffers.lmdb.slots import CHUNK, NUMBER, Databases, Slots
from service.buffers.lmdb.values import (
    SEAL,
    ZEROS,
    Chunk,
    Entry,
    Place,
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
"""Up to this size a value is small."""

PACKED, MOST_INLINE = 1 << 15, 1 << 20
"""Small values are kept in LMDB, which writes them when a transaction is committed. What a transaction changes beyond
so many bytes of them is better on its way to the disk before: values from that size on share slots then. With smaller
ones nothing is gained."""

MOST_KEPT, KEPT_BYTES, ARRAY_BYTES = 1 << 22, 1 << 25, 320
"""Bytes of a value that the writer remembers, and of all together, what Python takes for each of them included. To read
one anew and check it takes a quarter of an add; one that is larger would push out too many."""

MOST_WAITING, MOST_GRADIENTS = 2.0, 32
"""How many times a value's bytes may wait to be added to it, and in how many gradients: each makes every read and every
add that follows a little longer."""


NOWHERE = Entry()
"""Of a value that is in LMDB itself, or not there yet: nothing is to be left when it changes."""


class KeptValue(NamedTuple):
    """A value as the last add left it, flat, and its entry. A small one has room for what stands behind it in LMDB."""

    array: Array
    entry: Entry


class Kept:
    """Values by their ids: those that changed last, up to `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._values: dict[int, KeptValue] = {}
        self._bytes = 0

    def take(self, value: int | None) -> KeptValue | None:
        """A value, which is the caller's from now on; None if it is not here."""
        kept = self._values.pop(value, None) if value is not None else None
        if kept is not None:
            self._bytes -= kept.array.nbytes + ARRAY_BYTES
        return kept

    def keep(self, value: int, kept: KeptValue) -> None:
        """Keep a value, and let go of those that changed longest ago where that is too much."""
        self._values[value] = kept
        self._bytes += kept.array.nbytes + ARRAY_BYTES
        while self._bytes > KEPT_BYTES:
            self.take(next(iter(self._values)))

    def clear(self) -> None:
        """Let go of all."""
        self._values.clear()
        self._bytes = 0


class ValueWriter(ValueReader):
    """Values that a transaction changes. `written` is called after each chunk.

    What is in `kept` is true if no other process wrote since; it must be cleared unless the transaction is committed.
    """

    def __init__(self, env: Databases, txn: Any, kept: Kept, written: Callable[[], None]) -> None:
        super().__init__(env, txn)
        self._kept, self._written = kept, written
        self._memory = np.empty(CHUNK, np.uint8)
        self._inline_bytes = 0
        self.slots = Slots(env, txn)
        self._packs = Packs(env, txn, self.slots, written)

    def accumulate(self, spec: Spec, old: int | None, gradient: Gradient, weight: float, overwrite: bool) -> int:
        """Add to the value `old`. Returns the id of the result, under which alone it is from now on."""
        value = self.new_id() if old is None else old
        if spec.nbytes <= INLINE:
            self._add_small(spec, value, old, gradient, weight, overwrite)
            return value
        known, kept = self._kept.take(old), None
        if known is not None:
            kept, entry = known
        elif old is None:
            entry = Entry(chunks=[ZEROS] * math.ceil(spec.nbytes / CHUNK))
        else:
            entry = self._entry(old)
        if isinstance(gradient, GatheredRows) and self._may_wait(spec, entry, gradient, overwrite):
            entry.waiting.append(self._store_rows(gradient, weight))
        else:
            self._add_to_chunks(spec, value, entry, kept, gradient, weight, overwrite)
        self._put(value, entry.packed())
        return value

    def _add_small(
        self, spec: Spec, value: int, old: int | None, gradient: Gradient, weight: float, overwrite: bool
    ) -> None:
        known, left = self._kept.take(old), NOWHERE
        if known is not None:
            packed, left = known
        else:
            packed = np.empty(spec.nbytes + 1 + SEAL, np.uint8)
            try:
                left = NOWHERE if old is None else self._entry(old)
            except BufferCorrupt:
                if not overwrite:
                    raise
                self._packs.leave_unknown(value)
        result = packed[: spec.nbytes].view(spec.dtype)
        piece = gradient.piece(0, spec.size) if spec.size else np.empty(0, spec.dtype)
        total: Array | int = 0
        if old is not None and not overwrite:
            total = self._small(spec, old, left, result) if known is None else result
        if piece is None and not overwrite:
            result[...] = total
        else:
            add_piece(spec, result, total, piece, weight, overwrite)
        if left.place is not None:
            self._packs.leave(value, left.place.slot)
        self._kept.keep(value, KeptValue(packed, self._put_small(value, packed, spec.nbytes)))

    def _put_small(self, value: int, packed: Array, size: int) -> Entry:
        """Store a small value, the first `size` bytes, which are not to change before they are written."""
        if size < PACKED or self._inline_bytes + size <= MOST_INLINE:
            self._inline_bytes += size
            return self._put_inline(value, packed, size)
        data = packed[:size].data
        place = Place(*self._packs.add(value, data), xxhash.xxh3_64_intdigest(data, chunk_seed(value, 0)))
        entry = Entry(place=place)
        self._put(value, entry.packed())
        return entry

    def _put_inline(self, value: int, packed: Array, size: int) -> Entry:
        packed[size] = ord("i")
        self._put(value, packed.data)
        return NOWHERE

    def _read_place(self, value: int, place: Place, out: Array) -> None:
        self._packs.flush()
        super()._read_place(value, place, out)

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
        if isinstance(gradient, Dense) and spec.nbytes <= MOST_KEPT:
            whole = np.empty(spec.size, spec.dtype) if known is None else known
        spare = self._memory.view(spec.dtype)
        for number, start, stop in pieces_of(spec):
            piece = gradient.piece(start, stop)
            slot = entry.chunks[number].slot
            if overwrite and piece is None:
                self.slots.leave(slot)
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
            self._kept.keep(value, KeptValue(whole, entry))
        self._forget_waiting(entry)

    def _may_wait(self, spec: Spec, entry: Entry, rows: GatheredRows, overwrite: bool) -> bool:
        """Whether the rows are better written as they are: they are few, and the result need not be looked at."""
        waiting = sum(one.nbytes for one in entry.waiting) + rows.grad.nbytes + 16 * len(rows.grad)
        few = 2 * rows.grad.nbytes <= spec.nbytes and len(entry.waiting) < MOST_GRADIENTS
        return few and not overwrite and spec.nonfinite == "allow" and waiting <= MOST_WAITING * spec.nbytes

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
        """Forget a value; of one that is damaged, the slots that it has for itself are lost."""
        if value is None:
            return
        self._kept.take(value)
        try:
            entry = self._entry(value)
        except BufferCorrupt:
            self._packs.leave_unknown(value)
        else:
            self._forget_waiting(entry)
            for chunk in entry.chunks:
                self.slots.leave(chunk.slot)
            if entry.place is not None:
                self._packs.leave(value, entry.place.slot)
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
        self._written()
        return Chunk(slot, xxhash.xxh3_64_intdigest(data, chunk_seed(value, number)))

    def finish(self) -> None:
        """Bring what was written to the disk, and store which slots are in use: what is left before the commit."""
        self._move_lonely()
        self._packs.finish()
        self.slots.finish()

    def _move_lonely(self) -> None:
        """Bring values that hold slots which are half empty to LMDB, so that the slots are free, if there is room."""
        lonely = self._packs.lonely()
        if lonely and self._env.file.has_room(2 * sum(one.nbytes for one in lonely)):
            for one in lonely:
                with suppress(BufferCorrupt):  # whoever reads it is told
                    self._move(one)

    def _move(self, one: Lonely) -> None:
        known = self._kept.take(one.value)
        packed = np.empty(one.nbytes + 1 + SEAL, np.uint8) if known is None else known.array
        if known is None:
            place = self._entry(one.value).place
            if place is None or place.slot != one.slot:
                return
            self._read_place(one.value, place, packed[: one.nbytes])
        self._packs.leave(one.value, one.slot)
        entry = self._put_inline(one.value, packed, one.nbytes)
        if known is not None:
            self._kept.keep(one.value, KeptValue(packed, entry))

    def new_id(self) -> int:
        """A number that was never given before."""
        last = self._txn.get(b"last_id", db=self._env.meta)
        value: int = 1 + (0 if last is None else NUMBER.unpack(last)[0])
        self._txn.put(b"last_id", NUMBER.pack(value), db=self._env.meta)
        return value
