"""Questions to Scale.

For float64, only scales whose inverse is exact in float32: ONNX Runtime rounds any scale, and its inverse, to float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.dtypes import Array
from service.errors import InvalidTensor
from tests.golden.store import Case
from tests.golden.values import generator, special

SHAPES = [(), (1,), (5,), (2, 3), (2, 3, 4), (0,), (2, 0, 3)]
SCALES = [("float32", 3.0), ("float64", -0.3), ("int32", 7), ("int64", -3), ("float16", 0.1)]
SPECIAL = [-3.0, 1e-45, 1e-38, 3e38, np.inf, np.nan]

REASONS = {
    r"Scale value must not be 0": InvalidTensor,  # asked with scale_down only: ONNX Runtime always refuses it
    r"Scale input should have a single value": InvalidTensor,
}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for down in (0, 1):
        for shape in SHAPES:
            name = f"float32-{list(shape)}-down={down}"
            yield _case(name, _random(name, shape, "float32"), np.array(3, np.float32), down)
        for dtype in ("float32", "float64", "float16"):
            for kind, scale in SCALES:
                name = f"{dtype}-by-{kind}-down={down}"
                given = np.array([4 if dtype == "float64" else scale], kind)
                yield _case(name, _random(name, (2, 5), dtype), given, down)
        for one in SPECIAL:
            values = special(np.float32)
            yield _case(f"float32-special-{one}-down={down}", values, np.array(one, np.float32), down)
        yield _case(f"refused-shape-two-down={down}", np.ones(3, np.float32), np.ones(2, np.float32), down)
        yield _case(f"refused-shape-none-down={down}", np.ones(3, np.float32), np.ones(0, np.float32), down)
    yield _case("refused-zero", np.ones(3, np.float32), np.array(0, np.float32), 1)


def _random(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    return np.asarray(generator("Scale", name).normal(size=shape), dtype)


def _case(name: str, values: Array, scale: Array, down: int) -> Case:
    return Case("Scale", name, {"input": values, "scale": scale}, ("output",), {"scale_down": down})
