"""A worker that `test_graph_kills` kills and starts again: `python -m tests.clients.graph_worker URL RANK STEPS LOG`.

It keeps nothing: `LOG` is for the test, a line for each micro-batch and each step.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gradserve_client import Client

WORKERS, MICRO_BATCHES, RATE = 3, 2, 0.05


def batch(step: int, worker: int, number: int = 0) -> dict[str, Any]:
    """Return a micro-batch that follows from its place."""
    x = np.random.default_rng([step, worker, number]).standard_normal((4, 2)).astype(np.float32)
    return {"x": x, "target": x[:, :1] - 2 * x[:, 1:] + 3}


def main(url: str, rank: int, steps: int, log: str) -> None:
    with Client(url) as server, open(log, "a", buffering=1) as lines:
        model = server.graphs["lin"].join("killed", worker=f"rank{rank}", quorum=WORKERS * MICRO_BATCHES, timeout=60)
        model.start()
        while (step := model.step) < steps:
            for number in range(MICRO_BATCHES):
                found = model.forward_backward(batch(step, rank, number), weight=4)
                lines.write(f"{step}/{number} {found.loss!r}\n")
            done = model.optim_step(lr=RATE)
            lines.write(f"{step} {done.loss!r} {done.count} {done.replayed}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
