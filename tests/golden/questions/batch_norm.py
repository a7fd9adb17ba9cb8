"""Questions to BatchNormInternal and BatchNormalizationGrad.

Shapes fit together: ONNX Runtime does not check that of dY. PyTorch answers for float64, which it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

REASONS = {"refused": ShapeMismatch}
SHAPES: list[tuple[int, ...]] = [(4, 3), (5, 3, 7), (3, 4, 5, 6), (2, 3, 3, 2, 4), (6, 1, 4, 4), (1, 3, 2, 2)]
FORWARD = ("Y", "running_mean", "running_var", "saved_mean", "saved_inv_std")
BACKWARD = ("X_grad", "scale_grad", "bias_grad")


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for shape in SHAPES:
        yield _forward(f"float32-{list(shape)}", shape, "float32")
        yield _backward(f"float32-{list(shape)}", shape, "float32")
    for dtype, source in (("float16", "onnxruntime"), ("float64", "torch")):
        yield _forward(f"{dtype}-far-from-0", (3, 4, 5, 6), dtype, mean=3.0, source=source)
        yield _backward(f"{dtype}-far-from-0", (3, 4, 5, 6), dtype, mean=3.0, source=source)
    yield _forward("momentum", (4, 3, 2, 2), "float32", attributes={"epsilon": 0.5, "momentum": 0.25})
    yield _backward("no-images", (0, 3, 2, 2), "float32")
    wrong = _backward("refused-scale", (2, 3, 2, 2), "float32")
    yield Case(
        wrong.operator, wrong.name, {**wrong.inputs, "scale": np.ones(4, np.float32)}, BACKWARD, wrong.attributes
    )


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer, relative to the largest number."""
    largest = float(np.abs(case.outputs[output].astype(np.float64)).max(initial=0))
    dtype = case.inputs["X"].dtype
    if dtype == np.float16:
        return {"rtol": 2 * FLOAT16_ULP, "atol": FLOAT16_ULP * 1e-3 * largest}
    return {"rtol": 0, "atol": (1e-13 if dtype == np.float64 else 3e-6) * largest}


def _channels(name: str, shape: tuple[int, ...], dtype: str) -> Iterator[Any]:
    random = generator("batch_norm", name)
    while True:
        yield random.uniform(0.5, 2, shape[1]).astype(dtype)


def _forward(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    *,
    mean: float = 0.0,
    attributes: Mapping[str, Any] | None = None,
    source: str = "onnxruntime",
) -> Case:
    X = generator("BatchNormInternal", name).normal(mean, size=shape).astype(dtype)
    given = zip(("scale", "B", "input_mean", "input_var"), _channels(name, shape, dtype), strict=False)
    return Case("BatchNormInternal", name, {"X": X, **dict(given)}, FORWARD, attributes or {}, source=source)


def _backward(name: str, shape: tuple[int, ...], dtype: str, *, mean: float = 0.0, source: str = "onnxruntime") -> Case:
    """The mean and the inverse deviation are those of X, as far as it has any."""
    random = generator("BatchNormalizationGrad", name)
    dY, X = (random.normal(middle, size=shape).astype(dtype) for middle in (0, mean))
    axes = tuple(axis for axis in range(X.ndim) if axis != 1)
    wide = X.astype(np.float64)
    statistics = (wide.mean(axis=axes), 1 / np.sqrt(wide.var(axis=axes) + 1e-5)) if X.size else np.ones((2, shape[1]))
    inputs = {"dY": dY, "X": X, "scale": random.normal(size=shape[1]).astype(dtype)}
    inputs |= {key: one.astype(dtype) for key, one in zip(("mean", "variance"), statistics, strict=True)}
    return Case("BatchNormalizationGrad", name, inputs, BACKWARD, {"epsilon": 1e-5}, source=source)
