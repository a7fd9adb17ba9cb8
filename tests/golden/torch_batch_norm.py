"""Ask PyTorch for batch normalization and its gradient, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs, name -> array. PyTorch's running variance is the unbiased one, so the others follow from it."""
    torch.set_num_threads(1)
    given = {name: torch.tensor(array.astype(np.float64)) for name, array in inputs.items()}
    if operator == "BatchNormInternal":
        return forward(given)
    X, scale = given["X"].requires_grad_(), given["scale"].requires_grad_()
    bias = torch.zeros_like(scale, requires_grad=True)
    functional.batch_norm(X, None, None, scale, bias, training=True, eps=1e-5).backward(given["dY"])
    names = {"X_grad": X, "scale_grad": scale, "bias_grad": bias}
    return {name: one.grad.numpy() for name, one in names.items() if one.grad is not None}


def forward(given: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """BatchNormInternal with epsilon 1e-5 and momentum 0.9."""
    X, mean, variance = given["X"], given["input_mean"].clone(), given["input_var"].clone()
    old = variance.clone()
    Y = functional.batch_norm(X, mean, variance, given["scale"], given["B"], training=True, momentum=1 - 0.9, eps=1e-5)
    count = X.numel() // X.shape[1]
    population = (variance - 0.9 * old) / (1 - 0.9) * (count - 1) / count
    outputs = {"Y": Y, "running_mean": mean, "running_var": 0.9 * old + (1 - 0.9) * population}
    outputs |= {"saved_mean": (mean - 0.9 * given["input_mean"]) / (1 - 0.9)}
    outputs |= {"saved_inv_std": 1 / torch.sqrt(population + 1e-5)}
    return {name: one.numpy() for name, one in outputs.items()}
