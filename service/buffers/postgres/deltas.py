"""Deltas: the gradients that a value is the sum of, on their way to the database and back."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import orjson
from psycopg.errors import DataCorrupted, UndefinedTable

from service.buffers.gradients import Dense, Gradient, add_whole
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.schema import ROW_BYTES, table_of
from service.buffers.postgres.statements import OPEN_DELTAS, ROWS_AT_ONCE
from service.buffers.record import Spec
from service.buffers.store import Allocate
from service.dtypes import DTYPES, NAMES, Array
from service.errors import BufferCorrupt, ShapeMismatch

COPY_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The head of a binary COPY, without flags."""

_FOUND = struct.Struct("!hi")
"""A row of one field up to its data."""

TURN_BYTES = 1 << 18
"""Bytes of a large gradient that are written in a turn: they prolong a commit by a third."""

TURN_SECONDS = 0.02
"""The longest wait for a commit: a large gradient must not wait for a database that is slow."""

RECENT_SECONDS = 0.05
"""How long after a small request the next is expected."""


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


def source_of(gradient: Array | Gradient) -> Gradient:
    """Return what is stored for a gradient: an array before it is broadcast."""
    if isinstance(gradient, Dense):
        gradient = gradient.array
    return Dense(gradient, gradient.shape) if isinstance(gradient, np.ndarray) else gradient


def nbytes_of(gradient: Gradient) -> int:
    """Return the bytes of the numbers of a gradient."""
    return math.prod(gradient.shape) * gradient.dtype.itemsize


def pieces(gradient: Gradient) -> Iterator[memoryview]:
    """Yield the numbers in pieces of a chunk; a piece of zeros may be empty."""
    step, size = ROW_BYTES // gradient.dtype.itemsize, math.prod(gradient.shape)
    for start in range(0, size, step):
        piece = gradient.piece(start, min(start + step, size))
        yield memoryview(b"") if piece is None else np.ascontiguousarray(piece).view(np.uint8).data


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


@contextmanager
def _checked(value: int) -> Iterator[None]:
    """Raise `BufferCorrupt` for what no version has stored as a gradient of the value."""
    try:
        yield
    except (LookupError, ShapeMismatch, TypeError, ValueError) as error:
        raise BufferCorrupt(f"A gradient of the value {value} is damaged in the database: {error}") from None


class _Blob:
    """A gradient in a blob, which is read row by row: its pieces must be wanted in order, up to the last."""

    def __init__(self, connection: Connection, delta: Delta) -> None:
        with _checked(delta.value):
            self.shape, self.dtype = tuple(orjson.loads(delta.shape)), DTYPES[delta.dtype]
            self._size = math.prod(self.shape)
            if self._size * self.dtype.itemsize != delta.nbytes:
                raise ValueError(f"it has {delta.nbytes} bytes, and the shape {delta.shape}")
        self._rows = _rows(connection, delta)
        self._memory = np.empty(0, self.dtype)

    def piece(self, start: int, stop: int) -> Array:
        """Return the numbers, which the next call overwrites. Raises `BufferCorrupt` if the blob is not whole."""
        if len(self._memory) < stop - start:
            self._memory = np.empty(stop - start, self.dtype)
        numbers, filled = self._memory[: stop - start], 0
        flat = numbers.view(np.uint8)
        while filled < len(flat):
            nbytes, row = next(self._rows)
            flat[filled : filled + nbytes] = 0 if row is None else row
            filled += nbytes
        if stop == self._size:
            next(self._rows, None)  # raises if the blob goes on
        return numbers


def _rows(connection: Connection, delta: Delta) -> Iterator[tuple[int, Array | None]]:
    """Yield the bytes of the rows of a blob: their number, and None if they are zeros.

    Raises `BufferCorrupt` behind the last row if they are not those of the delta.
    """
    found, is_whole = 0, True
    query = (
        f"copy (select data from {table_of(delta.blob or 0)} where blob = %s order by number) to stdout (format binary)"
    )
    with _noticed(), connection.cursor().copy(query.encode(), (delta.blob,)) as copy:
        for place, row in enumerate(copy):
            start = 0 if place else len(COPY_HEAD)
            count, length = _FOUND.unpack_from(row, start) if len(row) - start >= _FOUND.size else (_END, 0)
            if count == _END:
                continue
            wanted = min(ROW_BYTES, delta.nbytes - found)
            is_whole &= length in (0, wanted) and wanted > 0
            if is_whole:
                found += wanted
                yield wanted, np.frombuffer(row, np.uint8, length, start + _FOUND.size) if length else None
    if found != delta.nbytes or not is_whole:
        raise BufferCorrupt(
            f"The blob {delta.blob} is damaged in the database: {found} of {delta.nbytes} bytes are whole"
        )


