"""Values of buffers as a transaction sees them: small values in LMDB, large values in chunks beside it (`format.py`).

A sparse gradient changes few rows of most chunks. So it is stored as it is and waits. So does the gradient of a push in
parts, which must add all its gradients at once. Every read adds what waits on the way. The writer adds it to the chunks
when the value changes in another way, when too much waits (`value_writer.py`), or, soon after its push, if it is large.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orjson
import xxhash

from service.buffers.gradients import Gradient, add_piece, beside_bytes, of_stored
from service.buffers.lmdb.format import NUMBER
from service.buffers.lmdb.slots import CHUNK_BYTES, Databases
from service.buffers.packed import SEAL_BYTES, unseal
from service.buffers.record import Spec
from service.buffers.store import Allocate
from service.dtypes import BOOL, WIRE, Array, DType
from service.errors import BufferCorrupt

_CHUNK = struct.Struct("<qQ")
_LENGTH = struct.Struct("<I")


class Chunk(NamedTuple):
    """The slot of a chunk, and the checksum of its elements."""

    slot: int
    check: int


ZEROS = Chunk(-1, 0)
"""A chunk of zeros, which has no slot."""


class StoredGradient(NamedTuple):
    """A gradient as it came: the id of its numbers, behind that of what rows or codes have beside them.

    Shape and dtype are those of the numbers before they are broadcast, or of the rows, or of the codes.
    """

    ids: Sequence[int]
    shape: Sequence[int]
    dtype: str
    weight: float = 1.0
    done: int = 0
    """While it waits, how many chunks of its value, from the first, have it already."""

    @property
    def sizes(self) -> list[int]:
        """The bytes under each id."""
        dtype = WIRE[self.dtype]
        others = [beside_bytes(self.shape, dtype)] if len(self.ids) > 1 else []
        return [*others, math.prod(self.shape) * dtype.itemsize]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def is_streamed(self, spec: Spec) -> bool:
        """Return whether a read of the value needs only a piece of it at a time in memory, and not all of it."""
        return len(self.ids) == 1 and tuple(self.shape) == spec.shape


@dataclass
class Entry:
    """What LMDB holds of a value: its elements, or its chunks and the gradients that wait for them."""

    inline: memoryview | None = None
    chunks: list[Chunk] = field(default_factory=list)
    waiting: list[StoredGradient] = field(default_factory=list)

    def pack(self) -> memoryview:
        """Return the entry as it is stored, with room for its seal."""
        if self.inline is not None:
            return memoryview(bytearray().join([self.inline, b"i", bytes(SEAL_BYTES)]))
        waiting = orjson.dumps([tuple(gradient) for gradient in self.waiting])
        chunks = [_CHUNK.pack(*chunk) for chunk in self.chunks]
        return memoryview(bytearray().join([*chunks, waiting, _LENGTH.pack(len(waiting)), b"c", bytes(SEAL_BYTES)]))

    @classmethod
    def unpack(cls, data: memoryview) -> Entry:
        """Return the entry from what is stored, without its seal."""
        if bytes(data[-1:]) == b"i":
            return cls(inline=data[:-1])
        end = len(data) - 1 - _LENGTH.size
        start = end - _LENGTH.unpack_from(data, end)[0]
        chunks = [Chunk(*fields) for fields in _CHUNK.iter_unpack(data[:start])]
        return cls(chunks=chunks, waiting=[StoredGradient(*fields) for fields in orjson.loads(data[start:end])])


def pieces_of(spec: Spec) -> Iterator[tuple[int, int, int]]:
    """Yield for each chunk of a value its number, its first element, and the element behind its last."""
    step = CHUNK_BYTES // spec.dtype.itemsize
    for number in range(math.ceil(spec.size / step)):
        yield number, number * step, min((number + 1) * step, spec.size)


class ValueReader:
    """The values that a transaction sees. Every method raises `BufferCorrupt` for a damaged value."""

    def __init__(self, env: Databases, txn: Any) -> None:
        self._env, self._txn = env, txn

    def load(self, spec: Spec, value: int | None, allocate: Allocate) -> Array:
        """Return a value in memory of its own."""
        result = allocate(spec.shape, spec.dtype)
        if value is None:
            result.fill(0)
            return result
        flat = result.reshape(-1)
        for start, stop, fill in self.pieces(spec, value):
            fill(flat[start:stop])
        return result

    def pieces(self, spec: Spec, value: int | None) -> Iterator[tuple[int, int, Any]]:
        """Yield for each piece its first element, the element behind its last, and a function that fills an array."""
        if value is None:
            for _, start, stop in pieces_of(spec):
                yield start, stop, lambda out: out.fill(0)
            return
        entry = self._entry(value)
        if entry.inline is not None:
            yield 0, spec.size, lambda out, data=entry.inline: np.copyto(out, np.frombuffer(data, spec.dtype))
            return
        waiting = self._waiting(spec, entry.waiting)
        for number, start, stop in pieces_of(spec):

            def fill(out: Array, number: int = number, start: int = start, stop: int = stop) -> None:
                self._read(value, entry.chunks, number, out)
                add_waiting(spec, waiting, start, stop, out)

            yield start, stop, fill

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        """Yield the elements of a value in order, a piece at a time; each piece overwrites the one before."""
        memory = np.empty(CHUNK_BYTES, np.uint8)
        for start, stop, fill in self.pieces(spec, value):
            piece = memory.view(spec.dtype)[: stop - start]
            fill(piece)
            yield piece

    def slots_of(self, value: int) -> dict[int, list[int]]:
        """Return the slots of a value, and of what waits to be added to it, by the id of each."""
        entry = self._entry(value)
        slots = {value: [chunk.slot for chunk in entry.chunks if chunk.slot >= 0]}
        for each in itertools.chain(*[gradient.ids for gradient in entry.waiting]):
            slots |= self.slots_of(each)
        return slots

    def gradient(self, spec: Spec, stored: StoredGradient) -> Gradient:
        """Return a stored gradient, of the buffer's shape."""
        dtype, shape = WIRE[stored.dtype], tuple(stored.shape)
        value, entry = stored.ids[-1], self._entry(stored.ids[-1])
        if stored.is_streamed(spec) and entry.inline is None:
            return _Streamed(shape, dtype, lambda number, out: self._read(value, entry.chunks, number, out))
        *others, array = map(self.load_bytes, stored.ids, stored.sizes)
        return of_stored(spec.shape, array.view(dtype).reshape(shape), others)

    def check(self, stored: StoredGradient) -> None:
        """Read a stored gradient."""
        for value, size in zip(stored.ids, stored.sizes, strict=True):
            for _ in self.streamed(Spec((size,), BOOL), value):
                pass  # reading checks it

    def _entry(self, value: int) -> Entry:
        sealed = self._txn.get(NUMBER.pack(value), db=self._env.values)
        data = None if sealed is None else unseal(sealed, value)
        if data is None:
            raise _corrupt(value)
        return Entry.unpack(data)

    def _inline(self, spec: Spec, value: int) -> Array:
        """Return a small value, flat, in LMDB's own memory: it is valid until the transaction writes."""
        data = self._entry(value).inline
        if data is None or len(data) != spec.nbytes:
            raise _corrupt(value)
        return np.frombuffer(data, spec.dtype)

    def _read(self, value: int, chunks: list[Chunk], number: int, out: Array) -> None:
        if number >= len(chunks):
            raise _corrupt(value)
        slot, check = chunks[number]
        if slot < 0:
            out[...] = 0
            return
        memory = out.view(np.uint8).data
        whole = self._env.file.read(slot, memory)
        if not whole or checksum_of(memory, value, number) != check:
            raise _corrupt(value)

    def _waiting(self, spec: Spec, gradients: Sequence[StoredGradient]) -> Waiting:
        step = CHUNK_BYTES // spec.dtype.itemsize
        return [(self.gradient(spec, stored), stored.weight, stored.done * step) for stored in gradients]

    def load_bytes(self, value: int, size: int) -> Array:
        """Return the bytes of a value, flat, in memory of their own."""
        return self.load(Spec((size,), BOOL), value, np.empty).view(np.uint8)


