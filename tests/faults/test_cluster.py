"""Replicas over one PostgreSQL: under clients that retry, sums stay exact whatever fails."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from service.buffers.postgres.deadlines import LOOK_SECONDS
from service.buffers.postgres.failures import RETRY_SECONDS
from tests.faults.cluster import Load, one_dies, replicas, wait
from tests.faults.printing import Counted
from tests.faults.servers import LONG, PATIENCE, Server, moments, pause
from tests.network import SIDES, Network
from tests.postgres import Cluster, cluster

REPLICAS = 3 if LONG else 2
KILLS = 200 if LONG else 3
CRASHES = 20 if LONG else 1
CUTS = 30 if LONG else 2


@pytest.fixture(scope="module")
def database() -> Iterator[Cluster]:
    with cluster(synchronous_commit="off") as made:  # which each transaction overrules
        yield made


def test_kills_of_replicas(database: Cluster, tmp_path: Path, counted: Counted) -> None:
    chance = random.Random(1)
    with replicas(REPLICAS, tmp_path, database.url) as servers, Load([one.url for one in servers]) as load:
        for number in moments(chance, KILLS, 0.0, 0.3):
            servers[number % REPLICAS].kill()
            load.check()
            servers[number % REPLICAS].start()
        load.go_on()
    counted(*load.counts(), f"kills of {REPLICAS} replicas: {KILLS}")


def test_kills_at_points_of_a_commit(database: Cluster, tmp_path: Path) -> None:
    order = tmp_path / "order"
    with one_dies(database, tmp_path, order) as (mortal, other), Load([mortal.url, other.url]) as load:
        for number in range(60 if LONG else 3):
            order.write_text(f"{['staged', 'made', 'committed'][number % 3]}:{1 + number // 3 % 3}")
            wait(lambda: mortal.process.poll() is not None, "the server does not die")
            load.check()
            mortal.restart()
        load.go_on()


def test_ends_of_backends(database: Cluster, tmp_path: Path) -> None:
    chance = random.Random(2)
    one = "select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend'"
    with replicas(REPLICAS, tmp_path, database.url) as servers, Load([each.url for each in servers]) as load:
        for number in moments(chance, 10 * CRASHES, 0.0, 0.1):
            among = "state <> 'idle'" if number % 2 else "pid is not null"
            database.execute(f"{one} and pid <> pg_backend_pid() and {among} order by random() limit 3")
            load.check()
        load.go_on()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGQUIT, signal.SIGINT] if LONG else [signal.SIGKILL])
def test_crashes_of_the_database(database: Cluster, tmp_path: Path, how: signal.Signals) -> None:
    chance = random.Random(how)
    with replicas(REPLICAS, tmp_path, database.url) as servers, Load([each.url for each in servers]) as load:
        for _ in moments(chance, CRASHES, 0.0, 0.3):
            database.stop(how)
            pause(chance, 0, 1)
            database.start()
            load.go_on()
            load.check()


def test_a_network_that_is_cut_and_stalls(database: Cluster, tmp_path: Path) -> None:
    """Each replica has a network of its own to the database. Commits are lost on their way there, and back."""
    chance = random.Random(3)
    with ExitStack() as stack:
        networks = [stack.enter_context(Network(database.port)) for _ in range(2)]
        servers = [
            stack.enter_context(Server(tmp_path / f"{number}", store=network.url, postgres_schema="cut"))
            for number, network in enumerate(networks)
        ]
        load = stack.enter_context(Load([each.url for each in servers]))
        for number in moments(chance, CUTS, 0.0, 0.1):
            network = networks[number % 2]
            for lost in map(network.lose_commit, SIDES):
                assert lost.wait(PATIENCE), "no commit is lost"
            load.check()
            network.cut()
            load.go_on()
            network.stall()
            least = 2 * RETRY_SECONDS if LONG and number == 1 else 0
            pause(chance, least, least + 1)
            network.flow()
            load.go_on()
            load.check()


def test_a_database_without_answer_is_no_readiness(database: Cluster, tmp_path: Path) -> None:
    with replicas(1, tmp_path, database.url) as (server,):
        database.stop()
        answer = httpx.get(f"{server.url}/v2/health/ready", timeout=PATIENCE)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        database.start()
        wait(server.is_ready, "the server does not get ready again")


def test_a_server_without_its_database_looks_for_it_twice_a_second(database: Cluster, tmp_path: Path) -> None:
    """To close steps that are due. Each look that fails writes a line to the log."""
    with replicas(1, tmp_path, database.url) as (server,):
        database.stop()
        began = time.monotonic()
        wait(lambda: server.log.read_text().count("closes steps that are due later") >= 4, "nothing looks for it")
        assert time.monotonic() - began > 2 * LOOK_SECONDS  # the first may have begun before
        database.start()
