"""What is added to a buffer: gradients of which any piece can be had, and the add of one piece."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from service.buffers.record import Spec
from service.dtypes import Array, DType
from service.errors import NonfiniteGradient, ShapeMismatch
from service.kernels import accumulate


class Gradient(Protocol):
    """A gradient of which any piece can be had by itself."""

    shape: tuple[int, ...]
    dtype: DType

    def piece(self, start: int, stop: int) -> Array | None:
        """The elements from `start` to `stop` of the flat gradient; None where there is nothing to add at all."""


class Dense:
    """An array, broadcast into `shape`, as a gradient. Raises `ShapeMismatch`, which tells its `name`."""

    def __init__(self, array: Array, shape: tuple[int, ...], name: str = "gradient") -> None:
        if array.shape != shape:
            try:
                array = np.broadcast_to(array, shape)
            except ValueError:
                raise ShapeMismatch(
                    f"{name} has shape {list(array.shape)}, which does not broadcast to the buffer's, {list(shape)}",
                    tensor=name,
                ) from None
        self.shape, self.dtype = shape, array.dtype
        self._flat = _flat(array)

    def piece(self, start: int, stop: int) -> Array:
        """The elements from `start` to `stop`, of the flat array."""
        return self._flat[start:stop]


def _flat(array: Array) -> Array | np.flatiter[Array]:
    """The array as what flat slices can be taken of, without a copy."""
    if array.flags.c_contiguous or not array.size:
        return array.reshape(-1)
    return array.squeeze().flat  # it goes through 32 dimensions; more, none of them 1, would be 2**33 elements


def add_piece(spec: Spec, result: Array, total: Array | int, piece: Array | None, weight: float, anew: bool) -> None:
    """One piece of an add, all arrays flat. Raises `NonfiniteGradient` where the buffer refuses the result.

    NumPy's floating-point warnings are the caller's to silence.
    """
    if anew:
        accumulate.replace(result, total, np.zeros(1, spec.dtype) if piece is None else piece, weight)
    else:
        assert piece is not None
        accumulate.add(result, total, piece, weight)
    if spec.nonfinite == "reject" and not np.isfinite(result).all():
        raise NonfiniteGradient("The gradient would make the buffer infinite or NaN, which nonfinite=reject refuses")
