"""Ask PyTorch for the gradients of average pools, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from service.dtypes import Array

POOLS: Any = (None, functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, name -> array. The pads of both sides must be alike, as PyTorch's are."""
    torch.set_num_threads(1)
    X = torch.zeros(inputs["shape"].tolist(), dtype=torch.float64, requires_grad=True)
    rank = X.ndim - 2
    pads = attributes["pads"]
    assert operator == "AveragePoolGrad"
    assert pads[:rank] == pads[rank:]
    include = bool(attributes.get("count_include_pad", 0))
    pool = POOLS[rank]
    Y = pool(X, attributes["kernel_shape"], attributes["strides"], pads[:rank], count_include_pad=include)
    Y.backward(torch.tensor(inputs["dY"].astype(np.float64)))
    assert X.grad is not None
    return {"dX": X.grad.numpy()}
