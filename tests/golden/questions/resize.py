"""Questions to ResizeGrad, which PyTorch answers: ONNX Runtime has no kernel for it on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tests.golden.store import Case
from tests.golden.values import generator

# The spatial axes of X and of dY, and the mode
CALLS: dict[str, tuple[list[int], list[int], str]] = {
    "1-D": ([7], [10], "linear"),
    "up": ([4, 5], [8, 15], "linear"),
    "down": ([9, 8], [4, 3], "linear"),
    "mixed": ([3, 9], [7, 4], "linear"),
    "3-D": ([3, 2, 5], [4, 6, 3], "linear"),
    "cubic-up": ([4, 5], [9, 10], "cubic"),
    "cubic-down": ([9, 8], [4, 3], "cubic"),
    "nearest-up": ([4, 5], [8, 15], "nearest"),
    "nearest-down": ([9, 8], [4, 3], "nearest"),
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for number, (name, (sizes, counts, mode)) in enumerate(CALLS.items()):
        if mode == "nearest":
            asked: list[dict[str, Any]] = [{"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}]
        else:
            asked = [{"coordinate_transformation_mode": one} for one in ("half_pixel", "align_corners")]
        for place, attributes in enumerate(asked):
            dtype = ("float32", "float64")[(number + place) % 2]
            case = f"{name}-{attributes['coordinate_transformation_mode']}-{dtype}"
            dY = generator("ResizeGrad", case).normal(size=(2, 3, *counts)).astype(dtype)
            inputs = {"dY": dY, "X": np.zeros((2, 3, *sizes), dtype)}
            yield Case("ResizeGrad", case, inputs, ("dX",), {"mode": mode, **attributes}, source="torch")


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """How far the kernel may be from the answer, relative to the largest number."""
    eps = float(np.finfo(case.inputs["dY"].dtype).eps)
    return {"rtol": 0, "atol": 8 * eps * float(np.abs(case.outputs[output]).max())}
