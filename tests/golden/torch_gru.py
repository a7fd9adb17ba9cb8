"""Run torch.nn.GRU forward and backward on inputs of GRUTraining and GRUGrad, in float64. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from service.dtypes import Array

SUFFIXES = ("", "_reverse")
"""Of the parameters of each direction."""


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, object]) -> dict[str, Array]:
    """HAll and HFinal, and the gradients of X, W and R, and of B and H0 where there, in ONNX's layout.

    The gradients are those of sum(HAll * grad_HAll) + sum(HFinal * grad_Ht). Beyond a sequence's length HAll is zero.
    """
    torch.set_num_threads(1)  # every sum has one order
    X, R = inputs["X"], inputs["R"]
    I, (D, _, H) = X.shape[2], R.shape  # noqa: E741
    bias_halves = np.split(inputs["B"], 2, axis=1) if "B" in inputs else ()
    halves = dict(zip(("bias_ih", "bias_hh"), bias_halves, strict=False))
    module = torch.nn.GRU(I, H, bias=bool(halves), bidirectional=D == 2, dtype=torch.float64)
    parameters = {"weight_ih": inputs["W"], "weight_hh": R, **halves}
    module.load_state_dict(
        {
            f"{name}_l0{SUFFIXES[d]}": torch.tensor(of_direction)
            for name, array in parameters.items()
            for d, of_direction in enumerate(_turned(array))
        }
    )
    starts = {name: torch.tensor(inputs[name], requires_grad=True) for name in ("X", "H0") if name in inputs}
    steps, H0 = starts["X"], starts.get("H0")
    HAll, HFinal = through_time(module, steps, H0, inputs)
    torch.autograd.backward([HAll, HFinal], [torch.tensor(inputs[name]) for name in ("grad_HAll", "grad_Ht")])

    def gradient(name: str) -> Array:
        return _turned(np.stack([module.get_parameter(f"{name}_l0{suffix}").grad for suffix in SUFFIXES[:D]]))

    answers = {"HAll": HAll.detach().numpy(), "HFinal": HFinal.detach().numpy()}
    answers |= {"dW": gradient("weight_ih"), "dR": gradient("weight_hh")}
    answers |= {"dB": np.concatenate([gradient(name) for name in halves], axis=1)} if halves else {}
    return answers | {f"d{name}": start.grad.numpy() for name, start in starts.items()}


def through_time(module: torch.nn.RNNBase, X: Any, start: Any, inputs: Mapping[str, Array]) -> tuple[Any, Any]:
    """HAll, and what the module returns as the final states, with the lengths of SL if there."""
    if "SL" not in inputs:
        states, finals = module(X, start)
    else:
        packed = pack_padded_sequence(X, torch.tensor(inputs["SL"]), enforce_sorted=False)
        states, finals = module(packed, start)
        states, _ = pad_packed_sequence(states, total_length=len(X))
    return states.unflatten(2, (-1, module.hidden_size)).transpose(1, 2), finals


def _turned(parameter: Array) -> Array:
    """[D, 3H, ...] with PyTorch's order of the gates, r, z, n, for ONNX's, z, r, h, or the other way round."""
    first, second, candidate = np.split(parameter, 3, axis=1)
    return np.concatenate([second, first, candidate], axis=1)
