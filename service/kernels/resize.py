"""The gradient of Resize, which is linear, so each element of X gets what it gave.

Resize works axis by axis, and so does its gradient: one sparse matrix after the other. float16 and bfloat16 are
computed in float32 and rounded once. Source of the semantics: ONNX's Resize, and ONNX Runtime's CPU kernel of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

# The private loop behind scipy's `csc_array @ dense`, as in _scatter.py.
from scipy.sparse._sparsetools import csc_matvecs

from service.dtypes import FLOAT32, FLOAT64, INT64, Array
from service.errors import InvalidParameter, InvalidTensor, MissingTensor, ShapeMismatch
from service.kernels._blocks import block_length, claim, scratch, share_out, spare_memory
from service.kernels._checks import check_shape, normalize_axis
from service.kernels._narrow import compute_wide, widen_tensor
from service.kernels._op import op
from service.kernels._types import Bit, Rank4, T, U, V

Coordinates = Literal[
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
]
Mode = Literal["nearest", "linear", "cubic"]
Nearest = Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]

FEW_NEIGHBOURS = 32
"""Neighbours in memory below which it is faster to copy a block so that it has more."""

TAP_BYTES = 80
"""Bytes of an element's places and weights along an axis, with those of intermediate results, for each tap."""

_ROUND: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


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
    antialias: Literal[0] = 0,
    keep_aspect_ratio_policy: Literal["stretch", "not_larger", "not_smaller"] = "stretch",
) -> Rank4[T]:
    """dX is the gradient of X in Y = Resize(X, roi, scales), from that of Y.

    X is any tensor of the shape of X, and dX has its shape; dY has as many dimensions. The inputs and attributes are
    Resize's own. `scales` has a number for each axis, or for each of `axes`; left out or empty, they are the ratios of
    the sizes of dY and X. An axis of scale 1 is left as it is, and so is a tensor of unchanged shape. `roi` has the
    starts and then the ends; only tf_crop_and_resize needs it. Places outside get nothing there, so
    `extrapolation_value` changes nothing, and neither does `keep_aspect_ratio_policy`. `antialias` must be 0, and
    `exclude_outside` is for cubic only. ONNX Runtime has no such kernel on CPUs. nearest computes places in float32, as
    Resize does there. Raises `ShapeMismatch`, `InvalidTensor`, `InvalidParameter`, `AxisOutOfRange` and
    `MissingTensor`.
    """
    if dY.ndim != X.ndim:
        raise ShapeMismatch(f"dY has shape {list(dY.shape)}, but must have the rank of X, {X.ndim}", tensor="dY")
    chosen = range(X.ndim) if axes is None else [normalize_axis(axis, X.ndim, "X") for axis in axes]
    if len(set(chosen)) < len(chosen):
        raise InvalidParameter(f"axes is {list(chosen)}, but must not have an axis twice", parameter="axes")
    if exclude_outside and mode != "cubic":
        raise InvalidParameter(f"exclude_outside is 1, but must be 0 in mode {mode}", parameter="exclude_outside")
    given = _given_scales(dY, X, chosen, scales)
    crop = None
    if coordinate_transformation_mode == "tf_crop_and_resize":
        crop = _crop(roi, len(chosen))
    elif scales is not None and scales.size:
        _check_sizes(dY, X, chosen, given)
    dtype = FLOAT32 if mode == "nearest" else FLOAT64
    taps: dict[int, _Taps] = {}
    for place, axis in enumerate(chosen):
        size, count = X.shape[axis], dY.shape[axis]
        with np.errstate(over="ignore"):
            scale = dtype.type(given[place])
        if not dY.size or dY.shape == X.shape or (scale == 1 and size == count):
            continue
        claim(TAP_BYTES * count)
        section = None if crop is None else (crop[place], crop[place + len(chosen)])
        with np.errstate(all="ignore"):
            numbers = np.arange(count, dtype=dtype)
            x = _places(coordinate_transformation_mode, size, count, scale, section, numbers)
            outside = (x < 0) | (x > size - 1) if section else np.zeros(count, np.bool_)
            x = np.clip(np.nan_to_num(x), -2, size + 1)
            if mode == "nearest":
                places, weights = _ROUND[nearest_mode](x)[:, None], np.ones((count, 1))
            elif mode == "linear":
                places, weights = _linear(np.clip(x, 0, size - 1))
            else:
                places, weights = _cubic(x, cubic_coeff_a, size if exclude_outside else None)
        weights[outside] = 0
        taps[axis] = np.clip(places, 0, size - 1).astype(INT64), weights
    return compute_wide({"dX": X.shape}, X.dtype, lambda memory: _run(dY, memory["dX"], taps))["dX"]  # type: ignore[return-value]


