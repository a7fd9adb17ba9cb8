"""Gradient of Gather: an ordered scatter-add. Source of the semantics: ONNX Runtime 1.19.2's CPU training kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# The private loop behind scipy's `csc_array @ dense`, which adds into existing memory. The public product makes a new
# array of the output's size and takes 3 to 100 times as long. tests/kernels/test_scipy_private.py fails if it changes.
from scipy.sparse._sparsetools import csc_matvecs

from service.dtypes import INT64, Array, DType, compute_dtype
from service.errors import IndexOutOfRange, InvalidTensor, ShapeMismatch, TooManyDimensions
from service.kernels._blocks import block_length, claim, new_output, share_out, spare_memory
from service.kernels._checks import normalize_axis
from service.kernels._op import op
from service.kernels._types import Shape, T, Tind
from service.limits import MAX_RANK

SORT_BYTES = 16
"""Bytes that NumPy takes to sort an index: its place, and as much to merge."""

UNIQUE_BYTES = 40
"""Bytes that NumPy takes to find out whether an index is the first of its value."""

SPARSE_NUMBERS_PER_INDEX = 32
"""Numbers of the output for each index from which on it is faster to find first which rows occur."""


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
        self.grad = np.ascontiguousarray(grad).reshape(count, self._inner)

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
        _add_rows(sums.reshape(count, -1), self._rows[low:high] - first, lambda part: self.grad[order[part], columns])


@op(
    "GatherGrad",
    outputs="output",
    example={"shape": [3, 2], "indices": [0, 2, 0], "grad": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
    multiply_adds=lambda shape, indices, grad, **_: math.prod(shape.ravel()[:MAX_RANK].tolist()),
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
    _clear(output)
    if grad.size:
        outer, inner = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
        _scatter_add(
            output.reshape(outer, dims[axis], inner), targets, np.ascontiguousarray(grad).reshape(outer, -1, inner)
        )
    return output


def _check(shape: Array, indices: Array, grad: Array, axis: int) -> tuple[tuple[int, ...], int, Array]:
    """Return the output's dimensions, the axis from the front, and the index along it for each row of `grad`."""
    dims = _dims(shape)
    axis = normalize_axis(axis, len(dims), "shape", "the tensor that shape describes")
    expected = (*dims[:axis], *indices.shape, *dims[axis + 1 :])
    if grad.shape != expected:
        raise ShapeMismatch(
            f"grad has shape {list(grad.shape)}, but must have {list(expected)}:"
            f" shape {list(dims)} with dimension {axis} replaced by the shape of indices, {list(indices.shape)}",
            tensor="grad",
        )
    return dims, axis, _targets(indices, dims[axis])


def _dims(shape: Array) -> tuple[int, ...]:
    if shape.size > MAX_RANK:
        raise TooManyDimensions(
            f"The output has {shape.size} dimensions; the limit is {MAX_RANK}, or GRADSERVE_MAX_DIMENSIONS if smaller",
            limit=MAX_RANK,
        )
    dims = tuple(shape.ravel().tolist())
    for place, dim in enumerate(dims):
        if dim < 0:
            raise InvalidTensor(f"shape[{place}] is {dim}, but a dimension must be 0 or more", tensor="shape")
    return dims


def _targets(indices: Array, size: int) -> Array:
    """Return `indices`, flat and counted from the front."""
    flat = indices.ravel()
    if not flat.size:
        return flat
    lowest = flat.min()
    if lowest < -size or flat.max() >= size:
        place = int(((flat < -size) | (flat >= size)).argmax())
        subscripts = "".join(f"[{k}]" for k in np.unravel_index(place, indices.shape))
        allowed = f"must be in [{-size}, {size - 1}]" if size else "the dimension that it indexes is empty"
        problem = f"indices{subscripts} is {flat[place]}, but {allowed}"
        raise IndexOutOfRange(problem, tensor="indices", index=int(flat[place]))
    if lowest < 0:
        given, flat = flat, spare_memory(flat.shape, INT64)
        flat[...] = given
        np.add(flat, size, out=flat, where=flat < 0)
    return flat


def _clear(output: Array) -> None:
    flat, length = output.reshape(-1), block_length(output.dtype)

    def clear(number: int) -> None:
        flat[number * length : (number + 1) * length] = 0

    share_out(clear, -(-flat.size // length))


def _zeros(shape: tuple[int, ...], dtype: DType) -> Array:
    zeros = spare_memory(shape, dtype)
    zeros[...] = 0
    return zeros


def _scatter_add(output: Array, targets: Array, grad: Array) -> None:
    """output[o, targets[k]] += grad[o, k], k in order; output is [outer, size, inner], grad [outer, count, inner].

    The 16-bit floats are added in float32. Unless most targets occur, the sums have rows for those that do.
    """
    outer, size, inner = output.shape
    count, dtype = targets.size, compute_dtype(grad.dtype)
    occurring: Array | slice = slice(None)
    if dtype != grad.dtype and size > count and size * inner > SPARSE_NUMBERS_PER_INDEX * count:
        claim(UNIQUE_BYTES * count)
        occurring, targets = np.unique(targets, return_inverse=True)
        size = len(occurring)
    height = min(outer, max(1, block_length(grad.dtype) // (count * inner)))
    if height > 1:
        targets = (np.arange(height)[:, None] * size + targets).ravel()

    def add(number: int) -> None:
        target, source = (tensor[number * height : (number + 1) * height] for tensor in (output, grad))
        sums = target if dtype == grad.dtype else _zeros((len(source), size, inner), dtype)
        rows = source.reshape(-1, inner)
        _add_rows(sums.reshape(-1, inner), targets[: len(rows)], rows.__getitem__)
        if sums is not target:
            target[:, occurring] = sums

    share_out(add, -(-outer // height))


def _add_rows(sums: Array, targets: Array, rows: Callable[[slice], Array]) -> None:
    """sums[targets[k]] += row k, k in order, in blocks of rows; sums is [size, width].

    This is the product of `rows` with a sparse matrix that has a single 1 in each column. For rows of single numbers
    NumPy has a loop of its own.
    """
    size, width = sums.shape
    height = min(len(targets), max(1, block_length(sums.dtype) // width))
    if width > 1:
        columns, ones = np.arange(height + 1), np.ones(height, sums.dtype)
    for start in range(0, len(targets), height or 1):
        part = slice(start, start + height)
        places = targets[part].astype(np.int64, copy=False)
        block = np.ascontiguousarray(rows(part), sums.dtype).reshape(-1)
        if width == 1:
            np.add.at(sums.reshape(-1), places, block)
        else:
            count = len(places)
            csc_matvecs(size, count, width, columns[: count + 1], places, ones[:count], block, sums.reshape(-1))
