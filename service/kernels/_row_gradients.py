"""The arithmetic of the gradients of layer normalization: rows of a matrix, each normalized by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.dtypes import FLOAT32, FLOAT64, Array, DType, cast, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import check_wanted, claim, cuts, new_output, row_major, scratch, share_out, spare_memory
from service.kernels._checks import normalize_axis, same_shapes
from service.kernels._narrow import load, store

BLOCK_ELEMENTS = 96 << 10
"""Elements of a tensor in a block, 128 rows of 768: smaller blocks spend more time on NumPy's calls."""

MAX_COLUMNS = 8192
"""The most columns of a block. Rows that are longer make several tiles, and are read twice."""

MAX_ROWS = 1024
"""The most rows of a block: their sums are rounded to float32."""

MIN_BLOCKS = 4
"""Blocks of a strip. The float64 sums of all strips together take no more memory than X as float32."""

MAX_STRIPS = 16
"""The most strips of rows, which threads share. Each has its own sums, so that their order is always the same."""


@dataclass(frozen=True)
class Rows:
    """The forward tensor and its gradient as matrices of N rows and M columns, and the dtype of the arithmetic."""

    values: Array
    Y_grad: Array
    shape: tuple[int, ...]
    dtype: DType

    @classmethod
    def of(
        cls, name: str, values: Array, Y_grad: Array, axis: int, per_column: dict[str, Array], per_row: dict[str, Array]
    ) -> Rows:
        """Check the shapes. `name` is that of the forward tensor `values`."""
        axis = normalize_axis(axis, values.ndim, name)
        same_shapes(**{name: values, "Y_grad": Y_grad})
        N, M = math.prod(values.shape[:axis]), math.prod(values.shape[axis:])
        kept = (*values.shape[:axis], *[1] * (values.ndim - axis))
        for tensors, shapes in ((per_column, [values.shape[axis:]]), (per_row, [kept, (N,)])):
            for one, tensor in tensors.items():
                if tensor.shape not in shapes:
                    expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
                    problem = f"{one} has shape {list(tensor.shape)}, but must have {expected}: {name} has shape"
                    raise ShapeMismatch(f"{problem} {list(values.shape)} and axis is {axis}", tensor=one)
        dtypes = {compute_dtype(tensor.dtype) for tensor in (values, Y_grad, *per_row.values())}
        forward, gradient = (row_major(tensor).reshape(N, M) for tensor in (values, Y_grad))
        return cls(forward, gradient, values.shape, FLOAT64 if FLOAT64 in dtypes else FLOAT32)

    def row_values(self, tensor: Array, part: slice) -> Array:
        """Return a statistic of some rows, as a column."""
        return np.ascontiguousarray(tensor.reshape(-1, 1)[part], self.dtype)

    def column_values(self, tensor: Array, columns: slice) -> Array:
        """Return the scale or the bias of some columns."""
        return tensor.reshape(-1)[columns].astype(self.dtype, copy=False)


