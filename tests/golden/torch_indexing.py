"""The gradient of a slice with negative steps: PyTorch flips, and then takes every step-th element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, name -> float64."""
    data = torch.zeros([int(n) for n in inputs["shape"]], dtype=torch.float64, requires_grad=True)
    sliced = data
    for start, end, axis, step in zip(
        *(inputs[name].tolist() for name in ("starts", "ends", "axes", "steps")), strict=True
    ):
        size = data.shape[axis]
        first, last = start + size * (start < 0), end + size * (end < 0)
        if step < 0:  # element k of the flipped axis is element size - 1 - k
            sliced, step = sliced.flip(axis), -step
            first, last = size - 1 - min(max(first, 0), size - 1), size - 1 - min(max(last, -1), size - 1)
        first, last = min(max(first, 0), size), min(max(last, 0), size)
        places = torch.arange(first, max(first, last), step)
        sliced = sliced.index_select(axis, places)
    sliced.backward(torch.from_numpy(inputs["dY"].astype("float64")))
    assert data.grad is not None
    return {"dX": data.grad.numpy()}
