"""A worker that trains a graph. All that it knows when it starts again is its rank, and what the server has."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from gradserve_client import Client

from tests.faults.printing import await_gate, print_requests, write

SECONDS = 600.0
"""How long a worker calls a server that is away, and how long a step waits for the others."""

RATE = 0.001
"""The learning rate. With 0.01, another order of the sums alone changes a weight of 4 by up to 1e-6 in 200 steps."""

EPSILON = 1e-4
"""AdamW's epsilon. With 1e-8, another order of the sums alone changes one run of 130 by more than 1e-6."""

WEIGHTS = "weights.safetensors"
"""The file of the weights of a model that has none itself."""


class Batch(NamedTuple):
    """A micro-batch: its inputs and its weight."""

    inputs: dict[str, Any]
    weight: int


def batch(kind: str, rank: int, step: int, number: int) -> Batch:
    """Return a worker's micro-batch of a step."""
    chance = np.random.default_rng((rank, step, number))
    if kind == "mlp":
        x = chance.standard_normal((8 * (rank + 1), 32), np.float32)
        return Batch({"x": x, "labels": x[:, :10].argmax(1)}, len(x))
    words = chance.integers(0, 50, (5, 3))
    return Batch({"input0": words, "labels": words.ravel() % 7}, 1)


def train(url: str, kind: str, workers: int, batches: int, steps: int) -> None:
    """Train as this rank until all steps are done. The first to come uploads the graph and begins the run."""
    print_requests()
    rank = int(os.environ["RANK"])
    with Client(url, timeout=SECONDS) as server:
        server.graphs.put(kind, f"{kind}.onnx", loss="SoftmaxCrossEntropyLoss" if kind == "mlp" else None)
        quorum = workers * batches if workers > 1 else None  # a single worker closes its steps itself
        rules: dict[str, Any] = {"quorum": quorum, "per_contributor": batches, "keep": steps}
        model = server.graphs[kind].join("run", worker=f"rank{rank}", timeout=SECONDS, **rules)
        model.start(None if kind == "mlp" else WEIGHTS)
        while model.step < steps:
            write(f"step {model.step}")
            await_gate(model.step)
            for number in range(batches):
                made = batch(kind, rank, model.step, number)
                assert model.forward_backward(made.inputs, weight=made.weight).counted
            step = model.optim_step(lr=RATE, epsilon=EPSILON)
            assert step.contributors == {f"rank{one}": batches for one in range(workers)}
