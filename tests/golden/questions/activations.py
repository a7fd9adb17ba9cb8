"""Questions to the gradients of element-wise activations. Both inputs always have one shape: it is not checked.

PyTorch is asked with common numbers: it sums products in its own order, where infinities may cancel that do not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator, special_pairs

SECOND = {"ReluGrad": "X", "LeakyReluGrad": "Y", "SigmoidGrad": "Y", "TanhGrad": "Y", "QuickGeluGrad": "X"}
ALPHAS = {"LeakyReluGrad": [0.01, 0.5, 0.0, -0.3, float("nan")], "QuickGeluGrad": [1.702, 1.0, -1.702, 0.0]}
SHAPES = [(), (1,), (7,), (2, 3), (2, 3, 4), (2, 1, 3, 2), (2, 1, 2, 3, 2), (0,), (0, 3), (2, 0, 3), (2, 0, 1, 3, 2)]
OF_TORCH: dict[str, list[dict[str, float]]] = {"QuickGeluGrad": [{}, {"alpha": 1.0}, {"alpha": -0.5}]}
"""The attributes with which PyTorch is asked for float64, which ONNX Runtime lacks."""
SHAPES_OF_TORCH = [(), (7,), (2, 3, 4), (0, 3), (11, 19)]
PEER = [-1, 0, 1, 100, -100, 1000, -1000]
PEER_X = [-10, -1, 0, 1, 10]


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in SECOND:
        # The kernels of these two have a float64 body in the schema; the rest is float32 only.
        dtypes = ["float32", "float64"] if operator in ("SigmoidGrad", "TanhGrad") else ["float32"]
        for dtype in dtypes:
            yield from _shapes(operator, dtype)
        for dtype in [*dtypes, "float16"]:
            yield from _special(operator, dtype)
        yield from _common_float16(operator)
        yield from _peer(operator)
    yield from _line()
    for operator, asked in OF_TORCH.items():
        for attributes in asked:
            yield from _of_torch(operator, attributes)


def tolerance(case: Case, output: str) -> Mapping[str, Any] | None:
    """How far the kernel may be from the answer; None: not by a bit."""
    dY = case.inputs["dY"]
    if case.source.startswith("torch"):
        # An activation's gradient is a sum of two products. PyTorch rounds each, and they may cancel.
        eps = float(np.finfo(dY.dtype).eps)
        return {"rtol": 4 * eps, "atol": 16 * eps * np.abs(dY)}
    if case.operator == "QuickGeluGrad":
        # ONNX Runtime's logistic is exactly 0 or 1 from about ±17 on, which alone makes 1.7e-6 of dY. Rounding 1 - s,
        # which is then multiplied by up to 17, makes the rest.
        atol = 2.5e-6 * np.abs(dY.astype(np.float64))
        if dY.dtype == np.float16:
            return {"rtol": FLOAT16_ULP, "atol": atol + np.finfo(np.float16).smallest_subnormal}
        return {"rtol": 1e-6, "atol": atol}
    if case.operator == "SigmoidGrad" and dY.dtype == np.float64:
        # ONNX Runtime has no kernel for it and multiplies in another order: dY * (Y * (1 - Y)).
        return {"rtol": 4 * np.finfo(np.float64).eps, "atol": 2 * np.finfo(np.float64).smallest_subnormal}
    return None


def _of_torch(operator: str, attributes: Mapping[str, float]) -> Iterator[Case]:
    for dtype in ("float32", "float64"):
        for shape in SHAPES_OF_TORCH:
            name = f"{dtype}-{list(shape)}{_named(attributes)}"
            random = generator("torch", operator, name)
            dY, second = random.normal(size=shape), random.normal(0, 3, shape)
            inputs = {"dY": np.asarray(dY, dtype), SECOND[operator]: np.asarray(second, dtype)}
            yield Case(operator, name, inputs, ("dX",), attributes, source="torch")


def _case(operator: str, name: str, dY: Array, second: Array, attributes: Mapping[str, float]) -> Case:
    return Case(operator, name, {"dY": dY, SECOND[operator]: second}, ("dX",), attributes)


def _attributes(operator: str) -> list[dict[str, float]]:
    return [{"alpha": alpha} for alpha in ALPHAS[operator]] if operator in ALPHAS else [{}]


def _named(attributes: Mapping[str, float]) -> str:
    return "".join(f"-{name}={value}" for name, value in attributes.items())


def _second(operator: str, random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """A plausible forward input or output."""
    x = random.normal(0, 3, shape)
    if operator == "SigmoidGrad":
        return np.asarray(1 / (1 + np.exp(-x)))
    return np.asarray(np.tanh(x) if operator == "TanhGrad" else x)


def _pair(operator: str, name: str, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    random = generator(operator, name)
    return random.normal(size=shape).astype(dtype), _second(operator, random, shape).astype(dtype)


def _shapes(operator: str, dtype: str) -> Iterator[Case]:
    for shape in SHAPES:
        name = f"{dtype}-{list(shape)}"
        dY, second = _pair(operator, name, shape, dtype)
        yield _case(operator, name, np.asarray(dY, dtype), np.asarray(second, dtype), {})


def _special(operator: str, dtype: str) -> Iterator[Case]:
    dY, second = special_pairs(dtype)
    if (operator, dtype) == ("SigmoidGrad", "float64"):
        # The float64 body is dY * (Y * (1 - Y)), which differs from the kernel where only one of them overflows.
        fit = np.abs(second[0]) != np.finfo(dtype).max
        dY, second = dY[:, fit], second[:, fit]
    for attributes in _attributes(operator):
        yield _case(operator, f"{dtype}-special{_named(attributes)}", dY, second, attributes)


def _common_float16(operator: str) -> Iterator[Case]:
    for attributes in _attributes(operator):
        name = f"float16-common{_named(attributes)}"
        yield _case(operator, name, *_pair(operator, name, (40, 25), "float16"), attributes)


def _line() -> Iterator[Case]:
    """Where ONNX Runtime's logistic saturates."""
    X = np.linspace(-30, 30, 2001, dtype=np.float32)
    for attributes in _attributes("QuickGeluGrad"):
        yield _case("QuickGeluGrad", f"float32-line{_named(attributes)}", np.ones_like(X), X, attributes)


def _peer(operator: str) -> Iterator[Case]:
    second = np.array(PEER_X if operator == "QuickGeluGrad" else PEER, np.float32)
    asked = {"LeakyReluGrad": [0.5], "QuickGeluGrad": ALPHAS["QuickGeluGrad"][:3]}.get(operator)
    for attributes in [{"alpha": alpha} for alpha in asked] if asked else [{}]:
        yield _case(operator, f"peer-Basic{_named(attributes)}", np.ones_like(second), second, attributes)
