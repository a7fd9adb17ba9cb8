"""Gradients that are added to a buffer piece by piece, and the add."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from service.buffers.record import Spec
from service.codecs.codes import BLOCK_LENGTH, block_count, decode
from service.dtypes import FLOAT32, INT8, INT64, Array, DType
from service.errors import IndexOutOfRange, NonfiniteGradient, NormTooLarge, ShapeMismatch
from service.kernels import accumulate
from service.kernels.gather import GatheredRows

BLOCK_ELEMENTS = 1 << 18
"""Elements of a value that are added at once: as float32 they fit into a cache."""

NORM_ELEMENTS = 1 << 15
"""Elements whose squares are summed at once: as float64 they fit into a cache."""


class Gradient(Protocol):
    """A gradient that yields any piece of itself."""

    shape: tuple[int, ...]
    dtype: DType

    def piece(self, start: int, stop: int) -> Array | None:
        """Return the elements from `start` to `stop` of the flat gradient: None for zeros, or one if all are alike."""


class Dense:
    """An array, broadcast to `shape`, as a gradient. Raises `ShapeMismatch`, with the array's `name`."""

    def __init__(self, array: Array, shape: tuple[int, ...], name: str = "gradient") -> None:
        source = array
        if array.shape != shape:
            try:
                array = np.broadcast_to(array, shape)
            except ValueError:
                raise ShapeMismatch(
                    f"{name} has shape {list(array.shape)}, which does not broadcast to the buffer's, {list(shape)}",
                    tensor=name,
                ) from None
        self.shape, self.dtype = shape, array.dtype
        self.array = source
        """The array before it was broadcast."""
        self._one = source.reshape(1) if source.size == 1 else None
        self._flat = _flat(array)

    def piece(self, start: int, stop: int) -> Array:
        return self._flat[start:stop] if self._one is None else self._one


class Rows:
    """A sparse gradient: row k of `rows` adds to row `indices[k]` of a value. Rows of one index add up.

    `indices` are integers of rank 1, and count from the end if they are negative.
    """

    def __init__(self, indices: Array, rows: Array) -> None:
        self.indices, self.rows = indices, rows
        self.gathered: GatheredRows | None = None
        """The gradient for the last shape."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.gathered is None else self.gathered.shape

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to add."""
        return not self.rows.size

    def onto(self, shape: tuple[int, ...], name: str = "gradient") -> GatheredRows:
        """Return the gradient for a value of this shape; the rows are sorted once.

        Raises `ShapeMismatch` and `IndexOutOfRange`, with the gradient's `name`.
        """
        if self.gathered is None or self.gathered.shape != shape:
            self.gathered = self._gather(shape, name)
        return self.gathered

    def _gather(self, shape: tuple[int, ...], name: str) -> GatheredRows:
        place = f"{name}/rows"
        if not shape:
            problem = f"{place} has rows, but the buffer has no dimensions, and so no rows: send one number"
            raise ShapeMismatch(problem, tensor=place)
        expected = (len(self.indices), *shape[1:])
        rows = self.rows.reshape(0, *shape[1:]) if self.rows.shape == (0,) else self.rows  # as the list [] in JSON
        if rows.shape != expected:
            raise ShapeMismatch(
                f"{place} has shape {list(rows.shape)}, but must have {list(expected)}: a row of the buffer, whose"
                f" shape is {list(shape)}, for each of {len(self.indices)} indices",
                tensor=place,
            )
        try:
            return GatheredRows(np.array(shape, np.int64), self.indices, rows)
        except IndexOutOfRange as error:
            index = error.context["index"]
            raise IndexOutOfRange(f"{name}/{error.detail}", tensor=f"{name}/indices", index=index) from None


class Coded:
    """A gradient in 8 bits: int8 `codes` of its shape, and a float32 for each block of the flat codes, `scales`."""

    dtype = FLOAT32

    def __init__(self, codes: Array, scales: Array) -> None:
        self.shape: tuple[int, ...] = codes.shape
        self.codes, self.scales = codes, scales

    def onto(self, shape: tuple[int, ...], name: str = "gradient") -> Coded:
        """Return the gradient for a value of this shape. Raises `ShapeMismatch`, with the gradient's `name`."""
        if self.shape != shape:
            problem = f"{name}/codes has shape {list(self.shape)}, but must have the buffer's, {list(shape)}"
            raise ShapeMismatch(problem, tensor=f"{name}/codes")
        return self

    def piece(self, start: int, stop: int) -> Array:
        first = start // BLOCK_LENGTH
        codes = self.codes.reshape(-1)[first * BLOCK_LENGTH : stop]
        return decode(codes, self.scales[first : block_count(stop)])[start - first * BLOCK_LENGTH :]


Sent: TypeAlias = Array | Rows | Coded
"""A gradient as a request has it."""


def adds_nothing(gradient: Gradient | Sent) -> bool:
    """Return whether the gradient has no rows, or is a single 0, which a worker without data sends for each buffer."""
    if isinstance(gradient, np.ndarray):
        return gradient.size == 1 and not gradient.any()
    return isinstance(gradient, Rows | GatheredRows) and gradient.is_empty


