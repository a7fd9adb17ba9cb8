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


def initial() -> dict[str, Any]:
    return {"w": np.arange(300.0), "b": [np.ones(()), None]}


def gradient(params: dict[str, Any], rank: int, step: int, number: int) -> dict[str, Any]:
    """Return whole numbers, whose sums are exact in any order, and which depend on all that was before."""
    seed = 13 * rank + 5 * step + number
    return {"w": (params["w"] * 7 + seed) % 101, "b": [(params["b"][0] * 3 + seed) % 11 if number else None, None]}


def stepped(params: dict[str, Any], total: dict[str, Any]) -> dict[str, Any]:
    return {"w": (params["w"] - total["w"]) % 1009, "b": [(params["b"][0] - total["b"][0]) % 1009, None]}


def reference() -> dict[str, Any]:
    """Return what one process makes of the gradients of all."""
    params = initial()
    for step in range(STEPS):
        all_of = [gradient(params, rank, step, n) for rank in range(WORKERS) for n in range(MICRO_BATCHES)]
        alone = [one["b"][0] for one in all_of if one["b"][0] is not None]
        total = {"w": sum(one["w"] for one in all_of), "b": [sum(alone)]}
        params = stepped(params, total)
    return params


def main(url: str, rank: int, directory: Path) -> None:
    checkpoint = directory / f"checkpoint{rank}"

    def save(params: Any, step: int) -> None:
        part = checkpoint.with_suffix(".part")
        part.write_bytes(pickle.dumps((params, step, gradients.state_dict())))
        os.replace(part, checkpoint)

    with Client(url) as server:
        params, first, state = pickle.loads(checkpoint.read_bytes()) if checkpoint.exists() else (initial(), 0, None)
        quorum = WORKERS * MICRO_BATCHES
        gradients = GradientAccumulator(
            params, server, run="killed", worker=f"rank{rank}", quorum=quorum, reduce="sum", request_bytes=1000
        )
        if state is None:
            save(params, 0)
        else:
            gradients.load_state_dict(state)
        for step in range(first, STEPS):
            for number in range(MICRO_BATCHES):
                gradients.push(gradient(params, rank, step, number), wait=step % 2 == 0)
            params = stepped(params, gradients.pull())
            save(params, step + 1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
