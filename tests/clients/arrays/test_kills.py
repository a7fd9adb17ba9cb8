"""Processes that are killed and started again, as a supervisor does it, while they train."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.arrays.worker import STEPS, WORKERS, reference
from tests.faults.servers import PATIENCE, Server
from tests.zygote import ROOT


class Workers:
    """The processes of a run, each with its checkpoint."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory = url, directory
        self.processes = [self.started(rank) for rank in range(WORKERS)]

    def started(self, rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.clients.arrays.worker", self._url, str(rank), str(self._directory)]
        return subprocess.Popen(command, cwd=ROOT)

    def kill(self, rank: int) -> None:
        """Kill a worker, and start the same command again."""
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.processes[rank] = self.started(rank)

    def checkpoint(self, rank: int) -> tuple[Any, int]:
        """Return the parameters of a worker and the number of its steps."""
        path = self._directory / f"checkpoint{rank}"
        params, step, _ = pickle.loads(path.read_bytes()) if path.exists() else (None, 0, None)
        return params, step

    def reach(self, step: int) -> None:
        """Wait until a worker has made this number of steps."""
        end = time.monotonic() + PATIENCE
        while max(self.checkpoint(rank)[1] for rank in range(WORKERS)) < step:
            assert time.monotonic() < end
            time.sleep(0.005)


@contextmanager
def working(url: str, directory: Path) -> Iterator[Workers]:
    workers = Workers(url, directory)
    try:
        yield workers
    finally:
        for process in workers.processes:
            process.kill()
            process.wait()


@pytest.mark.processes
def test_killed_workers_and_a_killed_server_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    chance = random.Random(0)
    with Server(tmp_path / "store") as server, working(server.url, tmp_path) as workers:
        for number, step in enumerate(range(1, STEPS, 5)):
            workers.reach(step)
            time.sleep(chance.uniform(0, 0.03))
            workers.kill(chance.randrange(WORKERS))
            if number % 4 == 2:
                server.restart()
        assert [process.wait(PATIENCE) for process in workers.processes] == [0] * WORKERS
        expected = reference()
        for rank in range(WORKERS):
            params, step = workers.checkpoint(rank)
            assert step == STEPS
            np.testing.assert_array_equal(params["w"], expected["w"])
            assert params["b"][0] == expected["b"][0]
