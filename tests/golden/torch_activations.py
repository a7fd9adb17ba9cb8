"""Ask PyTorch for gradients of activations whose kernel ONNX Runtime lacks, or lacks for float64. Needs torch.

The numbers are common ones: PyTorch sums products in its own order, where infinities may cancel that do not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from service.dtypes import Array
from tests.golden.store import Case
from tests.golden.values import generator

SHAPES = [(), (7,), (2, 3, 4), (0, 3), (11, 19)]


def quick_gelu(X: torch.Tensor, alpha: float = 1.702) -> torch.Tensor:
    return X * torch.sigmoid(alpha * X)


FORWARD: dict[str, Callable[..., torch.Tensor]] = {"QuickGeluGrad": quick_gelu}
"""The forward function of each operator, whose gradient is the answer. It takes X and the operator's attributes."""

ATTRIBUTES: dict[str, list[dict[str, float]]] = {"QuickGeluGrad": [{}, {"alpha": 1.0}, {"alpha": -0.5}]}
"""The attributes to ask with, if the operator has any."""


def ask() -> Iterator[Case]:
    """All questions of this module."""
    for operator in FORWARD:
        for attributes in ATTRIBUTES.get(operator, [{}]):
            named = "".join(f"-{name}={value}" for name, value in attributes.items())
            for dtype in ("float32", "float64"):
                for shape in SHAPES:
                    yield _case(operator, f"{dtype}-{list(shape)}{named}", shape, dtype, attributes)


def _case(operator: str, name: str, shape: tuple[int, ...], dtype: str, attributes: Mapping[str, float]) -> Case:
    random = generator("torch", operator, name)
    dY, X = random.normal(size=shape), random.normal(0, 3, shape)
    return Case(operator, name, {"dY": np.asarray(dY, dtype), "X": np.asarray(X, dtype)}, ("dX",), attributes)


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, name -> array."""
    torch.set_num_threads(1)
    X = torch.tensor(inputs["X"], requires_grad=True)
    FORWARD[operator](X, **attributes).backward(torch.tensor(inputs["dY"]))
    assert X.grad is not None
    return {"dX": X.grad.numpy()}
