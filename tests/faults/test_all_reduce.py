"""Workers all-reduce through one buffer under kills of the server: all read the same, correct sums."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from service.dtypes import Array
from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key

WORKERS = 8
STEPS = 200 if LONG else 20
KILLS = 20 if LONG else 2
SIZE = 20_000


def gradient(worker: int, step: int) -> Array:
    """Return integers, whose float32 sum is exact in any order."""
    return np.random.default_rng((worker, step)).integers(-1000, 1000, SIZE).astype(np.float32)


class Worker:
    """A worker that adds its gradient in each step and reads the sum."""

    def __init__(self, connect: Callable[[], Client], number: int) -> None:
        self._connect, self.number = connect, number
        self.read: list[bytes] = []
        self.closed = 0

    def run(self, failed: threading.Event) -> None:
        try:
            with self._connect() as client:
                for step in range(STEPS):
                    if failed.is_set():
                        return
                    receipt = client.add("sum", gradient(self.number, step), key=new_key(), step=step)
                    assert receipt["step"] == step
                    self.closed += receipt["closed"]
                    self.read.append(client.value("sum", step=step, timeout=30).tobytes())
        except BaseException:
            failed.set()
            raise


def wait_for(worker: Worker, step: int, failed: threading.Event) -> None:
    """Wait until the worker reaches the step or any worker has failed."""
    end = time.monotonic() + PATIENCE
    while len(worker.read) < step and not failed.is_set():
        assert time.monotonic() < end
        time.sleep(0.001)


def check(client: Client, workers: list[Worker]) -> None:
    """Check that all workers have read the same correct sum of every step."""
    for step in range(STEPS):
        expected = sum(gradient(number, step) for number in range(WORKERS))
        assert isinstance(expected, np.ndarray)
        assert {one.read[step] for one in workers} == {expected.tobytes()}
    assert sum(one.closed for one in workers) == STEPS
    last = client.metadata("sum")
    assert (last["step"], last["version"], last["count"]) == (STEPS, WORKERS * STEPS, 0)
    assert last["closed_steps"] == [STEPS - 2, STEPS - 1]


def check_sums(
    connect: Callable[[], Any], chance: random.Random, faults: list[Callable[[], object]], patience: float
) -> None:
    """Let all workers add and read steps while these faults happen, and check what they have read."""
    failed = threading.Event()
    with connect() as client, ThreadPoolExecutor(WORKERS) as threads:
        client.create("sum", (SIZE,), "float32", quorum=WORKERS, keep=2)
        workers = [Worker(connect, number) for number in range(WORKERS)]
        running = [threads.submit(one.run, failed) for one in workers]
        try:
            for number, fail in enumerate(faults, 1):
                wait_for(workers[0], number * STEPS // (len(faults) + 1), failed)
                time.sleep(chance.uniform(0, 0.02))
                fail()
            for one in running:
                one.result(patience)
        finally:
            failed.set()
        check(client, workers)


def test_every_worker_reads_the_same_correct_sums(tmp_path: Path) -> None:
    chance = random.Random(6)
    with Server(tmp_path / "store", workers=2) as server:
        ways: list[Callable[[], object]] = [server.restart, partial(server.kill_a_worker, chance)]
        check_sums(partial(Client, server.url), chance, [ways[kill % 2] for kill in range(KILLS)], PATIENCE)
