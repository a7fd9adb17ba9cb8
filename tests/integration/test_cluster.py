"""The profile `cluster` loses nothing while its replicas and its databases are killed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import uuid4

import httpx
import numpy as np
import pytest
from gradserve_client import Buffer, Client

from tests.integration.conftest import client
from tests.integration.stack import Cluster
from tests.serving import wait_until

REPLICAS = ("gradserve-1", "gradserve-2", "gradserve-3")
WEIGHTS = (1, 2, 3, 4, 5, 6)
SIZES = (10, 50_000)
"""Elements of a gradient in a row, and of one in a blob."""


@pytest.fixture(autouse=True)
def _runs(cluster: Cluster) -> Iterator[None]:
    cluster.wait()
    yield
    for service in (*REPLICAS, "postgres-1", "postgres-2"):
        cluster.start(service)
    cluster.wait()


def keyed(cluster: Cluster) -> Client:
    return Client(cluster.url, api_key=cluster.secret, timeout=180)


@contextmanager
def exact(cluster: Cluster) -> Iterator[list[Buffer]]:
    """Add to buffers all the time, from six clients that retry. At the end every add must be counted exactly once."""
    over, names = threading.Event(), [f"{uuid4().hex}.{size}" for size in SIZES]

    def work(weight: int) -> int:
        count = 0
        with keyed(cluster) as server:
            while not over.wait(0.02):
                for name, size in zip(names, SIZES, strict=True):
                    server.buffers[name].accumulate(np.arange(size, dtype=np.float32), weight=weight)
                count += 1
        return count

    with keyed(cluster) as server, ThreadPoolExecutor(len(WEIGHTS)) as pool:
        buffers = [server.buffers[name] for name in names]
        for buffer, size in zip(buffers, SIZES, strict=True):
            buffer.create((size,), dtype="float64")
        workers = [pool.submit(work, weight) for weight in WEIGHTS]
        try:
            yield buffers
        finally:
            over.set()
        counts = [one.result(timeout=180) for one in workers]
        for buffer, size in zip(buffers, SIZES, strict=True):
            taken = buffer.take()
            assert taken.count == sum(counts)
            assert np.array_equal(taken.value, np.dot(counts, WEIGHTS) * np.arange(size, dtype=np.float64))


def goes_on(buffers: list[Buffer], more: int = 30) -> None:
    """Wait until this number of gradients has been added to each buffer."""
    for buffer in buffers:
        aim = buffer.info().count + more
        for _ in range(1200):
            if buffer.info().count >= aim:
                break
            time.sleep(0.05)
        else:
            raise AssertionError(f"the adds do not go on: {buffer.info()}")


def follows(cluster: Cluster, primary: str, standby: str) -> bool:
    query = f"select count(*) from pg_stat_replication where application_name = '{standby}' and sync_state = 'quorum'"
    return cluster.sql(primary, query) == "1"


def test_sums_stay_exact_while_replicas_are_killed(cluster: Cluster) -> None:
    with exact(cluster) as buffers:
        for replica in (*REPLICAS, *REPLICAS):
            goes_on(buffers)
            cluster.kill(replica)
            goes_on(buffers)
            cluster.start(replica)


def test_sums_stay_exact_while_the_databases_are_killed(cluster: Cluster) -> None:
    with exact(cluster) as buffers:
        for database in ("postgres-1", "postgres-2", "postgres-1"):
            goes_on(buffers)
            cluster.kill(database)
            cluster.start(database)
        goes_on(buffers)


def test_a_promoted_standby_has_every_acknowledged_add(cluster: Cluster) -> None:
    old, new = "postgres-1", "postgres-2"
    with exact(cluster) as buffers:
        for _ in range(2):
            goes_on(buffers)
            cluster.kill(old)
            assert cluster.sql(new, "select pg_promote()") == "t"
            cluster.start(old)  # it finds that its peer has taken its place, and copies it
            goes_on(buffers)
            assert follows(cluster, new, old)
            old, new = new, old
    assert cluster.sql("postgres-2", "select pg_is_in_recovery()") == "t"


def test_the_metrics_cover_the_databases(cluster: Cluster) -> None:
    secret = cluster.keys("add", uuid4().hex, "--scopes", "admin")
    with client(cluster.url, secret) as admin:
        lines = admin.get("/metrics").raise_for_status().text.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("gradserve_database_")}
    assert found["gradserve_database_standbys"] == 1
    assert found["gradserve_database_lag_bytes"] >= 0
    assert 9 <= found["gradserve_database_connections"] < found["gradserve_database_connections_limit"]


def test_no_add_is_answered_while_there_is_no_standby(cluster: Cluster) -> None:
    name = uuid4().hex
    with client(cluster.url, cluster.secret) as server, keyed(cluster) as patient, ThreadPoolExecutor(1) as pool:
        server.put(f"/v1/buffers/{name}", json={"shape": [1]}).raise_for_status()
        cluster.kill("postgres-2")
        added = pool.submit(patient.buffers[name].accumulate, [1.0])
        waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        wait_until(lambda: cluster.sql("postgres-1", waiting) != "0")
        assert not added.done()
        probe = httpx.get(f"{cluster.url}/v2/health/ready", trust_env=False, timeout=30)
        assert (probe.status_code, "no synchronous standby" in probe.json()["error"]) == (503, True)
        cluster.start("postgres-2")
        assert added.result(timeout=60).count == 1
        cluster.wait()
        assert server.get(f"/v1/buffers/{name}").json()["count"] == 1
