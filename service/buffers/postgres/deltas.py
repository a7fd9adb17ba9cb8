"""Deltas: the gradients that a value is the sum of, on their way to the database and back."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import orjson

from service.buffers.gradients import Dense, Gradient, add_whole
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.schema import ROW_BYTES
from service.buffers.postgres.statements import DELTAS
from service.buffers.record import Spec
from service.buffers.store import Allocate
from service.dtypes import DTYPES, NAMES, Array
from service.errors import BufferCorrupt

_COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The head of a binary COPY, without flags."""

_ROW = struct.Struct("!hiqiii")
"""A row of `chunks` up to its data: three fields; blob, number and data, each with its length before it."""

_FOUND = struct.Struct("!hi")
"""A row of one field up to its data."""

TURN_BYTES = 1 << 18
"""Bytes of a large gradient that are written in a turn: they prolong a commit by a third."""

TURN_SECONDS = 0.02
"""The longest wait for a commit: a large gradient must not wait for a database that is slow."""

RECENT_SECONDS = 0.05
"""How long after a small request the next is expected."""


@dataclass
class Payload:
    """The numbers of a delta: a gradient before it is broadcast to its buffer's shape."""

    gradient: Gradient

    @property
    def nbytes(self) -> int:
        return math.prod(self.gradient.shape) * self.gradient.dtype.itemsize

    def onto(self, shape: tuple[int, ...]) -> Gradient:
        """Return the gradient, broadcast to `shape`."""
        gradient = self.gradient
        return Dense(gradient.array, shape) if isinstance(gradient, Dense) else gradient

    def pieces(self) -> Iterator[memoryview]:
        """Yield the numbers in pieces of a chunk; a piece of zeros may be empty."""
        gradient = self.gradient
        step = ROW_BYTES // gradient.dtype.itemsize
        size = self.nbytes // gradient.dtype.itemsize
        for start in range(0, size, step):
            piece = gradient.piece(start, min(start + step, size))
            yield memoryview(b"") if piece is None else np.ascontiguousarray(piece).view(np.uint8).data

    def inline(self) -> bytes | None:
        """Return all numbers, or None if they are too large for a row."""
        if self.nbytes > ROW_BYTES:
            return None
        size = self.nbytes // self.gradient.dtype.itemsize
        piece = self.gradient.piece(0, size) if size else np.empty(0, self.gradient.dtype)
        return bytes(self.nbytes) if piece is None else np.ascontiguousarray(piece).tobytes()


_END = -1
"""The field count of the row that ends a binary COPY."""


class Delta(NamedTuple):
    """A row of `deltas`: `weight` times the numbers, which are in `data` or in the blob."""

    value: int
    seq: int
    weight: float
    overwrite: bool
    dtype: str
    shape: str
    """As JSON."""
    nbytes: int
    blob: int | None
    data: bytes | None
    staged: int | None = None
    """The value of the row in the database, if it was staged: the row gets the place and the weight of this delta."""


def payload_of(gradient: Array | Gradient) -> Payload:
    """Return what is stored for a gradient: an array before it is broadcast."""
    if isinstance(gradient, Dense):
        gradient = gradient.array
    if isinstance(gradient, np.ndarray):
        return Payload(Dense(gradient, gradient.shape))
    return Payload(gradient)


class Turns:
    """Tells threads that write large gradients when a transaction with small requests has been made.

    A commit waits until the disks, and those of the standby, have all that was written to the log before. Beside
    gradients of 64 MB that is up to eight times as long. So a large gradient is written in pieces, each after a commit.
    """

    def __init__(self) -> None:
        self._made, self._last = threading.Condition(), 0.0

    def tell(self) -> None:
        """Say that a transaction with small requests has been made."""
        self._last = time.monotonic()
        with self._made:
            self._made.notify_all()

    def wait(self) -> None:
        """Wait for the next such transaction, if there was one just now."""
        if time.monotonic() - self._last < RECENT_SECONDS:
            with self._made:
                self._made.wait(TURN_SECONDS)


