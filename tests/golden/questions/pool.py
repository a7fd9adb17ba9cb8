"""Questions to MaxPoolGrad and AveragePoolGrad.

dY always has the right shape, and indices are in range: ONNX Runtime checks neither. PyTorch answers for 3-D averages,
where ONNX Runtime is wrong, and for float64, which it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from service.errors import ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

REASONS = {"refused-shape": ShapeMismatch}

# The spatial axes of X, k, strides, pads
CALLS: dict[str, tuple[list[int], list[int], list[int], list[int]]] = {
    "1-D": ([9], [3], [2], [1, 0]),
    "2-D": ([6, 8], [2, 2], [2, 2], [0, 0, 0, 0]),
    "2-D-overlapping": ([7, 6], [3, 3], [2, 1], [1, 1, 1, 1]),
    "2-D-gaps": ([8, 7], [2, 1], [3, 2], [0, 0, 0, 0]),
    "2-D-all": ([4, 5], [4, 5], [1, 1], [0, 0, 0, 0]),
    "3-D": ([4, 5, 6], [2, 3, 2], [2, 1, 2], [0, 1, 0, 0, 1, 0]),
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for name, (sizes, kernel, strides, pads) in CALLS.items():
        counts = _counts(sizes, kernel, strides, pads)
        yield _max(name, sizes, counts)
        attributes = {"kernel_shape": kernel, "strides": strides, "pads": pads}
        source = "torch" if len(sizes) == 3 else "onnxruntime"
        for include in (0, 1):
            given = {**attributes, "count_include_pad": include}
            yield _average(f"{name}-include={include}", sizes, counts, given, source=source)
        if name in ("2-D-overlapping", "3-D"):
            yield _average(f"{name}-float64", sizes, counts, attributes, "float64", source="torch")
    yield _max("many-for-one", [40], [900])
    yield _average("no-attributes", [4, 4], [3, 3], {"kernel_shape": [2, 2]})
    yield _average("valid", [5, 4], [2, 2], {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "VALID"})
    refused = _max("refused-shape", [4, 4], [2, 2])
    yield Case(refused.operator, refused.name, {**refused.inputs, "dY": refused.inputs["dY"][..., :1]}, ("dX",))


def tolerance(case: Case, output: str) -> Mapping[str, Any] | None:
    """How far the kernel may be from the answer: an average divides once, and adds in another order."""
    if case.operator == "MaxPoolGrad":
        return None
    eps = float(np.finfo(case.inputs["dY"].dtype).eps)
    return {"rtol": 4 * eps, "atol": 4 * eps * float(np.abs(case.inputs["dY"]).max())}


def _counts(sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], pads: Sequence[int]) -> list[int]:
    axes = zip(sizes, kernel, strides, pads[: len(sizes)], pads[len(sizes) :], strict=True)
    return [(size + begin + end - k) // stride + 1 for size, k, stride, begin, end in axes]


def _max(name: str, sizes: Sequence[int], counts: Sequence[int]) -> Case:
    """Each index is anywhere in its plane."""
    random = generator("MaxPoolGrad", name)
    shape, size = (2, 3, *counts), int(np.prod(sizes))
    places = random.integers(0, size, shape)
    Indices = places + np.arange(6).reshape(2, 3, *[1] * len(sizes)) * size
    inputs = {"dY": random.normal(size=shape).astype(np.float32), "Indices": Indices}
    return Case("MaxPoolGrad", name, {**inputs, "shape": np.array([2, 3, *sizes])}, ("dX",))


def _average(
    name: str,
    sizes: Sequence[int],
    counts: Sequence[int],
    attributes: Mapping[str, Any],
    dtype: str = "float32",
    source: str = "onnxruntime",
) -> Case:
    dY = generator("AveragePoolGrad", name).normal(size=(2, 3, *counts)).astype(dtype)
    inputs = {"dY": dY, "shape": np.array([2, 3, *sizes])}
    return Case("AveragePoolGrad", name, inputs, ("dX",), attributes, source=source)
