"""Softmax and LogSoftmax, and their gradients in two generations.

Every gradient takes `dY` and the forward output `Y` (probabilities, or their logarithms), of the same shape and
floating dtype and of rank 1 or more. It returns `dX`, of that shape and dtype. The first generation sums over all
dimensions from `axis` on together, the `_13` generation over `axis` alone. An empty tensor gives an empty tensor.
float16 and bfloat16 are computed in float32 and rounded once. Raises `ShapeMismatch` or `DtypeMismatch` if the inputs
differ, and `AxisOutOfRange`. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from service.dtypes import Array, compute_dtype
from service.kernels._blocks import block_length, cuts, share_out
from service.kernels._checks import normalize_axis, same_shape
from service.kernels._cross_entropy import softmax
from service.kernels._elementwise import prepare
from service.kernels._narrow import load, room_for, store
from service.kernels._op import op
from service.kernels._types import Rank2, T

FAMILY = "Softmax"

MIN_TILE_COLUMNS = 4096
"""The fewest columns in a tile, unless the tensor has fewer: short pieces of distant rows are slow to read."""

_PROBABILITIES = {"dY": [[1.0, 2.0, 3.0]], "Y": [[0.25, 0.25, 0.5]]}
_LOGARITHMS = {"dY": [[1.0, 2.0, 3.0]], "Y": [[-1.5, -1.25, -0.75]]}


@dataclass(frozen=True)
class _Rule:
    """dX = apply(dY, Y, sum(dY, Y)), where `sum` is over the reduced axis. Blocks are [outer, reduced, inner]."""

    sum: Callable[[Array, Array], Array]
    apply: Callable[[Array, Array, Array, Array], object]


def _softmax_apply(dY: Array, Y: Array, total: Array, out: Array) -> None:
    np.subtract(dY, total, out=out)
    np.multiply(out, Y, out=out)


def _log_softmax_apply(dY: Array, Y: Array, total: Array, out: Array) -> None:
    np.exp(Y, out=out)
    np.multiply(out, total, out=out)
    np.subtract(dY, out, out=out)


# einsum makes one pass over the operands and needs no temporary. Without `optimize` it never calls BLAS.
_SOFTMAX = _Rule(lambda dY, Y: np.einsum("odi,odi->oi", dY, Y), _softmax_apply)
_LOG_SOFTMAX = _Rule(lambda dY, Y: np.einsum("odi->oi", dY), _log_softmax_apply)


@op("SoftmaxGrad", outputs="dX", example=_PROBABILITIES)
def softmax_grad(dY: Rank2[T], Y: Rank2[T], /, *, axis: int = 1, out: T | None = None) -> Rank2[T]:
    """dX = Y * (dY - sum(dY * Y)), the sum over all dimensions from `axis` on.

    For models of opset 12 and older; newer ones need SoftmaxGrad_13. The default axis, 1, needs a rank of 2 or more.
    """
    axis = normalize_axis(axis, Y.ndim, "Y")
    return _grad(_SOFTMAX, dY, Y, axis, Y.ndim, out)


@op("LogSoftmaxGrad", outputs="dX", example=_LOGARITHMS)
def log_softmax_grad(dY: Rank2[T], Y: Rank2[T], /, *, axis: int = 1, out: T | None = None) -> Rank2[T]:
    """dX = dY - exp(Y) * sum(dY), the sum over all dimensions from `axis` on.

    For models of opset 12 and older; newer ones need LogSoftmaxGrad_13. The default axis, 1, needs a rank of 2 or more.
    """
    axis = normalize_axis(axis, Y.ndim, "Y")
    return _grad(_LOG_SOFTMAX, dY, Y, axis, Y.ndim, out)


@op("SoftmaxGrad_13", outputs="dX", example=_PROBABILITIES)
def softmax_grad_13(dY: T, Y: T, /, *, axis: int = -1, out: T | None = None) -> T:
    """dX = Y * (dY - sum(dY * Y)), the sum along `axis`.

    For models of opset 13 and newer; older ones need SoftmaxGrad, which sums over several dimensions.
    """
    axis = normalize_axis(axis, Y.ndim, "Y")
    return _grad(_SOFTMAX, dY, Y, axis, axis + 1, out)


@op("LogSoftmaxGrad_13", outputs="dX", example=_LOGARITHMS)
def log_softmax_grad_13(dY: T, Y: T, /, *, axis: int = -1, out: T | None = None) -> T:
    """dX = dY - exp(Y) * sum(dY), the sum along `axis`.

    For models of opset 13 and newer; older ones need LogSoftmaxGrad, which sums over several dimensions.
    """
    axis = normalize_axis(axis, Y.ndim, "Y")
    return _grad(_LOG_SOFTMAX, dY, Y, axis, axis + 1, out)


def softmax_13(X: Array, /, *, axis: int = -1, logarithms: bool = False) -> Array:
    """Return exp(X) / sum(exp(X)), the sum along `axis`, or the logarithms of that. Raises `AxisOutOfRange`."""
    axis = normalize_axis(axis, X.ndim, "X")
    Y: Array
    Y, (given,) = prepare((X,), None)
    shape = math.prod(X.shape[:axis]), X.shape[axis], math.prod(X.shape[axis + 1 :])
    softmax(given.reshape(shape), Y.reshape(shape), logarithms=logarithms)
    return Y


def _grad(rule: _Rule, dY: T, Y: T, start: int, stop: int, out: T | None) -> T:
    """Apply `rule` with the sum over the dimensions from `start` to `stop` - 1."""
    same_shape(Y=Y, dY=dY)
    result, (left, right) = prepare((dY, Y), out)
    if result.size:
        shape = [math.prod(Y.shape[part]) for part in (slice(start), slice(start, stop), slice(stop, None))]
        _reduce_and_apply(rule, left.reshape(shape), right.reshape(shape), result.reshape(shape))
    return result


def _reduce_and_apply(rule: _Rule, dY: Array, Y: Array, out: Array) -> None:
    """Cut [outer, reduced, inner] into tiles that hold the whole reduced axis, and apply the rule to each tile.

    If such a tile is too long for the cache, cut the reduced axis as well, sum the pieces first, and apply afterwards.
    """
    outer, reduced, inner = Y.shape
    length, dtype = block_length(Y.dtype), compute_dtype(Y.dtype)
    width = min(inner, max(length // reduced, MIN_TILE_COLUMNS))
    depth = min(reduced, length // width)
    height = max(1, length // (reduced * width)) if depth == reduced else 1
    rows, pieces, columns = (cuts(*axis) for axis in ((outer, height), (reduced, depth), (inner, width)))
    tiles = [(row, piece, column) for row in rows for column in columns for piece in pieces]
    sums: dict[int, Array] = {}

    def load_tile(number: int) -> tuple[Array, Array]:
        return load(dY[tiles[number]], dtype, 0), load(Y[tiles[number]], dtype, 1)

    def apply(number: int, blocks: tuple[Array, Array], total: Array) -> None:
        target = out[tiles[number]]
        result = room_for(target, dtype, 2)
        rule.apply(*blocks, total[:, None], result)
        store(result, target, (0, 1))  # no longer those of dY and Y

    def sum_and_apply(number: int) -> None:
        blocks = load_tile(number)
        apply(number, blocks, rule.sum(*blocks))

    def sum_piece(number: int) -> None:
        sums[number] = rule.sum(*load_tile(number))

    def apply_total(number: int) -> None:
        apply(number, load_tile(number), totals[number // len(pieces)])

    if len(pieces) == 1:
        share_out(sum_and_apply, len(tiles))
        return
    share_out(sum_piece, len(tiles))
    with np.errstate(all="ignore"):
        strips = (range(start, start + len(pieces)) for start in range(0, len(tiles), len(pieces)))
        totals = [np.sum([sums[number] for number in strip], axis=0) for strip in strips]
    share_out(apply_total, len(tiles))
