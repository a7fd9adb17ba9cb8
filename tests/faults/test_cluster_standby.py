"""Replicas over a PostgreSQL with a synchronous standby: what they have acknowledged outlives its primary."""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.buffers.postgres import PostgresStore
from service.errors import StoreFailed
from tests.buffers.calls import add, create
from tests.buffers.stores import Clock
from tests.faults.cluster import Load, Pair, replicas, wait
from tests.faults.printing import Counted
from tests.faults.servers import LONG, PATIENCE, Client, Server, moments, new_key, pause, tensors
from tests.network import Network

FAILOVERS = 10 if LONG else 1
STOPS = 20 if LONG else 1
CANCELS = 50 if LONG else 3

SIZE = 20_000
"""Elements of a float64 gradient that is a blob."""

WAITING = "backend_type = 'client backend' and wait_event = 'SyncRep'"
SYNCHRONOUS = "select 1 from pg_stat_replication where sync_state = 'sync'"
WAITERS = f"from pg_stat_activity where {WAITING}"

QUIET = f"""
    select (select count(*) {WAITERS}) > 0 and not exists (
        select from pg_stat_activity where pid <> pg_backend_pid() and state = 'active' and wait_event is null
    )
"""
"""Whether a commit waits for the standby, and nothing else runs."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as directory, Pair(Path(directory)) as made:
        yield made


@contextmanager
def connected(*servers: Server) -> Iterator[list[Client]]:
    """Yield a client of each server."""
    with ExitStack() as stack:
        yield [stack.enter_context(Client(server.url)) for server in servers]


@contextmanager
def watched(pair: Pair, place: Path) -> Iterator[tuple[Server, Server, PostgresStore]]:
    """Yield two servers that wait for the standby, and a store of theirs that does not."""
    schema = f"s{new_key()}"
    with (
        replicas(2, place, pair.url, durability="replicated", postgres_schema=schema) as (one, two),
        closing(PostgresStore(pair.url, schema=schema)) as behind,
    ):
        yield one, two, behind


def adding(client: Client, key: str, seconds: float) -> int | None:
    """Add once, with this key. Return the answer's status, or None if there is no answer in time."""
    try:
        body = tensors(gradient=np.ones(3))
        return client.once("POST", "/v1/buffers/w/accumulate", key=key, timeout=seconds, **body).status_code
    except httpx.ReadTimeout:
        return None


def test_nothing_is_acknowledged_without_the_standby(pair: Pair, tmp_path: Path) -> None:
    """Not even a key that the primary knows: cancelling the wait for the standby makes it known there."""
    with watched(pair, tmp_path) as (one, two, behind), connected(one, two) as clients:
        clients[0].create("w", (3,), quorum=2)
        pair.standby.stop()
        assert adding(clients[0], "k", 1) is None
        assert behind.record("w").count == 0
        assert pair.primary.execute(f"select pg_cancel_backend(pid) {WAITERS}") == [(True,)]
        wait(lambda: behind.record("w").count == 1, "the commit is not visible")
        assert adding(clients[1], "k", 1) is None
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(adding, clients[0], "another", PATIENCE)
            assert not one.is_ready()
            wait(lambda: pair.primary.execute(f"select 1 {WAITERS}"), "the add does not wait")
            assert not later.done()
            pair.standby.start()
            assert later.result() in (200, 503)
        assert clients[1].add("w", np.ones(3), key="k")["count"] == 1
        clients[1].add("w", np.ones(3), key="another")
        assert clients[0].value("w", step=0).tolist() == [2, 2, 2]
        wait(one.is_ready, "the server is not ready again")


def test_a_closed_step_is_not_read_before_the_standby_has_it(pair: Pair, tmp_path: Path) -> None:
    with watched(pair, tmp_path) as (one, two, behind), connected(one, two) as clients:
        clients[0].create("w", (3,), quorum=1)
        pair.standby.stop()
        assert adding(clients[0], "k", 1) is None
        pair.primary.execute(f"select pg_terminate_backend(pid) {WAITERS}")
        wait(lambda: behind.record("w").step == 1, "the commit is not visible")
        assert clients[1].once("GET", "/v1/buffers/w/value", params={"step": 0}, timeout=10).status_code == 503
        pair.standby.start()
        assert clients[1].value("w", step=0).tolist() == [1, 1, 1]
        assert clients[0].add("w", np.ones(3), key="k")["closed"]


def test_a_step_closed_late_is_not_read_before_the_standby_has_it(pair: Pair) -> None:
    """The record says when the step was due: perhaps long ago, while no server could close it."""
    with closing(PostgresStore(pair.url, schema="late", replicated=True, clock=Clock())) as store:
        create(store, "w", quorum=1)
        add(store, "w", 1.0)
        assert store.durable(["w"], 0)[0].step == 1
        pair.standby.stop()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(add, store, "w", 1.0)
            wait(lambda: pair.primary.execute(f"select pg_cancel_backend(pid) {WAITERS}"), "the add does not wait")
            wait(lambda: store.record("w").step == 2, "the commit is not visible")
            for read in (store.durable, store.read):
                with pytest.raises(StoreFailed, match="no synchronous standby"):
                    read(["w"], 1)
            pair.standby.start()
            wait(lambda: pair.primary.execute(SYNCHRONOUS), "the standby does not follow")
            assert store.durable(["w"], 1)[0].step == 2
            assert store.read(["w"], 1)[0].value.tolist() == [1, 1]


