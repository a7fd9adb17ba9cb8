"""Statistics of a tensor: counts, extremes, mean, 2-norm, a histogram of magnitudes, and a picture of a few cells.

All arithmetic is in float64, which holds every element exactly. It goes through a tensor once, in blocks: no temporary
has the tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from service.dtypes import FLOAT64, INT64, Array

BLOCK_ELEMENTS = 1 << 15
"""Elements of a block. As float64 and as exponents it takes 512 KB, which fit into the cache of a core.

Each call of NumPy then takes at least 3 us without the interpreter's lock.
"""

MAX_BINS = 64
"""Bins of a histogram: more than a chart can show side by side on a phone."""

FIELDS = 1 << 11
"""Values of the exponent's field in a float64: 0 for zeros and subnormals, and the last for infinities and NaN."""

MANTISSA_BITS = 52
"""Bits of a float64 below the exponent's field."""

EXPONENT_BIAS = 1023
"""The exponent's field of 1.0."""

LEAST_EXPONENT = -1000
"""The least power of 2 that divides elements: with it, the squares of subnormals do not vanish."""

HEADROOM_BITS = 64
"""Bits by which a heat map's elements are shifted down: 2**64 of the largest float64 then have a finite sum."""


@dataclass(frozen=True)
class Summary:
    """Statistics of a tensor. The numbers are those of its finite elements: None if it has none.

    `norm` is None, too, if it is beyond the largest float64. `bounds` are ascending powers of 2; `counts[i]` elements
    have a magnitude from `bounds[i - 1]` up to, but without, `bounds[i]`. Zeros are not in the histogram.
    """

    size: int
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    norm: float | None = None
    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)


def of_zeros(size: int) -> Summary:
    """Return the summary of a tensor of zeros."""
    number = 0.0 if size else None
    return Summary(size, zeros=size, least=number, most=number, mean=number, norm=number)


def summarize(value: Array) -> Summary:
    """Return the summary of a tensor of floats of any shape."""
    flat, fields, moments = value.reshape(-1), np.zeros(FIELDS, INT64), _Moments()
    memory, bits = np.empty(min(flat.size, BLOCK_ELEMENTS), FLOAT64), np.empty(min(flat.size, BLOCK_ELEMENTS), INT64)
    nan = zeros = 0
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, BLOCK_ELEMENTS):
            part = flat[start : start + BLOCK_ELEMENTS]
            wide = memory[: part.size]
            wide[...] = part
            found = _fields(wide, bits[: part.size])
            fields += found
            if found[0]:
                zeros += wide.size - int(np.count_nonzero(wide))
            if found[-1]:
                nan += int(np.count_nonzero(np.isnan(wide)))
                wide = wide[np.isfinite(wide)]
            if wide.size:
                moments.add(wide)
    infinite, finite = int(fields[-1]) - nan, flat.size - int(fields[-1])
    fields[0] -= zeros
    bounds, counts = _histogram(fields)
    if not finite:
        return Summary(flat.size, nan, infinite)
    mean, norm = moments.mean(finite), moments.norm()
    return Summary(flat.size, nan, infinite, zeros, moments.least, moments.most, mean, norm, bounds, counts)


def _fields(wide: Array, bits: Array) -> Array:
    """Count the elements by the field of their exponent. `bits` is overwritten."""
    np.right_shift(wide.view(INT64), MANTISSA_BITS, out=bits)
    np.bitwise_and(bits, FIELDS - 1, out=bits)
    return np.bincount(bits, minlength=FIELDS)


class _Moments:
    """Extremes and sums of finite elements.

    The sums are of elements divided by 2**`exponent`, so that no sum overflows and no square of a largest element
    vanishes.
    """

    def __init__(self) -> None:
        self.least, self.most = math.inf, -math.inf
        self._total = self._squares = 0.0
        self._exponent = LEAST_EXPONENT

    def add(self, block: Array) -> None:
        """Add a block, which this overwrites."""
        least, most = float(block.min()), float(block.max())
        self.least, self.most = min(self.least, least), max(self.most, most)
        exponent = math.frexp(max(abs(least), abs(most)))[1]
        if exponent > self._exponent:
            self._total = math.ldexp(self._total, self._exponent - exponent)
            self._squares = math.ldexp(self._squares, 2 * (self._exponent - exponent))
            self._exponent = exponent
        block *= 2.0**-self._exponent
        self._total += float(block.sum())
        self._squares += float(np.einsum("i,i->", block, block))  # not np.dot: BLAS may start threads

    def mean(self, count: int) -> float:
        """Return the mean of this many elements. Rounding does not move it beyond their extremes."""
        return min(max(_times_power(self._total / count, self._exponent), self.least), self.most)

    def norm(self) -> float | None:
        """Return the 2-norm, None if it is beyond the largest float64."""
        norm = _times_power(math.sqrt(self._squares), self._exponent)
        return norm if math.isfinite(norm) else None


