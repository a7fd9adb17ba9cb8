"""Whatever is answered is on the standby, whichever server wrote it. Each answer is asked for while it is cut off.

A server without the fence has written what the answers would be about: its commits are on the primary alone, as are
those whose wait for the standby was cancelled.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.buffers.postgres import PostgresStore, outage, store
from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.schema import PARTITION_SECONDS, drop_partitions, make_partitions
from service.errors import StoreFailed
from tests.buffers.answers import ANSWERS, prepare
from tests.buffers.calls import add, create
from tests.faults.cluster import Pair, replicas, wait
from tests.faults.servers import PATIENCE, Client, new_key, tensors
from tests.postgres import Cluster

SECONDS = 1.0
"""How long an answer that needs no standby may take. An answer that must not come shows nothing to wait for."""

WAITING = "from pg_stat_activity where backend_type = 'client backend' and wait_event = 'SyncRep'"

CUTS = ("stopped", "silent, and waits for it cancelled")

Call = tuple[str, str, dict[str, Any]]

DY = {"dY": {"dtype": "float64", "data": [1.0, 1.0, 1.0]}}

X = {"dY": [1.0, 1.0, 1.0], "X": [1.0, 1.0, 1.0]}

INFER = {"inputs": [{"name": name, "shape": [3], "datatype": "FP64", "data": [1.0, 1.0, 1.0]} for name in ("dY", "X")]}

WRITES = {
    ("put", "/v1/buffers/{name}"),
    ("patch", "/v1/buffers/{name}"),
    ("delete", "/v1/buffers/{name}"),
    ("post", "/v1/buffers/{name}/accumulate"),
    ("post", "/v1/buffers/{name}/zero"),
    ("post", "/v1/buffers/{name}/take"),
    ("post", "/v1/buffers/create"),
    ("post", "/v1/buffers/accumulate"),
    ("post", "/v1/buffers/zero"),
    ("post", "/v1/buffers/take"),
    ("patch", "/v1/buffers"),
    ("delete", "/v1/buffers"),
    ("delete", "/v1/pushes"),
    ("post", "/v1/runs/{run}/join"),
    ("post", "/v1/runs/{run}/leave"),
    ("post", "/v1/runs/{run}/finish"),
    ("delete", "/v1/runs/{run}"),
}
"""Requests that the store answers through `submit`."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with tempfile.TemporaryDirectory() as directory, Pair(Path(directory)) as made:
        yield made


@contextmanager
def cut_off(pair: Pair, how: str) -> Iterator[None]:
    """Cut the standby off."""
    if how == "stopped":
        pair.standby.stop()
        try:
            yield
        finally:
            if pair.standby.process is None:
                pair.standby.start()
        return
    done = threading.Event()

    def cancel() -> None:
        while not done.wait(0.05):
            pair.primary.execute(f"select pg_cancel_backend(pid) {WAITING}")

    canceller = threading.Thread(target=cancel)
    with silent(pair):
        canceller.start()
        try:
            yield
        finally:
            done.set()
            canceller.join()


