"""Three workers train a model whose pushes go in several parts. They, their server and its database are killed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.faults.cluster import Pair, replicas
from tests.faults.servers import LONG, Client, Server
from tests.faults.trainer import WORKERS, reference
from tests.faults.workers import Workers

MEGABYTES, PART_BYTES, STEPS = (300, 64 << 20, 60) if LONG else (6, 1 << 20, 6)
KILLS_OF_WORKERS, KILLS_OF_SERVERS, FAILOVERS = (6, 4, 2) if LONG else (2, 1, 1)

LINES = 30
"""Lines that a worker writes in a step, about: two for each request."""


class Run(Workers):
    """Workers that train a large model, and the weights and counts that they must come to."""

    def __init__(self, servers: Sequence[Server], place: Path) -> None:
        super().__init__(servers, place, STEPS, "tests.faults.trainer", MEGABYTES, PART_BYTES, STEPS)

    def check(self) -> None:
        """Let the workers make the last step. Check their weights, and that each push has counted once."""
        self.finish()
        expected = reference(MEGABYTES, STEPS)
        for rank in range(WORKERS):
            weights, state = torch.load(self.place / f"rank{rank}.pt", mmap=True)
            assert (state["step"], weights.keys()) == (STEPS, expected.keys())
            assert all(torch.equal(weights[name], one) for name, one in expected.items())
        with Client(self.servers[0].url) as client:
            found = client.done("GET", "/v1/buffers", params={"limit": 1000})["buffers"]
            assert client.done("GET", "/v1/pushes")["pushes"] == []
        sums = [one for one in found if not one["name"].endswith("::start")]
        assert sum(one["dtype"] == "float64" for one in sums) > 3  # tallies: a push has a part for each
        assert {(one["step"], one["count"], one["version"]) for one in sums} == {(STEPS, 0, WORKERS * STEPS)}

    def __enter__(self) -> Run:
        return self


def test_a_run_outlives_kills_of_its_workers_and_its_server(place: Path) -> None:
    with Server(place / "store") as server, Run([server] * WORKERS, place) as run:
        kills = [run.kill_worker] * KILLS_OF_WORKERS + [run.kill_server] * KILLS_OF_SERVERS
        run.suffer(random.Random(1), kills, LINES)
        run.check()


def test_a_run_outlives_failovers(place: Path) -> None:
    with (
        Pair(place) as pair,
        replicas(WORKERS, place, pair.url, durability="replicated") as servers,
        Run(servers, place) as run,
    ):
        for one in (pair.primary, pair.standby):
            one.set(max_wal_size="4GB")  # as docs/scaling.md says
        kills = [run.kill_worker] * KILLS_OF_WORKERS + [run.kill_server] * KILLS_OF_SERVERS
        run.suffer(random.Random(2), [*kills, *[lambda _: pair.fail_over()] * FAILOVERS], LINES)
        run.check()
