"""Processes that are killed and started again, as a supervisor does it, while they train."""

from __future__ import annotations

import pickle
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.arrays.worker import STEPS, WORKERS, reference
from tests.clients.killed import Workers, until
from tests.faults.servers import Server


def checkpoint(directory: Path, rank: int) -> tuple[Any, list[float]]:
    """Return the parameters of a worker and the mean losses of its steps."""
    path = directory / f"checkpoint{rank}"
    params, losses, _ = pickle.loads(path.read_bytes()) if path.exists() else (None, [], None)
    return params, losses


def has_made(directory: Path, step: int) -> bool:
    """Whether a worker has made this number of steps."""
    return max(len(checkpoint(directory, rank)[1]) for rank in range(WORKERS)) >= step


@pytest.mark.processes
def test_killed_workers_and_a_killed_server_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    chance = random.Random(0)
    with Server(tmp_path / "store") as server:
        arguments = [[server.url, str(rank), str(tmp_path)] for rank in range(WORKERS)]
        train(server, Workers("tests.clients.arrays.worker", arguments, tmp_path / "log"), tmp_path, chance)


def train(server: Server, started: Workers, directory: Path, chance: random.Random) -> None:
    with started as workers:
        for number, step in enumerate(range(1, STEPS, 5)):
            until(partial(has_made, directory, step))
            time.sleep(chance.uniform(0, 0.03))
            workers.kill(chance.randrange(WORKERS))
            if number % 4 == 2:
                server.restart()
        assert workers.end() == [0] * WORKERS
        expected, means = reference()
        for rank in range(WORKERS):
            params, losses = checkpoint(directory, rank)
            assert len(losses) == STEPS
            assert losses == means
            np.testing.assert_array_equal(params["w"], expected["w"])
            assert params["b"][0] == expected["b"][0]
