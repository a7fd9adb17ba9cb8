"""Questions to FusedMatMul. ONNX Runtime's has no float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

BOTH = [
    ((4, 5), (5, 6)),
    ((2, 3, 4, 5), (5, 6)),
    ((4, 5), (2, 3, 5, 6)),
    ((1, 4, 5), (3, 5, 6)),
    ((2, 1, 4, 5), (3, 5, 6)),
    ((5,), (5, 6)),
    ((4, 5), (5,)),
    ((5,), (5,)),
    ((3, 4, 5), (5,)),
    ((5,), (3, 5, 2)),
    ((0, 5), (5, 6)),
    ((4, 0), (0, 6)),
    ((2, 0, 4), (4, 3)),
    ((0, 4, 5), (5, 6)),
]
TURNED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, float]]] = [
    ((5, 4), (5, 6), {"transA": 1}),
    ((4, 5), (6, 5), {"transB": 1, "alpha": 0.125}),
    ((2, 4, 3), (5, 4), {"transA": 1, "transB": 1, "alpha": -2.0}),
    ((2, 3, 5, 4), (2, 3, 5, 6), {"transA": 1}),
    ((5,), (5, 6), {"transA": 1}),
    ((4, 5), (5,), {"transB": 1}),
    ((4, 3, 5), (3, 5, 6), {"transBatchA": 1}),
    ((5, 3, 4), (3, 5, 6), {"transBatchA": 1, "transA": 1}),
    ((3, 4, 5), (5, 3, 6), {"transBatchB": 1}),
    ((3, 4, 5), (6, 3, 5), {"transBatchB": 1, "transB": 1}),
    ((4, 2, 3, 5), (2, 3, 5, 6), {"transBatchA": 1}),
    ((4, 3, 5), (5, 3, 6), {"transBatchA": 1, "transBatchB": 1, "alpha": 0.5}),
]
UNFIT: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]] = [
    ((4, 5), (4, 6), {}),
    ((4, 5), (5, 6), {"transA": 1}),
    ((2, 4, 5), (3, 5, 6), {}),
    ((), (5, 6), {}),
    ((4, 5), (), {}),
    ((4, 5), (5, 6), {"transBatchA": 1}),
    ((4, 3, 5), (5, 6), {"transBatchB": 1}),
    ((4,), (5,), {}),
]
REASONS = {"unfit": ShapeMismatch}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for a, b, attributes in [*((a, b, {}) for a, b in BOTH), *TURNED]:
        yield _case("float32", "float32", a, b, attributes)
    for a, b, attributes in TURNED[1:3]:
        yield _case("float16", "float16", a, b, attributes)
    for a, b, wrong in UNFIT:
        yield _case("unfit", "float32", a, b, wrong)


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer: at most five products are added, each at most about ten."""
    return {"rtol": FLOAT16_ULP if case.inputs["A"].dtype == np.float16 else 0.0, "atol": 4e-6}


def _case(name: str, dtype: str, a: tuple[int, ...], b: tuple[int, ...], attributes: Mapping[str, float]) -> Case:
    name = f"{name}-{list(a)}-{list(b)}" + "".join(f"-{key}={value}" for key, value in attributes.items())
    A, B = (np.asarray(generator(name, side).normal(size=shape), dtype) for side, shape in (("A", a), ("B", b)))
    return Case("FusedMatMul", name, {"A": A, "B": B}, ("Y",), attributes)
