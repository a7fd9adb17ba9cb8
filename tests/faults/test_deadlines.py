"""Kill -9 while steps with deadlines are open: each step closes once, and every gradient is in one of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import Balanced, replicas
from tests.faults.servers import LONG, Client, Server, moments, pause
from tests.faults.steps import running
from tests.faults.test_cluster_sums import faults
from tests.postgres import Cluster

KILLS = 40 if LONG else 2

DEADLINE = 0.15
"""Seconds of a deadline: the server is killed before it, at it, and after it."""


def honour(client: Client, prefix: str, chance: random.Random, crash: Callable[[], object]) -> None:
    """Check that each step closes once if a crash comes before its deadline, or while it closes."""
    names = [f"{prefix}.{number}" for number in range(20)]
    for name in names:
        client.create(name, (2,), deadline_seconds=DEADLINE, quorum=9)
    client.add_many({name: np.array([1.0, 2.0]) for name in names})
    pause(chance, 0, 1.3 * DEADLINE)
    crash()
    for name in names:
        receipt = client.done("GET", f"/v1/buffers/{name}", params={"step": 0, "timeout": 30})
        assert (receipt["closed_by"], receipt["count"], receipt["version"]) == ("deadline", 1, 2)
        known = client.metadata(name)
        assert (known["step"], known["version"], known["closed_steps"]) == (1, 2, [0])
        assert client.value(name, step=0).tolist() == [1, 2]


def test_a_deadline_is_honoured_after_a_kill(tmp_path: Path) -> None:
    chance = random.Random(1)
    with Server(tmp_path / "store") as server, Client(server.url) as client:
        for kill in range(KILLS):
            honour(client, f"b{kill}", chance, server.restart)


def test_a_deadline_is_honoured_after_a_crash_of_the_database(database: Cluster, tmp_path: Path) -> None:
    """The server lives, or dies, too."""
    chance = random.Random(3)
    with replicas(1, tmp_path, database.url) as (server,), Client(server.url) as client:

        def crash() -> None:
            database.stop(signal.SIGKILL)
            if chance.random() < 0.5:
                server.kill()
                server.launch()
            database.start()

        for kill in range(KILLS):
            honour(client, f"b{kill}", chance, crash)


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_end_once_while_servers_die(workers: int, tmp_path: Path) -> None:
    chance = random.Random(workers)
    with Server(tmp_path / "store", workers=workers) as server, running(lambda: Client(server.url)):
        for _ in moments(chance, KILLS, 0.2, 0.8):
            if workers > 1 and chance.random() < 0.7:
                server.kill_a_worker(chance)
            else:
                server.restart()


def test_steps_end_once_while_replicas_and_their_database_die(database: Cluster, tmp_path: Path) -> None:
    chance = random.Random(4)
    with replicas(2, tmp_path, database.url) as servers:
        ways = faults(database, servers)
        with running(partial(Balanced, [server.url for server in servers])):
            for number in moments(chance, max(KILLS, len(ways)), 0.2, 0.8):
                ways[number % len(ways)]()