@contextmanager
def _noticed() -> Iterator[None]:
    """Raise `DataCorrupted` if the table of a blob is missing, as the database does for a page."""
    try:
        yield
    except UndefinedTable as error:
        raise DataCorrupted(str(error)) from None


def read_numbers(connection: Connection, delta: Delta) -> Array:
    """Return the numbers of a delta. Raises `BufferCorrupt` if some are missing, or if the row is damaged."""
    if delta.blob is not None:
        blob = _Blob(connection, delta)
        return blob.piece(0, math.prod(blob.shape)).reshape(blob.shape)
    with _checked(delta.value):
        return np.frombuffer(delta.data or b"", DTYPES[delta.dtype]).reshape(orjson.loads(delta.shape))


def stream(connection: Connection, values: Sequence[int]) -> Iterator[Delta]:
    """Return the deltas of different values in the order of the values and of `seq`, few at a time.

    A value without deltas has one whose `seq` is None.
    """
    return (Delta(*row) for row in connection.fetched(OPEN_DELTAS(values), ROWS_AT_ONCE))


def complete(value: int, deltas: Iterable[Delta], last: int | None = None) -> Iterator[Delta]:
    """Yield the deltas of a value. Raises `BufferCorrupt` if one is missing; `last` is the `seq` of its last, if known.

    It ends at what is missing, or behind the last.
    """
    seq = None
    for delta in deltas:
        if delta.seq is None:
            continue
        is_next = (delta.seq == 1 or delta.overwrite) if seq is None else delta.seq == seq + 1
        if not is_next or delta.value != value:
            seq = None
            break
        seq = delta.seq
        yield delta
    if seq is None or last not in (None, seq):
        raise BufferCorrupt(f"The database lacks gradients of the value {value}")


def total(
    connection: Connection,
    spec: Spec,
    deltas: Iterable[Delta],
    allocate: Allocate,
    unwritten: Mapping[int, Gradient] = MappingProxyType({}),
) -> Array:
    """Return the sum of the deltas of a value, in their order, in memory of its own.

    `unwritten` has the blobs that the database does not have yet. Raises `BufferCorrupt`.
    """
    result = allocate(spec.shape, spec.dtype)
    flat = result.reshape(-1)
    before = None
    for delta in deltas:
        is_read = delta.blob is not None and delta.blob not in unwritten
        gradient: Gradient | None = _Blob(connection, delta) if is_read else None  # not all of it is in memory
        if gradient is None or gradient.shape != spec.shape:
            gradient = gradient_of(connection, spec, delta, unwritten)
        add_whole(spec, flat, before, gradient, delta.weight, delta.overwrite)
        before = flat
    if before is None:
        flat[...] = 0
    return result


def gradient_of(connection: Connection, spec: Spec, delta: Delta, unwritten: Mapping[int, Gradient]) -> Gradient:
    """Return the gradient of a delta, of the buffer's shape. The rest is as for `total`."""
    if delta.blob is not None and delta.blob in unwritten:
        source = unwritten[delta.blob]
        return Dense(source.array, spec.shape) if isinstance(source, Dense) else source
    numbers = read_numbers(connection, delta)
    with _checked(delta.value):
        return Dense(numbers, spec.shape)


def delta_of(value: int, seq: int, source: Gradient, weight: float, overwrite: bool, blob: int | None) -> Delta:
    """Return the row of a gradient, whose numbers are in the row without a blob."""
    nbytes = nbytes_of(source)
    data = (b"".join(pieces(source)) or bytes(nbytes)) if blob is None else None
    dtype, shape = NAMES[source.dtype], orjson.dumps(source.shape).decode()
    return Delta(value, seq, weight, overwrite, dtype, shape, nbytes, blob, data)
