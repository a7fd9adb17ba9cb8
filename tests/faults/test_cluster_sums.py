"""Replicas over one PostgreSQL: workers that all-reduce, concurrent histories, many buffers, a full disk, clocks."""

from __future__ import annotations

import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.faults import test_all_reduce as all_reduce
from tests.faults import test_history as history
from tests.faults.cluster import CLIENTS, Balanced, Load, replicas, wait
from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key, tensors
from tests.postgres import NOBODY, Cluster

REPLICAS = 8 if LONG else 2
BUFFERS = 4000 if LONG else 200
REQUESTS = 50 if LONG else 10
"""Adds of each client, each of them to half of the buffers."""

DISK_BYTES = 1 << 30
"""Room for what the store may keep of freed gradients: 256 MB for each of two processes."""

HOUR = 3600


def faults(database: Cluster, servers: list[Server]) -> list[Callable[[], object]]:
    """Return what can be done to servers and database, the fastest first."""

    def crash() -> None:
        database.stop(signal.SIGKILL)
        database.start()

    end = "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend'"
    ends = partial(database.execute, f"{end} and pid <> pg_backend_pid()")
    return [ends, *[server.restart for server in servers], crash]


def test_every_worker_reads_the_same_correct_sums(database: Cluster, tmp_path: Path) -> None:
    chance = random.Random(1)
    with replicas(3, tmp_path, database.url) as servers:
        connect = partial(Balanced, [server.url for server in servers])
        ways = chance.choices(faults(database, servers), k=20 if LONG else 3)
        all_reduce.check_sums(connect, chance, ways, 3 * PATIENCE)


def test_concurrent_calls_are_linearizable(database: Cluster, tmp_path: Path) -> None:
    chance = random.Random(8)
    with replicas(2, tmp_path, database.url) as servers:
        connect = partial(Balanced, [server.url for server in servers])
        history.check_calls(connect, chance, lambda: chance.choice(faults(database, servers))(), 2 * PATIENCE)


def test_many_overlapping_buffers(database: Cluster, tmp_path: Path) -> None:
    """Locks in one order: eight clients add to half of all buffers each time, in an order of their own."""
    names = [f"b{number}" for number in range(BUFFERS)]
    with replicas(REPLICAS, tmp_path, database.url) as servers, ThreadPoolExecutor(8) as threads:
        urls = [server.url for server in servers]
        with Balanced(urls) as client:
            list(threads.map(lambda name: client.create(name, (2,)), names[:1]))
            for name in names[1:]:
                client.create(name, (2,))

            def add(number: int) -> Counter[str]:
                chance, sums = random.Random(number), Counter[str]()
                with Balanced(urls) as one:
                    for _ in range(REQUESTS):
                        some = chance.sample(names, BUFFERS // 2)
                        one.add_many({name: np.full(2, float(number)) for name in some}, key=new_key())
                        sums.update(dict.fromkeys(some, number))
                return sums

            expected = sum(threads.map(add, range(1, 9)), Counter[str]())
            for start in range(0, BUFFERS, 1000):
                values = client.values(*names[start : start + 1000])[1]
                for name, value in values.items():
                    assert value.tolist() == [expected[name]] * 2
    assert database.execute("select sum(deadlocks) from pg_stat_database") == [(0,)]


def test_a_full_disk_of_the_database(tmp_path: Path) -> None:
    """The log has no room, either: the database stops, and starts again once there is room."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},uid={NOBODY},gid={NOBODY},mode=755", "tmpfs"]
        mounted = subprocess.run([*mounting, path], capture_output=True, text=True, timeout=30)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        database = Cluster(path / "data")
        try:
            database.create()
            database.start(min_wal_size="32MB", max_wal_size="64MB")
            with replicas(2, tmp_path, database.url) as servers, Load([server.url for server in servers]) as load:
                for _ in range(5 if LONG else 1):
                    _fill(path / "ballast")
                    wait(lambda: is_refused(servers[0]), "a full disk takes adds")
                    (path / "ballast").unlink()
                    wait(lambda: serves_again(servers[0], database), "a disk with room takes no adds")
                    load.go_on()
                    load.check()
        finally:
            database.stop()
            subprocess.run(["umount", path], check=True, timeout=30)


def serves_again(server: Server, database: Cluster) -> bool:
    """Return whether the server takes an add. A database that has died meanwhile starts again."""
    if database.process is not None and database.process.poll() is not None:
        database.start(min_wal_size="32MB", max_wal_size="64MB")
    return not is_refused(server)


def is_refused(server: Server) -> bool:
    """Return whether the server refuses an add, for the time being."""
    with Client(server.url) as client:
        body = tensors(gradient=np.ones((CLIENTS, 3)))
        path = "/v1/buffers/small/accumulate"
        return client.once("POST", path, params={"do_update": "false"}, key=new_key(), **body).status_code in (503, 507)


def _fill(path: Path) -> None:
    """Write a file until the file system has no room."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def test_clocks_of_replicas_an_hour_apart(database: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []
    for name, ahead in {"fast": HOUR, "slow": -HOUR}.items():
        jump = tmp_path / f"{name}.jump"
        jump.write_text(str(ahead))
        monkeypatch.setenv("GRADSERVE_TEST_JUMP", str(jump))
        jumping = "tests.faults.jumping"
        servers.append(Server(tmp_path / name, module=jumping, store=database.url, postgres_schema="clocks"))
    with servers[0] as fast, servers[1] as slow, Client(fast.url) as ahead_client, Client(slow.url) as late_client:
        ahead_client.create("w", (3,), ttl_seconds=HOUR / 2)
        for key in ("k", "l"):
            receipts = [one.add("w", np.ones(3), key=key) for one in (late_client, ahead_client, late_client)]
            assert receipts[0] == receipts[1] == receipts[2]
        assert ahead_client.metadata("w")["count"] == 2
        for client in (ahead_client, late_client):
            assert abs(client.metadata("w")["updated_at"] - time.time()) < PATIENCE
