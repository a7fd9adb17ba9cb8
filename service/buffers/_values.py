"""Values of buffers on the disk: small ones in LMDB, large ones in a file beside it.

LMDB copies a value twice on its way to the disk, and keeps lists of its free pages that every small commit after a
large one writes anew. So a large value is cut into chunks, which lie in slots of the file `values` (`_slots.py`); LMDB
holds which slots these are, with a checksum for each chunk.

The thread that writes remembers the values that it wrote last, and adds to them where they are. They are written whole
all the same; what is forgotten, or was changed by another process, is read and checked.

A sparse gradient changes few rows of most chunks. It is written as it is, and added to the chunks when the value
changes again in another way, or when 32 of them wait, or twice as many bytes as the value has; whoever reads it adds
them on the way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from service.buffers._slots import CHUNK, NUMBER, Databases, Slots
from service.buffers.gradients import Dense, Gradient, add_piece
from service.buffers.store import Allocate, Array, Spec
from service.dtypes import BOOL, DTYPES, NAMES
from service.errors import BufferCorrupt
from service.kernels.gather import GatheredRows

SEAL = 8
"""Bytes of a checksum."""

INLINE = 1 << 16
"""Up to this size a value is kept in LMDB."""

MOST_KEPT, KEPT_BYTES, ARRAY_BYTES = 1 << 22, 1 << 25, 256
"""Bytes of a value that the writer remembers, and of all together, what Python takes for each of them included. To read
one anew and check it takes a quarter of an add; one that is larger would push out too many."""

MOST_WAITING, MOST_GRADIENTS = 2.0, 32
"""How many times a value's bytes may wait to be added to it, and in how many gradients: each makes every read and every
add that follows a little longer."""

_CHUNKS = np.dtype([("slot", "<i8"), ("check", "<u8")])
"""Where a chunk is; slot -1: nowhere, it is all zeros."""

_LENGTH = struct.Struct("<I")


class _Waiting(NamedTuple):
    """A sparse gradient that waits: the ids of its indices and of its rows, their number and length, its weight."""

    index_id: int
    rows_id: int
    height: int
    inner: int
    dtype: str
    weight: float

    @property
    def nbytes(self) -> int:
        return self.height * (16 + self.inner * DTYPES[self.dtype].itemsize)


@dataclass
class _Entry:
    """A value as LMDB has it: its elements, or where its chunks are and what waits to be added to them."""

    inline: memoryview | None = None
    chunks: Array = field(default_factory=lambda: np.empty(0, _CHUNKS))
    waiting: list[_Waiting] = field(default_factory=list)

    def packed(self) -> memoryview:
        """With room for a seal."""
        if self.inline is not None:
            return memoryview(bytearray().join([self.inline, b"i", bytes(SEAL)]))
        waiting = orjson.dumps([tuple(one) for one in self.waiting])
        return memoryview(
            bytearray().join([self.chunks.tobytes(), waiting, _LENGTH.pack(len(waiting)), b"c", bytes(SEAL)])
        )

    @classmethod
    def unpacked(cls, data: memoryview) -> _Entry:
        if bytes(data[-1:]) == b"i":
            return cls(data[:-1])
        end = len(data) - 1 - _LENGTH.size
        start = end - _LENGTH.unpack_from(data, end)[0]
        chunks = np.frombuffer(data[:start], _CHUNKS).copy()
        return cls(None, chunks, [_Waiting(*one) for one in orjson.loads(data[start:end])])


def pieces_of(spec: Spec) -> Iterator[tuple[int, int, int]]:
    """The chunks of a value: number, first element, and the one after the last."""
    step = CHUNK // spec.dtype.itemsize
    for number in range(math.ceil(spec.size / step)):
        yield number, number * step, min((number + 1) * step, spec.size)


def seal(data: bytes, seed: int) -> bytes:
    """The data with its checksum, seeded by where it belongs."""
    return data + xxhash.xxh3_64_digest(data, seed)


def opened(sealed: memoryview, seed: int) -> memoryview | None:
    """What was sealed; None if it is not as it was."""
    data = sealed[:-SEAL]
    return data if xxhash.xxh3_64_digest(data, seed) == bytes(sealed[-SEAL:]) else None


class ValueReader:
    """The values that a transaction sees. What is damaged raises `BufferCorrupt`."""

    def __init__(self, env: Databases, txn: Any) -> None:
        self._env, self._txn = env, txn

    def load(self, spec: Spec, value: int | None, allocate: Allocate) -> Array:
        """A value, in memory of its own."""
        result = allocate(spec.shape, spec.dtype)
        flat = result.reshape(-1)
        for start, stop, fill in self.pieces(spec, value):
            fill(flat[start:stop])
        return result

    def pieces(self, spec: Spec, value: int | None) -> Iterator[tuple[int, int, Any]]:
        """The pieces of a value: first element, the one after the last, and what fills a flat array with them."""
        if value is None:
            for _, start, stop in pieces_of(spec):
                yield start, stop, _clear
            return
        entry = self._entry(value)
        if entry.inline is not None:
            yield 0, spec.size, lambda out, data=entry.inline: np.copyto(out, np.frombuffer(data, spec.dtype))
            return
        waiting = self._waiting(spec, entry)
        for number, start, stop in pieces_of(spec):

            def fill(out: Array, number: int = number, start: int = start, stop: int = stop) -> None:
                self._read(value, entry.chunks, number, out)
                _add_waiting(spec, waiting, start, stop, out)

            yield start, stop, fill

    def parts_of(self, value: int) -> dict[int, list[int]]:
        """The ids of a value and of what waits to be added to it, each with its slots."""
        entry = self._entry(value)
        parts = {value: [slot for slot in entry.chunks["slot"].tolist() if slot >= 0]}
        for one in entry.waiting:
            parts |= self.parts_of(one.index_id) | self.parts_of(one.rows_id)
        return parts

    def _entry(self, value: int) -> _Entry:
        return _Entry.unpacked(self._packed(value))

    def _inline(self, spec: Spec, value: int) -> Array:
        """A small value, flat, where it lies."""
        data = self._packed(value)
        if len(data) != spec.nbytes + 1 or data[-1] != ord("i"):
            raise _corrupt(value)
        return np.frombuffer(data, spec.dtype, spec.size)

    def _packed(self, value: int) -> memoryview:
        sealed = self._txn.get(NUMBER.pack(value), db=self._env.values)
        data = None if sealed is None else opened(sealed, value)
        if data is None:
            raise _corrupt(value)
        return data

    def _read(self, value: int, chunks: Array, number: int, out: Array) -> None:
        if number >= len(chunks):
            raise _corrupt(value)
        slot, check = chunks[number].item()
        if slot < 0:
            out[...] = 0
            return
        memory = out.view(np.uint8).data
        whole = self._env.file.read(slot, memory)
        if not whole or xxhash.xxh3_64_intdigest(memory, _seed(value, number)) != check:
            raise _corrupt(value)

    def _waiting(self, spec: Spec, entry: _Entry) -> list[tuple[GatheredRows, float]]:
        found = []
        for one in entry.waiting:
            index = self._load_bytes(one.index_id, one.height * 16).view(np.int64).reshape(2, one.height)
            rows = self._load_bytes(one.rows_id, one.nbytes - one.height * 16).view(DTYPES[one.dtype])
            found.append((GatheredRows.of(spec.shape, index, rows.reshape(one.height, one.inner)), one.weight))
        return found

    def _load_bytes(self, value: int, size: int) -> Array:
        return self.load(_bytes(size), value, np.empty).view(np.uint8)


def _bytes(size: int) -> Spec:
    return Spec((size,), BOOL)


def _add_waiting(spec: Spec, waiting: list[tuple[GatheredRows, float]], start: int, stop: int, out: Array) -> bool:
    """Add to a piece what waits for it. Whether anything did."""
    pieces = [(piece, weight) for rows, weight in waiting if (piece := rows.piece(start, stop)) is not None]
    for piece, weight in pieces:
        add_piece(spec, out, out, piece, weight, anew=False)
    return bool(pieces)


def _clear(out: Array) -> None:
    out[...] = 0


def _seed(value: int, number: int) -> int:
    return (value << 32 | number) & (1 << 64) - 1


def _corrupt(value: int) -> BufferCorrupt:
    return BufferCorrupt(
        f"Value {value} is damaged on the disk; gradserve doctor tells more. Delete the buffer and create it again"
    )


class Kept:
    """Values as the last add left them, by their ids; those that changed last, up to `KEPT_BYTES`.

    A small one has room for what `_Entry.packed` puts behind it.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}
        self._bytes = 0

    def take(self, value: int | None) -> Array | None:
        """A value, which is the caller's from now on; None if it is not here."""
        array = self._arrays.pop(value, None) if value is not None else None
        if array is not None:
            self._bytes -= array.nbytes + ARRAY_BYTES
        return array

    def keep(self, value: int, array: Array) -> None:
        """Keep a value, and let go of those that changed longest ago where that is too much."""
        self._arrays[value] = array
        self._bytes += array.nbytes + ARRAY_BYTES
        while self._bytes > KEPT_BYTES:
            self.take(next(iter(self._arrays)))

    def clear(self) -> None:
        """Let go of all."""
        self._arrays.clear()
        self._bytes = 0


