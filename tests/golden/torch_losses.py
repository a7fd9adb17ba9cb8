"""Ask PyTorch for cross-entropy losses and gradients where ONNX Runtime is wrong or ends. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from service.dtypes import Array
from tests.golden.questions.losses import NAMES


def run(operator: str, inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """The outputs by name, of operators whose log_prob is that of the scores: it is its own log_softmax."""
    torch.set_num_threads(1)
    names = NAMES[operator]
    scores = torch.tensor(inputs[names[0]], requires_grad=True)
    weight = torch.tensor(inputs[names[2]]) if names[2] in inputs else None
    ignored = int(inputs.get("ignore_index", attributes.get("ignore_index", -1)))
    loss = cross_entropy(
        scores, torch.tensor(inputs[names[1]]), weight, ignore_index=ignored, reduction=attributes["reduction"]
    )
    if not operator.endswith("Grad"):
        log_prob = torch.log_softmax(scores, 1).detach().numpy()
        return {"output": loss.detach().numpy(), "Y": loss.detach().numpy(), "log_prob": log_prob}
    loss.backward(torch.tensor(inputs["dY"]))
    assert scores.grad is not None
    return {"d_logits": scores.grad.numpy()}
