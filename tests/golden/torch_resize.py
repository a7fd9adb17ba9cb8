"""Ask PyTorch for the gradients of interpolation, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from service.dtypes import Array

LINEAR = ("linear", "bilinear", "trilinear")


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, name -> array."""
    torch.set_num_threads(1)
    assert operator == "ResizeGrad"
    X = torch.tensor(inputs["X"].astype(np.float64), requires_grad=True)
    dY = torch.tensor(inputs["dY"].astype(np.float64))
    modes = {"nearest": "nearest", "cubic": "bicubic", "linear": LINEAR[X.ndim - 3]}
    corners = None
    if attributes["mode"] != "nearest":
        corners = attributes["coordinate_transformation_mode"] == "align_corners"
    functional.interpolate(X, dY.shape[2:], mode=modes[attributes["mode"]], align_corners=corners).backward(dY)
    assert X.grad is not None
    return {"dX": X.grad.numpy()}
