"""Resize and its gradient, where each element of X gets what it gave, as Resize is linear.

Both work axis by axis, with one sparse matrix after the other. float16 and bfloat16 are computed in float32 and rounded
once. Source of the semantics: ONNX's Resize, and ONNX Runtime's CPU kernel of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from service.dtypes import FLOAT64, Array
from service.errors import DtypeMismatch, InvalidParameter, InvalidTensor, MissingTensor, ShapeMismatch
from service.kernels._blocks import block_length, claim, scratch, share_out, spare_memory
from service.kernels._checks import check_shape, normalize_axis
from service.kernels._narrow import compute_wide, widen_tensor
from service.kernels._op import op
from service.kernels._resize_taps import Coordinates, Kind, Mode, Nearest, Shape, Taps
from service.kernels._types import Bit, Rank4, T, U, V

FAMILY = "Convolution, pooling and resizing"

FEW_NEIGHBOURS = 32
"""Neighbours in memory below which it is faster to copy a block so that it has more."""


@op(
    "ResizeGrad",
    outputs="dX",
    example={
        "dY": [[[[1.0, 2.0, 4.0, 8.0]]]],
        "X": [[[[0.0, 0.0]]]],
        "roi": [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        "scales": [1.0, 1.0, 1.0, 2.0],
        "mode": "linear",
    },
)
def resize_grad(
    dY: Rank4[T],
    X: Rank4[T],
    roi: V | None = None,
    scales: U | None = None,
    /,
    *,
    mode: Mode = "nearest",
    coordinate_transformation_mode: Coordinates = "half_pixel",
    nearest_mode: Nearest = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: Bit = 0,
    extrapolation_value: float = 0.0,
    axes: list[int] | None = None,
    antialias: Bit = 0,
    keep_aspect_ratio_policy: Literal["stretch", "not_larger", "not_smaller"] = "stretch",
) -> Rank4[T]:
    """dX is the gradient of X in Y = Resize(X, roi, scales), from that of Y.

    X is any tensor of the shape of X, and dX has its shape; dY has as many dimensions. The inputs and attributes are
    Resize's own. `scales` has a number for each axis, or for each of `axes`; left out or empty, they are the ratios of
    the sizes of dY and X. An axis of scale 1 is left as it is, and so is a tensor of unchanged shape. `roi` has the
    starts and then the ends; only tf_crop_and_resize needs it. Places outside get nothing there, so
    `extrapolation_value` changes nothing, and neither does `keep_aspect_ratio_policy`. `antialias` stretches the filter
    of linear and cubic where X shrinks. `exclude_outside`, for cubic and `antialias` only, leaves out what is outside,
    as PyTorch does. ONNX Runtime has no such kernel on CPUs. nearest computes places in float32, as Resize does there.
    Raises `ShapeMismatch`, `InvalidTensor`, `InvalidParameter`, `AxisOutOfRange` and `MissingTensor`.
    """
    if dY.ndim != X.ndim:
        raise ShapeMismatch(f"dY has shape {list(dY.shape)}, but must have the rank of X, {X.ndim}", tensor="dY")
    chosen = _chosen(X, axes)
    given = _given_scales(dY, X, chosen, scales)
    if scales is not None and scales.size and coordinate_transformation_mode != "tf_crop_and_resize":
        _check_sizes(dY, X, chosen, given)
    kind = Kind(mode, coordinate_transformation_mode, nearest_mode, cubic_coeff_a, exclude_outside, antialias)
    taps = kind.taps(X.shape, dY.shape, chosen, given, roi)
    from scipy.sparse._sparsetools import csc_matvecs  # private, as in _scatter.py

    result = compute_wide({"dX": X.shape}, X.dtype, lambda memory: _run(csc_matvecs, dY, memory["dX"], taps))
    return result["dX"]  # type: ignore[return-value]


def resize(
    X: Array,
    roi: Array | None = None,
    scales: Array | None = None,
    sizes: Array | None = None,
    /,
    *,
    axes: Sequence[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
    extrapolation_value: float = 0.0,
    **kind: Any,
) -> Array:
    """Return Y = Resize(X, roi, scales, sizes), as ONNX defines it, with the attributes of ResizeGrad.

    Either `scales` or `sizes` has elements. X has floats, or anything in mode nearest. Raises as ResizeGrad.
    """
    chosen = _chosen(X, axes)
    shape, factors = _sizes(X, chosen, scales, sizes, keep_aspect_ratio_policy)
    taps = Kind(**kind).taps(X.shape, shape, chosen, factors, roi)
    if kind.get("mode", "nearest") == "nearest":
        claim(2 * math.prod(shape) * X.itemsize)
        Y = X
        for axis in _in_order(taps, X.shape, shape):
            Y = Y.take(taps[axis][0][:, 0], axis=axis)
    elif X.dtype.kind in "iub":
        raise DtypeMismatch(f"X is {X.dtype}, but must have floats unless the mode is nearest", tensor="X")
    else:
        from scipy.sparse._sparsetools import csr_matvecs

        Y = compute_wide({"Y": shape}, X.dtype, lambda memory: _run(csr_matvecs, X, memory["Y"], taps))["Y"]
    for axis, (_, _, outside) in taps.items():
        if outside.any():
            Y[(slice(None),) * axis + (outside,)] = extrapolation_value
    return Y


def _chosen(X: Array, axes: Sequence[int] | None) -> list[int]:
    chosen = [*range(X.ndim)] if axes is None else [normalize_axis(axis, X.ndim, "X") for axis in axes]
    if len(set(chosen)) < len(chosen):
        raise InvalidParameter(f"axes is {chosen}, but must not have an axis twice", parameter="axes")
    return chosen


def _sizes(
    X: Array, axes: Sequence[int], scales: Array | None, sizes: Array | None, policy: str
) -> tuple[Shape, list[float]]:
    """Return the shape of Y, and the scale of each of the axes."""
    shape, old = [*X.shape], [X.shape[axis] for axis in axes]
    if scales is not None and scales.size:
        factors = _positive(scales, len(axes))
        new = [int(np.float32(size) * np.float32(scale)) for size, scale in zip(old, factors, strict=True)]
    elif sizes is None or not X.size:
        raise MissingTensor("Resize needs elements, and the input 'scales' or 'sizes'", tensor="scales")
    else:
        check_shape("sizes", sizes, len(axes))
        new = sizes.tolist()
        if policy != "stretch":
            factor = (min if policy == "not_larger" else max)(size / one for size, one in zip(new, old, strict=True))
            new = [int(one * factor + 0.5) for one in old]
        factors = [size / one for size, one in zip(new, old, strict=True)]
    for axis, size in zip(axes, new, strict=True):
        if size < 1:
            raise InvalidTensor(f"The sizes are {new}, but must be 1 or more", tensor="sizes")
        shape[axis] = size
    return tuple(shape), factors


def _given_scales(dY: Array, X: Array, axes: Sequence[int], scales: Array | None) -> list[float]:
    """Return the scale of each axis. Raises `ShapeMismatch` unless dY has the shape that follows."""
    rest = [size for axis, size in enumerate(X.shape) if axis not in axes]
    if rest != [size for axis, size in enumerate(dY.shape) if axis not in axes]:
        problem = f"dY has shape {list(dY.shape)}, but must have that of X, {list(X.shape)}, along all but {list(axes)}"
        raise ShapeMismatch(problem, tensor="dY")
    if not X.size and dY.size:
        raise ShapeMismatch(f"dY has shape {list(dY.shape)}, but X, {list(X.shape)}, is empty", tensor="dY")
    if scales is None or not scales.size:
        return [dY.shape[axis] / max(1, X.shape[axis]) for axis in axes]
    return _positive(scales, len(axes))


def _positive(scales: Array, count: int) -> list[float]:
    check_shape("scales", scales, count)
    numbers: list[float] = scales.astype(FLOAT64).tolist()
    for place, number in enumerate(numbers):
        if not 0 < number < math.inf:
            raise InvalidTensor(f"scales[{place}] is {number}, but must be above 0 and finite", tensor="scales")
    return numbers


def _check_sizes(dY: Array, X: Array, axes: Sequence[int], scales: Sequence[float]) -> None:
    """Raise `ShapeMismatch` unless dY has floor(size * scale) elements, with rounding to float32 or without."""
    for axis, scale in zip(axes, scales, strict=True):
        size, count = X.shape[axis], dY.shape[axis]
        with np.errstate(all="ignore"):
            most = np.floor([size * scale, np.float32(size) * np.float32(scale)])
        if count not in most:
            problem = f"dY has {count} elements along axis {axis}, but must have {most[0]:.17g}: {size} times {scale}"
            raise ShapeMismatch(problem, tensor="dY")


def _run(multiply: Callable[..., None], given: Array, result: Array, taps: dict[int, Taps]) -> None:
    """Go along the axes.

    `multiply` multiplies with a sparse matrix: with that of the taps, or with its transpose.
    """
    if not given.size:
        result[...] = 0
        return
    block = widen_tensor(given)
    for number, axis in enumerate(_in_order(taps, given.shape, result.shape)):
        shape = (*block.shape[:axis], result.shape[axis], *block.shape[axis + 1 :])
        out = result if number == len(taps) - 1 else spare_memory(shape, result.dtype)
        _apply(multiply, block, out, axis, taps[axis])
        block = out
    if not taps:
        result[...] = block


def _in_order(taps: Iterable[int], old: Shape, new: Shape) -> list[int]:
    """Return the axes, those first that shrink most: then no intermediate result is larger than both ends."""
    return sorted(taps, key=lambda axis: new[axis] / old[axis])


def _apply(multiply: Callable[..., None], block: Array, out: Array, axis: int, taps: Taps) -> None:
    """Multiply the block with the matrix along the axis. Taps have places in the longer tensor's axis."""
    outer, inner = math.prod(block.shape[:axis]), math.prod(block.shape[axis + 1 :])
    count, size = block.shape[axis], out.shape[axis]
    source, target = block.reshape(outer, count, inner), out.reshape(outer, size, inner)
    pointers, places = np.arange(len(taps[0]) + 1) * taps[0].shape[1], taps[0].reshape(-1)
    weights = taps[1].astype(block.dtype).reshape(-1)

    def add(values: Array, sums: Array) -> None:
        sums[...] = 0
        neighbours = values.size // count
        multiply(size, count, neighbours, pointers, places, weights, values.reshape(-1), sums.reshape(-1))

    if inner >= FEW_NEIGHBOURS:
        share_out(lambda number: add(source[number], target[number]), outer)
        return
    height = max(1, block_length(block.dtype, 2) // (max(count, size) * inner))

    def add_moved(number: int) -> None:
        part = slice(number * height, (number + 1) * height)
        moved = source[part].swapaxes(0, 1)
        values, sums = (
            scratch(slot, moved.size // count * length, block.dtype).reshape(length, *moved.shape[1:])
            for slot, length in enumerate((count, size))
        )
        values[...] = moved
        add(values, sums)
        target[part] = sums.swapaxes(0, 1)

    share_out(add_moved, -(-outer // height))
