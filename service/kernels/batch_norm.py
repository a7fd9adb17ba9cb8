"""BatchNormalization in training, and its gradient, with any number of spatial axes.

A channel's statistics are over all images and pixels. float16 and bfloat16 are computed in float32 and rounded once;
sums over images are in float64. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, Array, DType, cast, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import check_wanted, claim, cuts, new_output, row_major, scratch, share_out
from service.kernels._checks import check_shape, same_shape
from service.kernels._narrow import load, room_for, store
from service.kernels._op import op
from service.kernels._types import Bit, Rank4, T, U, V

FAMILY = "Normalization"

TILE_NUMBERS = 1 << 18
"""Numbers of each tensor in a tile, which takes ten of NumPy's calls."""

MAX_PARTS = 8
"""The most parts, whose sums are added at the end: enough to occupy the threads."""

SUM_LENGTH = 1024
"""The most pixels that are added one after the other, in the dtype to compute with."""

CHANNEL_ARRAYS = 16
"""The most arrays with a float64 for each channel at a time, beside the sums."""

_X = [[[[1.0, 3.0]], [[0.0, 4.0]]]]


@op(
    "BatchNormInternal",
    outputs="Y running_mean running_var saved_mean saved_inv_std",
    example={
        "X": _X,
        "scale": [1.0, 0.5],
        "B": [0.0, 1.0],
        "input_mean": [0.0, 0.0],
        "input_var": [1.0, 1.0],
        "epsilon": 0.0,
        "momentum": 0.5,
    },
)
def batch_norm_internal(
    X: Rank4[T],
    scale: U,
    B: U,
    input_mean: V,
    input_var: V,
    /,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: Bit = 1,
) -> tuple[Rank4[T], V, V, V, V]:
    """Y = (X - mean) * inv_std * scale + B; running_* = momentum * input_* + (1 - momentum) * statistic.

    X is [N, C, ...], all others are [C], Y has the shape of X. The statistics, of a channel over all its numbers, are
    saved_mean and the population variance; saved_inv_std = 1 / sqrt(variance + epsilon). running_var has the population
    variance, too, as in ONNX; PyTorch has the unbiased one there, and its momentum is 1 - momentum. Without
    training_mode the statistics are input_mean and input_var, and running_* are the same. Raises `ShapeMismatch`, also
    for training without images or pixels.
    """
    batch = _Batch.of(X, scale=scale, B=B, input_mean=input_mean, input_var=input_var)
    if training_mode and not batch.count and batch.C:
        raise ShapeMismatch(
            f"X has shape {list(X.shape)}, but needs numbers for the statistics of a channel", tensor="X"
        )
    Y: Any = new_output(None, X.shape, X.dtype)
    given, result = batch.flat(X), batch.flat(Y)
    mean, variance = input_mean.astype(FLOAT64), input_var.astype(FLOAT64)

    with np.errstate(all="ignore"):
        if training_mode:
            mean = batch.total(lambda tile: [_sums(load(given[tile], batch.dtype, 0))])[0] / batch.count
            shift = batch.column(mean)
            squares, rest = batch.total(lambda tile: _moments(batch.centered(given, shift, tile))) / batch.count
            variance = squares - rest**2
        inv = 1 / np.sqrt(variance + epsilon)
        shift, factor = batch.column(mean), batch.column(scale * inv)
        offset = batch.column(B - (mean - shift[:, 0]) * scale * inv)

        def normalize(tile: _Tile) -> None:
            target = room_for(result[tile], batch.dtype, 2)
            np.multiply(batch.centered(given, shift, tile), factor[tile[1]], out=target)
            np.add(target, offset[tile[1]], out=target)
            store(target, result[tile], (0, 1))

        batch.each(normalize)
        running = [mean, variance]
        if training_mode:
            pairs = ((input_mean, mean), (input_var, variance))
            running = [momentum * old.astype(FLOAT64) + (1 - momentum) * new for old, new in pairs]
        statistics = (*running, mean, inv)
        return (Y, *(_output(one, input_mean.dtype) for one in statistics))


@op(
    "BatchNormalizationGrad",
    outputs="X_grad scale_grad bias_grad",
    example={
        "dY": [[[[1.0, 0.5]], [[2.0, -1.0]]]],
        "X": _X,
        "scale": [1.0, 0.5],
        "mean": [2.0, 2.0],
        "variance": [1.0, 0.5],
        "epsilon": 1e-5,
    },
)
def batch_normalization_grad(
    dY: Rank4[T],
    X: Rank4[T],
    scale: U,
    mean: V,
    variance: V,
    /,
    *,
    epsilon: float = 1e-5,
    wanted: Collection[str] = ("X_grad", "scale_grad", "bias_grad"),
) -> tuple[Rank4[T], U, U]:
    """X_grad = scale * inv / n * (n * dY - bias_grad - x * scale_grad), where x = (X - mean) * inv.

    dY and X are [N, C, ...], all others are [C]; n is the number of a channel's numbers. `variance` is, despite its
    name, inv = 1 / sqrt(variance + epsilon), which BatchNormInternal returns as saved_inv_std. So `epsilon` changes
    nothing. bias_grad is the sum of dY, and scale_grad that of dY * x, over all but the channels. Only the requested
    outputs are computed. Without images the sums are 0. Raises `ShapeMismatch` and `DtypeMismatch`.
    """
    batch = _Batch.of(X, scale=scale, mean=mean, variance=variance)
    same_shape(X=X, dY=dY)
    X_grad: Any = new_output(None, X.shape, X.dtype) if "X_grad" in wanted else None
    n, inv, shift = max(1, batch.count), variance.astype(FLOAT64), batch.column(mean)
    given, incoming = batch.flat(X), batch.flat(dY)

    def sums(tile: _Tile) -> list[Array]:
        block = load(incoming[tile], batch.dtype, 0)
        return [_sums(block), _sums(block, batch.centered(given, shift, tile))]

    with np.errstate(all="ignore"):
        bias_grad, products = batch.total(sums)
        rest = mean.astype(FLOAT64) - shift[:, 0]
        scale_grad = (products - rest * bias_grad) * inv
        if X_grad is not None:
            result, slopes = batch.flat(X_grad), scale * inv**2 * scale_grad / n
            factor, slope = batch.column(scale * inv), batch.column(slopes)
            offset = batch.column(scale * inv * bias_grad / n - rest * slopes)

            def differentiate(tile: _Tile) -> None:
                block, target = batch.centered(given, shift, tile), room_for(result[tile], batch.dtype, 2)
                np.multiply(block, slope[tile[1]], out=block)
                np.add(block, offset[tile[1]], out=block)
                np.multiply(load(incoming[tile], batch.dtype, 0), factor[tile[1]], out=target)
                np.subtract(target, block, out=target)
                store(target, result[tile], (0, 1))

            batch.each(differentiate)
        named = {"scale_grad": scale_grad, "bias_grad": bias_grad}
        totals = (_output(one, scale.dtype) if name in wanted else None for name, one in named.items())
        return (X_grad, *totals)


