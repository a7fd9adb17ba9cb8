"""Ask PyTorch for GELU's gradients and QuickGelu, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import gelu

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """The operator's output, name -> array."""
    torch.set_num_threads(1)
    given = {name: torch.tensor(array, dtype=torch.float64) for name, array in inputs.items()}
    X = given["X"].requires_grad_()
    if operator == "QuickGelu":
        return {"Y": (X * torch.sigmoid(attributes["alpha"] * X)).detach().numpy()}
    Y = gelu(X + given["B"] if "B" in given else X, approximate="tanh" if "Fast" in operator else "none")
    Y.backward(given["dY"])
    assert X.grad is not None
    return {"dX": X.grad.numpy()}
