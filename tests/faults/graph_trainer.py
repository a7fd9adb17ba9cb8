"""A worker that trains a graph. All that it knows when it starts again is its rank, and what the server has."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from service.dtypes import Array
from tests.faults.printing import await_last, write
from tests.faults.servers import Client, tensors

SECONDS = 600.0
"""How long a worker calls a server that is away, and how long a step waits for the others."""

RATE = 0.01

GROUPS = {"weights": "p", "gradients": "g", "momentums_1": "m", "momentums_2": "v"}


class Batch(NamedTuple):
    """A micro-batch: its inputs, its weight, and the seed of its Dropout."""

    inputs: dict[str, Array]
    weight: int
    seed: int


def batch(kind: str, rank: int, step: int, number: int) -> Batch:
    """Return a worker's micro-batch of a step."""
    chance = np.random.default_rng((rank, step, number))
    seed = int(chance.integers(1 << 30))
    if kind == "mlp":
        x = chance.standard_normal((8 * (rank + 1), 32), np.float32)
        return Batch({"x": x, "labels": x[:, :10].argmax(1)}, len(x), seed)
    words = chance.integers(0, 50, (5, 3))
    return Batch({"input0": words, "labels": words.ravel() % 7}, 1, seed)


def train(url: str, kind: str, workers: int, batches: int, steps: int) -> None:
    """Train as this rank until all steps are done."""
    rank = int(os.environ["RANK"])
    with Client(url, patience=SECONDS) as client:
        while (step := steps_of(client)) < steps:
            write(f"epoch {step}")
            await_last(step, steps)
            for number in range(batches):
                forward_backward(client, kind, rank, step, number)
            optim_step(client, step)


def steps_of(client: Client) -> int:
    """Return the count of steps that are done: each writes the parameters once."""
    found = client.done("GET", "/v1/buffers", params={"prefix": "run.p.", "limit": 1})
    return int(found["buffers"][0]["version"]) - 1


def forward_backward(client: Client, kind: str, rank: int, step: int, number: int) -> None:
    made = batch(kind, rank, step, number)
    into = ["gradients:run.g.*", "loss:run.loss"]
    query = {"from": "parameters:run.p.*", "into": into, "weight": made.weight, "epoch": step}
    query |= {"contributor": f"rank{rank}"} | ({"seed": made.seed} if kind == "mlp" else {})
    write(f"batch {number}")
    key = f"{rank}, {step}, {number}"
    client.done("POST", f"/v1/graphs/{kind}", key=key, params=query, **tensors(**made.inputs))
    write("counted")


def optim_step(client: Client, step: int) -> None:
    """Ask for the step, as every worker does, and wait for the others' micro-batches."""
    sources = [f"{group}:run.{letter}.*{f'@{step}' * (letter == 'g')}" for group, letter in GROUPS.items()]
    targets = [f"updated_{group}:run.{letter}.*" for group, letter in GROUPS.items() if letter != "g"]
    query: dict[str, Any] = {"from": sources, "set": targets, "reduce": "mean", "timeout": 30}
    body = {"lr": RATE, "step": step + 1}
    write("step")
    while True:
        answer = client.send("POST", "/v1/ops/AdamWOptimizer", key=f"step {step}", params=query, json=body)
        if answer.is_success:
            break
        assert answer.json()["code"] in {"epoch_open", "source_changed"}, answer.text
    write("done")
