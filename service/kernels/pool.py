"""Gradients of MaxPool and AveragePool, with one spatial axis or more.

The shape of X is an input. float16 and bfloat16 are added in float32 and rounded once. Source of the semantics: the
CPU kernels of ONNX Runtime 1.19.2, and its forward operators where the gradients are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import IndexOutOfRange, InvalidTensor, ShapeMismatch
from service.kernels._blocks import block_length, check_wanted, claim, new_output, scratch, share_out
from service.kernels._checks import check_shape, same_shapes
from service.kernels._narrow import compute_wide, narrow, widen
from service.kernels._op import op
from service.kernels._scatter import clear, output_size, read_shape
from service.kernels._types import Bit, NotNegative, Positive, Rank4, Shape, T, Tind
from service.kernels._windows import AutoPad, Windows, make_windows, same
from service.limits import MAX_RANK

INDEX_BLOCK = 1 << 16
"""Indices in a block."""


@op(
    "MaxPoolGrad",
    outputs="dX",
    example={"dY": [[[[1.0, 2.0]]]], "Indices": [[[[1, 2]]]], "shape": [1, 1, 2, 2]},
    multiply_adds=lambda dY, Indices, shape, **_: output_size(shape),
)
def max_pool_grad(
    dY: Rank4[T],
    Indices: Rank4[Tind],
    shape: Shape,
    /,
    *,
    kernel_shape: list[Positive] | None = None,
    strides: list[Positive] | None = None,
    pads: list[NotNegative] | None = None,
    dilations: list[Positive] | None = None,
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: Bit = 0,
    storage_order: Literal[0] = 0,
) -> Rank4[T]:
    """dX = zeros(shape); dX.flat[Indices] += dY.

    `shape` is that of X, [N, C, in...]; dY and Indices are [N, C, out...]. Indices are what MaxPool returns: places in
    all of X, flat and row-major. PyTorch's are places in a plane: add (n * C + c) * prod(in). -1 is no element, and
    neither is what ONNX Runtime's MaxPool gives for a window without numbers: the place of (-1, -1, ...) in the plane.
    Elements with several gradients get them in order. MaxPool's own attributes change nothing; `storage_order` must be
    0. Raises `ShapeMismatch`, `IndexOutOfRange`, `InvalidTensor` for a wrong dimension and `TooManyDimensions`.
    """
    dims = _dims(dY, shape)
    same_shapes(dY=dY, Indices=Indices)
    size = math.prod(dims[2:])
    values, targets, kept = dY.reshape(-1), Indices.reshape(-1), _kept(Indices, dims)

    def fill(memory: dict[str, Array]) -> None:
        sums = memory["dX"].reshape(-1)
        zeros = 0  # the sums before it are zeros, or begun
        if kept is not None or not targets.size:
            clear(sums)
            zeros = sums.size
        for start in range(0, targets.size, INDEX_BLOCK):
            check_wanted()
            part = slice(start, start + INDEX_BLOCK)
            places, block = targets[part], values[part]
            if kept is not None:
                places, block = places[kept[part]], block[kept[part]]
            elif zeros <= (last := int(places.max())):  # the plane of the last index, and planes before it
                sums[zeros : (zeros := min(sums.size, (last // size + 1) * size))] = 0
            np.add.at(sums, places.astype(np.int64, copy=False), block.astype(sums.dtype, copy=False))
        sums[zeros:] = 0

    return compute_wide({"dX": dims}, dY.dtype, fill)["dX"]  # type: ignore[return-value]


def _kept(Indices: Array, dims: tuple[int, ...]) -> Array | None:
    """Return which of the flat indices are elements, or None if all are. Raises `IndexOutOfRange`.

    The place of (-1, -1, ...) in a plane is also that of an element in the plane before. It is none if all other
    indices are in their own planes, as MaxPool's are.
    """
    if not Indices.size:
        return None
    planes = Indices.reshape(dims[0] * dims[1], -1)
    size = math.prod(dims[2:])
    first = np.arange(len(planes))[:, None] * size
    if (planes.min(axis=1) >= first[:, 0]).all() and (planes.max(axis=1) < first[:, 0] + size).all():
        return None
    claim(4 * planes.size)
    own = (planes >= first) & (planes < first + size)
    hole = sum(math.prod(dims[axis:]) for axis in range(3, len(dims) + 1))
    if (own | (planes == first - hole)).all():
        return own.reshape(-1)
    if planes.min() < -1 or planes.max() >= len(planes) * size:
        place = int(((planes < -1) | (planes >= len(planes) * size)).argmax())
        index = int(planes.reshape(-1)[place])
        subscripts = "".join(f"[{k}]" for k in np.unravel_index(place, Indices.shape))
        problem = f"Indices{subscripts} is {index}, but must be in [-1, {len(planes) * size - 1}]"
        raise IndexOutOfRange(problem, tensor="Indices", index=index)
    return np.asarray(planes >= 0).reshape(-1)


def _dims(dY: Array, shape: Array) -> tuple[int, ...]:
    """Return the dimensions of dX."""
    dims = read_shape(shape)
    if len(dims) < 3:
        raise InvalidTensor(f"shape is {list(dims)}, but must have 3 dimensions or more", tensor="shape")
    if dY.ndim != len(dims) or dY.shape[:2] != dims[:2]:
        problem = (
            f"dY has shape {list(dY.shape)}, but must have the rank and the first two dimensions of shape, {list(dims)}"
        )
        raise ShapeMismatch(problem, tensor="dY")
    return dims


def _average_work(dY: Array, shape: Array, *, kernel_shape: Sequence[int], **_: Any) -> int:
    taps = sum(min(k, dim) for k, dim in zip(kernel_shape, shape.ravel()[2:MAX_RANK].tolist(), strict=False))
    return (dY.size + output_size(shape)) * max(1, taps)


@op(
    "AveragePoolGrad",
    outputs="dX",
    example={"dY": [[[[4.0, 8.0]]]], "shape": [1, 1, 2, 3], "kernel_shape": [2, 2]},
    multiply_adds=_average_work,
)
def average_pool_grad(
    dY: Rank4[T],
    shape: Shape,
    /,
    *,
    kernel_shape: list[Positive],
    strides: list[Positive] | None = None,
    pads: list[NotNegative] | None = None,
    dilations: list[Positive] | None = None,
    auto_pad: AutoPad = "NOTSET",
    ceil_mode: Bit = 0,
    count_include_pad: Bit = 0,
) -> Rank4[T]:
    """dX = zeros(shape); each element of dY is spread evenly over its window's elements: dX[window] += dY / count.

    `shape` is that of X, [N, C, in...], and dY is [N, C, out...]. `count` are the window's elements inside X, or, with
    count_include_pad, all elements of the kernel, also where `ceil_mode` lets a window stick out. A window without an
    element of X gives nothing; with `ceil_mode`, dY may leave out those at the end. The other attributes are as in
    ConvGrad, but SAME_UPPER and SAME_LOWER take no account of `dilations`, as in ONNX Runtime's AveragePool. Raises
    `ShapeMismatch`, `InvalidParameter`, `InvalidTensor` for a negative dimension and `TooManyDimensions`.
    """
    dims = _dims(dY, shape)
    windows = make_windows(dims[2:], kernel_shape, strides, dilations, pads, auto_pad)
    if auto_pad.startswith("SAME"):
        windows = same(windows, windows.kernel, auto_pad)
    windows.check_fit("X")
    axes = _axes(dY, windows, bool(ceil_mode))
    output: Any = new_output(None, dims, dY.dtype)
    if not dY.size or not output.size:
        clear(output)
        return output
    planes, target = dY.reshape(-1, *dY.shape[2:]), output.reshape(-1, *dims[2:])
    dtype = compute_dtype(dY.dtype)
    divisors = np.asarray(math.prod(windows.kernel) if count_include_pad else _elements(axes), dtype)
    height = max(1, block_length(dY.dtype, 2) // max(math.prod(dims[2:]), math.prod(dY.shape[2:])))

    def spread(number: int) -> None:
        part = slice(number * height, (number + 1) * height)
        given, result = planes[part], target[part]
        block = scratch(0, given.size, dtype).reshape(given.shape)
        np.divide(widen(given, 1) if given.dtype != dtype else given, divisors, out=block)
        for number, axis in reversed([*enumerate(axes, 1)]):
            shape = (*block.shape[:number], axis.size, *block.shape[number + 1 :])
            is_last = number == 1 and result.dtype == dtype
            block = axis.spread(
                block, result if is_last else scratch(number, math.prod(shape), dtype).reshape(shape), number
            )
        if result.dtype != dtype:
            narrow(block, result, (0, len(axes) + 1))

    share_out(spread, -(-len(planes) // height))
    return output


@dataclass(frozen=True)
class _Axis:
    """The windows along an axis of X. Tap t of window w lies at w * stride + t * dilation - begin."""

    size: int
    count: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    def elements(self) -> Array:
        """Return how many elements of X each window has."""
        first = np.arange(self.count) * self.stride - self.begin
        low, high = (-((first - end) // self.dilation) for end in (0, self.size))
        return np.maximum(0, np.minimum(high, self.kernel) - np.maximum(low, 0))

    def spread(self, block: Array, out: Array, axis: int) -> Array:
        """Fill `out` with zeros, and add each element of `block` to all elements of its window along the axis."""
        before = (slice(None),) * axis
        moves = list(self._moves())
        apart = self.stride > (self.kernel - 1) * self.dilation
        if not apart or sum(len(range(*place.indices(self.size))) for place, _ in moves) < self.size:
            out[...] = 0
        for place, window in moves:
            if apart:
                out[(*before, place)] = block[(*before, window)]
            else:
                out[(*before, place)] += block[(*before, window)]
        return out

    def _moves(self) -> Iterator[tuple[slice, slice]]:
        """Yield, tap by tap or window by window, elements of X and the windows that they get the gradient of."""
        by_tap = self.kernel <= self.count
        step, count = (self.stride, self.count) if by_tap else (self.dilation, self.kernel)
        for number in range(self.kernel if by_tap else self.count):
            first = number * (self.dilation if by_tap else self.stride) - self.begin
            low, high = max(0, -(first // step)), min(count, -((first - self.size) // step))
            if low < high:
                windows = slice(low, high) if by_tap else slice(number, number + 1)
                yield slice(first + low * step, first + (high - 1) * step + 1, step), windows


def _axes(dY: Array, windows: Windows, ceil: bool) -> list[_Axis]:
    """Return the axes. Raises `ShapeMismatch` unless dY has all windows, or with `ceil` all that begin inside."""
    counts = list(windows.counts)
    for axis, (room, stride, size, begin) in enumerate(
        zip(windows.rooms, windows.strides, windows.sizes, windows.begins, strict=True)
    ):
        if ceil:
            counts[axis] = -(-room // stride) + 1
            if dY.shape[2 + axis] == counts[axis] - 1 and dY.shape[2 + axis] * stride >= size + begin:
                counts[axis] -= 1
    check_shape("dY", dY, *dY.shape[:2], *counts)
    parts = (windows.sizes, counts, windows.kernel, windows.strides, windows.dilations, windows.begins)
    return [_Axis(*numbers) for numbers in zip(*parts, strict=True)]


def _elements(axes: Sequence[_Axis]) -> Array:
    """Return how many elements of X each window has. Those without any are not divided by 0 here, nor spread."""
    product: Array = np.ones((), np.int64)
    for axis in axes:
        product = np.multiply.outer(product, axis.elements())
    return np.maximum(product, 1)
