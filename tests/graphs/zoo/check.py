"""What a server computes for a model of the zoo, against PyTorch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gradserve_client import Client
from gradserve_client.graph_models import GraphInfo
from torch import Tensor
from torch.nn import functional as F

from service.dtypes import Array
from tests.graphs.zoo.example import Example
from tests.graphs.zoo.exports import EXPORTED

LOSSES: dict[str, Callable[..., Any]] = {
    "SoftmaxCrossEntropyLoss": F.cross_entropy,
    "NegativeLogLikelihoodLoss": F.nll_loss,
    "MSELoss": F.mse_loss,
    "L1Loss": F.l1_loss,
    "BCEWithLogitsLoss": F.binary_cross_entropy_with_logits,
}

TOLERANCE = 1e-4
"""How far a gradient may be from that in float64, in parts of its largest element."""

BATCHES = (EXPORTED, 3, 6)
"""The samples of the batches of the steps."""

LR, EPSILON, WEIGHT_DECAY = 0.01, 1e-3, 0.01


class Reference:
    """The module of an example in float64, and its parameters that are trained."""

    def __init__(self, example: Example) -> None:
        self.example, self.net = example, copy.deepcopy(example.net()).double()
        self.trained = {name: one for name, one in self.net.named_parameters() if one.requires_grad}

    def loss(self, batch: int) -> Tensor:
        """Compute the loss of a batch, and the gradients of the parameters."""
        self.net.zero_grad()
        tensors = {k: v.double() if v.is_floating_point() else v for k, v in self.example.tensors(batch).items()}
        loss = self.net(*(tensors[name] for name in self.example.given))
        if self.example.target is not None:
            loss = LOSSES[self.example.loss](loss, tensors[self.example.target])
        loss.backward()
        return loss.detach()

    def gradients(self) -> dict[str, Array]:
        """Return the gradients of the parameters that the loss depends on."""
        return {name: one.grad.numpy().copy() for name, one in self.trained.items() if one.grad is not None}

    def named(self, info: GraphInfo) -> dict[str, str]:
        """Return the name in the module of each parameter of the graph. One that several share has its first name."""
        names = {id(one): name for name, one in self.trained.items()}
        found = self.net.named_parameters(remove_duplicate=False)
        own = {name: names[id(one)] for name, one in found if id(one) in names}
        return {name: own.get(name, f"no parameter: {name}") for name in info.parameters}


def put(client: Client, example: Example, form: str, content: bytes) -> GraphInfo:
    """Upload an export of the model. Raises `InvalidInput` for one that the server refuses."""
    return client.graphs.put(example.name, content, loss=example.loss, train=example.train.get(form))


def worst_error(client: Client, example: Example, info: GraphInfo) -> float:
    """Return the largest relative error of losses and gradients, after three steps of AdamW have been right, too.

    Raises `AssertionError` for wrong numbers.
    """
    right, graph = Reference(example), client.graphs[example.name]
    names = right.named(info)
    errors: dict[str, float] = {}
    for batch in BATCHES[:2]:
        loss, expected = right.loss(batch).numpy(), right.gradients()
        assert sorted(names.values()) == sorted(expected), f"the parameters are {[*names]}, not {[*expected]}"
        got = graph.run(sent(example, batch), outputs=["loss", "gradients"])
        named = {names[name]: got[f"gradients.{name}"] for name in names}
        errors |= {f"{key} of {batch}": one for key, one in relative(named, expected).items()}
        errors[f"loss of {batch}"] = float(abs(got["loss"] - loss) / max(abs(loss), 1e-3))
    wrong = {name: one for name, one in errors.items() if not one <= TOLERANCE}
    assert not wrong, wrong
    check_steps(client, right, info, names)
    return max(errors.values())


def relative(got: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, float]:
    """Return the largest error of each gradient, in parts of its largest element.

    A gradient that is zero but for rounding counts in parts of the largest of all.
    """
    scales = {name: np.abs(one).max() for name, one in expected.items()}
    largest = max(scales.values())
    return {
        name: float(np.abs(got[name] - one).max() / (scales[name] if scales[name] > 1e-9 * largest else largest))
        for name, one in expected.items()
    }


def check_steps(client: Client, right: Reference, info: GraphInfo, names: Mapping[str, str]) -> None:
    """Compare the losses and the parameters of three steps of AdamW."""
    optimizer = torch.optim.AdamW(right.trained.values(), lr=LR, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    model = client.graphs[info.name].join(f"{info.name}-run", worker="w0")
    for number, batch in enumerate(BATCHES, 1):
        loss = right.loss(batch).item()
        optimizer.step()
        found = model.forward_backward(sent(right.example, batch), weight=batch)
        assert found.loss is not None
        assert abs(found.loss - loss) <= TOLERANCE * max(abs(loss), 1e-3), (number, found.loss, loss)
        model.optim_step(lr=LR, epsilon=EPSILON, weight_decay=WEIGHT_DECAY)
        for name, value in model.parameters().items():
            expected = right.trained[names[name]].detach().numpy()
            np.testing.assert_allclose(value, expected, rtol=3e-7, atol=1e-3 * LR * number, err_msg=name)


def sent(example: Example, batch: int) -> dict[str, Any]:
    """Return the tensors of a request."""
    return {name: one.numpy() for name, one in example.tensors(batch).items()}


def delete(client: Client, name: str) -> None:
    """Delete a graph with its run."""
    for run in client.runs.list():
        client.runs.delete(run.name)
    client.graphs[name].delete()
