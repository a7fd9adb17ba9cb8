"""Gradients that are added to a buffer piece by piece, and the add of a piece."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from service.buffers.record import Spec
from service.dtypes import Array, DType
from service.errors import NonfiniteGradient, ShapeMismatch
from service.kernels import accumulate


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


def _flat(array: Array) -> Array | np.flatiter[Array]:
    """Return a view of the array that takes flat slices, without a copy."""
    if array.flags.c_contiguous or not array.size:
        return array.reshape(-1)
    return array.squeeze().flat  # flat has at most 32 dimensions; 33 without a 1 would be 2**33 elements


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
