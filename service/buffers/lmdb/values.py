"""Values of buffers on the disk: small ones in LMDB, large ones in a file beside it, and so are small ones that change
together with many others (`packs.py`).

LMDB copies a value twice on its way to the disk, and keeps lists of its free pages that every small commit after a
large one writes anew. So a large value is cut into chunks, which lie in slots of the file `values` (`slots.py`); LMDB
holds which slots these are, with a checksum for each chunk.

A sparse gradient changes few rows of most chunks. It is written as it is, and added to the chunks when the value
changes again in another way, or when 32 of them wait, or twice as many bytes as the value has; whoever reads it adds
them on the way.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson
import xxhash

from service.buffers.gradients import add_piece
from service.buffers.lmdb.slots import CHUNK, NUMBER, Databases
from service.buffers.record import Spec
from service.buffers.store import Allocate
from service.dtypes import BOOL, DTYPES, Array
from service.errors import BufferCorrupt
from service.kernels.gather import GatheredRows

SEAL = 8
"""Bytes of a checksum."""

_CHUNK = struct.Struct("<qQ")
_PLACE = struct.Struct("<qIQ")
_LENGTH = struct.Struct("<I")


class Chunk(NamedTuple):
    """Where a chunk is, and its checksum."""

    slot: int
    check: int


ZEROS = Chunk(-1, 0)
"""A chunk that is nowhere: it is all zeros."""


class Place(NamedTuple):
    """Where a value is that shares a slot with others, from which byte on, and its checksum."""

    slot: int
    offset: int
    check: int


class Parts(NamedTuple):
    """The slots that a value has for itself, and its place in one that it shares."""

    own: list[int]
    shared: Place | None


class Waiting(NamedTuple):
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
class Entry:
    """A value as LMDB has it: its elements, or where they are, or where its chunks are and what waits to be added."""

    inline: memoryview | None = None
    place: Place | None = None
    chunks: list[Chunk] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)

    def packed(self) -> memoryview:
        """With room for a seal."""
        if self.inline is not None:
            return memoryview(bytearray().join([self.inline, b"i", bytes(SEAL)]))
        if self.place is not None:
            return memoryview(bytearray().join([_PLACE.pack(*self.place), b"p", bytes(SEAL)]))
        waiting = orjson.dumps([tuple(one) for one in self.waiting])
        chunks = [_CHUNK.pack(*chunk) for chunk in self.chunks]
        return memoryview(bytearray().join([*chunks, waiting, _LENGTH.pack(len(waiting)), b"c", bytes(SEAL)]))

    @classmethod
    def unpacked(cls, data: memoryview) -> Entry:
        kind = bytes(data[-1:])
        if kind == b"i":
            return cls(inline=data[:-1])
        if kind == b"p":
            return cls(place=Place(*_PLACE.unpack(data[:-1])))
        end = len(data) - 1 - _LENGTH.size
        start = end - _LENGTH.unpack_from(data, end)[0]
        chunks = [Chunk(*one) for one in _CHUNK.iter_unpack(data[:start])]
        return cls(chunks=chunks, waiting=[Waiting(*one) for one in orjson.loads(data[start:end])])


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
        if entry.place is not None:
            yield 0, spec.size, lambda out, place=entry.place: self._read_place(value, place, out)
            return
        waiting = self._waiting(spec, entry)
        for number, start, stop in pieces_of(spec):

            def fill(out: Array, number: int = number, start: int = start, stop: int = stop) -> None:
                self._read(value, entry.chunks, number, out)
                add_waiting(spec, waiting, start, stop, out)

            yield start, stop, fill

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        """The elements of a value, in order, a piece at a time, which the next one overwrites."""
        memory = np.empty(CHUNK, np.uint8)
        for start, stop, fill in self.pieces(spec, value):
            piece = memory.view(spec.dtype)[: stop - start]
            fill(piece)
            yield piece

    def parts_of(self, value: int) -> dict[int, Parts]:
        """The ids of a value and of what waits to be added to it, each with its slots."""
        entry = self._entry(value)
        parts = {value: Parts([chunk.slot for chunk in entry.chunks if chunk.slot >= 0], entry.place)}
        for one in entry.waiting:
            parts |= self.parts_of(one.index_id) | self.parts_of(one.rows_id)
        return parts

    def _entry(self, value: int) -> Entry:
        sealed = self._txn.get(NUMBER.pack(value), db=self._env.values)
        data = None if sealed is None else opened(sealed, value)
        if data is None:
            raise _corrupt(value)
        return Entry.unpacked(data)

    def _small(self, spec: Spec, value: int, entry: Entry, memory: Array) -> Array:
        """A small value, flat, where it lies, or in the memory given, flat too."""
        if entry.place is not None:
            self._read_place(value, entry.place, memory)
            return memory
        if entry.inline is None or len(entry.inline) != spec.nbytes:
            raise _corrupt(value)
        return np.frombuffer(entry.inline, spec.dtype)

    def _read(self, value: int, chunks: list[Chunk], number: int, out: Array) -> None:
        if number >= len(chunks):
            raise _corrupt(value)
        slot, check = chunks[number]
        if slot < 0:
            out[...] = 0
        else:
            self._fill(out, value, number, Place(slot, 0, check))

    def _read_place(self, value: int, place: Place, out: Array) -> None:
        self._fill(out, value, 0, place)

    def _fill(self, out: Array, value: int, number: int, place: Place) -> None:
        memory = out.view(np.uint8).data
        whole = self._env.file.read(place.slot, memory, place.offset)
        if not whole or xxhash.xxh3_64_intdigest(memory, chunk_seed(value, number)) != place.check:
            raise _corrupt(value)

    def _waiting(self, spec: Spec, entry: Entry) -> list[tuple[GatheredRows, float]]:
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


def add_waiting(spec: Spec, waiting: list[tuple[GatheredRows, float]], start: int, stop: int, out: Array) -> bool:
    """Add to a piece what waits for it. Whether anything did."""
    pieces = [(piece, weight) for rows, weight in waiting if (piece := rows.piece(start, stop)) is not None]
    for piece, weight in pieces:
        add_piece(spec, out, out, piece, weight, anew=False)
    return bool(pieces)


def _clear(out: Array) -> None:
    out[...] = 0


def chunk_seed(value: int, number: int) -> int:
    """Where a chunk belongs, as the seed of its checksum."""
    return (value << 32 | number) & (1 << 64) - 1


def _corrupt(value: int) -> BufferCorrupt:
    return BufferCorrupt(
        f"Value {value} is damaged on the disk (see gradserve doctor). Delete the buffer and create it again"
    )
