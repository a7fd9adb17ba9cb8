"""The server shares itself out by namespace: a greedy tenant does not stop the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from benchmarks.tenants import Result
from service.api.http import admission
from service.engine.engine import Engine
from service.keys import add as add_key
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.api.models import chain, linear
from tests.api.test_health import GATHER, Gate
from tests.serving import assert_problem, in_flight, serving, wait_until

MOST = 1 << 20
"""Bytes in flight, at most."""


class Tenants:
    """A server with the keys of two namespaces."""

    def __init__(self, url: str, secrets: dict[str, str]) -> None:
        self.url, self._secrets = url, secrets

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._secrets[name]}"} if self._secrets else {}

    def client(self, name: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers(name), timeout=30)

    def run(self, name: str, size: int) -> httpx.Response:
        """Run ReluGrad on two tensors of `size` elements."""
        body = safetensors.numpy.save({tensor: np.ones(size, np.float32) for tensor in ("dY", "X")})
        with self.client(name) as client:
            return client.post("/v1/ops/ReluGrad", content=body, headers=SAFE)

    @contextmanager
    def upload(self, name: str, announced: int, body: bytes = b"") -> Iterator[socket.socket]:
        """Yield the connection of an add that has sent only the beginning of its body."""
        host, port = self.url.removeprefix("http://").split(":")
        lines = ["POST /v1/buffers/a/accumulate HTTP/1.1", "Host: x", f"Content-Length: {announced}"]
        lines += [f"{header}: {value}" for header, value in {**self.headers(name), **SAFE}.items()]
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            before = in_flight(self.url)
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            wait_until(lambda: in_flight(self.url) == before + 1)
            yield connection


@contextmanager
def tenants(path: Path, names: str = "ab", **settings: Any) -> Iterator[Tenants]:
    scopes = ["ops", "buffers:read", "buffers:write", "graphs:write"]
    secrets = {name: add_key(path / "keys", name, scopes, name) for name in names}
    given = {"max_bytes_in_flight": MOST, "max_body_bytes": 4 * MOST, **settings}
    with serving(keys=path / "keys", **given) as url:
        yield Tenants(url, secrets)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with tenants(tmp_path_factory.mktemp("keys")) as server:
        yield server


@pytest.fixture
def server(shared: Tenants) -> Tenants:
    """Return a server that holds no bytes of other tests."""
    wait_until(lambda: in_flight(shared.url, "_bytes") == in_flight(shared.url) == 0)
    return shared


# ----- memory -----


def test_an_announced_body_takes_nothing_from_other_namespaces(server: Tenants) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.upload("a", MOST // 8))
        assert in_flight(server.url, "_bytes") == 0
        for _ in range(2):
            assert server.run("b", 50_000).status_code == 200


def test_an_idle_body_takes_nothing_from_its_own_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_bytes_in_flight=MOST) as url, ExitStack() as stack:
        server = Tenants(url, {})
        for _ in range(4):
            stack.enter_context(server.upload("a", MOST // 4))
        monkeypatch.setattr(admission, "PROMISE_SECONDS", 60)
        assert_problem(server.run("a", 50_000), 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT")  # the rest may come yet
        monkeypatch.setattr(admission, "PROMISE_SECONDS", 0)
        assert server.run("a", 50_000).status_code == 200


def test_a_namespace_holds_at_most_half(server: Tenants) -> None:
    part = bytes(MOST // 3)
    with server.upload("a", MOST // 3 + 1, part):
        wait_until(lambda: in_flight(server.url, "_bytes") > MOST // 3)
        problem = assert_problem(server.run("a", 40_000), 429, "busy", "this namespace", "half of GRADSERVE_")
        assert problem["limit"] == MOST // 2
        assert server.run("b", 40_000).status_code == 200


def test_a_request_beyond_the_share_leaves_the_share_of_others(server: Tenants) -> None:
    """A request that is alone in its namespace may hold as much as it needs."""
    body = bytes(2 * MOST)
    with server.upload("a", 2 * MOST + 1, body):
        wait_until(lambda: in_flight(server.url, "_bytes") > 2 * MOST)
        assert server.run("b", 50_000).status_code == 200
        assert_problem(server.run("b", 100_000), 429, "busy")


def test_a_body_that_finds_no_room_when_it_comes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PROMISE_SECONDS", 0)
    size = 3 * MOST // 4
    with serving(max_bytes_in_flight=MOST) as url:
        server = Tenants(url, {})
        with server.upload("a", size) as late:
            with server.upload("a", size, bytes(size - 1)):
                wait_until(lambda: in_flight(url, "_bytes") > size - 1000)
                late.sendall(bytes(size))
                answer = b"".join(iter(lambda: late.recv(10_000), b""))
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"\r\nretry-after: 1\r\n" in answer.lower()
                assert b"\r\nconnection: close\r\n" in answer
                assert in_flight(url, "_bytes") == size
        wait_until(lambda: in_flight(url, "_bytes") == 0)


# ----- threads -----


@contextmanager
def occupied(server: Tenants, monkeypatch: pytest.MonkeyPatch, waiting: int) -> Iterator[httpx.Client]:
    """Yield a client of namespace a, whose requests hold all threads while `waiting` more of them wait."""
    gate = Gate()
    monkeypatch.setattr(Engine, "run", gate)
    with server.client("a") as client, ThreadPoolExecutor() as pool:
        ask = lambda: client.post("/v1/ops/GatherGrad", content=GATHER)  # noqa: E731
        asked = [pool.submit(ask)]
        try:
            assert gate.started.acquire(timeout=30)
            asked += [pool.submit(ask) for _ in range(waiting)]
            wait_until(lambda: f"gradserve_waiting {waiting}.0" in client.get("/metrics").text)
            yield client
        finally:
            gate.let_go.set()
        assert {one.result().status_code for one in asked} == {200}


def test_long_requests_do_not_hold_the_threads_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tenants(tmp_path, threads=1, max_waiting=3) as server, server.client("b") as other:
        with occupied(server, monkeypatch, 3) as client:
            for _ in range(3):
                assert other.get("/v1/buffers").status_code == 200
            refused = client.get("/v1/buffers")
            assert_problem(refused, 429, "busy", "3 requests", "this namespace", "GRADSERVE_MAX_WAITING")
            assert refused.headers["retry-after"] == "1"
        assert client is not other


def test_small_requests_beyond_the_queue_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(threads=1, max_waiting=2) as url, occupied(Tenants(url, {}), monkeypatch, 2) as client:
        assert_problem(client.get("/v1/buffers"), 429, "busy", "GRADSERVE_MAX_WAITING")
        assert client.get("/v2/health/ready").status_code == 200
        assert client.put("/v1/buffers/a", json={"shape": [1]}).status_code == 201


LENGTH, SIZE = 4000, 256
"""A chain of matrix products. It takes more than a second."""


def upload(server: Tenants, name: str, graph: str, content: bytes) -> None:
    with server.client(name) as client:
        client.put(f"/v1/graphs/{graph}", content=content).raise_for_status()


@pytest.mark.parametrize(("threads", "names"), [(1, "abc"), (1, "aaabb"), (2, "aabbcc")])
def test_long_graphs_let_a_small_one_go_first(tmp_path: Path, threads: int, names: str) -> None:
    """The small one is planned and answered while each long one has still far to go. These lose nothing."""
    with tenants(tmp_path, "abcdz", threads=threads, max_bytes_in_flight=64 * MOST) as server, ExitStack() as stack:
        for name in {*names}:
            upload(server, name, "long", chain(LENGTH, SIZE))
        upload(server, "z", "small", linear())
        clients = {name: stack.enter_context(server.client(name)) for name in {*names, "z"}}
        pool = stack.enter_context(ThreadPoolExecutor(8))
        asked = [pool.submit(clients[one].post, "/v1/graphs/long", json={}, headers=TO_SAFETENSORS) for one in names]
        wait_until(lambda: in_flight(server.url) == len(asked))
        for _ in range(3):
            answer = clients["z"].post("/v1/graphs/small", json={"x": [[1, 10]]})
            assert answer.raise_for_status().json()["y"]["data"] == [[33]]
            assert not any(one.done() for one in asked)
        for one in asked:
            (product,) = safetensors.numpy.load(one.result().raise_for_status().content).values()
            np.testing.assert_array_equal(product, np.eye(SIZE))


# ----- the benchmark -----


@pytest.mark.parametrize(
    ("ratio", "longest", "met"),
    [(1.0, 0.1, True), (4.9, 0.99, True), (0.04, 0.1, False), (5.1, 0.1, False), (1.0, 23.0, False)],
)
def test_the_benchmark_of_tenants_fails_without_a_baseline(ratio: float, longest: float, met: bool) -> None:
    """A ratio of almost nothing says that the tenant was not alone when it was measured alone."""
    assert Result("takes of many", ratio, longest, "").is_met == met
