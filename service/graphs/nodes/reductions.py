"""Operators that reduce along axes. Sums are added in float64 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from service.dtypes import INT64, Array
from service.graphs.nodes.elementwise import apply
from service.graphs.nodes.shapes import axes_of, integers
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, claim

_sum = OPERATORS["ReduceSumTraining"].kernel


def _mean(data: Array, axes: Array, **options: Any) -> Array:
    total = _sum(data, axes, **options)
    return apply(np.divide, total, np.asarray(max(1, data.size) // max(1, total.size), total.dtype))


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(data: Array, axes: Array, *, keepdims: int) -> Array:
        claim(data.nbytes // max(1, data.shape[-1] if data.ndim else 1))
        return np.asarray(function(data, axis=tuple(axes.tolist()) or None, keepdims=bool(keepdims)))

    return reduce


def _of(before: Callable[..., Any], after: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the reduction that sums before(data), and gives after(sum)."""

    def reduce(data: Array, axes: Array, **options: Any) -> Array:
        total: Array = _sum(apply(before, data), axes, **options)
        return total if after is None else apply(after, total)

    return reduce


def _log_sum_exp(data: Array, axes: Array, *, keepdims: int) -> Array:
    along = tuple(axes.tolist()) or None
    highest = np.max(data, axis=along, keepdims=True)
    highest = np.where(np.isfinite(highest), highest, 0).astype(data.dtype)
    total = _sum(apply(np.exp, apply(np.subtract, data, highest)), axes, keepdims=1)
    result = apply(np.add, apply(np.log, total), highest)
    return result if keepdims else np.squeeze(result, along)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceMax": _extreme(np.max),
    "ReduceMin": _extreme(np.min),
    "ReduceProd": _extreme(np.prod),
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
