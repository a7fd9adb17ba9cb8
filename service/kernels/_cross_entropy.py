"""The arithmetic that all cross-entropy operators share, in blocks of samples that fit the cache.

Scores are seen as [outer, classes, inner], and samples as [outer, inner]. Each sample has a weight, and labels that say
how much of it belongs to each class. Losses, weights and their sums are float64, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.dtypes import Array, DType, cast, compute_dtype
from service.kernels._blocks import claim, current_workspace, cuts, new_output, scratch, share_out
from service.kernels._checks import has_shape, one_element
from service.kernels._narrow import load, room_for, store

BLOCK_LENGTH = 80_000
"""Scores in a block. With up to `TEMPORARIES` more arrays of its size, it fits into 2 MB."""

TEMPORARIES = 4
"""The most arrays of a block's size that a thread takes at once: scores, result, exponentials and shares, if narrow."""

LEAST_COLUMNS = 16
"""The fewest columns in a block, unless the scores have fewer: as many as a cache line has in float32."""

SUM_LENGTH = 128
"""Numbers that are added one after the other. NumPy's pairwise sums, along the last axis, have as many."""

Place = tuple[slice, slice, slice]


class Labels(Protocol):
    """How much of each sample belongs to each class. A block is the scores at a place, [outer, classes, inner]."""

    def pick(self, block: Array, place: Place) -> Array:
        """Return the sum over the classes of labels times block, as [outer, inner]."""

    def subtract(self, block: Array, place: Place) -> None:
        """Replace the probabilities in the block with the gradient of the loss of each sample, before its weight."""


@dataclass(frozen=True)
class ClassLabels:
    """Samples that belong to one class each: its number, as [outer, inner]."""

    numbers: Array

    def pick(self, block: Array, place: Place) -> Array:
        return block[self._at(place)]

    def subtract(self, block: Array, place: Place) -> None:
        block[self._at(place)] -= 1

    def _at(self, place: Place) -> tuple[Array, Array, Array]:
        numbers = self.numbers[place[0], place[2]]
        rows, columns = numbers.shape
        return np.arange(rows)[:, None], numbers, np.arange(columns)


@dataclass(frozen=True)
class SharedLabels:
    """Samples that belong to every class in part: how much, as [outer, classes, inner]."""

    shares: Array

    def pick(self, block: Array, place: Place) -> Array:
        terms = scratch(3, block.size, block.dtype).reshape(block.shape)
        return _class_sum(np.multiply(load(self.shares[place], block.dtype, 4), block, out=terms))[:, 0]

    def subtract(self, block: Array, place: Place) -> None:
        shares = load(self.shares[place], block.dtype, 4)
        np.multiply(block, _class_sum(shares), out=block)
        np.subtract(block, shares, out=block)


@dataclass(frozen=True)
class Samples:
    """The samples of scores of the shape [outer, classes, inner]. Only those that are `kept`, or all, count."""

    shape: tuple[int, int, int]
    label_shape: tuple[int, ...]
    labels: Labels
    weights: Array
    kept: Array | None = None

    def reduce(self, losses: Array, reduction: str, dtype: DType) -> Array:
        """Return weighted losses of [outer, inner] in the shape of the labels, their sum, or their mean."""
        with np.errstate(all="ignore"):
            if reduction != "none":
                return cast(np.asarray(losses.sum() / self._divisor(reduction)), dtype)
            output: Array = new_output(None, self.label_shape, dtype)
            output[...] = cast(losses, dtype).reshape(self.label_shape)
            return output

    def factors(self, dY: Array, reduction: str) -> Array:
        """Return the number that the gradient of each sample is multiplied with, as [outer, inner]."""
        with np.errstate(all="ignore"):
            if reduction != "none":
                return self.weights * (one_element("dY", dY) / self._divisor(reduction))
            has_shape("dY", dY, self.label_shape, "that of the labels, with reduction none")
            return dY.reshape(self.weights.shape) * self.weights

    def _divisor(self, reduction: str) -> float:
        """Return the sum of the weights for a mean, or 1 if that is 0, as ONNX Runtime does."""
        return float(self.weights.sum()) or 1.0 if reduction == "mean" else 1.0

    def weigh(self, picked: Array, place: Place, losses: Array) -> None:
        """Write the weighted losses at a place, from the logarithms of the labels' probabilities."""
        at = place[0], place[2]
        np.multiply(-self.weights[at], picked, out=losses[at], where=True if self.kept is None else self.kept[at])