def _flat(array: Array) -> Array | np.flatiter[Array]:
    """Return a view of the array that takes flat slices, without a copy."""
    if array.flags.c_contiguous or not array.size:
        return array.reshape(-1)
    return array.squeeze().flat  # flat has at most 32 dimensions; 33 without a 1 would be 2**33 elements


def numbers_of(gradient: Gradient) -> Array:
    """Return the numbers of a gradient as it came: before it is broadcast, or rows, or codes."""
    if isinstance(gradient, GatheredRows):
        return gradient.grad
    assert isinstance(gradient, Dense | Coded)
    return gradient.codes if isinstance(gradient, Coded) else gradient.array


def beside(gradient: Gradient) -> list[Array]:
    """Return what a gradient has beside its numbers: the index of its rows, or the scales of its codes."""
    if isinstance(gradient, GatheredRows):
        return [gradient.index]
    return [gradient.scales] if isinstance(gradient, Coded) else []


def beside_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Return the bytes of what rows, or codes, of this shape and dtype have beside them."""
    return FLOAT32.itemsize * block_count(math.prod(shape)) if dtype == INT8 else 2 * INT64.itemsize * shape[0]


def of_stored(shape: tuple[int, ...], numbers: Array, others: Sequence[Array]) -> Gradient:
    """Return the gradient of this shape that has these numbers, and the bytes of what was beside them."""
    if not others:
        return Dense(numbers, shape)
    if numbers.dtype == INT8:
        return Coded(numbers, others[0].view(FLOAT32))
    return GatheredRows.of(shape, others[0].view(INT64).reshape(2, len(numbers)), numbers)


def stored_bytes(gradient: Gradient) -> int:
    """Return the bytes of a gradient as it came."""
    numbers = numbers_of(gradient)
    return int(numbers.nbytes) + (0 if isinstance(gradient, Dense) else beside_bytes(numbers.shape, numbers.dtype))


def add_piece(
    spec: Spec, result: Array, total: Array | int, piece: Array | None, weight: float, overwrite: bool
) -> None:
    """Add a piece of a gradient to `total`, or with `overwrite` replace it, and write the result into `result`.

    All arrays are flat. A piece of one element counts for each element of `result`. The caller silences NumPy's
    floating-point warnings. Raises `NonfiniteGradient` if the buffer refuses the result.
    """
    if overwrite:
        accumulate.replace(result, total, np.zeros(1, spec.dtype) if piece is None else piece, weight)
    else:
        assert piece is not None
        accumulate.add(result, total, piece, weight)
    if spec.nonfinite == "reject" and not np.isfinite(result).all():
        raise NonfiniteGradient("The gradient would make the buffer infinite or NaN, which nonfinite=reject refuses")


def add_whole(
    spec: Spec, result: Array, total: Array | None, gradient: Gradient, weight: float, overwrite: bool
) -> None:
    """Add a gradient to `total`, None for zeros, in blocks, as `add_piece` does. `result` may be `total`."""
    for start in range(0, spec.size, BLOCK_ELEMENTS):
        part = slice(start, min(start + BLOCK_ELEMENTS, spec.size))
        piece = gradient.piece(part.start, part.stop)
        before = 0 if total is None else total[part]
        if piece is not None or overwrite:
            add_piece(spec, result[part], before, piece, weight, overwrite)
        elif result is not total:
            result[part] = before


def check_finite(spec: Spec, gradient: Gradient, weight: float) -> None:
    """Raise `NonfiniteGradient` if `weight` times the gradient is not finite in a buffer that refuses this."""
    for start in range(0, spec.size if spec.nonfinite == "reject" else 0, BLOCK_ELEMENTS):
        stop = min(start + BLOCK_ELEMENTS, spec.size)
        if (piece := gradient.piece(start, stop)) is not None:
            add_piece(spec, np.empty(stop - start, spec.dtype), 0, piece, weight, overwrite=False)


def check_norm(gradient: Gradient, max_norm: float, name: str) -> None:
    """Raise `NormTooLarge` if the 2-norm of the gradient is above `max_norm`, or if the gradient is not finite."""
    norm = norm_of(gradient)
    if not norm <= max_norm:
        problem = f"{name} has the 2-norm {norm}, but the buffer takes up to {max_norm} (max_norm)"
        raise NormTooLarge(problem, tensor=name, norm=norm if math.isfinite(norm) else None, max_norm=max_norm)


def norm_of(gradient: Gradient) -> float:
    """Return the 2-norm, computed in float64: infinite or NaN if an element is.

    A piece is divided by a power of 2 before its squares are summed, so that no square overflows or vanishes.
    """
    size, norm = math.prod(gradient.shape), 0.0
    if isinstance(gradient, Dense) and gradient.array.size < size:
        source = gradient.array
        return norm_of(Dense(source, source.shape)) * math.sqrt(size / source.size)
    for start in range(0, size, NORM_ELEMENTS):
        piece = gradient.piece(start, min(start + NORM_ELEMENTS, size))
        if piece is None:
            continue
        numbers = piece.astype(np.float64)
        largest = float(np.abs(numbers).max())
        if not math.isfinite(largest):
            return largest
        _, exponent = math.frexp(largest)
        scaled = np.ldexp(numbers, -exponent)
        norm = math.hypot(norm, float(np.ldexp(np.sqrt(np.square(scaled).sum()), exponent)))
    return norm
