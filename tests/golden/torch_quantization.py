"""PyTorch's fake quantization, whose numbers are clipped before they become integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """output and mask, name -> array."""
    scale, zero_point = float(inputs["scale"].item()), int(inputs["zero_point"].item())
    bounds = attributes.get("quant_min", 0), attributes.get("quant_max", 255)
    x = torch.from_numpy(inputs["input"].astype("float64"))
    q = torch.clamp(torch.round(x / scale) + zero_point, *bounds)
    mask = torch.round(x / scale) + zero_point == q
    return {"output": ((q - zero_point) * scale).numpy(), "mask": mask.numpy()}
