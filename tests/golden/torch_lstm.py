"""Run torch.nn.LSTM forward and backward on inputs of LSTMTraining and LSTMGrad, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from service.dtypes import Array
from tests.golden.torch_gru import SUFFIXES, through_time

TO_TORCH, TO_ONNX = (0, 2, 3, 1), (0, 3, 1, 2)
"""ONNX's order of the gates is i, o, f, c, and PyTorch's is i, f, c, o."""


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """HAll, HFinal and CFinal, and the gradients of X, W, R, and of B and the starts where there, in ONNX's layout.

    The gradients are those of sum(HAll * dHAll) + sum(HFinal * dHFinal) + sum(CFinal * dCFinal). Beyond a sequence's
    length HAll is zero.
    """
    torch.set_num_threads(1)  # every sum has one order
    X, R = inputs["X"], inputs["R"]
    I, (D, _, H) = X.shape[2], R.shape  # noqa: E741
    biases = np.split(inputs["B"], 2, axis=1) if "B" in inputs else ()
    parameters = {"weight_ih": inputs["W"], "weight_hh": R, **dict(zip(("bias_ih", "bias_hh"), biases, strict=False))}
    module = torch.nn.LSTM(I, H, bias="B" in inputs, bidirectional=D == 2, dtype=torch.float64)
    module.load_state_dict(
        {
            f"{name}_l0{SUFFIXES[d]}": torch.tensor(of_direction)
            for name, array in parameters.items()
            for d, of_direction in enumerate(_turned(array, TO_TORCH))
        }
    )
    leaves = {name: torch.tensor(inputs[name], requires_grad=True) for name in ("X", "Ht0", "Ct0") if name in inputs}
    steps, start = leaves["X"], (leaves["Ht0"], leaves["Ct0"]) if "Ht0" in leaves else None
    HAll, finals = through_time(module, steps, start, inputs)
    made = [HAll, *finals]
    torch.autograd.backward(made, [torch.tensor(inputs[name]) for name in ("dHAll", "dHFinal", "dCFinal")])
    answers = dict(zip(("HAll", "HFinal", "CFinal"), (one.detach().numpy() for one in made), strict=True))
    slopes = {
        name: _turned(np.stack([module.get_parameter(f"{name}_l0{end}").grad for end in SUFFIXES[:D]]), TO_ONNX)
        for name in parameters
    }
    answers |= {"dW": slopes["weight_ih"], "dR": slopes["weight_hh"]}
    answers |= {"dB": np.concatenate([slopes["bias_ih"], slopes["bias_hh"]], axis=1)} if biases else {}
    return answers | {f"d{name.replace('t', '')}": leaf.grad.numpy() for name, leaf in leaves.items()}


def _turned(parameter: Array, order: Sequence[int]) -> Array:
    """[D, 4H, ...] with its four blocks in another order."""
    blocks = np.split(parameter, 4, axis=1)
    return np.concatenate([blocks[k] for k in order], axis=1)
