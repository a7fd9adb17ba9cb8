"""A worker that trains by gradients of whole numbers: float32 sums of them are exact in any order."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from tests.faults.printing import await_gate, print_requests, write

WORKERS = 3
COLUMNS = 256
PERIOD = 251
WEIGHTS = range(1, WORKERS + 1)
"""The weight of each rank's pushes."""

SECONDS = 600.0
"""How long a worker calls a server that is away, and how long a step waits for a worker on a slow machine."""

Gradients = list[torch.Tensor]


class Training:
    """A model with zeros as weights, its optimizer, and its gradients."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self._places = [places(shape) for shape in shapes]

    def gradients(self, step: int, rank: int) -> Gradients:
        """Return the gradients of a worker in a step: whole numbers below 1000."""
        return [
            (place * (rank + 1.0)).add_((7 * step + 13 * rank + layer) % 101)
            for layer, place in enumerate(self._places)
        ]

    def set(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self.model, gradients, strict=True):
            parameter.grad = gradient

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def shapes_of(megabytes: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model of this size."""
    rows = (megabytes << 20) // 4 // COLUMNS
    return [*((rows * share // 12, COLUMNS) for share in (1, 5, 3, 2, 1)), (7,)]


def places(shape: tuple[int, ...]) -> torch.Tensor:
    """Return each weight's place in its layer, modulo `PERIOD`. Its gradients follow from this and from its layer."""
    return (torch.arange(math.prod(shape), dtype=torch.int32) % PERIOD).view(shape)


def reference(megabytes: int, steps: int) -> dict[str, torch.Tensor]:
    """Return the weights that one process comes to with the weighted means of all workers' gradients.

    It trains a period of each layer.
    """
    shapes = shapes_of(megabytes)
    training = Training([(PERIOD,)] * len(shapes))
    for step in range(steps):
        means = [torch.zeros(PERIOD) for _ in shapes]
        for rank, weight in enumerate(WEIGHTS):
            for mean, gradient in zip(means, training.gradients(step, rank), strict=True):
                mean.add_(gradient, alpha=weight)
        training.set([mean.div_(sum(WEIGHTS)) for mean in means])
        training.step()
    trained = training.model.state_dict()
    return {name: weights[places(shape)] for (name, weights), shape in zip(trained.items(), shapes, strict=True)}


def train(url: str, megabytes: int, part_bytes: int, steps: int) -> None:
    """Train as this rank, from the checkpoint on if there is one. Write a line for each step and request."""
    torch.set_num_threads(1)
    print_requests()
    rank = int(os.environ["RANK"])
    training = Training(shapes_of(megabytes))
    with Client(url, timeout=SECONDS) as server:
        own: dict[str, Any] = {"request_bytes": part_bytes, "deadline_seconds": SECONDS}
        gradients = GradientAccumulator.from_env(training.model, server, run="run", **own)
        load_or_save(f"rank{rank}.pt", training.model, gradients)
        while gradients.step < steps:
            write(f"step {gradients.step}")
            await_gate(gradients.step)
            training.set(training.gradients(gradients.step, rank))
            gradients.push(weight=WEIGHTS[rank])
            assert gradients.pull().contributors == {f"rank{one}": 1 for one in range(WORKERS)}
            training.step()
            save(f"rank{rank}.pt", training.model, gradients)


def load_or_save(path: str, *parts: Any) -> None:
    """Load the states from the checkpoint. Without one, save the first."""
    if not os.path.exists(path):
        save(path, *parts)
        return
    for part, state in zip(parts, torch.load(path), strict=True):
        part.load_state_dict(state)


def save(path: str, *parts: Any) -> None:
    """Save the states at one moment."""
    torch.save([part.state_dict() for part in parts], f"{path}.new")
    os.replace(f"{path}.new", path)