class _Streamed:
    """A gradient that is read a chunk at a time. A piece is valid until the next. `read` fills an array by a chunk."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, read: Callable[[int, Array], None]) -> None:
        self.shape, self.dtype, self._read = shape, dtype, read
        self._nbytes = math.prod(shape) * dtype.itemsize
        self._memory, self._number = np.empty(CHUNK_BYTES, np.uint8), -1

    def piece(self, start: int, stop: int) -> Array:
        at, end = start * self.dtype.itemsize, stop * self.dtype.itemsize
        parts = [self._part(at, min(end, at + CHUNK_BYTES - at % CHUNK_BYTES))]
        while (at := at + parts[-1].size) < end:
            parts[-1] = parts[-1].copy()  # before the next chunk takes its memory
            parts.append(self._part(at, min(end, at + CHUNK_BYTES)))
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(self.dtype)

    def _part(self, at: int, end: int) -> Array:
        """Return bytes of one chunk."""
        number, offset = divmod(at, CHUNK_BYTES)
        if number != self._number:
            self._number = -1
            self._read(number, self._memory[: min(CHUNK_BYTES, self._nbytes - number * CHUNK_BYTES)])
            self._number = number
        return self._memory[offset : offset + end - at]


Waiting: TypeAlias = list[tuple[Gradient, float, int]]
"""Gradients that wait to be added to a value, their weights, and the first element of the value that lacks them."""


def add_waiting(spec: Spec, waiting: Waiting, start: int, stop: int, out: Array) -> bool:
    """Add to a piece what waits for it. Return whether anything did."""
    lacking = [(gradient, weight) for gradient, weight, first in waiting if start >= first]
    pieces = [(piece, weight) for each, weight in lacking if (piece := each.piece(start, stop)) is not None]
    for piece, weight in pieces:
        add_piece(spec, out, out, piece, weight, overwrite=False)
    return bool(pieces)


def may_be_sum(spec: Spec, array: Array) -> bool:
    """Return whether the array looks like a value, so that its bytes may be those of its sum with zeros."""
    return array.shape == spec.shape and array.dtype == spec.dtype and bool(array.flags.c_contiguous)


def is_sum(array: Array, start: int, stop: int) -> bool:
    """Return whether these bytes of an array are those of its sum with zeros, as values have it: there is no -0."""
    size, spec = array.dtype.itemsize, Spec(array.shape, array.dtype)
    flat, memory = array.reshape(-1)[start // size : stop // size], np.empty(CHUNK_BYTES, np.uint8).view(array.dtype)
    for first in range(0, flat.size, memory.size):
        piece = flat[first : first + memory.size]
        total = memory[: piece.size]
        add_piece(spec, total, 0, piece, 1.0, overwrite=False)
        if not np.array_equal(piece.view(f"u{size}"), total.view(f"u{size}")):
            return False
    return True


def checksum_of(chunk: memoryview, value: int, number: int) -> int:
    """Return the checksum of a chunk, seeded by its value and its number: in another place it does not match."""
    return xxhash.xxh3_64_intdigest(chunk, (value << 32 | number) & (1 << 64) - 1)


def _corrupt(value: int) -> BufferCorrupt:
    return BufferCorrupt(
        f"Value {value} is damaged on the disk (see gradserve doctor). Delete the buffer and create it again"
    )
