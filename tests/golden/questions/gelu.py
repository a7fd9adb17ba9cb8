"""Questions to GELU's gradients and QuickGelu.

ONNX Runtime gives NaN for infinities, and its FastGeluGrad for numbers whose cube overflows: it is not asked for those.
A last dimension of 0 ends the process of the two that have a bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

PLAIN, BIASED = ("GeluGrad", "FastGeluGrad"), ("BiasGeluGrad_dX", "BiasFastGeluGrad_dX")
SHAPES = [(1,), (7,), (2, 3), (2, 3, 4), (0, 3), (2, 0), (11, 19)]
ALPHAS = [1.702, 1.0, -1.0, 0.0]
REASONS = {"unfit": ShapeMismatch}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in (*PLAIN, *BIASED):
        for dtype in ("float32", "float16"):
            yield from _shapes(operator, dtype)
        yield _case(operator, "line", *_line(operator))
        for dtype in ("float32", "float64"):
            yield from _shapes(operator, dtype, source="torch")
    for operator in BIASED:
        dY, X = np.ones((2, 3, 2), np.float32)
        for name, B in {"scalar": np.float32(1), "rank-2": X[:1], "short": X[0, :1], "long": np.ones(3)}.items():
            yield _case(operator, f"unfit-B-{name}", dY, X, np.asarray(B, np.float32))
        yield _case(operator, "unfit-dY", dY[:2], X, X[0])
    for alpha in ALPHAS:
        line = np.linspace(-30, 30, 401)
        for dtype, source in (("float32", "onnxruntime"), ("float32", "torch"), ("float64", "torch")):
            given = {"X": line.astype(dtype)}
            yield Case("QuickGelu", f"{dtype}-{alpha}", given, ("Y",), {"alpha": alpha}, source=source)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer."""
    if case.operator == "QuickGelu":
        X = np.abs(case.inputs["X"])
        # ONNX Runtime's logistic is exactly 0 or 1 from about ±17 on.
        eps = 2.0**-20 if case.source.startswith("onnx") else float(np.finfo(X.dtype).eps)
        return {"rtol": 1e-6 if X.dtype == np.float32 else 4 * eps, "atol": 2 * eps * X}
    dY = np.abs(case.inputs["dY"].astype(np.float64))
    if case.source.startswith("torch"):
        eps = float(np.finfo(case.inputs["dY"].dtype).eps)
        # PyTorch's tanh form makes its tail of 1 - tanh(u)^2, which cancels.
        return {"rtol": 4 * eps, "atol": (16 if "Fast" in case.operator else 4) * eps * dY}
    # ONNX Runtime's GeluGrad is up to 2.2e-7 off, and its FastGeluGrad up to 5.6e-7.
    narrow = case.inputs["dY"].dtype == np.float16
    return {"rtol": FLOAT16_ULP if narrow else 0.0, "atol": (1.5e-3 if narrow else 8e-7) * dY}


def _shapes(operator: str, dtype: str, source: str = "onnxruntime") -> Iterator[Case]:
    for shape in SHAPES:
        if operator in BIASED and not shape[-1] and source == "onnxruntime":
            continue
        random = generator(operator, dtype, str(shape), source)
        X, B = random.normal(0, 3, shape), random.normal(0, 1, shape[-1])
        numbers = [random.normal(size=shape), X, B][: 3 if operator in BIASED else 2]
        yield _case(operator, f"{dtype}-{list(shape)}", *(np.asarray(one, dtype) for one in numbers), source=source)


def _line(operator: str) -> Iterator[Array]:
    X = np.linspace(-20, 20, 2001, dtype=np.float32)
    yield from (np.ones_like(X), X, np.zeros_like(X))[: 3 if operator in BIASED else 2]


def _case(operator: str, name: str, *numbers: Array, source: str = "onnxruntime") -> Case:
    return Case(operator, name, dict(zip(("dY", "X", "B"), numbers, strict=False)), ("dX",), source=source)
