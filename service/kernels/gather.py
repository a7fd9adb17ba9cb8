"""Gradient of Gather: an ordered scatter-add. Source of the semantics: ONNX Runtime 1.19.2's CPU training kernel."""

from __future__ import annotations

import math

import numpy as np

from service.dtypes import INT64, Array, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import claim, new_output, row_major, spare_memory
from service.kernels._checks import normalize_axis
from service.kernels._op import op
from service.kernels._scatter import add_rows, clear, flat_indices, output_size, read_shape, scatter_add
from service.kernels._types import Shape, T, Tind

FAMILY = "Indexing, slicing and joining"

SORT_BYTES = 16
"""Bytes that NumPy takes to sort an index: its place, and as much to merge."""


class GatheredRows:
    """GatherGrad's output, computed piece by piece. `shape` and `dtype` are those of the whole output.

    The constructor has the parameters of `gather_grad`, and raises the same errors. The attribute `grad` has a row of
    the gradient for each index.
    """

    def __init__(self, shape: Array, indices: Array, grad: Array, /, *, axis: int = 0) -> None:
        self.shape, axis, targets = _check(shape, indices, grad, axis)
        self.dtype = grad.dtype
        outer, self._inner = math.prod(self.shape[:axis]), math.prod(self.shape[axis + 1 :])
        if not grad.size:
            outer = 0  # nothing to add, however many rows there are
        count = outer * targets.size
        claim(SORT_BYTES * count)
        rows, self._rows = spare_memory((2, count), INT64)
        np.add(np.arange(outer)[:, None] * self.shape[axis], targets, out=rows.reshape(outer, targets.size))
        self._order = rows.argsort(kind="stable")
        np.take(rows, self._order, out=self._rows)
        self.grad = row_major(grad).reshape(count, self._inner)

    @classmethod
    def of(cls, shape: tuple[int, ...], index: Array, grad: Array) -> GatheredRows:
        """Return the object that has this `shape`, `index` and `grad`."""
        gathered = cls.__new__(cls)
        gathered.shape, gathered.dtype, gathered._inner = shape, grad.dtype, grad.shape[1]
        gathered._rows, gathered._order, gathered.grad = index[0], index[1], grad
        return gathered

    @property
    def is_empty(self) -> bool:
        """Whether the output is zeros because no index refers to any element."""
        return not self.grad.size

    @property
    def index(self) -> Array:
        """Two rows of numbers: the output's rows to add to, in order, and the row of `grad` to add to each."""
        return np.stack([self._rows, self._order])

    def piece(self, start: int, stop: int) -> Array | None:
        """Return the elements from `start` to `stop` of the flat output, or None if no index refers to any of them."""
        inner = self._inner
        low, high = np.searchsorted(self._rows, (start // inner, -(-stop // inner)))
        if low == high:
            return None
        sums = np.zeros(stop - start, compute_dtype(self.dtype))
        at = start
        with np.errstate(all="ignore"):
            while at < stop:  # the rest of a row, whole rows, and the beginning of a row
                row, column = divmod(at, inner)
                count = 1 if column else max(1, (stop - at) // inner)
                width = min(inner - column, stop - at)
                self._add(row, count, slice(column, column + width), sums[at - start : at - start + count * width])
                at += count * width
            return sums.astype(self.dtype, copy=False)

    def _add(self, first: int, count: int, columns: slice, sums: Array) -> None:
        """Add to `sums`, which is flat, the columns `columns` of the `count` rows from `first` on."""
        low, high = np.searchsorted(self._rows, (first, first + count))
        order = self._order[low:high]
        add_rows(sums.reshape(count, -1), self._rows[low:high] - first, lambda part: self.grad[order[part], columns])


@op(
    "GatherGrad",
    outputs="output",
    example={"shape": [3, 2], "indices": [0, 2, 0], "grad": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
    multiply_adds=lambda shape, indices, grad, **_: output_size(shape),
    sparse=GatheredRows,
)
def gather_grad(shape: Shape, indices: Tind, grad: T, /, *, axis: int = 0, out: T | None = None) -> T:
    """output = zeros(shape); output[.., indices, ..] += grad, along `axis`.

    `shape` is the shape of Gather's data, as a tensor of any rank, read flat. `indices` may have any shape; negative
    indices count from the end. `grad` has the shape of Gather's output: `shape` with the dimension `axis` replaced by
    the dimensions of `indices`. `output` has the dtype of `grad`. Duplicates are always added in their order in
    `indices`. float16 and bfloat16 are added in float32 and rounded once. Raises `AxisOutOfRange`, `IndexOutOfRange`,
    `ShapeMismatch`, `InvalidTensor` for a negative dimension and `TooManyDimensions`.
    """
    dims, axis, targets = _check(shape, indices, grad, axis)
    output = new_output(out, dims, grad.dtype)
    if np.may_share_memory(output, grad):
        grad = grad.copy()
    if np.may_share_memory(output, targets):
        targets = targets.copy()
    clear(output)
    if grad.size:
        outer, inner = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
        scatter_add(output.reshape(outer, dims[axis], inner), targets, row_major(grad).reshape(outer, -1, inner))
    return output


def _check(shape: Array, indices: Array, grad: Array, axis: int) -> tuple[tuple[int, ...], int, Array]:
    """Return the output's dimensions, the axis from the front, and the index along it for each row of `grad`."""
    dims = read_shape(shape)
    axis = normalize_axis(axis, len(dims), "shape", "the tensor that shape describes")
    expected = (*dims[:axis], *indices.shape, *dims[axis + 1 :])
    if grad.shape != expected:
        raise ShapeMismatch(
            f"grad has shape {list(grad.shape)}, but must have {list(expected)}:"
            f" shape {list(dims)} with dimension {axis} replaced by the shape of indices, {list(indices.shape)}",
            tensor="grad",
        )
    return dims, axis, flat_indices(indices, dims[axis])
