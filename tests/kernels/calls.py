"""Calls of every operator with a floating output, for tests that hold for all of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from service.dtypes import Array
from service.kernels import OPERATORS

FLOAT_DTYPES = [np.dtype(name) for name in ("float32", "float64", "float16")] + [np.dtype(ml_dtypes.bfloat16)]
NARROW_DTYPES = FLOAT_DTYPES[2:]


@dataclass(frozen=True)
class Call:
    """An operator and inputs that fit together."""

    operator: str
    inputs: Sequence[Array]
    attributes: dict[str, Any]

    def run(self, **more: Any) -> Array:
        """The floating output."""
        result = OPERATORS[self.operator].kernel(*self.inputs, **self.attributes, **more)
        output: Array = result[-1] if isinstance(result, tuple) else result
        return output

    def on(self, change: Callable[[Array], Array]) -> Call:
        """The same with `change` made to every input."""
        return replace(self, inputs=[change(array) for array in self.inputs])

    def floats(self) -> list[int]:
        """The places of the inputs that are gradients or values."""
        return [place for place, array in enumerate(self.inputs) if array.dtype in FLOAT_DTYPES]


@lru_cache(maxsize=2)
def _numbers(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return normal and uniform numbers. The next call of the same kind takes copies of them."""
    random = np.random.default_rng(1)
    first, second = random.normal(size=shape), random.uniform(-1, 1, shape)
    return np.asarray(first, dtype), np.asarray(second, dtype)


def _pair(operator: str, **attributes: Any) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        return Call(operator, [one.copy() for one in _numbers(shape, np.dtype(dtype))], attributes)

    return make


def _flagged(operator: str, flag: bool) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        call = _pair(operator)(shape, dtype)
        return replace(call, inputs=[*call.inputs, np.array(flag)])

    return make


def _zero(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
    return Call("ZeroGradient", [_pair("")(shape, dtype).inputs[0], np.array([True, False])], {})


def _alone(operator: str) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        return Call(operator, _pair("")(shape, dtype).inputs[:1], {})

    return make


def _biased(operator: str) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        call = _pair(operator)(shape, dtype)
        return replace(call, inputs=[*call.inputs, _pair("")(shape[-1:], dtype).inputs[0]])

    return make


def _dropout(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
    dy, numbers = _pair("")(shape, dtype).inputs
    return Call("DropoutGrad", [dy, numbers > 0, np.array(0.25, dtype)], {})


def _scale(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
    return Call("Scale", [_pair("")(shape, dtype).inputs[0], np.array(-3)], {"scale_down": 1})


def _gather(axis: int) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        """Each index about twice, some negative."""
        random = np.random.default_rng(2)
        size, place = shape[axis], axis % len(shape)
        indices = random.integers(-size, size, 2 * size + 1) if size else np.empty(0, np.int64)
        grad = random.normal(size=(*shape[:place], len(indices), *shape[place + 1 :]))
        return Call("GatherGrad", [np.array(shape), indices, np.asarray(grad, dtype)], {"axis": axis})

    return make


def _loss_grad(operator: str, bias: bool) -> Callable[..., Call]:
    def make(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Call:
        """The classes are dimension 1; of a vector, half of it. Some samples, or all without classes, are ignored."""
        shape = shape if len(shape) > 1 else (shape[0] // 2, 2)
        labels = np.random.default_rng(3).integers(-1, shape[1], (shape[0], *shape[2:]))
        dY, log_prob = _numbers(labels.shape, np.dtype(dtype))[0].copy(), _numbers(shape, np.dtype(dtype))[1].copy()
        weights, more = _numbers(shape[1:2], np.dtype(dtype))[1].copy(), {"reduction": "none"}
        if bias:
            return Call(operator, [dY, log_prob, labels, weights, np.array(-1), log_prob.copy()], more)
        return Call(operator, [dY, log_prob, labels, weights], {**more, "ignore_index": -1})

    return make


ELEMENTWISE: dict[str, Callable[..., Call]] = {
    "ReluGrad": _pair("ReluGrad"),
    "LeakyReluGrad": _pair("LeakyReluGrad", alpha=0.3),
    "SigmoidGrad": _pair("SigmoidGrad"),
    "TanhGrad": _pair("TanhGrad"),
    "QuickGeluGrad": _pair("QuickGeluGrad"),
    "GeluGrad": _pair("GeluGrad"),
    "FastGeluGrad": _pair("FastGeluGrad"),
    "QuickGelu": _alone("QuickGelu"),
    "InPlaceAccumulator": _pair("InPlaceAccumulator"),
    "InPlaceAccumulator-false": _flagged("InPlaceAccumulator", False),
    "InPlaceAccumulatorV2": _pair("InPlaceAccumulatorV2"),
    "InPlaceAccumulatorV2-overwrite": _flagged("InPlaceAccumulatorV2", True),
    "ZeroGradient": _zero,
    "Scale": _scale,
}
SOFTMAX: dict[str, Callable[..., Call]] = {
    f"{operator}-axis={axis}": _pair(operator, axis=axis)
    for operator in ("SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxGrad_13", "LogSoftmaxGrad_13")
    for axis in (0, -1)
}
GATHER: dict[str, Callable[..., Call]] = {f"GatherGrad-axis={axis}": _gather(axis) for axis in (0, -1)}
MIXED: dict[str, Callable[..., Call]] = {
    "BiasGeluGrad_dX": _biased("BiasGeluGrad_dX"),
    "BiasFastGeluGrad_dX": _biased("BiasFastGeluGrad_dX"),
    "DropoutGrad": _dropout,
}
"""Element-wise, but with inputs of several shapes or dtypes."""

LOSSES: dict[str, Callable[..., Call]] = {
    "SoftmaxCrossEntropyLossGrad": _loss_grad("SoftmaxCrossEntropyLossGrad", False),
    "SoftmaxCrossEntropyLossInternalGrad": _loss_grad("SoftmaxCrossEntropyLossInternalGrad", True),
}

CALLS = {**ELEMENTWISE, **SOFTMAX, **GATHER, **MIXED, **LOSSES}
"""Name -> function that makes the call for an output of a given shape and dtype."""


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how many bytes are allocated at most while `work` is called."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