def write_blobs(connection: Connection, payloads: Iterable[tuple[int, Payload]], turns: Turns | None = None) -> None:
    """Write the numbers of each payload under its blob's id. Give way at the `turns`."""
    with connection.cursor().copy("copy chunks from stdin (format binary)") as copy:
        copy.write(_COPY_HEAD)
        for blob, payload in payloads:
            for number, data in enumerate(payload.pieces()):
                copy.write(_ROW.pack(3, 8, blob, 4, number, len(data)) + data)
                if turns is not None and (number + 1) % (TURN_BYTES // ROW_BYTES) == 0:
                    turns.wait()
        copy.write(b"\xff\xff")


def read_numbers(connection: Connection, delta: Delta) -> Array:
    """Return the numbers of a delta. Raises `BufferCorrupt` if a row is missing."""
    dtype, shape = DTYPES[delta.dtype], orjson.loads(delta.shape)
    if delta.blob is None:
        return np.frombuffer(delta.data or b"", dtype).reshape(shape)
    numbers = np.empty(shape, dtype)
    flat, filled = numbers.reshape(-1).view(np.uint8), 0
    query = "copy (select data from chunks where blob = %s order by number) to stdout (format binary)"
    with connection.cursor().copy(query, (delta.blob,)) as copy:
        for place, row in enumerate(copy):
            start = 0 if place else len(_COPY_HEAD)
            count, length = _FOUND.unpack_from(row, start) if len(row) - start >= _FOUND.size else (_END, 0)
            if count == _END:
                continue
            stop = min(filled + (length or ROW_BYTES), len(flat))
            flat[filled:stop] = np.frombuffer(row, np.uint8, length, start + _FOUND.size) if length else 0
            filled = stop
    if filled != len(flat):
        raise BufferCorrupt(f"{len(flat) - filled} bytes of the blob {delta.blob} are missing in the database")
    return numbers


def read_deltas(connection: Connection, values: Sequence[int]) -> dict[int, list[Delta]]:
    """Return the deltas of each value, in order."""
    found: dict[int, list[Delta]] = {value: [] for value in values}
    for row in connection.exchange([DELTAS(values)])[0]:
        found[row[0]].append(Delta(*row))
    return found


def check_complete(value: int, deltas: Sequence[Delta], last: int | None = None) -> None:
    """Raise `BufferCorrupt` if a delta of the value is missing. `last` is the `seq` of its last, None if not known."""
    seqs = [delta.seq for delta in deltas]
    is_whole = bool(deltas) and seqs == [*range(seqs[0], seqs[0] + len(seqs))]
    if not is_whole or (seqs[0] > 1 and not deltas[0].overwrite) or last not in (None, seqs[-1]):
        raise BufferCorrupt(f"The database lacks gradients of the value {value}")


def total(
    connection: Connection,
    spec: Spec,
    deltas: Sequence[Delta],
    allocate: Allocate,
    unwritten: Mapping[int, Payload] | None = None,
) -> Array:
    """Return the sum of the deltas of a value, in their order, in memory of its own.

    `unwritten` has the blobs that the database does not have yet. Raises `BufferCorrupt`.
    """
    result = allocate(spec.shape, spec.dtype)
    flat = result.reshape(-1)
    last = max((place for place, delta in enumerate(deltas) if delta.overwrite), default=0)
    for place, delta in enumerate(deltas[last:]):
        gradient = gradient_of(connection, spec, delta, unwritten)
        add_whole(spec, flat, flat if place else None, gradient, delta.weight, delta.overwrite)
    if not deltas:
        flat[...] = 0
    return result


def gradient_of(
    connection: Connection, spec: Spec, delta: Delta, unwritten: Mapping[int, Payload] | None = None
) -> Gradient:
    """Return the gradient of a delta, of the buffer's shape. The rest is as for `total`."""
    if unwritten and delta.blob is not None and delta.blob in unwritten:
        return unwritten[delta.blob].onto(spec.shape)
    return Dense(read_numbers(connection, delta), spec.shape)


def delta_of(value: int, seq: int, payload: Payload, weight: float, overwrite: bool, blob: int | None) -> Delta:
    """Return the row of a payload, which is inline without a blob."""
    gradient = payload.gradient
    data = payload.inline() if blob is None else None
    dtype, shape = NAMES[gradient.dtype], orjson.dumps(gradient.shape).decode()
    return Delta(value, seq, weight, overwrite, dtype, shape, payload.nbytes, blob, data)
