"""Operators that reduce along axes. Sums are added in float64 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from service.dtypes import BOOL, INT64, Array, DType
from service.graphs.nodes.elementwise import apply
from service.graphs.nodes.shapes import axes_of, integers
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, claim

_sum = OPERATORS["ReduceSumTraining"].kernel


def _mean(data: Array, axes: Array, **options: Any) -> Array:
    total = _sum(data, axes, **options)
    return apply(np.divide, total, np.asarray(data.size // max(1, total.size), total.dtype))


def _extreme(function: Callable[..., Any], sign: int) -> Callable[..., Any]:
    """Return the reduction by the function. That of nothing is an infinity with the sign, or the integer next to it."""

    def reduce(data: Array, axes: Array, *, keepdims: int) -> Array:
        along = tuple(axes.tolist()) or tuple(range(data.ndim))
        claim(data.itemsize * math.prod(n for axis, n in enumerate(data.shape) if axis not in along))
        edge = {} if data.size or not sign else {"initial": _edge(data.dtype, sign)}
        return np.asarray(function(data, axis=along, keepdims=bool(keepdims), **edge))

    return reduce


def _edge(dtype: DType, sign: int) -> Any:
    if dtype.kind in "iu":
        return np.iinfo(dtype).min if sign < 0 else np.iinfo(dtype).max
    return sign > 0 if dtype == BOOL else sign * np.inf


def _of(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the reduction that sums before(data), and gives after(sum)."""

    def reduce(data: Array, axes: Array, **options: Any) -> Array:
        total: Array = _sum(apply(before, data), axes, **options)
        return total if after is None else apply(after, total)

    return reduce


def _log_sum_exp(data: Array, axes: Array, *, keepdims: int) -> Array:
    along = tuple(axes.tolist()) or None
    highest = REDUCTIONS["ReduceMax"](data, axes, keepdims=1)
    highest = np.where(np.isfinite(highest), highest, 0).astype(data.dtype)
    total = _sum(apply(np.exp, apply(np.subtract, data, highest)), axes, keepdims=1)
    result = apply(np.add, apply(np.log, total), highest)
    return result if keepdims else np.squeeze(result, along)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _extreme(np.max, -1),
    "ReduceMin": _extreme(np.min, 1),
    "ReduceProd": _extreme(np.prod, 0),
    "ReduceL1": _of(np.abs),
    "ReduceSumSquare": _of(np.square),
    "ReduceL2": _of(np.square, np.sqrt),
    "ReduceLogSum": _of(np.positive, np.log),
    "ReduceLogSumExp": _log_sum_exp,
}
"""The function of each reduction: of the data, the axes, and keepdims. Without axes it reduces along all."""


@maker(*REDUCTIONS)
def _reduction(node: Node) -> Function:
    function, keepdims = REDUCTIONS[node.op], node.attributes.get("keepdims", 1)
    fixed = np.array(node.attributes.get("axes", []), INT64)
    does_nothing = node.attributes.get("noop_with_empty_axes", 0)

    def reduce(data: Array, axes: Array | None = None) -> Array:
        along = fixed if axes is None else axes
        if does_nothing and not along.size:
            return data
        result: Array = function(data, np.array(axes_of(integers(along), data.ndim), INT64), keepdims=keepdims)
        return result

    return reduce
