"""Questions to FakeQuant and its gradient. PyTorch answers for numbers that overflow ONNX Runtime's integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from service.errors import InvalidTensor
from tests.golden.store import Case
from tests.golden.values import generator

SETTINGS: list[tuple[float, float, dict[str, int]]] = [
    (0.1, 0.0, {}),
    (0.05, 128.0, {}),
    (0.25, 3.9, {"quant_min": -8, "quant_max": 7}),
    (2.0, -2.7, {"quant_min": -128, "quant_max": 127}),
    (1e-3, 0.0, {"quant_min": 0, "quant_max": 0}),
]

REASONS = {"refused-scale": InvalidTensor}


def ask() -> Iterator[Case]:
    """All questions of this module."""
    x = np.concatenate([generator("FakeQuant").normal(size=200) * 5, np.arange(-20, 20) * 0.125]).astype(np.float32)
    for scale, zero_point, attributes in SETTINGS:
        yield _quant(f"scale={scale}-zero={zero_point}", x, scale, zero_point, attributes)
    large = np.array([1e30, -1e30, np.inf, -np.inf, 3e18], np.float32)
    inputs = {"input": large, "scale": np.array(0.5, np.float32), "zero_point": np.array(10.0, np.float32)}
    yield Case("FakeQuant", "large", inputs, ("output", "mask"), source="torch")
    yield _quant("refused-scale", x, 0.0, 0.0, {})
    dY = x[:40].reshape(5, 8)
    masked = {"dY": np.abs(dY), "gradient_mask": dY > 0}
    yield Case("FakeQuantGrad", "matrix", masked, ("dX",))


def _quant(name: str, x: Any, scale: float, zero_point: float, attributes: dict[str, int]) -> Case:
    inputs = {"input": x, "scale": np.array([scale], np.float32), "zero_point": np.array([zero_point], np.float32)}
    return Case("FakeQuant", name, inputs, ("output", "mask"), attributes)
