"""Gradient of Gather: an ordered scatter-add. Source of the semantics: ONNX Runtime 1.19.2's CPU training kernel."""

from __future__ import annotations

import math

import numpy as np

# The loop behind scipy's public `csc_array @ dense`. Only here can it add into memory that is already there, instead of
# into a fresh array of the output's size.
from scipy.sparse._sparsetools import csc_matvecs

from service.dtypes import compute_dtype
from service.errors import IndexOutOfRange, InvalidTensor, ShapeMismatch, TooManyDimensions
from service.kernels._blocks import block_length, new_output, share_out
from service.kernels._checks import normalize_axis
from service.kernels._op import Array, Shape, T, Tind, op
from service.limits import MAX_RANK


class GatheredRows:
    """GatherGrad's output, of which any piece can be had by itself: `shape`, `dtype`, and the numbers when asked for.

    `grad` is the gradient in rows, one for each index. Takes what `gather_grad` takes, and raises the same.
    """

    def __init__(self, shape: Array, indices: Array, grad: Array, /, *, axis: int = 0) -> None:
        self.shape, axis, targets = _bound(shape, indices, grad, axis)
        self.dtype = grad.dtype
        outer, self._inner = math.prod(self.shape[:axis]), math.prod(self.shape[axis + 1 :])
        if not grad.size:
            outer = 0  # nothing to add, however many rows there are
        rows = (np.arange(outer)[:, None] * self.shape[axis] + targets).ravel()
        self._order = rows.argsort(kind="stable")
        self._rows = rows[self._order]
        self.grad = np.ascontiguousarray(grad).reshape(rows.size, self._inner)

    @classmethod
    def of(cls, shape: tuple[int, ...], index: Array, grad: Array) -> GatheredRows:
        """The same again from its `index` and its `grad`."""
        made = cls.__new__(cls)
        made.shape, made.dtype, made._inner = shape, grad.dtype, grad.shape[1]
        made._rows, made._order, made.grad = index[0], index[1], grad
        return made

    @property
    def index(self) -> Array:
        """The rows of the output that are added to, in order, and which row of `grad` goes to each."""
        return np.stack([self._rows, self._order])

    def piece(self, start: int, stop: int) -> Array | None:
        """The elements from `start` to `stop` of the flat output; None if all are zero because no index leads there."""
        first, last = start // self._inner, -(-stop // self._inner)
        low, high = np.searchsorted(self._rows, (first, last))
        if low == high:
            return None
        count, dtype = high - low, compute_dtype(self.dtype)
        sums = np.zeros((last - first, self._inner), dtype)
        grad = self.grad[self._order[low:high]].astype(dtype, copy=False)
        targets = self._rows[low:high] - first
        columns, ones = np.arange(count + 1), np.ones(count, dtype)
        csc_matvecs(last - first, count, self._inner, columns, targets, ones, grad.reshape(-1), sums.reshape(-1))
        flat = sums.reshape(-1)[start - first * self._inner : stop - first * self._inner]
        with np.errstate(over="ignore"):
            return flat.astype(self.dtype, copy=False)


@op(
    "GatherGrad",
    outputs="output",
    example={"shape": [3, 2], "indices": [0, 2, 0], "grad": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]},
    linear=False,
    sparse=GatheredRows,
)
def gather_grad(shape: Shape, indices: Tind, grad: T, /, *, axis: int = 0, out: T | None = None) -> T:
    """output = zeros(shape); output[.., indices, ..] += grad, along `axis`.

    `shape` is the shape of Gather's data, as a tensor of any rank, read flat. `indices` may have any shape and count
    from the end where negative. `grad` has the shape of Gather's output: `shape` with the dimension `axis` replaced by
    the dimensions of `indices`; `output` has its dtype. Duplicates are added in their order in `indices`, always the
    same. float16 and bfloat16 are added in float32 and rounded once. Raises `AxisOutOfRange`, `IndexOutOfRange`,
    `ShapeMismatch`, `InvalidTensor` for a negative dimension and `TooManyDimensions`.
    """
    dims, axis, targets = _bound(shape, indices, grad, axis)
    output = new_output(out, dims, grad.dtype)
    if np.may_share_memory(output, grad):
        grad = grad.copy()
    _clear(output)
    if grad.size:
        outer, inner = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
        _scatter_add(
            output.reshape(outer, dims[axis], inner), targets, np.ascontiguousarray(grad).reshape(outer, -1, inner)
        )
    return output


def _bound(shape: Array, indices: Array, grad: Array, axis: int) -> tuple[tuple[int, ...], int, Array]:
    """The dimensions of the output, the axis from the front, and the index into it for each row of `grad`."""
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
            f"The output has {shape.size} dimensions; the limit is {MAX_RANK}, or less by GRADSERVE_MAX_DIMENSIONS",
            limit=MAX_RANK,
        )
    dims = tuple(shape.ravel().tolist())
    for place, dim in enumerate(dims):
        if dim < 0:
            raise InvalidTensor(f"shape[{place}] is {dim}, but a dimension must be 0 or more", tensor="shape")
    return dims


def _targets(indices: Array, size: int) -> Array:
    """`indices`, flat, int64 and counted from the front."""
    flat = indices.astype(np.int64).ravel()
    outside = (flat < -size) | (flat >= size)
    if outside.any():
        place = int(outside.argmax())
        where = "".join(f"[{k}]" for k in np.unravel_index(place, indices.shape))
        allowed = f"must be in [{-size}, {size - 1}]" if size else "the dimension that it indexes is empty"
        raise IndexOutOfRange(
            f"indices{where} is {flat[place]}, but {allowed}", tensor="indices", index=int(flat[place])
        )
    return np.where(flat < 0, flat + size, flat)


def _clear(output: Array) -> None:
    flat, length = output.reshape(-1), block_length(output.dtype)

    def clear(number: int) -> None:
        flat[number * length : (number + 1) * length] = 0

    share_out(clear, -(-flat.size // length))


def _scatter_add(output: Array, targets: Array, grad: Array) -> None:
    """output[o, targets[k]] += grad[o, k], k in order; output is [outer, size, inner], grad [outer, count, inner].

    For all `o` of a block at once, this is the product of a sparse matrix with a one in each column. The 16-bit floats
    are added in float32, in rows for the targets that occur.
    """
    outer, size, inner = output.shape
    count, dtype = targets.size, compute_dtype(grad.dtype)
    occurring = None
    if dtype != grad.dtype:
        occurring, targets = np.unique(targets, return_inverse=True)
        size = occurring.size
    height = min(outer, max(1, block_length(grad.dtype) // max(1, count * inner)))
    row_of = (np.arange(height)[:, None] * size + targets).ravel()
    columns, ones = np.arange(height * count + 1), np.ones(height * count, dtype)

    def add(number: int) -> None:
        target, source = (tensor[number * height : (number + 1) * height] for tensor in (output, grad))
        rows, count_all = len(source) * size, len(source) * count
        sums = target if occurring is None else np.zeros((len(source), size, inner), dtype)
        csc_matvecs(
            rows,
            count_all,
            inner,
            columns[: count_all + 1],
            row_of[:count_all],
            ones[:count_all],
            source.astype(dtype, copy=False).reshape(-1),
            sums.reshape(-1),
        )
        if occurring is not None:
            target[:, occurring] = sums

    share_out(add, -(-outer // height))