_Taps = tuple[Array, Array]
"""For each element of dY along an axis, the places in X that it depends on, and their weights: [out, taps]."""


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
    check_shape("scales", scales, len(axes))
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


def _crop(roi: Array | None, count: int) -> list[float]:
    if roi is None or not roi.size:
        raise MissingTensor("tf_crop_and_resize needs the input 'roi'", tensor="roi")
    check_shape("roi", roi, 2 * count)
    if not np.isfinite(roi.astype(FLOAT64)).all():
        raise InvalidTensor("roi must be finite", tensor="roi")
    return roi.astype(FLOAT64).tolist()


def _places(
    transformation: str, size: int, count: int, scale: np.floating, section: tuple[float, float] | None, x: Array
) -> Array:
    """Return where in an axis of `size` elements the numbers `x` of its `count` resized elements lie, in x's dtype."""
    number = x.dtype.type
    half = number(0.5)
    match transformation:
        case "asymmetric":
            return x / scale
        case "align_corners":
            return x * number(size - 1) / number(max(1, count - 1))
        case "tf_half_pixel_for_nn":
            return (x + half) / scale
        case "tf_crop_and_resize":
            start, end = map(number, section or (0, 1))
            if count == 1:
                return half * (start + end) * number(size - 1) + x
            return start * number(size - 1) + x * (end - start) * number(size - 1) / number(count - 1)
        case "pytorch_half_pixel" if count == 1:
            return x
        case "half_pixel_symmetric":
            middle = number(size) / 2
            return middle * (1 - number(count) / (scale * number(size))) + (x + half) / scale - half
    return (x + half) / scale - half


def _linear(x: Array) -> _Taps:
    low = np.floor(x)
    return np.stack([low, low + 1], axis=1), np.stack([1 - (x - low), x - low], axis=1)


def _cubic(x: Array, a: float, within: int | None) -> _Taps:
    """Return four neighbours each, with the weights of Keys' cubic convolution, over those `within` a size if given."""
    low = np.floor(x)
    places = low[:, None] + np.arange(-1, 3)
    far = np.abs(x[:, None] - places)
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    weights = np.where(far <= 1, near, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a)
    if within is not None:
        weights *= (places >= 0) & (places < within)
        weights /= weights.sum(axis=1, keepdims=True)
    return places, weights


def _run(dY: Array, dX: Array, taps: dict[int, _Taps]) -> None:
    """Go back along the axes, those first that shrink most, so that no intermediate result is larger than both ends."""
    if not dY.size:
        dX[...] = 0
        return
    block = widen_tensor(dY)
    for number, axis in enumerate(sorted(taps, key=lambda axis: dX.shape[axis] / dY.shape[axis])):
        shape = (*block.shape[:axis], dX.shape[axis], *block.shape[axis + 1 :])
        out = dX if number == len(taps) - 1 else spare_memory(shape, dX.dtype)
        _apply(block, out, axis, taps[axis])
        block = out
    if not taps:
        dX[...] = block


def _apply(block: Array, out: Array, axis: int, taps: _Taps) -> None:
    """Add each element of `block` along the axis, times its weights, to its places in `out`, which begins as zeros."""
    outer, inner = math.prod(block.shape[:axis]), math.prod(block.shape[axis + 1 :])
    count, size, width = block.shape[axis], out.shape[axis], taps[0].shape[1]
    source, target = block.reshape(outer, count, inner), out.reshape(outer, size, inner)
    pointers, places = np.arange(count + 1) * width, taps[0].reshape(-1)
    weights = taps[1].astype(block.dtype).reshape(-1)

    def add(values: Array, sums: Array) -> None:
        sums[...] = 0
        neighbours = values.size // count
        csc_matvecs(size, count, neighbours, pointers, places, weights, values.reshape(-1), sums.reshape(-1))

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
