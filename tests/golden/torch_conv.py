"""Ask PyTorch for the gradients of convolutions, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from service.dtypes import Array

CONV: Any = (None, functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSED: Any = (None, functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """dX, dW and dB, name -> array."""
    torch.set_num_threads(1)
    dY, X, W = (torch.tensor(inputs[name].astype(np.float64), requires_grad=name != "dY") for name in ("dY", "X", "W"))
    B = torch.zeros(dY.shape[1], dtype=torch.float64, requires_grad=True)
    forward = transposed if operator == "ConvTransposeGrad" else conv
    rank = X.ndim - 2
    lists = {"strides": [1] * rank, "dilations": [1] * rank, "pads": [0] * 2 * rank, "group": 1, "auto_pad": "NOTSET"}
    forward(X, W, B, list(dY.shape[2:]), **{**lists, **attributes}).backward(dY)
    return {name: one.grad.numpy() for name, one in {"dX": X, "dW": W, "dB": B}.items() if one.grad is not None}


def conv(
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor,
    counts: Sequence[int],
    *,
    strides: list[int],
    dilations: list[int],
    pads: list[int],
    group: int,
    auto_pad: str,
    kernel_shape: object = None,
) -> torch.Tensor:
    """Conv, with the padding of SAME_* as ONNX has it."""
    rank = X.ndim - 2
    if auto_pad.startswith("SAME"):
        axes = zip(counts, strides, W.shape[2:], dilations, X.shape[2:], strict=True)
        totals = [(count - 1) * stride + (k - 1) * dilation + 1 - size for count, stride, k, dilation, size in axes]
        begins = [int((total + (auto_pad == "SAME_LOWER")) / 2) for total in totals]
        pads = begins + [total - begin for total, begin in zip(totals, begins, strict=True)]
    around = [pads[axis + side] for axis in reversed(range(rank)) for side in (0, rank)]
    return CONV[rank](functional.pad(X, around), W, B, stride=strides, dilation=dilations, groups=group)


def transposed(
    X: torch.Tensor,
    W: torch.Tensor,
    B: torch.Tensor,
    _: Sequence[int],
    *,
    strides: list[int],
    dilations: list[int],
    pads: list[int],
    output_padding: list[int],
    group: int,
    auto_pad: str,
) -> torch.Tensor:
    """ConvTranspose. PyTorch pads both sides alike, so the pads are cut off the whole output."""
    rank = X.ndim - 2
    more = [0] * rank
    whole = TRANSPOSED[rank](X, W, None, stride=strides, dilation=dilations, groups=group, output_padding=more)
    ends = [extra - end for extra, end in zip(output_padding, pads[rank:], strict=True)]
    around = [by for axis in reversed(range(rank)) for by in (-pads[axis], ends[axis])]
    return functional.pad(whole, around) + B.reshape(-1, *[1] * rank)
