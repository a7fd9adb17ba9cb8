"""Ask PyTorch for gradients of activations whose kernel ONNX Runtime lacks, or lacks for float64. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from service.dtypes import Array


def quick_gelu(X: torch.Tensor, alpha: float = 1.702) -> torch.Tensor:
    return X * torch.sigmoid(alpha * X)


FORWARD: dict[str, Callable[..., torch.Tensor]] = {"QuickGeluGrad": quick_gelu}
"""The forward function of each operator, whose gradient is the answer. It takes X and the operator's attributes."""


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, name -> array."""
    torch.set_num_threads(1)
    X = torch.tensor(inputs["X"], requires_grad=True)
    FORWARD[operator](X, **attributes).backward(torch.tensor(inputs["dY"]))
    assert X.grad is not None
    return {"dX": X.grad.numpy()}
