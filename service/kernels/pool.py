"""MaxPool and AveragePool, and their gradients, with one spatial axis or more.

The gradients take the shape of X. float16 and bfloat16 are added in float32 and rounded once. Source of the semantics:
the CPU kernels of ONNX Runtime 1.19.2, and its forward operators where the gradients are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from service.dtypes import INT32, INT64, Array, DType, compute_dtype
from service.errors import IndexOutOfRange, InvalidTensor, ShapeMismatch
from service.kernels._blocks import block_length, check_wanted, claim, cuts, new_output, row_major, scratch, share_out
from service.kernels._checks import check_shape, same_shapes
from service.kernels._narrow import compute_wide, load, store
from service.kernels._op import check_work, op
from service.kernels._pool_axes import Axis, axes_of, divisors_of, least_of
from service.kernels._scatter import clear, output_size, read_shape
from service.kernels._types import Bit, NotNegative, Positive, Rank4, Shape, T, Tind
from service.kernels._windows import AutoPad, Windows, make_windows, same
from service.limits import MAX_RANK

FAMILY = "Convolution, pooling and resizing"

INDEX_BLOCK = 1 << 16
"""Indices in a block."""

FOLD_MULTIPLY_ADDS = 16
"""Multiplications and additions of a product that take as long as to fold a number into a window."""


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
    values, targets, kept = row_major(dY).reshape(-1), row_major(Indices).reshape(-1), _kept(Indices, dims)

    def fill(memory: dict[str, Array]) -> None:
        sums = memory["dX"].reshape(-1)
        zeros = 0  # the sums before it are zeros, or begun
        if kept is not None or not targets.size:
            clear(sums)
            zeros = sums.size
        for part in cuts(targets.size, INDEX_BLOCK):
            check_wanted()
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
    rest: dict[str, Any] = {"strides": strides, "pads": pads, "dilations": dilations, "auto_pad": auto_pad}
    return spread_means(dY, shape, kernel_shape, count_include_pad, whole=True, ceil_mode=ceil_mode, **rest)


def spread_means(
    dY: Array,
    shape: Array,
    kernel_shape: Sequence[int],
    count_include_pad: int = 0,
    *,
    whole: bool = False,
    ceil_mode: int = 0,
    auto_pad: str = "NOTSET",
    **attributes: Any,
) -> Any:
    """Return the gradient of `average_pool`. With `whole`, `count_include_pad` counts all elements of a kernel."""
    dims = _dims(dY, shape)
    windows = make_windows(dims[2:], kernel_shape, auto_pad=auto_pad, **attributes)
    if auto_pad.startswith("SAME"):
        windows = same(windows, windows.kernel, auto_pad)
    windows.check_fit("X")
    axes = axes_of(windows, dY.shape[2:], ceil=bool(ceil_mode))
    check_shape("dY", dY, *dims[:2], *(axis.count for axis in axes))
    output: Any = new_output(None, dims, dY.dtype)
    if not dY.size or not output.size:
        clear(output)
        return output
    dtype = compute_dtype(dY.dtype)
    divisors = np.asarray(divisors_of(windows, axes, count_include_pad, whole=whole), dtype)

    def divide(block: Array) -> Array:
        return np.divide(block, divisors, out=scratch(1, block.size, dtype).reshape(block.shape))

    _run(dY, output, axes, Axis.spread, start=divide)
    return output


def max_pool(
    X: Array, /, *, indices: bool = False, ceil_mode: int = 0, storage_order: Literal[0] = 0, **attributes: Any
) -> tuple[Array, ...]:
    """Return Y = MaxPool(X), as ONNX defines it, and with `indices` the Indices that MaxPoolGrad takes.

    X is [N, C, in...], and Y and Indices are [N, C, out...]. The attributes are those of AveragePoolGrad, and
    `kernel_shape` is that of X if left out. NaN in a window makes its Y NaN. An index of -1 stands for a window in the
    padding. Raises `ShapeMismatch`, `InvalidParameter` and `TensorTooLarge`.
    """
    axes = _axes(X, _windows(X, **attributes), ceil_mode)
    Y = _output(X, axes, X.dtype)
    places = _output(X, axes, INT64) if indices else None
    _run(X, Y, axes, partial(Axis.gather, fold=np.maximum, least=least_of(X.dtype)), indices=places)
    return (Y,) if places is None else (Y, places)


def average_pool(
    X: Array, /, *, ceil_mode: int = 0, count_include_pad: int = 0, whole: bool = False, **attributes: Any
) -> Array:
    """Return Y = AveragePool(X), whose windows are those of AveragePoolGrad. The rest is as in `max_pool`.

    With `count_include_pad`, a window that sticks out counts what lies in X and its padding, or, with `whole`, all.
    """
    windows = _windows(X, **attributes)
    if attributes.get("auto_pad", "").startswith("SAME"):
        windows = same(windows, windows.kernel, attributes["auto_pad"])
    axes = _axes(X, windows, ceil_mode)
    divisors = divisors_of(windows, axes, count_include_pad, whole=whole)
    Y = _output(X, axes, X.dtype)

    def divide(sums: Array) -> None:
        np.divide(sums, divisors, out=sums, casting="same_kind")

    _run(X, Y, axes, partial(Axis.gather, fold=np.add, least=0), finish=divide)
    return Y


def _windows(X: Array, *, kernel_shape: Sequence[int] | None = None, **attributes: Any) -> Windows:
    if X.ndim < 3:
        raise ShapeMismatch(f"X has shape {list(X.shape)}, but must have 3 dimensions or more", tensor="X")
    return make_windows(X.shape[2:], X.shape[2:] if kernel_shape is None else kernel_shape, **attributes)


def _axes(X: Array, windows: Windows, ceil_mode: int) -> list[Axis]:
    windows.check_fit("X")
    axes = axes_of(windows, None, ceil=bool(ceil_mode))
    size = max(X.size, math.prod([*X.shape[:2], *(axis.count for axis in axes)]))
    check_work("The pool", FOLD_MULTIPLY_ADDS * size * sum(min(axis.kernel, axis.size) for axis in axes))
    return axes


def _output(X: Array, axes: Sequence[Axis], dtype: DType) -> Array:
    output: Array = new_output(None, (*X.shape[:2], *(axis.count for axis in axes)), dtype)
    return output


def _run(
    given: Array,
    output: Array,
    axes: Sequence[Axis],
    step: Callable[[Axis, Array, Array, int], object],
    *,
    start: Callable[[Array], Array] = lambda block: block,
    finish: Callable[[Array], object] = lambda block: None,
    indices: Array | None = None,
) -> None:
    """Fill `output` with what `step` makes of blocks of `given`, axis by axis, or find maxima and fill `indices`."""
    sizes, counts, dtype = given.shape[2:], output.shape[2:], compute_dtype(given.dtype)
    count, size = math.prod(given.shape[:2]), math.prod(sizes)
    planes, target = row_major(given).reshape(count, *sizes), output.reshape(count, *counts)
    height = max(1, block_length(given.dtype, 2) // max(1, size, math.prod(counts)))
    kind = INT32 if size <= np.iinfo(INT32).max else INT64
    claim(0 if indices is None else 3 * size * kind.itemsize)
    numbers = np.arange(0 if indices is None else size, dtype=kind)

    def run(number: int) -> None:
        part = slice(number * height, (number + 1) * height)
        block, result = planes[part], target[part]
        block = start(load(block, dtype, 0))
        places = numbers if indices is None else np.broadcast_to(numbers.reshape(sizes), block.shape)
        for depth, axis in reversed([*enumerate(axes, 1)]):
            shape = (*block.shape[:depth], counts[depth - 1], *block.shape[depth + 1 :])
            is_last = depth == 1 and result.dtype == dtype
            out = result if is_last else scratch(depth + 1, math.prod(shape), dtype).reshape(shape)
            if indices is None:
                step(axis, block, out, depth)
            else:
                found = scratch(depth + 1, math.prod(shape), kind).reshape(shape)
                axis.find(block, out, depth, places, found)
                places = found
            block = out
        finish(block)
        store(block, result, (0, 1))
        if indices is not None:
            first = ((part.start + np.arange(len(block))) * size).reshape(-1, *[1] * len(counts))
            np.add(places, first, out=(flat := indices.reshape(target.shape)[part]))
            np.copyto(flat, -1, where=places < 0)

    share_out(run, -(-count // height))