def test_replicated_follows_the_settings_of_the_database(pair: Pair, tmp_path: Path) -> None:
    """Some managers of PostgreSQL empty synchronous_standby_names when the standby is gone. Adds must not go on."""
    with replicas(1, tmp_path, pair.url, durability="replicated") as (server,), Client(server.url) as client:
        client.create("w", (3,))
        assert adding(client, "k", PATIENCE) == 200
        pair.primary.set(synchronous_standby_names="")
        wait(lambda: not server.is_ready(), "the server stays ready")
        assert adding(client, "l", 1) is None
        pair.primary.set(synchronous_standby_names="*")
        wait(server.is_ready, "the server is not ready again")
        assert client.add("w", np.ones(3), key="l")["count"] == 2


@pytest.mark.parametrize("durability", ["local", "replicated"])
@pytest.mark.parametrize("how", ["all", "some"])
def test_connections_that_led_to_a_standby_are_left(pair: Pair, tmp_path: Path, how: str, durability: str) -> None:
    """The endpoint of the database is stale for a while. Then connections that were open stay open, to the standby."""
    with Network(pair.primary.port) as network, ThreadPoolExecutor(8) as threads:
        with replicas(1, tmp_path, network.url, durability=durability) as (server,), Client(server.url) as client:
            client.create("w", (SIZE,))

            def reads(_: object = None) -> bool:
                return httpx.get(f"{server.url}/v1/buffers/w/value", timeout=PATIENCE).status_code == 200

            assert reads()
            assert server.is_ready()
            network.target = pair.standby.port
            if how == "all":
                network.cut()
            wait(lambda: not all(threads.map(reads, range(8))), "no read comes to the standby")
            wait(lambda: not reads(), "some connections still lead to the primary")
            assert not server.is_ready()
            network.target = pair.primary.port
            wait(reads, "reads still come to the standby")
            assert server.is_ready()
            assert all(threads.map(reads, range(8)))
            assert client.add("w", np.ones(SIZE))["count"] == 1


@pytest.mark.parametrize(("durability", "clients"), [("local", 1), ("replicated", 20)])
def test_reads_of_a_silent_database_end_soon(pair: Pair, tmp_path: Path, durability: str, clients: int) -> None:
    """It has vanished without a word, as behind a network that drops all. Reads before that wait for 10 seconds."""
    paths, ended, failed = ("", "/value", "/value?step=0"), threading.Event(), threading.Event()

    def timed(path: str) -> tuple[int, float]:
        began = time.monotonic()
        status = httpx.get(f"{server.url}{path}", timeout=PATIENCE).status_code
        return status, time.monotonic() - began

    def reading(number: int) -> float:
        longest = 0.0
        for path in itertools.cycle(paths[number % 3 :]):
            status, seconds = timed(f"/v1/buffers/w{path}")
            longest = max(longest, seconds)
            if status != 200:
                failed.set()
            if ended.is_set():
                return longest
        return longest

    with Network(pair.primary.port) as network, ThreadPoolExecutor(clients) as threads:
        with replicas(1, tmp_path, network.url, durability=durability) as (server,), Client(server.url) as client:
            client.create("w", (SIZE,), quorum=1)
            client.add("w", np.ones(SIZE))
            running = [threads.submit(reading, number) for number in range(clients)]
            assert timed("/v1/buffers/w/value?step=0")[0] == 200
            network.stall()
            assert failed.wait(PATIENCE)
            known = time.monotonic()
            answers = [timed(f"/v1/buffers/w{path}") for path in paths * 4] + [timed("/v2/health/ready")] * 3
            assert {status for status, _ in answers} == {503}
            assert time.monotonic() < known + 6
            ended.set()
            assert max(one.result(PATIENCE) for one in running) < 6
            network.flow()
            wait(lambda: timed("/v1/buffers/w/value")[0] == 200, "the server does not read again")
            wait(server.is_ready, "the server is not ready again")


@contextmanager
def loaded(pair: Pair, place: Path) -> Iterator[Load]:
    """Yield a load on two servers that wait for the standby."""
    with replicas(2, place, pair.url, durability="replicated") as servers, Load([one.url for one in servers]) as load:
        yield load


def test_stops_of_the_standby(pair: Pair, tmp_path: Path) -> None:
    chance = random.Random(1)
    with watched(pair, tmp_path) as (*servers, behind), Load([one.url for one in servers]) as load:

        def answers_have_come() -> bool:
            is_quiet, committed = pair.primary.execute(QUIET), behind.read(["small"])[0].value[:, 0].tolist()
            return is_quiet == [(True,)] and [one.answered for one in load.adders] == committed

        for _ in moments(chance, STOPS, 0.0, 0.3):
            pair.standby.stop(chance.choice([signal.SIGINT, signal.SIGKILL]))
            wait(answers_have_come, "commits go on, or answers do not come")
            before = [one.answered for one in load.adders]
            pause(chance, 0.2, 2)
            assert [one.answered for one in load.adders] == before
            pair.standby.start()
            load.go_on()
            load.check()