@contextmanager
def silent(pair: Pair) -> Iterator[None]:
    """Let the standby say nothing more, though its connection to the primary stays."""
    ((receiver,),) = pair.standby.execute("select pid from pg_stat_wal_receiver")
    assert isinstance(receiver, int)
    os.kill(receiver, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(receiver, signal.SIGCONT)


def kinds(of: str) -> dict[str, Call]:
    """Return requests that read the buffers of this prefix, and jobs that were made before."""
    w, none, named = f"/v1/buffers/{of}.w", {"If-None-Match": "*"}, {"json": {"names": [f"{of}.w"]}}
    prefix: dict[str, Any] = {"params": {"prefix": f"{of}."}}
    return {
        "a list": ("GET", "/v1/buffers", prefix),
        "metadata": ("GET", w, {}),
        "the head of metadata": ("HEAD", w, {}),
        "metadata that the client has": ("GET", w, {"headers": none}),
        "a receipt": ("GET", w, {"params": {"step": 0}}),
        "a receipt, waited for": ("GET", w, {"params": {"step": 0, "timeout": 60}}),
        "a value": ("GET", f"{w}/value", {}),
        "a value that the client has": ("GET", f"{w}/value", {"headers": none}),
        "a value of a step": ("GET", f"{w}/value", {"params": {"step": 0}}),
        "a value, waited for": ("GET", f"{w}/value", {"params": {"step": 0, "timeout": 60}}),
        "values by name": ("POST", "/v1/buffers/value", named),
        "values by prefix": ("POST", "/v1/buffers/value", prefix),
        "values of a step": ("POST", "/v1/buffers/value", {**named, "params": {"step": 0}}),
        "statistics": ("GET", f"{w}/statistics", {}),
        "statistics of a step": ("GET", f"{w}/statistics", {"params": {"step": 0}}),
        "statistics of the last step": ("GET", f"{w}/statistics", {"params": {"closed": True}}),
        "statistics by name": ("POST", "/v1/buffers/statistics", named),
        "statistics by prefix": ("POST", "/v1/buffers/statistics", prefix),
        "pushes": ("GET", "/v1/pushes", prefix),
        "runs": ("GET", "/v1/runs", prefix),
        "a run": ("GET", f"/v1/runs/{of}.run", {}),
        "a job from a buffer": ("POST", "/v1/ops/ReluGrad", {"params": {"from": f"X:{of}.w"}, "json": DY}),
        **jobs(of),
    }


def jobs(of: str) -> dict[str, Call]:
    """Return jobs that are made once."""
    keys = {"headers": {"Idempotency-Key": of}}
    into = f"dX:{of}.w"
    return {
        "a job into a buffer": ("POST", "/v1/ops/ReluGrad", {"params": {"into": into}, "json": X, **keys}),
        "a model's output into a buffer": (
            "POST",
            "/v2/models/ReluGrad/infer",
            {"json": {**INFER, "parameters": {"into": into}}, "headers": {"Idempotency-Key": f"{of}, too"}},
        ),
    }


def prepared(client: Client, of: str) -> None:
    """Make what these requests are about."""
    client.create(f"{of}.w", (3,), keep=2)
    client.add(f"{of}.w", np.ones(3))
    client.done("POST", f"/v1/buffers/{of}.w/take")
    client.done(
        "POST",
        "/v1/buffers/accumulate",
        params={"push": of, "part": 1, "parts": 2},
        **tensors(**{f"{of}.w": np.ones(3)}),
    )
    worker = {"worker": "x", "token": "t", "prefix": f"{of}.", "buffer": f"{of}.w"}
    client.done("POST", f"/v1/runs/{of}.run/join", json=worker)
    for method, path, rest in jobs(of).values():
        client.done(method, path, **rest)


def answered(client: Client, calls: Mapping[str, Call], seconds: float = SECONDS) -> dict[str, int]:
    """Send each request, some at a time. Return the statuses of those that are answered in time."""

    def ask(call: Call) -> int | None:
        method, path, rest = call
        try:
            return client.once(method, path, timeout=seconds, **rest).status_code
        except httpx.ReadTimeout:
            return None

    with ThreadPoolExecutor(4) as threads:
        found = dict(zip(calls, threads.map(ask, calls.values()), strict=True))
    return {what: status for what, status in found.items() if status not in (None, 503)}


@pytest.mark.parametrize("how", CUTS)
def test_no_answer_has_what_the_standby_lacks(pair: Pair, tmp_path: Path, how: str) -> None:
    common = {"postgres_schema": f"s{new_key()}", "threads": 64}
    (place := tmp_path / "plain").mkdir()
    with ExitStack() as stack:
        (fenced,) = stack.enter_context(replicas(1, tmp_path, pair.url, durability="replicated", **common))
        (plain,) = stack.enter_context(replicas(1, place, pair.url, durability="local", **common))
        client, writer = (stack.enter_context(Client(server.url)) for server in (fenced, plain))
        prepared(writer, "before")
        statuses = {what: 304 if "has" in what else 200 for what in kinds("before")}
        assert answered(client, kinds("before"), PATIENCE) == statuses
        client.create("waited", (3,))
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(
                answered, client, {"a step": ("GET", "/v1/buffers/waited", {"params": {"step": 0, "timeout": 60}})}
            )
            with cut_off(pair, how):
                writer.done("POST", "/v1/buffers/waited/take")
                prepared(writer, "after")
                assert answered(client, kinds("after")) == {}
                assert later.result() == {}
                if how == "stopped":
                    pair.fail_over()
        wait(lambda: answered(client, kinds("before")) == statuses, "the server does not go on")
        if how == "stopped":
            assert client.send("GET", "/v1/buffers/after.w").status_code == 404
            assert client.metadata("waited")["step"] == 0


def test_all_endpoints_of_buffers_are_asked(pair: Pair, tmp_path: Path) -> None:
    with replicas(1, tmp_path, pair.url) as (server,):
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    known = [(method.lower(), path) for method, path, _ in kinds("of").values()]
    for path, methods in paths.items():
        form = re.compile(re.sub(r"{\w+}", "[^/]+", path))
        for method in {"get", "put", "post", "patch", "delete"} & methods.keys():
            if path.startswith(("/v1/buffers", "/v1/pushes", "/v1/runs")) and (method, path) not in WRITES:
                assert any(method == one and form.fullmatch(place) for one, place in known), (method, path)


@pytest.mark.parametrize("how", CUTS)
def test_a_store_says_nothing_that_the_standby_lacks(pair: Pair, how: str) -> None:
    """Each answer comes from a store of its own: the writer of one would wait with the first."""
    schema = f"s{new_key()}"

    def opened(**options: Any) -> PostgresStore:
        return PostgresStore(pair.url, schema=schema, **options)

    with ExitStack() as stack:
        plain = stack.enter_context(closing(opened()))
        fenced = {what: stack.enter_context(closing(opened(replicated=True))) for what in ANSWERS}
        threads = stack.enter_context(ThreadPoolExecutor(len(ANSWERS)))
        prepare(plain.within("before"))

        def ask(of: str) -> dict[str, Future[Any]]:
            return {what: threads.submit(answer, fenced[what].within(of)) for what, answer in ANSWERS.items()}

        expected = {what: answer(plain.within("before")) for what, answer in ANSWERS.items()}
        assert {what: answer(fenced[what].within("before")) for what, answer in ANSWERS.items()} == expected
        with cut_off(pair, how):
            prepare(plain.within("after"))
            asked = ask("after")
            time.sleep(SECONDS)
            assert [what for what, one in asked.items() if one.done() and one.exception() is None] == []
        for what, one in asked.items():
            error = one.exception(PATIENCE)
            assert error is None or (isinstance(error, StoreFailed) and not what.startswith("submit")), what
        assert all(answer(fenced[what].within("after")) is not None for what, answer in ANSWERS.items())


def test_an_emptied_setting_acknowledges_nothing(pair: Pair, tmp_path: Path) -> None:
    """To empty synchronous_standby_names ends the waits for the standby, and the database does not warn."""
    with closing(PostgresStore(pair.url, schema=f"s{new_key()}", replicated=True)) as fenced:
        create(fenced, "w")
        pair.standby.stop()
        with ThreadPoolExecutor(1) as thread:
            adding = thread.submit(add, fenced, "w", 1.0)
            wait(lambda: pair.primary.execute(f"select 1 {WAITING}"), "the add does not wait")
            pair.primary.set(synchronous_standby_names="")
            with pytest.raises(StoreFailed):
                fenced.durable(["w"])
            time.sleep(SECONDS)
            assert not adding.done()
            pair.primary.set(synchronous_standby_names="*")
            pair.standby.start()
            assert adding.result(PATIENCE)["count"] == 1


def test_a_failover_between_a_read_and_its_fence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standby of the next primary has all that this has, but not what was read."""
    monkeypatch.setattr(store, "READ_SECONDS", PATIENCE)
    monkeypatch.setattr(outage, "AWAY_SECONDS", PATIENCE)  # a failover takes as long as the machine lets it
    schema, usual, servers, dead = f"s{new_key()}", Database.cross, list[str](), list[Cluster]()

    def cross(self: Database, connection: Connection) -> str:
        if servers and not dead:
            dead.append(pair.primary)
            pair.fail_over()
        servers.append(usual(self, connection))
        return servers[-1]

    with (
        closing(PostgresStore(pair.url, schema=schema, replicated=True)) as fenced,
        closing(PostgresStore(pair.url, schema=schema)) as plain,
    ):
        create(fenced, "w")
        monkeypatch.setattr(Database, "cross", cross)
        assert fenced.durable(["w"])[0].count == 0
        pair.standby.stop()
        add(plain, "w", 1.0)
        assert fenced.record("w").count == 1
        assert fenced.durable(["w"])[0].count == 0
        assert (len(servers), len({*servers})) == (3, 2)


def test_reads_behind_a_silent_standby_leave_no_backends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the reads of many servers take all connections of the database, until it gives the standby up."""
    monkeypatch.setattr(store, "READ_SECONDS", 0.5)
    with closing(PostgresStore(pair.url, schema=f"s{new_key()}", replicated=True)) as fenced:
        create(fenced, "w")
        with silent(pair):
            for _ in range(3):
                with pytest.raises(StoreFailed):
                    fenced.durable(["w"])
            wait(lambda: not pair.primary.execute(f"select 1 {WAITING}"), "backends wait for ever", 5)

        def is_read() -> bool:
            with suppress(StoreFailed):  # a slow machine sees a long outage, and asks whether it is over
                return bool(fenced.durable(["w"]))
            return False

        wait(is_read, "reads do not come back", PATIENCE)


def test_the_janitor_does_not_wait_for_a_silent_standby(pair: Pair) -> None:
    """Else each of its rounds leaves a backend that waits."""
    schema = f"s{new_key()}"
    with closing(PostgresStore(pair.url, schema=schema, replicated=True)) as fenced:
        create(fenced, "w")
        with silent(pair), closing(Database(pair.url, schema, replicated=True)) as database:
            pair.primary.execute(f'set synchronous_commit = off; update "{schema}".buffers set expires = 0')
            make_partitions(database, 100 * PARTITION_SECONDS)
            drop_partitions(database, 200 * PARTITION_SECONDS, 1.0)
            wait(lambda: not pair.primary.execute(f'select 1 from "{schema}".buffers'), "a buffer does not expire")
            assert pair.primary.execute(f"select 1 {WAITING}") == []


def test_clients_that_read_without_a_standby_leave_the_threads_to_others(pair: Pair, tmp_path: Path) -> None:
    settings = {"durability": "replicated", "threads": 2}
    with replicas(1, tmp_path, pair.url, **settings) as (server,), Client(server.url) as client:
        client.create("w", (3,))
        stop = threading.Event()

        def read() -> None:
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
                while not stop.is_set():
                    http.get("/v1/buffers/w")

        with ThreadPoolExecutor(8) as threads, cut_off(pair, "stopped"):
            for _ in range(8):
                threads.submit(read)
            try:
                large = np.ones(1 << 20)
                answer = client.once("POST", "/v1/ops/ReluGrad", timeout=10, **tensors(dY=large, X=large))
                metrics = client.once("GET", "/metrics", timeout=10)
            finally:
                stop.set()
        assert (answer.status_code, metrics.status_code) == (200, 200)
