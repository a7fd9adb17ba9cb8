"""Workers that have no files: one or all of them are killed, and their server, and all end with the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.faults.resuming import KINDS, WORKERS, reference
from tests.faults.servers import LONG, Server
from tests.faults.workers import Workers

STEPS, KILLS = (400, 50) if LONG else (24, 3)

LINES = 12
"""Lines that a worker writes in a step, about: two for each request."""


class Run(Workers):
    """Workers that the server alone lets go on."""

    def kill_all(self, rank: int) -> None:
        """Kill all workers at once. One of them begins before the others."""
        for worker in self._workers:
            worker.process.kill()
        for number in (rank, *(one for one in range(WORKERS) if one != rank)):
            self._workers[number].die()
            self._workers[number].start()

    def __enter__(self) -> Run:
        return self


@pytest.mark.parametrize("kind", KINDS)
def test_workers_without_files_end_with_the_bits_of_a_run_without_kills(place: Path, kind: str) -> None:
    with Server(place / "store") as server:
        given = (STEPS, "tests.faults.resuming", kind, STEPS)
        with Run([server] * WORKERS, place, *given) as run:
            faults = [run.kill_all, run.kill_worker, run.kill_server] * (KILLS // 3 + 1)
            run.suffer(random.Random(kind), faults[:KILLS], LINES)
            run.finish()
        for rank in range(WORKERS):
            with np.load(place / f"rank{rank}.npz") as found:
                for own, expected in zip(found.values(), reference(kind, STEPS), strict=True):
                    np.testing.assert_array_equal(own, expected)
        state = httpx.get(f"{server.url}/v1/runs/run").json()
        assert (state["step"], state["state"]) == (STEPS, "finished")
