"""Questions to Dropout's gradient. ONNX Runtime's ignores `training_mode`, and gives -0 or NaN for masked elements.

A ratio of 0 makes it ignore the mask, except for float16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidTensor, ShapeMismatch
from tests.golden.store import Case
from tests.golden.values import generator

SHAPES = [(), (2, 3, 4), (2, 0, 3)]
RATIOS = [0.1, 0.5, 0.999, 0.0]
REASONS = {"unfit-(range|ratio)": InvalidTensor, "unfit-mask": ShapeMismatch}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for dtype in ("float32", "float64", "float16"):
        for shape in SHAPES:
            yield _case(f"{dtype}-{list(shape)}-default", shape, dtype)
            for ratio in RATIOS if dtype != "float16" else RATIOS[:-1]:
                yield _case(f"{dtype}-{list(shape)}-{ratio}", shape, dtype, ratio=np.array(ratio, dtype))
    for name, dtype in {"float64": "float64", "float16": "float16", "vector": "float32"}.items():
        given = np.array([0.1] if name == "vector" else 0.1, dtype)
        yield _case(f"ratio-{name}", (7,), "float32", ratio=given, training_mode=np.array(True))
    for bad in (-0.1, 1.0, float("nan"), float("inf")):
        yield _case(f"unfit-range-{bad}", (3,), "float32", ratio=np.array(bad, np.float32))
    for size in (0, 2):
        yield _case(f"unfit-ratio-{size}", (3,), "float32", ratio=np.full(size, 0.5, np.float32))
    yield _case("unfit-mask", (3,), "float32", mask=np.ones(2, np.bool_))


def tolerance(case: Case, output: str) -> Mapping[str, Any]:
    """No number may differ, except for signs of zeros where the mask is false, and where dy is float64.

    ONNX Runtime rounds the ratio, and 1 less the ratio, to float32.
    """
    kept = 1 - float(case.inputs.get("ratio", np.array(0.5)).item())
    return {"rtol": 2.0**-23 / kept if case.inputs["dy"].dtype == np.float64 else 0.0}


def _case(name: str, shape: tuple[int, ...], dtype: str, **more: Array) -> Case:
    random = generator(name)
    given = {"dy": random.normal(size=shape).astype(dtype), "mask": random.random(shape) < 0.5}
    inputs = {key: np.asarray(array) for key, array in {**given, **more}.items()}
    return Case("DropoutGrad", name, inputs, ("dx",))
