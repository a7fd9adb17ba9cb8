"""PyTorch's optimizers and clipping, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from service.dtypes import Array


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs of AdamWOptimizer or InplaceClipGradNorm, name -> float64."""
    groups: dict[str, dict[str, Array]] = {}
    for name, array in inputs.items():
        group, _, member = name.partition(".")
        groups.setdefault(group, {})[member] = array
    return _adamw(groups, attributes) if operator == "AdamWOptimizer" else _clipped(groups["gradients"], attributes)


def _parameters(group: Mapping[str, Array]) -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in group.items()}


def _adamw(groups: Mapping[str, Mapping[str, Array]], attributes: Mapping[str, Any]) -> dict[str, Array]:
    weights = _parameters(groups["weights"])
    given = {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 0.01, **attributes}
    optimizer = torch.optim.AdamW(
        weights.values(),
        lr=float(groups["lr"][""].item()),
        betas=(given["alpha"], given["beta"]),
        eps=given["epsilon"],
        weight_decay=given["weight_decay"],
    )
    for name, weight in weights.items():
        weight.grad = torch.from_numpy(groups["gradients"][name].copy())
        optimizer.state[weight] = {
            "step": torch.tensor(float(groups["step"][""].item()) - 1),
            "exp_avg": torch.from_numpy(groups["momentums_1"][name].copy()),
            "exp_avg_sq": torch.from_numpy(groups["momentums_2"][name].copy()),
        }
    optimizer.step()
    outputs = {}
    for name, weight in weights.items():
        outputs[f"updated_weights.{name}"] = weight.detach().numpy()
        outputs[f"updated_momentums_1.{name}"] = optimizer.state[weight]["exp_avg"].numpy()
        outputs[f"updated_momentums_2.{name}"] = optimizer.state[weight]["exp_avg_sq"].numpy()
    return outputs


def _clipped(gradients: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    parameters = _parameters(gradients)
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradients[name].copy())
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), attributes.get("max_norm", 1.0))
    clipped = {
        f"clipped_gradients.{name}": one.grad.numpy() for name, one in parameters.items() if one.grad is not None
    }
    return {**clipped, "total_norm": norm.numpy()}