class Gradients:
    """The gradients, one block of rows after the other.

    Sums over rows and columns are products of BLAS. `normalize(block, rows, columns, out)` returns x, if `normalized`,
    else x / inverse, which saves a pass; it may write to `out`. The mean of b counts if `centered`.
    """

    def __init__(
        self,
        rows: Rows,
        normalize: Callable[[Array, slice, slice, Array], Array],
        scale: Array,
        inverse: Array,
        wanted: Collection[str],
        *,
        normalized: bool = False,
        centered: bool = True,
    ) -> None:
        self.rows, self.normalize, self.wanted = rows, normalize, wanted
        self.given_scale, self.inverse, self.normalized, self.centered = scale, inverse, normalized, centered
        N, M = rows.values.shape
        width = max(1, min(M, MAX_COLUMNS))
        self.height = min(MAX_ROWS, BLOCK_ELEMENTS // width)
        self.tiles = cuts(M, width)
        claim(2 * M * rows.dtype.itemsize)
        self.scale = rows.column_values(scale, slice(M))
        self.weights = self.scale / rows.dtype.type(max(1, M))
        """With these weights, sums over columns are means of b."""
        self.ones = np.ones(self.height, rows.dtype)
        self.X_grad: Array | None = None

    def all(self) -> tuple[Any, Any, Any]:
        """Return the gradients of X, of the scale and of the bias, or None for those that nobody wants."""
        rows, (N, M) = self.rows, self.rows.values.shape
        X_grad: Array | None = None
        if "X_grad" in self.wanted:
            X_grad = new_output(None, rows.shape, rows.values.dtype)
            self.X_grad = X_grad.reshape(N, M)
        step = self.height * max(MIN_BLOCKS, -(-N // (self.height * MAX_STRIPS)))
        sums = spare_memory((-(-N // step), 2, M), FLOAT64)

        def strip(number: int) -> None:
            sums[number] = 0
            stop = min(N, (number + 1) * step)
            for start in range(number * step, stop, self.height):
                check_wanted()
                self._block(slice(start, min(stop, start + self.height)), *sums[number])

        share_out(strip, len(sums) if M else 0)
        return X_grad, self._total("scale_grad", sums[:, 0]), self._total("bias_grad", sums[:, 1])

    def _total(self, name: str, sums: Array) -> Array | None:
        if name not in self.wanted:
            return None
        total: Array = new_output(None, self.given_scale.shape, self.given_scale.dtype)
        with np.errstate(all="ignore"):
            total.reshape(-1)[...] = cast(sums.sum(axis=0), total.dtype)
        return total

    def _block(self, part: slice, scale_sums: Array, bias_sums: Array) -> None:
        """Add a block's sums over rows, and write its rows of X_grad."""
        means = np.zeros((2, part.stop - part.start, 1))
        x = None
        for tile in self.tiles:
            x = self._sum(part, tile, scale_sums[tile], bias_sums[tile], means)
        if self.X_grad is not None:
            b_mean, bx_mean = means.astype(self.rows.dtype)
            for tile in self.tiles:
                self._apply(part, tile, x if len(self.tiles) == 1 else None, b_mean, bx_mean)

    def _sum(self, part: slice, tile: slice, scale_sums: Array, bias_sums: Array, means: Array) -> Array | None:
        """Add the sums of one tile of the block, and return its x, or x / inverse."""
        dY = load(self.rows.Y_grad[part, tile], self.rows.dtype, 0)
        ones = self.ones[: len(dY)]
        if "bias_grad" in self.wanted:
            bias_sums += ones @ dY
        if self.X_grad is None and "scale_grad" not in self.wanted:
            return None
        x = self._normalized(part, tile)
        product = np.multiply(dY, x, out=self._memory(part, tile))
        factors = ones if self.normalized else self.rows.row_values(self.inverse, part)[:, 0]
        if "scale_grad" in self.wanted:
            scale_sums += factors @ product
        if self.X_grad is not None:
            weights = self.weights[tile]
            if self.centered:
                means[0, :, 0] += dY @ weights
            means[1, :, 0] += np.square(factors, dtype=FLOAT64) * (product @ weights)
        return x

    def _apply(self, part: slice, tile: slice, x: Array | None, b_mean: Array, bx_mean: Array) -> None:
        """Write one tile of X_grad."""
        assert self.X_grad is not None
        dY, target = load(self.rows.Y_grad[part, tile], self.rows.dtype, 0), self.X_grad[part, tile]
        x = self._normalized(part, tile) if x is None else x
        subtrahend = scratch(1, dY.size, dY.dtype).reshape(dY.shape)
        out = np.multiply(dY, self.scale[tile], out=self._memory(part, tile))
        np.multiply(x, bx_mean, out=subtrahend)
        if self.centered:
            np.add(subtrahend, b_mean, out=subtrahend)
        np.subtract(out, subtrahend, out=out)
        np.multiply(out, self.rows.row_values(self.inverse, part), out=out)
        store(out, target, (0, 1))

    def _memory(self, part: slice, tile: slice) -> Array:
        """Return a block for results on the way: that of X_grad, if it has the dtype of the arithmetic."""
        dtype, size = self.rows.dtype, (part.stop - part.start) * (tile.stop - tile.start)
        if self.X_grad is not None and self.X_grad.dtype == dtype:
            return self.X_grad[part, tile]
        return scratch(2, size, dtype).reshape(part.stop - part.start, -1)

    def _normalized(self, part: slice, tile: slice) -> Array:
        block = load(self.rows.values[part, tile], self.rows.dtype, 3)
        return self.normalize(block, part, tile, scratch(1, block.size, block.dtype).reshape(block.shape))