_Tile = tuple[slice, slice, slice]


@dataclass(frozen=True)
class _Batch:
    """The sizes of tensors [N, C, S], whose spatial axes are one, and the dtype to compute with."""

    N: int
    C: int
    S: int
    dtype: DType

    @classmethod
    def of(cls, X: Array, **channels: Array) -> _Batch:
        """Return the sizes of X. Raises `ShapeMismatch` unless each of `channels` has the shape [C]."""
        if X.ndim < 2:
            raise ShapeMismatch(f"X has shape {list(X.shape)}, but must have 2 dimensions or more", tensor="X")
        for name, tensor in channels.items():
            check_shape(name, tensor, X.shape[1])
        N, C, *pixels = X.shape
        return cls(N, C, math.prod(pixels), compute_dtype(X.dtype))

    @property
    def count(self) -> int:
        """The numbers of a channel."""
        return self.N * self.S

    def tiles(self) -> list[_Tile]:
        """Return the tiles: images, channels and pixels that are neighbours in memory."""
        if not self.N * self.C * self.S:
            return []  # of many empty images, too
        pixels = min(self.S, TILE_NUMBERS)
        channels = max(1, min(self.C, TILE_NUMBERS // pixels))
        images = max(1, TILE_NUMBERS // (pixels * channels))
        return list(itertools.product(cuts(self.N, images), cuts(self.C, channels), cuts(self.S, pixels)))

    def total(self, function: Callable[[_Tile], Sequence[Array]]) -> Array:
        """Return the sums over all tiles of what `function` returns: sums for each channel of the tile."""
        tiles = self.tiles()
        count = min(MAX_PARTS, len(tiles))
        claim(8 * (2 * count + CHANNEL_ARRAYS) * self.C)
        sums = np.zeros((2, max(1, count), self.C))

        def add(number: int) -> None:
            for tile in tiles[len(tiles) * number // count : len(tiles) * (number + 1) // count]:
                check_wanted()
                for row, values in enumerate(function(tile)):
                    sums[row, number, tile[1]] += values

        share_out(add, count)
        return sums.sum(axis=1)

    def each(self, function: Callable[[_Tile], None]) -> None:
        """Call `function` with each tile."""
        tiles = self.tiles()
        share_out(lambda number: function(tiles[number]), len(tiles))

    def centered(self, tensor: Array, mean: Array, tile: _Tile) -> Array:
        """Return a tile of a tensor minus the mean of each channel, in scratch."""
        block = load(tensor[tile], self.dtype, 1)
        return np.subtract(block, mean[tile[1]], out=scratch(1, block.size, self.dtype).reshape(block.shape))

    def column(self, numbers: Array) -> Array:
        """Return a number for each channel as a column, in the dtype to compute with."""
        with np.errstate(over="ignore"):
            return numbers.astype(self.dtype)[:, None]

    def flat(self, tensor: Array) -> Array:
        """Return a tensor as [N, C, S]."""
        return row_major(tensor).reshape(self.N, self.C, self.S)


def _sums(block: Array, factor: Array | None = None) -> Array:
    """Return the sums of the block, or of its products with `factor`, over images and pixels, by channel."""
    total, pixels = np.zeros(block.shape[1]), block.shape[2]
    cut = pixels - pixels % SUM_LENGTH
    for part, length in ((slice(cut), SUM_LENGTH), (slice(cut, None), pixels - cut)):
        if part.stop != 0 and length:
            rows, *factors = (
                one[..., part].reshape(*block.shape[:2], -1, length) for one in (block, factor) if one is not None
            )
            sums = np.vecdot(rows, *factors) if factors else np.einsum("nckp->nck", rows)
            total += sums.sum(axis=(0, 2), dtype=FLOAT64)
    return total


def _moments(block: Array) -> list[Array]:
    return [_sums(block, block), _sums(block)]


def _output(numbers: Array, dtype: DType) -> Array:
    """Return an output with the numbers, rounded."""
    output: Array = new_output(None, numbers.shape, dtype)
    with np.errstate(all="ignore"):
        output[...] = cast(numbers, dtype)
    return output
