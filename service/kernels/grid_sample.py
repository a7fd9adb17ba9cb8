"""GridSample and its gradients: the product of a sparse matrix with an image, and how the matrix grows with the grid.

float16 and bfloat16 are computed in float32 and rounded once. Source of the semantics: ONNX's GridSample, and PyTorch's
grid_sample for its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.polynomial import polynomial

from service.dtypes import FLOAT64, FLOATS, INT64, NAMES, Array, DType, compute_dtype
from service.errors import DtypeMismatch, InvalidParameter, ShapeMismatch, shown
from service.kernels._blocks import claim
from service.kernels._op import check_work

WEIGHTS = {
    "nearest": np.array([[1.0]]),
    "linear": np.array([[1.0, 0], [-1, 1]]),
    "cubic": np.array([[0.0, 1, 0, 0], [-0.75, 0, 0.75, 0], [1.5, -2.25, 1.5, -0.75], [-0.75, 1.25, -1.25, 0.75]]),
}
"""The weights of the taps along an axis: polynomials of the distance from the first of the two in the middle."""

PADDINGS = ("zeros", "border", "reflection")

TAP_BYTES, ENTRY_BYTES = 96, 64
"""Bytes that a tap along an axis takes, and a weight of the matrix."""


class Sampler:
    """The attributes of GridSample, in opset 16 or later. Raises `InvalidParameter`."""

    def __init__(self, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0) -> None:
        for name, value, allowed in (
            ("mode", mode.removeprefix("bi"), [*WEIGHTS]),
            ("padding_mode", padding_mode, PADDINGS),
        ):
            if value not in allowed:
                raise InvalidParameter(
                    f"{name} is {shown(value)}, but must be one of {', '.join(allowed)}", parameter=name
                )
        self.mode, self.padding, self.corners = mode.removeprefix("bi"), padding_mode, align_corners

    def sample(self, X: Array, grid: Array) -> Array:
        """Return the numbers of X [N, C, in...] at the places of grid [N, out..., axes], as [N, C, out...].

        A place is one number for each axis, the last axis first: -1 and 1 are the ends. Raises `ShapeMismatch`,
        `DtypeMismatch` and `TensorTooLarge`.
        """
        matrix = self._matrix(X.shape, X.dtype, grid)
        return _image(matrix @ _columns(X), (*X.shape[:2], *grid.shape[1:-1]), X.dtype)

    def image_grad(self, dY: Array, shape: Sequence[int], grid: Array) -> Array:
        """Return the gradient of X, which has this shape."""
        return _image(self._matrix(shape, dY.dtype, grid).T @ _columns(dY), shape, dY.dtype)

    def grid_grad(self, dY: Array, X: Array, grid: Array) -> Array:
        """Return the gradient of the grid."""
        given, factors = _columns(X), _columns(dY)
        slopes = [self._matrix(X.shape, X.dtype, grid, k) @ given for k in reversed(range(grid.shape[-1]))]
        sums = [np.einsum("pc,pc->p", slope, factors, dtype=slope.dtype) for slope in slopes]
        return np.stack(sums, axis=-1).reshape(grid.shape).astype(grid.dtype)

    def _matrix(self, shape: Sequence[int], dtype: DType, grid: Array, along: int | None = None) -> Any:
        """Return the weights of X [N * in] in Y [N * out]; `along` an axis, how they grow with the grid."""
        from scipy.sparse import csr_array  # late: most servers never need it

        rank, taps, wide = len(shape) - 2, WEIGHTS[self.mode].shape[1], compute_dtype(dtype)
        if not 1 <= rank <= 3 or 0 in shape[1:] or grid.shape != (shape[0], *grid.shape[1 : rank + 1], rank):
            problem = f"X has shape {list(shape)} and grid {list(grid.shape)}"
            raise ShapeMismatch(f"{problem}, but they must have [N, C, in...] and [N, out..., axes], with 1 to 3 axes")
        if NAMES.get(dtype) not in FLOATS.dtypes:
            raise DtypeMismatch(f"X is {dtype}, but must be one of {', '.join(FLOATS.dtypes)}", tensor="X")
        points, pixels = math.prod(grid.shape[:-1]), math.prod(shape[2:])
        check_work("GridSample", points * taps**rank * (shape[1] + 16))
        claim(points * (TAP_BYTES * taps * rank + ENTRY_BYTES * taps**rank + 2 * shape[1] * wide.itemsize))
        places = np.repeat(np.arange(shape[0]), points // max(1, shape[0]))[None]
        weights = np.ones((1, points))
        for axis, size in enumerate(shape[2:]):
            found, *factors = self._taps(grid[..., rank - 1 - axis].reshape(-1).astype(FLOAT64), size)
            places = (places[:, None] * size + found).reshape(-1, points)
            weights = (weights[:, None] * factors[axis == along]).reshape(-1, points)
        starts = np.arange(points + 1) * len(places)
        entries = weights.T.astype(wide).reshape(-1), places.T.reshape(-1), starts
        return csr_array(entries, shape=(points, shape[0] * pixels))

    def _taps(self, g: Array, size: int) -> tuple[Array, Array, Array]:
        """Return the place, the weight, and how it grows, of each tap along an axis, [taps, points]."""
        coefficients, slope = WEIGHTS[self.mode], np.full_like(g, (size - 1 if self.corners else size) / 2)
        x = (g + 1) * slope - (0 if self.corners else 0.5)
        if self.mode != "cubic":
            x, growth = self._padded(x, size)
            slope *= growth
        first = np.rint(x) if self.mode == "nearest" else np.floor(x)
        count = coefficients.shape[1]
        places = first + (np.arange(count) - (count > 2))[:, None]
        if self.mode == "cubic":
            places, _ = self._padded(places, size)
        inside = (places >= 0) & (places < size)  # not so for NaN
        weights, changes = (
            polynomial.polyval(x - first, one) for one in (coefficients, polynomial.polyder(coefficients))
        )
        return (
            np.where(inside, places, 0).astype(INT64),
            np.where(inside, weights, 0),
            np.where(inside, changes * slope, 0),
        )

    def _padded(self, x: Array, size: int) -> tuple[Array, Array]:
        """Return the places inside that stand for the places x, and how they grow with x: 1, 0 or -1."""
        growth = np.ones_like(x)
        if self.padding == "zeros":
            return x, growth
        if self.padding == "reflection":
            low, span = (0, max(1, size - 1)) if self.corners else (-0.5, size)
            far = (x - low) % (2 * span)
            growth = np.where(far < span, 1.0, -1.0)
            x = low + np.minimum(far, 2 * span - far)
        return np.clip(x, 0, size - 1), growth * ((x > 0) & (x < size - 1))


def _columns(X: Array) -> Array:
    """Return [N, C, in...] as [N * in, C], in the dtype of the arithmetic."""
    claim(2 * X.size * compute_dtype(X.dtype).itemsize)
    return np.moveaxis(X, 1, -1).reshape(-1, X.shape[1]).astype(compute_dtype(X.dtype), copy=False)


def _image(rows: Array, shape: Sequence[int], dtype: DType) -> Array:
    """Return [N * in, C] as [N, C, in...], in this dtype."""
    claim(rows.size * dtype.itemsize)
    return np.moveaxis(rows.reshape(shape[0], *shape[2:], shape[1]), -1, 1).astype(dtype, order="C")
