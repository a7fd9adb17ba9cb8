"""The windows of pools along one axis after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from service.dtypes import Array, DType
from service.kernels._blocks import check_wanted
from service.kernels._windows import Windows


@dataclass(frozen=True)
class Axis:
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

    def spread(self, block: Array, out: Array, axis: int) -> None:
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

    def gather(self, block: Array, out: Array, axis: int, *, fold: np.ufunc, least: float) -> None:
        """Let each element of `out` be the fold of `least` and all elements of its window along the axis."""
        before = (slice(None),) * axis
        out[...] = least
        for place, window in self._moves():
            check_wanted()
            part, target = block[(*before, place)], out[(*before, window)]
            if self.kernel > self.count:
                part = fold.reduce(part, axis=axis, keepdims=True)
            fold(target, part, out=target)

    def find(self, block: Array, out: Array, axis: int, indices: Array, found: Array) -> None:
        """Write the greatest elements to `out`, and to `found` the `indices` of the first of them, or -1."""
        before = (slice(None),) * axis
        out[...], found[...] = least_of(out.dtype), -1
        for place, window in reversed([*self._moves()]):
            check_wanted()
            part, numbers = block[(*before, place)], indices[(*before, place)]
            target, old = out[(*before, window)], found[(*before, window)]
            if self.kernel > self.count:
                first = part.argmax(axis=axis, keepdims=True)
                part, numbers = (np.take_along_axis(one, first, axis) for one in (part, numbers))
            # Arithmetic has no branches, which random numbers make slow.
            np.add(old, (numbers - old) * np.asarray(part >= target).view(np.uint8), out=old)
            np.maximum(target, part, out=target)


def least_of(dtype: DType) -> float:
    """Return the least number of a dtype."""
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def axes_of(windows: Windows, counts: Sequence[int] | None, *, ceil: bool) -> list[Axis]:
    """Return the axes, with all windows, or with `ceil` all that begin in X or in the padding before it.

    `counts` are those of dY, if there is one. With `ceil`, dY may have windows that begin behind X, too. Raises
    `ShapeMismatch` unless dY has all windows.
    """
    expected = list(windows.counts)
    axes = zip(windows.rooms, windows.strides, windows.sizes, windows.begins, strict=True)
    for axis, (room, stride, size, begin) in enumerate(axes if ceil else ()):
        most = expected[axis] = -(-room // stride) + 1
        if (most - 1) * stride >= size + begin and (counts is None or counts[axis] < most):
            expected[axis] -= 1
    parts = (windows.sizes, expected, windows.kernel, windows.strides, windows.dilations, windows.begins)
    return [Axis(*numbers) for numbers in zip(*parts, strict=True)]


def elements_of(axes: Sequence[Axis]) -> Array:
    """Return how many elements of X each window has. Those without any are not divided by 0 here, nor spread."""
    product: Array = np.ones((), np.int64)
    for axis in axes:
        product = np.multiply.outer(product, axis.elements())
    return np.maximum(product, 1)


def taps_of(windows: Windows, axes: Sequence[Axis]) -> Array:
    """Return how many taps of each window lie in X or its padding: a window may stick out at the end."""
    ends = zip(axes, windows.begins, windows.ends, strict=True)
    return elements_of([replace(axis, size=begin + axis.size + end, begin=0) for axis, begin, end in ends])


def divisors_of(windows: Windows, axes: Sequence[Axis], count_include_pad: int, *, whole: bool) -> Any:
    """Return how many elements each window's sum is divided by: those in X, or in X and its padding, or `whole`."""
    if not count_include_pad:
        return elements_of(axes)
    return math.prod(windows.kernel) if whole else taps_of(windows, axes)
