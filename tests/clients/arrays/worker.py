"""A worker that `test_kills` kills and starts again.

`python -m tests.clients.arrays.worker URL RANK DIRECTORY`
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gradserve_client import Client
from gradserve_client.arrays import GradientAccumulator

WORKERS, MICRO_BATCHES, STEPS = 3, 2, 40
WEIGHT = 12
"""The weights of all pushes of a step."""


def weight(rank: int) -> int:
    return rank + 1


def initial() -> dict[str, Any]:
    return {"w": np.arange(300.0), "b": [np.ones(()), None]}


def gradient(params: dict[str, Any], rank: int, step: int, number: int) -> dict[str, Any]:
    """Return whole numbers, whose sums are exact in any order, and which depend on all that was before."""
    seed = 13 * rank + 5 * step + number
    return {"w": (params["w"] * 7 + seed) % 101, "b": [(params["b"][0] * 3 + seed) % 11 if number else None, None]}


def stepped(params: dict[str, Any], total: dict[str, Any]) -> dict[str, Any]:
    return {"w": (params["w"] - total["w"]) % 1009, "b": [(params["b"][0] - total["b"][0]) % 1009, None]}


def loss(params: dict[str, Any], rank: int, step: int, number: int) -> float:
    """Return a whole number, too."""
    return float((params["w"].sum() + 17 * rank + 3 * step + number) % 997)


def reference() -> tuple[dict[str, Any], list[float]]:
    """Return what one process makes of the gradients of all, and the mean loss of each step."""
    params, losses = initial(), []
    pushes = [(rank, number) for rank in range(WORKERS) for number in range(MICRO_BATCHES)]
    for step in range(STEPS):
        losses.append(sum(weight(rank) * loss(params, rank, step, n) for rank, n in pushes) / WEIGHT)
        found = [(weight(rank), gradient(params, rank, step, n)) for rank, n in pushes]
        alone = [size * one["b"][0] for size, one in found if one["b"][0] is not None]
        params = stepped(params, {"w": sum(size * one["w"] for size, one in found), "b": [sum(alone)]})
    return params, losses


def main(url: str, rank: int, directory: Path) -> None:
    checkpoint = directory / f"checkpoint{rank}"

    def save() -> None:
        part = checkpoint.with_suffix(".part")
        part.write_bytes(pickle.dumps((params, losses, gradients.state_dict())))
        os.replace(part, checkpoint)

    with Client(url) as server:
        params, losses, state = pickle.loads(checkpoint.read_bytes()) if checkpoint.exists() else (initial(), [], None)
        rules: Any = {"quorum": WORKERS * MICRO_BATCHES, "reduce": "sum", "loss": True}
        gradients = GradientAccumulator(params, server, run="killed", worker=f"rank{rank}", request_bytes=1000, **rules)
        if state is None:
            save()
        else:
            gradients.load_state_dict(state)
        for step in range(len(losses), STEPS):
            for number in range(MICRO_BATCHES):
                its = loss(params, rank, step, number)
                gradients.push(gradient(params, rank, step, number), weight=weight(rank), loss=its, wait=step % 2 == 0)
            params = stepped(params, gradients.pull())
            assert gradients.pulled is not None
            losses.append(gradients.pulled.loss)
            save()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
