"""Which elements of X the elements of Y = Resize(X) depend on, along each axis, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from service.dtypes import FLOAT32, FLOAT64, INT64, Array
from service.errors import InvalidParameter, InvalidTensor, MissingTensor
from service.kernels._blocks import claim
from service.kernels._checks import check_shape

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

TAP_BYTES = 80
"""Bytes of an element's places and weights along an axis, with those of intermediate results, for each tap."""

Shape = tuple[int, ...]

Taps = tuple[Array, Array, Array]
"""For each element of Y along an axis, the places in X that it depends on, their weights, and if it lies outside."""

_ROUND: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True)
class Kind:
    """How elements of Y depend on those of X."""

    mode: str = "nearest"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    antialias: int = 0

    def taps(
        self, old: Shape, new: Shape, axes: Sequence[int], scales: Sequence[float], roi: Array | None
    ) -> dict[int, Taps]:
        """Return the taps of each axis that changes. `old` and `new` are the shapes of X and Y."""
        if self.exclude_outside and self.mode != "cubic" and not self.antialias:
            problem = f"exclude_outside is 1, but must be 0 in mode {self.mode} without antialias"
            raise InvalidParameter(problem, parameter="exclude_outside")
        crop = _crop(roi, len(axes)) if self.coordinate_transformation_mode == "tf_crop_and_resize" else None
        dtype = FLOAT32 if self.mode == "nearest" else FLOAT64
        taps: dict[int, Taps] = {}
        for place, axis in enumerate(axes):
            size, count = old[axis], new[axis]
            with np.errstate(over="ignore"):
                scale = dtype.type(scales[place])
            if not math.prod(new) or new == old or (scale == 1 and size == count):
                continue
            stretch = max(1.0, 1 / float(scale)) if self.antialias and self.mode != "nearest" else 1.0
            claim(int(TAP_BYTES * stretch * count))
            section = None if crop is None else (crop[place], crop[place + len(axes)])
            with np.errstate(all="ignore"):
                x = _places(
                    self.coordinate_transformation_mode, size, count, scale, section, np.arange(count, dtype=dtype)
                )
                outside = (x < 0) | (x > size - 1) if section else np.zeros(count, np.bool_)
                places, weights = self._weigh(np.clip(np.nan_to_num(x), -2, size + 1), size, stretch)
            weights[outside] = 0
            taps[axis] = np.clip(places, 0, size - 1).astype(INT64), weights, outside
        return taps

    def _weigh(self, x: Array, size: int, stretch: float) -> tuple[Array, Array]:
        """Return the places in X around each of `x`, and their weights."""
        if self.mode == "nearest":
            return _ROUND[self.nearest_mode](x)[:, None], np.ones((len(x), 1))
        if self.mode == "linear" and stretch == 1:
            x = np.clip(x, 0, size - 1)
        reach = math.ceil((1 if self.mode == "linear" else 2) * stretch)
        places = np.floor(x)[:, None] + np.arange(1 - reach, reach + 1)
        far = np.abs(x[:, None] - places) / stretch
        weights = np.maximum(0, 1 - far) if self.mode == "linear" else _keys(far, self.cubic_coeff_a)
        if self.exclude_outside:
            weights *= (places >= 0) & (places < size)
        if self.exclude_outside or stretch > 1:
            weights /= weights.sum(axis=1, keepdims=True)
        return places, weights


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


def _keys(far: Array, a: float) -> Array:
    """Return the weights of Keys' cubic convolution."""
    near = ((a + 2) * far - (a + 3)) * far**2 + 1
    return np.where(far <= 1, near, np.where(far < 2, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a, 0))
