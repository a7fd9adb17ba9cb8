"""Ask PyTorch to put padding back. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """The output, name -> array."""
    assert operator == "PadAndUnflatten"
    assert not attributes
    given, indices, dims = (torch.tensor(inputs[name]) for name in ("input", "indices", "unflatten_dims"))
    rows = torch.zeros(int(dims.prod()), *given.shape[1:]).index_copy(0, indices, given)
    return {"output": rows.reshape(*dims.tolist(), *given.shape[1:]).double().numpy()}
