"""Questions to sums along axes and to the gradient of a division.

ONNX Runtime takes axis 0 of a scalar, and a dY that broadcasts to another shape. Its B * B over- and underflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import AxisOutOfRange, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import FLOAT16_ULP, generator

SUMS: list[tuple[tuple[int, ...], list[int], dict[str, int]]] = [
    ((2, 3, 4), [1], {}),
    ((2, 3, 4), [0, 2], {"keepdims": 0}),
    ((2, 3, 4), [-1, 0], {}),
    ((2, 3, 4), [1, -2], {"keepdims": 0}),
    ((2, 3, 4), [], {}),
    ((2, 3, 4), [], {"keepdims": 0}),
    ((2, 3, 4), [], {"noop_with_empty_axes": 1}),
    ((2, 0, 3), [1], {}),
    ((2, 0, 3), [0], {"keepdims": 0}),
    ((2, 3, 4), [0], {"noop_with_empty_axes": 1}),
]
QUOTIENTS = [((2, 3), (2, 3)), ((2, 3, 4), ()), ((2, 3, 4), (4,)), ((3, 1), (2, 1, 4)), ((), (2, 3)), ((1, 3), (1, 1))]
REASONS = {"unfit-axes": ShapeMismatch, "unfit-(range|shape)": AxisOutOfRange, "unfit-quotient": ShapeMismatch}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for dtype in ("float32", "float64", "int32", "int64", "float16"):
        for shape, axes, attributes in SUMS if dtype == "float32" else SUMS[:2]:
            yield _sum(f"{dtype}-{list(shape)}-{axes}", dtype, shape, np.array(axes, np.int64), attributes)
    largest = {"data": np.full(3, 2**31 - 1, np.int32), "axes": np.array([0])}
    yield Case("ReduceSumTraining", "int32-wraps", largest, ("reduced",))
    yield _sum("unfit-axes", "float32", (2, 3), np.zeros((1, 1), np.int64), {})
    for axis in (2, -3):
        yield _sum(f"unfit-range-{axis}", "float32", (2, 3), np.array([axis]), {})
    for dtype in ("float32", "float64", "float16"):
        for a, b in QUOTIENTS if dtype == "float32" else QUOTIENTS[2:3]:
            yield _quotient(dtype, dtype, a, b)
    yield _quotient("unfit-quotient", "float32", (2, 3), (2,))


def tolerance(case: Case, output: str) -> Mapping[str, Any] | None:
    """How far the kernel may be from the answer. ONNX Runtime adds up to 24 numbers in their dtype."""
    dtype = case.outputs[output].dtype
    if dtype.kind == "i":
        return None
    largest = max(1.0, float(np.abs(case.outputs[output].astype(np.float64)).max(initial=0)))
    eps = float(np.finfo(dtype).eps)
    return {
        "rtol": FLOAT16_ULP if dtype == np.float16 else 0.0,
        "atol": (4 if dtype == np.float16 else 8) * eps * largest,
    }


def _sum(name: str, dtype: str, shape: tuple[int, ...], axes: Array, attributes: Mapping[str, int]) -> Case:
    name += "".join(f"-{key}={value}" for key, value in attributes.items())
    data = np.asarray(generator(name).normal(0, 9, shape), dtype)
    return Case("ReduceSumTraining", name, {"data": data, "axes": axes}, ("reduced",), attributes)


def _quotient(name: str, dtype: str, a: tuple[int, ...], b: tuple[int, ...]) -> Case:
    name, random = f"{name}-{list(a)}-{list(b)}", generator(name, str(a), str(b))
    shape = np.broadcast_shapes(a, b) if not name.startswith("unfit") else a
    A, B, dY = random.normal(size=a), random.uniform(0.5, 2, b), random.normal(size=shape)
    given = {key: np.asarray(array, dtype) for key, array in {"dY": dY, "A": A, "B": B}.items()}
    return Case("DivGrad", name, given, ("dA", "dB"))