@pytest.mark.parametrize("function", ["pg_cancel_backend", "pg_terminate_backend"])
def test_cancelled_waits_for_the_standby(pair: Pair, tmp_path: Path, function: str) -> None:
    """Each wait is cancelled while the standby is away. The primary dies soon after, and the standby goes on."""
    chance = random.Random(2)
    with loaded(pair, tmp_path) as load:
        pair.standby.stop()
        cancelled = 0
        for _ in moments(chance, CANCELS, 0.1, 0.3):
            cancelled += len(pair.primary.execute(f"select {function}(pid) {WAITERS}"))
        assert cancelled > 0
        pair.fail_over()
        load.go_on()


def test_failovers(pair: Pair, tmp_path: Path, counted: Counted) -> None:
    """The primary is killed under load, the standby promoted, and the other copied from it as the next standby."""
    chance = random.Random(3)
    with loaded(pair, tmp_path) as load:
        for _ in moments(chance, FAILOVERS, 0.0, 0.5):
            pair.fail_over()
            load.go_on()
            load.check()
    counted(*load.counts(), f"failovers of the database: {FAILOVERS}")


def sent(client: Client, part: int, names: str, seconds: float) -> int | None:
    """Send a part of a push once, for buffers with a letter. Return the status, or None if no answer comes in time."""
    query = {"push": "p", "part": part, "parts": 2}
    body = tensors(**{name: np.ones(SIZE) for name in names})
    try:
        answer = client.once("POST", "/v1/buffers/accumulate", params=query, timeout=seconds, **body)
    except httpx.ReadTimeout:
        return None
    return answer.status_code


def test_a_push_in_parts_outlives_failovers(pair: Pair, tmp_path: Path) -> None:
    """One comes between its parts. One comes after the commit of the last part, which the next primary lacks."""
    with watched(pair, tmp_path) as (one, two, behind), connected(one, two) as clients:
        for name in "ab":
            clients[0].create(name, (SIZE,))
        assert sent(clients[0], 1, "a", PATIENCE) == 202
        pair.fail_over()
        wait(lambda: sent(clients[0], 1, "a", PATIENCE) == 202, "the part does not come again")
        assert [push["staged"] for push in clients[1].done("GET", "/v1/pushes")["pushes"]] == [[1]]
        pair.standby.stop()
        assert sent(clients[0], 2, "b", 1) is None
        assert behind.record("a").count == 0
        wait(lambda: pair.primary.execute(f"select pg_cancel_backend(pid) {WAITERS}"), "the part does not wait")
        wait(lambda: behind.record("a").count == 1, "the commit is not visible")
        for client, part, name in ((clients[1], 2, "b"), (clients[0], 1, "a")):
            assert sent(client, part, name, 1) is None
        pair.fail_over()
        # 1 if the first server has made the push again: its client does not know.
        found, _ = clients[1].values("a", "b")
        assert [receipt["count"] for receipt in found.values()] in ([0, 0], [1, 1])
        receipts = [client.push({"a": np.ones(SIZE), "b": np.ones(SIZE)}, push="p") for client in clients]
        assert receipts[0] == receipts[1]
        assert [receipt["count"] for receipt in receipts[0].values()] == [1, 1]
        assert all((clients[1].value(name) == 1).all() for name in "ab")


def test_a_refused_push_is_not_answered_before_the_standby_has_it(pair: Pair, tmp_path: Path) -> None:
    with watched(pair, tmp_path) as (one, two, behind), connected(one, two) as clients:
        for client, name in zip(clients, "ab", strict=True):
            client.create(name, (SIZE,))
        pair.standby.stop()
        assert sent(clients[0], 1, "c", 1) is None
        wait(lambda: pair.primary.execute(f"select pg_cancel_backend(pid) {WAITERS}"), "the part does not wait")
        wait(behind.pushes, "the refusal is not visible")
        assert sent(clients[1], 2, "", 1) is None
        pair.standby.start()
        wait(lambda: sent(clients[1], 2, "", PATIENCE) == 404, "the refusal is not answered")


def test_the_old_primary_acknowledges_nothing(pair: Pair, tmp_path: Path) -> None:
    """It comes back and takes itself for the primary: new replicas find it first. Nothing of it may be lost later."""
    old, url = pair.primary, pair.url_of(pair.primary, pair.standby)
    with replicas(1, tmp_path, url, durability="replicated") as (server,), Client(server.url) as client:
        client.create("w", (3,))
        old.stop(signal.SIGKILL)
        pair.promote()
        old.start()
        server.kill()
        server.launch()
        wait(lambda: "Waiting for the database, 30 seconds" in server.log.read_text(), "the start is silent")
        assert "no synchronous standby just now" in server.log.read_text()
        assert not server.is_ready()
        server.kill()
        old.stop()
        pair.standby.follow(pair.primary)
        server.start()
        assert client.add("w", np.ones(3), key=new_key())["count"] == 1
