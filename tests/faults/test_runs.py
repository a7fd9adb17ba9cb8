"""Three workers train a model whose pushes go in several parts. They, their server and its database are killed."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.faults.cluster import Pair, replicas
from tests.faults.servers import LONG, Client, Server
from tests.faults.trainer import LAST, WORKERS, reference
from tests.trainers import Trainer
from tests.zygote import ROOT

MEGABYTES, PART_BYTES, STEPS = (300, 64 << 20, 60) if LONG else (6, 1 << 20, 6)
KILLS_OF_WORKERS, KILLS_OF_SERVERS, FAILOVERS = (6, 4, 2) if LONG else (2, 1, 1)

LINES = 30
"""Lines that a worker writes in a step, about: two for each request."""

STILL_SECONDS = 600 if LONG else 60
"""Seconds without a line of a worker that make a test fail."""

Fault: TypeAlias = Callable[[int], None]
"""A fault that comes while the worker of this rank is in the midst of a step."""


class Run:
    """The workers, each with its server, and the faults."""

    def __init__(self, servers: Sequence[Server], place: Path) -> None:
        self._place, self._servers = place, servers
        self._workers = [Trainer(self._code(rank), place, rank, WORKERS) for rank in range(WORKERS)]

    def _code(self, rank: int) -> str:
        given = f"{self._servers[rank].url!r}, {MEGABYTES}, {PART_BYTES}, {STEPS}"
        return (
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.faults.trainer import train\ntrain({given})\n"
        )

    def kill_worker(self, rank: int) -> None:
        self._workers[rank].die()
        self._workers[rank].start()

    def kill_server(self, rank: int) -> None:
        self._servers[rank].kill()
        self._servers[rank].launch()

    def suffer(self, chance: random.Random, faults: Sequence[Fault]) -> None:
        """Cause the faults in a random order, each in its share of the steps, when a worker has come so far."""
        for number, fault in enumerate(chance.sample(faults, len(faults))):
            step = int((number + chance.random()) * (STEPS - 2) / len(faults))
            rank = chance.randrange(WORKERS)
            self._reach(rank, step, chance.randrange(LINES))
            fault(rank)

    def _reach(self, rank: int, step: int, lines: int) -> None:
        """Wait until a worker has written this many lines since it began the step, or waits in the last step."""
        worker, seen, end = self._workers[rank], "", time.monotonic() + STILL_SECONDS
        while not has_come(printed := worker.printed(), step, lines):
            if printed != seen:
                seen, end = printed, time.monotonic() + STILL_SECONDS
            assert worker.process.poll() is None, worker.log.read_text()
            assert time.monotonic() < end, f"rank {rank} does not come to step {step}: {printed[-1000:]}"
            time.sleep(0.002)

    def check(self) -> None:
        """Let the workers make the last step. Check their weights, and that each push has counted once."""
        for rank in range(WORKERS):
            self._reach(rank, STEPS, 0)
        (self._place / LAST).touch()
        for worker in self._workers:
            worker.ends()
        expected = reference(MEGABYTES, STEPS)
        for rank in range(WORKERS):
            weights, state = torch.load(self._place / f"rank{rank}.pt", mmap=True)
            assert (state["epoch"], weights.keys()) == (STEPS, expected.keys())
            assert all(torch.equal(weights[name], one) for name, one in expected.items())
        with Client(self._servers[0].url) as client:
            found = client.done("GET", "/v1/buffers", params={"limit": 1000})["buffers"]
            assert client.done("GET", "/v1/pushes")["pushes"] == []
        sums = [one for one in found if not one["name"].endswith("::start")]
        assert sum(one["dtype"] == "float64" for one in sums) > 3  # tallies: a push has a part for each
        assert {(one["epoch"], one["count"], one["version"]) for one in sums} == {(STEPS, 0, WORKERS * STEPS)}

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.die()


def has_come(printed: str, step: int, lines: int) -> bool:
    """Return whether a worker has written this many lines since it began this step or a later one."""
    written = printed.splitlines()
    begun = [at for at, line in enumerate(written) if line.startswith("epoch ") and int(line[6:]) >= step]
    return bool(begun and len(written) > begun[0] + lines) or printed.endswith(f"epoch {STEPS - 1}\n")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Yield a directory. The long form's is on a disk: its stores and checkpoints are too large for the memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp" if LONG else None) as directory:
        yield Path(directory)


def test_a_run_outlives_kills_of_its_workers_and_its_server(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server, Run([server] * WORKERS, tmp_path) as run:
        kills = [run.kill_worker] * KILLS_OF_WORKERS + [run.kill_server] * KILLS_OF_SERVERS
        run.suffer(random.Random(1), kills)
        run.check()


def test_a_run_outlives_failovers(tmp_path: Path) -> None:
    with (
        Pair(tmp_path) as pair,
        replicas(WORKERS, tmp_path, pair.url, durability="replicated") as servers,
        Run(servers, tmp_path) as run,
    ):
        for one in (pair.primary, pair.standby):
            one.set(max_wal_size="4GB")  # as docs/scaling.md says
        kills = [run.kill_worker] * KILLS_OF_WORKERS + [run.kill_server] * KILLS_OF_SERVERS
        run.suffer(random.Random(2), [*kills, *[lambda _: pair.fail_over()] * FAILOVERS])
        run.check()
