"""The gradients of operators that reduce axes, and of sums and softmax along one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, INT64, Array
from service.graphs.gradients.arrays import rounded_once
from service.graphs.gradients.tape import gradient_of, gradients
from service.graphs.nodes.indexing import cumulated
from service.kernels import claim
from service.kernels.softmax import log_softmax_grad_13, softmax_grad_13

Axes = tuple[int, ...]


def _share_of_equals(dY: Array, X: Array, Y: Array, axes: Axes) -> Array:
    equal = X == Y
    return np.where(equal, dY / np.maximum(equal.sum(axis=axes, keepdims=True), 1), 0)


def _product(dY: Array, X: Array, Y: Array, axes: Axes) -> Array:
    """Return dY times the product of all other numbers."""
    zeros = (X == 0).sum(axis=axes, keepdims=True)
    rest = np.prod(X, axis=axes, keepdims=True, where=X != 0)
    return dY * np.where(zeros == 0, rest / X, np.where((zeros == 1) & (X == 0), rest, 0))


REDUCTIONS: dict[str, Callable[[Array, Array, Array, Axes], Any]] = {
    "ReduceL1": lambda dY, X, Y, axes: dY * np.sign(X),
    "ReduceL2": lambda dY, X, Y, axes: np.where(Y == 0, 0, dY * X / Y),
    "ReduceLogSum": lambda dY, X, Y, axes: np.broadcast_to(dY * np.exp(-Y), X.shape),
    "ReduceLogSumExp": lambda dY, X, Y, axes: dY * np.exp(X - Y),
    "ReduceMax": _share_of_equals,
    "ReduceMin": _share_of_equals,
    "ReduceProd": _product,
    "ReduceSumSquare": lambda dY, X, Y, axes: 2 * dY * X,
}
"""The gradient of each reduction: a function of dY, X, Y and the axes. dY and Y have 1 in place of what is reduced."""


def _reduce(function: Callable[..., Array], op: str) -> None:
    def gradient(
        dY: Array, X: Array, Y: Array, B: Array | None, *, axes: Axes = (), noop_with_empty_axes: int = 0
    ) -> Array:
        reduced = _reduced(X.ndim, axes, B, noop_with_empty_axes)
        kept = _kept(X.shape, reduced)
        return rounded_once(function)(dY.reshape(kept), X, Y.reshape(kept), axes=reduced)

    gradients(op, gradient)


for _op, _function in REDUCTIONS.items():
    _reduce(_function, _op)


@gradient_of("ReduceSum")
def _spread(
    dY: Array, shape: tuple[int, ...], B: Array | None, *, axes: Axes = (), noop_with_empty_axes: int = 0
) -> Array:
    """Return the gradient for each element, as a view without memory of its own."""
    return np.broadcast_to(dY.reshape(_kept(shape, _reduced(len(shape), axes, B, noop_with_empty_axes))), shape)


@gradient_of("ReduceMean")
def _spread_mean(
    dY: Array, shape: tuple[int, ...], B: Array | None, *, axes: Axes = (), noop_with_empty_axes: int = 0
) -> Array:
    share = rounded_once(np.multiply)(dY, dY.size / max(1, math.prod(shape)))
    return _spread(share, shape, B, axes=axes, noop_with_empty_axes=noop_with_empty_axes)


def _reduced(rank: int, axes: Axes, given: Array | None, noop: int) -> Axes:
    """Return the axes, which are an attribute or, from opset 13 or 18 on, an input. Without any, these are all."""
    axes = axes if given is None else tuple(given.reshape(-1).tolist())
    return tuple(axis % rank for axis in axes) if len(axes) or noop else (*range(rank),)


def _kept(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


# The sum of all that each element was added to is the cumulative sum in the other direction.
def _behind(dY: Array, B: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    return cumulated(np.add, dY, B, exclusive=exclusive, reverse=1 - reverse)


gradients("CumSum", _behind)


@gradient_of("CumProd")
def _cumulative_product(dY: Array, X: Array, B: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Return the gradient. That of a line's first zero is of the products without it, and those behind it are 0."""
    claim(6 * FLOAT64.itemsize * X.size)
    x, options = X.astype(FLOAT64), {"exclusive": exclusive, "reverse": reverse}
    zeros = cumulated(np.add, (x == 0).astype(INT64), B, reverse=reverse)
    first = (x == 0) & (zeros == 1)
    given, without = (cumulated(np.multiply, one, B, **options) for one in (x, np.where(first, 1, x)))
    sums, of_first = (_behind(dY * one, B, **options) for one in (given, without))
    return np.where(first, of_first, np.where(zeros > 0, 0, sums / x)).astype(dY.dtype)


gradients("Softmax", softmax_grad_13)
gradients("LogSoftmax", log_softmax_grad_13)