class ValueWriter(ValueReader):
    """Values that a transaction changes. `written` is called after each chunk.

    What is in `kept` is true if no other process wrote since; it must be cleared unless the transaction is committed.
    """

    def __init__(self, env: Databases, txn: Any, kept: Kept, written: Callable[[], None]) -> None:
        super().__init__(env, txn)
        self._kept, self._written = kept, written
        self._memory = np.empty(CHUNK, np.uint8)
        self.slots = Slots(env, txn)

    def accumulate(self, spec: Spec, old: int | None, gradient: Gradient, weight: float, overwrite: bool) -> int:
        """Add to the value `old`. Returns the id of the result, under which alone it is from now on."""
        value = self.new_id() if old is None else old
        if spec.nbytes <= INLINE:
            self._add_small(spec, value, old, gradient, weight, overwrite)
            return value
        if old is None:
            entry = _Entry(None, np.full(math.ceil(spec.nbytes / CHUNK), -1, _CHUNKS))
        else:
            entry = self._entry(old)
        if isinstance(gradient, GatheredRows) and self._may_wait(spec, entry, gradient, overwrite):
            entry.waiting.append(self._store_rows(gradient, weight))
            self._kept.take(value)
        else:
            self._add_to_chunks(spec, value, entry, gradient, weight, overwrite)
        self._put(value, entry.packed())
        return value

    def _add_small(
        self, spec: Spec, value: int, old: int | None, gradient: Gradient, weight: float, overwrite: bool
    ) -> None:
        known = self._kept.take(old)
        packed = np.empty(spec.nbytes + 1 + SEAL, np.uint8) if known is None else known
        packed[spec.nbytes] = ord("i")
        result = packed[: spec.nbytes].view(spec.dtype)
        piece = gradient.piece(0, spec.size) if spec.size else np.empty(0, spec.dtype)
        total: Array | int = 0
        if old is not None and not overwrite:
            total = self._inline(spec, old) if known is None else result
        if piece is None and not overwrite:
            result[...] = total
        else:
            add_piece(spec, result, total, piece, weight, overwrite)
        self._put(value, packed.data)
        self._kept.keep(value, packed)

    def _add_to_chunks(
        self, spec: Spec, value: int, entry: _Entry, gradient: Gradient, weight: float, overwrite: bool
    ) -> None:
        waiting = [] if overwrite else self._waiting(spec, entry)
        known, whole = self._kept.take(value), None
        if isinstance(gradient, Dense) and spec.nbytes <= MOST_KEPT:
            whole = np.empty(spec.size, spec.dtype) if known is None else known
        spare = self._memory.view(spec.dtype)
        for number, start, stop in pieces_of(spec):
            piece = gradient.piece(start, stop)
            slot = int(entry.chunks[number]["slot"])
            if overwrite and piece is None:
                self.slots.leave(slot)
                entry.chunks[number] = (-1, 0)
                continue
            out = spare[: stop - start] if whole is None else whole[start:stop]
            total: Array | int = 0
            if known is not None and known is whole:
                total = out
            elif not overwrite and (slot >= 0 or waiting):
                self._read(value, entry.chunks, number, out)
                if not _add_waiting(spec, waiting, start, stop, out) and piece is None:
                    continue
                total = out
            elif piece is None:
                continue
            if piece is not None:
                add_piece(spec, out, total, piece, weight, overwrite)
            entry.chunks[number] = self._write(value, number, slot, out.view(np.uint8).data)
        if whole is not None:
            self._kept.keep(value, whole)
        self._forget_waiting(entry)

    def _may_wait(self, spec: Spec, entry: _Entry, rows: GatheredRows, overwrite: bool) -> bool:
        """Whether the rows are better written as they are: they are few, and the result need not be looked at."""
        waiting = sum(one.nbytes for one in entry.waiting) + rows.grad.nbytes + 16 * len(rows.grad)
        few = 2 * rows.grad.nbytes <= spec.nbytes and len(entry.waiting) < MOST_GRADIENTS
        return few and not overwrite and spec.nonfinite == "allow" and waiting <= MOST_WAITING * spec.nbytes

    def _store_rows(self, gradient: GatheredRows, weight: float) -> _Waiting:
        rows = gradient.grad
        ids = [self._store_bytes(array) for array in (gradient.index, rows)]
        return _Waiting(ids[0], ids[1], len(rows), rows.shape[1], NAMES[rows.dtype], weight)

    def _store_bytes(self, array: Array) -> int:
        value, data = self.new_id(), np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if data.size <= INLINE:
            self._put(value, _Entry(data.data).packed())
            return value
        starts = range(0, data.size, CHUNK)
        pieces = [data[start : start + CHUNK].data for start in starts]
        written = [self._write(value, number, -1, piece) for number, piece in enumerate(pieces)]
        self._put(value, _Entry(None, np.array(written, _CHUNKS)).packed())
        return value

    def free(self, value: int | None) -> None:
        """Forget a value; of one that is damaged, the slots are lost."""
        if value is None:
            return
        self._kept.take(value)
        with suppress(BufferCorrupt):
            entry = self._entry(value)
            self._forget_waiting(entry)
            for slot in entry.chunks["slot"].tolist():
                self.slots.leave(slot)
        self._txn.delete(NUMBER.pack(value), db=self._env.values)

    def _put(self, value: int, packed: memoryview) -> None:
        packed[-SEAL:] = xxhash.xxh3_64_digest(packed[:-SEAL], value)
        self._txn.put(NUMBER.pack(value), packed, db=self._env.values)

    def _forget_waiting(self, entry: _Entry) -> None:
        for one in entry.waiting:
            self.free(one.index_id)
            self.free(one.rows_id)
        entry.waiting = []

    def _write(self, value: int, number: int, slot: int, data: memoryview) -> tuple[int, int]:
        """Write a chunk that was in `slot`: where it is now, and its checksum."""
        slot = self.slots.write(slot, data)
        self._written()
        return slot, xxhash.xxh3_64_intdigest(data, _seed(value, number))

    def new_id(self) -> int:
        """A number that was never given before."""
        last = self._txn.get(b"last_id", db=self._env.meta)
        value: int = 1 + (0 if last is None else NUMBER.unpack(last)[0])
        self._txn.put(b"last_id", NUMBER.pack(value), db=self._env.meta)
        return value