def _times_power(number: float, exponent: int) -> float:
    """Return the number times 2**`exponent`, infinite if that is beyond float64."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.copysign(math.inf, number)


def _histogram(fields: Array) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return bounds and counts of at most `MAX_BINS` bins, from elements counted by the field of their exponent."""
    used = np.flatnonzero(fields[:-1])
    if not used.size:
        return (), (0,)
    step = 1
    while used[-1] // step - used[0] // step >= MAX_BINS:
        step *= 2
    first, last = int(used[0]) // step, int(used[-1]) // step
    lower = [number * step for number in range(first, last + 2)]
    bounds = tuple(math.ldexp(1.0, field - EXPONENT_BIAS) for field in lower if 0 < field < FIELDS - 1)
    grouped = fields[: (last + 1) * step].copy()
    grouped[FIELDS - 1 :] = 0  # not finite
    counts = grouped.reshape(-1, step).sum(axis=1)[first:].tolist()
    below, above = [0] * (first > 0), [0] * (lower[-1] < FIELDS - 1)
    return bounds, tuple(below + counts + above)


# ----- the heat map -----


def heat_map(value: Array, cells: int) -> Array:
    """Return the means of the finite elements of each cell, as float64 of at most `cells` rows and columns.

    The cells divide the last axis into columns, and all other axes together into rows. A cell without a finite element
    is NaN. A float64 below 2**-958 may lose bits.
    """
    width = value.shape[-1] if value.ndim else 1
    height = math.prod(value.shape[:-1])
    grid = value.reshape(height, width)
    tops, lefts = _edges(height, cells), _edges(width, cells)
    sums, counts = np.zeros((tops.size - 1, lefts.size - 1)), np.zeros((tops.size - 1, lefts.size - 1), INT64)
    memory = np.empty(min(value.size, BLOCK_ELEMENTS), FLOAT64)
    with np.errstate(all="ignore"):
        for row in range(tops.size - 1):
            for rows, columns in _tiles(int(tops[row]), int(tops[row + 1]), width):
                tile = grid[rows, columns]
                wide = memory[: tile.size].reshape(tile.shape)
                _add_tile(tile, wide, columns.start, lefts, sums[row], counts[row])
        means = np.ldexp(sums / counts, HEADROOM_BITS)
    largest = np.finfo(FLOAT64).max
    return np.clip(means, -largest, largest)


def _edges(length: int, cells: int) -> Array:
    """Return where cells begin along an axis, and where the last one ends."""
    count = min(length, cells)
    return np.arange(count + 1) * length // max(count, 1)


def _tiles(top: int, bottom: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the columns of tiles that cover these rows, each a block at most."""
    columns = min(width, BLOCK_ELEMENTS)
    rows = max(1, BLOCK_ELEMENTS // max(columns, 1))
    for first in range(top, bottom, rows):
        for left in range(0, width, BLOCK_ELEMENTS):
            yield slice(first, min(first + rows, bottom)), slice(left, min(left + columns, width))


def _add_tile(tile: Array, wide: Array, left: int, lefts: Array, sums: Array, counts: Array) -> None:
    """Add a tile, whose first column is `left`, to the sums and the counts of a row of cells. `wide` is overwritten."""
    np.multiply(tile, FLOAT64.type(2.0**-HEADROOM_BITS), out=wide, dtype=FLOAT64, casting="unsafe")
    finite = np.isfinite(wide)
    wide[~finite] = 0
    first = int(np.searchsorted(lefts, left, "right")) - 1
    end = int(np.searchsorted(lefts, left + tile.shape[1], "left"))
    starts = np.maximum(lefts[first:end] - left, 0)
    sums[first:end] += np.add.reduceat(wide.sum(axis=0), starts)
    counts[first:end] += np.add.reduceat(finite.sum(axis=0, dtype=INT64), starts)