def losses_of(log_prob: Array, samples: Samples) -> Array:
    """Return the weighted losses, as [outer, inner]."""
    losses = np.zeros_like(samples.weights)
    everywhere = (slice(None),) * 3
    if math.prod(samples.shape):
        with np.errstate(all="ignore"):
            samples.weigh(samples.labels.pick(log_prob.reshape(samples.shape), everywhere), everywhere, losses)
    return losses


def log_softmax_losses(scores: Array, samples: Samples, log_prob: Array | None) -> Array:
    """Return the weighted losses, as [outer, inner]. Write log_softmax of the scores to `log_prob`, if given."""
    losses = np.zeros_like(samples.weights)
    given, dtype = scores.reshape(samples.shape), compute_dtype(scores.dtype)
    target = None if log_prob is None else log_prob.reshape(samples.shape)

    def compute(place: Place) -> None:
        X = load(given[place], dtype, 0)
        result = _scratch_like(X, 1) if target is None else room_for(target[place], dtype, 1)
        _take_log_softmax(X, result)
        samples.weigh(samples.labels.pick(result, place), place, losses)
        if target is not None:
            store(result, target[place], (0, 2))

    _by_blocks(samples.shape, dtype, compute)
    return losses


def softmax(scores: Array, target: Array, *, logarithms: bool) -> None:
    """Write the softmax of scores [outer, classes, inner], or its logarithms, to the target, which is like them."""
    dtype = compute_dtype(scores.dtype)

    def compute(place: Place) -> None:
        X, result = load(scores[place], dtype, 0), room_for(target[place], dtype, 1)
        if logarithms:
            _take_log_softmax(X, result)
        else:
            np.subtract(X, X.max(axis=1, keepdims=True), out=result)
            np.exp(result, out=result)
            np.divide(result, _class_sum(result), out=result)
        store(result, target[place], (0, 2))

    _by_blocks(scores.shape, dtype, compute)


def _take_log_softmax(X: Array, result: Array) -> None:
    np.subtract(X, X.max(axis=1, keepdims=True), out=result)
    total = _class_sum(np.exp(result, out=_scratch_like(X, 2)))
    np.subtract(result, np.log(total), out=result)


def gradient(log_prob: Array, samples: Samples, factors: Array, d_logits: Array, bias: Array | None = None) -> None:
    """Write to `d_logits` the gradient of the scores from log_softmax of them, plus `bias`."""
    given, target = (one.reshape(samples.shape) for one in (log_prob, d_logits))
    dtype = compute_dtype(log_prob.dtype)
    added = None if bias is None else bias.reshape(samples.shape)

    def compute(place: Place) -> None:
        result = room_for(target[place], dtype, 1)
        np.exp(load(given[place], dtype, 0), out=result)
        samples.labels.subtract(result, place)
        np.multiply(result, factors[place[0], None, place[2]].astype(dtype), out=result)
        if samples.kept is not None:
            np.copyto(result, 0, where=~samples.kept[place[0], None, place[2]])
        if added is not None:
            np.add(result, added[place], out=result, casting="same_kind")
        store(result, target[place], (0, 2))

    _by_blocks(samples.shape, dtype, compute)


def _by_blocks(shape: tuple[int, ...], dtype: DType, compute: Callable[[Place], None]) -> None:
    """Call `compute` with the place of each block. A block has all classes: many of them make it long."""
    outer, classes, inner = shape
    if not math.prod(shape):
        return
    width = min(inner, max(BLOCK_LENGTH // classes, LEAST_COLUMNS))
    height = max(1, BLOCK_LENGTH // (classes * width)) if width == inner else 1
    places = [(rows, slice(None), columns) for rows in cuts(outer, height) for columns in cuts(inner, width)]
    if (length := height * width * classes) > BLOCK_LENGTH:
        claim(min(current_workspace().threads, len(places)) * TEMPORARIES * length * dtype.itemsize)
    share_out(lambda number: compute(places[number]), len(places))


def _class_sum(block: Array) -> Array:
    """Return the sum over the classes, as [outer, 1, inner]. NumPy sums in pairs along the last axis only."""
    if block.shape[2] > 1 and block.shape[1] > SUM_LENGTH:
        block = np.add.reduceat(block, range(0, block.shape[1], SUM_LENGTH), axis=1)
    return block.sum(axis=1, keepdims=True)


def _scratch_like(block: Array, slot: int) -> Array:
    return scratch(slot, block.size, block.dtype).reshape(block.shape)
