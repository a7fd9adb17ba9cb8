"""A worker without files of its own: the server keeps its run. Gradients are whole numbers, whose sums are exact."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from gradserve_client import Client, arrays
from gradserve_client.torch import GradientAccumulator

from tests.faults.printing import await_gate, print_requests, write

WORKERS = 3

SECONDS = 600.0
"""How long a worker calls a server that is away, and how long a step waits for a worker on a slow machine."""

SHAPES = ((40, 30), (7,))

Array: TypeAlias = np.ndarray[Any, Any]


def gradients(step: int, rank: int) -> list[Array]:
    """Return the gradients of a worker in a step: whole numbers up to 100, some of them negative."""
    chance = np.random.default_rng((step, rank))
    return [chance.integers(-100, 101, shape).astype(np.float32) for shape in SHAPES]


class Torch:
    """Weights in PyTorch, with AdamW."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def begin(self, server: Client, **given: Any) -> Any:
        """Join the run."""
        self.run = GradientAccumulator.from_env(self.model, server, optimizer=self.optimizer, **given)
        return self.run

    def push(self, found: list[Array]) -> None:
        """Push these gradients."""
        for parameter, one in zip(self.model, found, strict=True):
            parameter.grad = torch.from_numpy(one)
        self.run.push()

    def pull(self) -> None:
        """Take the step with the mean."""
        self.run.pull()
        self.step()

    def alone(self, mean: list[Array]) -> None:
        """Take the step with this mean."""
        for parameter, one in zip(self.model, mean, strict=True):
            parameter.grad = torch.from_numpy(one)
        self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Array]:
        """Return the weights."""
        return [one.detach().numpy() for one in self.model]


class NumPy:
    """Weights in NumPy, with a momentum that the program keeps."""

    def __init__(self) -> None:
        self.state = {name: [np.zeros(shape, np.float32) for shape in SHAPES] for name in ("weights", "momentum")}

    def begin(self, server: Client, **given: Any) -> Any:
        """Join the run."""
        model = self.state["weights"]
        self.run = arrays.GradientAccumulator.from_env(model, server, optimizer=self.state, **given)
        return self.run

    def push(self, found: list[Array]) -> None:
        """Push these gradients."""
        self.run.push(found)

    def pull(self) -> None:
        """Take the step with the mean."""
        self.alone(self.run.pull())

    def alone(self, mean: list[Array]) -> None:
        """Take the step with this mean."""
        rate, decay = np.float32(0.01), np.float32(0.9)
        self.state["momentum"] = [decay * old + one for old, one in zip(self.state["momentum"], mean, strict=True)]
        self.state["weights"] = [
            old - rate * one for old, one in zip(self.state["weights"], self.state["momentum"], strict=True)
        ]

    def weights(self) -> list[Array]:
        """Return the weights."""
        return self.state["weights"]


KINDS: dict[str, Callable[[], Torch | NumPy]] = {"torch": Torch, "numpy": NumPy}


def reference(kind: str, steps: int) -> list[Array]:
    """Return the weights that one process comes to with the means of all workers' gradients."""
    training = KINDS[kind]()
    for step in range(steps):
        each = [gradients(step, rank) for rank in range(WORKERS)]
        training.alone([(a + b + c) / np.float32(WORKERS) for a, b, c in zip(*each, strict=True)])
    return training.weights()


def train(url: str, kind: str, steps: int) -> None:
    """Train as this rank. Write a line for each step and request, and the weights in the end."""
    print_requests()
    rank = int(os.environ["RANK"])
    training = KINDS[kind]()
    with (
        Client(url, timeout=SECONDS) as server,
        training.begin(server, run="run", deadline_seconds=SECONDS, timeout=SECONDS, state_every=3) as run,
    ):
        while run.step < steps:
            write(f"step {run.step}")
            await_gate(run.step)
            training.push(gradients(run.step, rank))
            training.pull()
        np.savez(f"rank{rank}.npz", *training.weights())
