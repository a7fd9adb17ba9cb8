"""Health, start and stop, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Any

import httpx
import pytest
import uvicorn

from service.api.http.waiting import Waiting
from service.api.http.wire import Ending
from service.api.server import server_config
from service.buffers.memory import MemoryStore
from service.engine.engine import Engine
from service.settings import Settings
from tests.serving import assert_problem, in_flight, serving, wait_until


def test_a_running_server_is_live_and_ready(client: httpx.Client) -> None:
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}


def assert_not_ready(answer: httpx.Response) -> None:
    assert (answer.status_code, list(answer.json())) == (503, ["error"])


def test_a_server_is_not_ready_before_its_start_and_after_its_stop() -> None:
    config = server_config(Settings(store="memory:"))
    config.lifespan = "off"
    app: Any = config.app
    server = uvicorn.Server(config)

    async def check() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server._serve([listener]))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert (await client.get("/v2/health/live")).status_code == 200
            assert_not_ready(await client.get("/v2/health/ready"))
            assert_problem(await client.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}), 503, "not_ready")
            async with app.router.lifespan_context(app):
                assert (await client.get("/v2/health/ready")).status_code == 200
            assert_not_ready(await client.get("/v2/health/ready"))
        server.should_exit = True
        await serving

    asyncio.run(check())


def test_a_bug_is_answered_without_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(Engine, "run", broken)
    monkeypatch.setattr(MemoryStore, "records", broken)
    with serving() as url, httpx.Client(base_url=url) as client:
        for method, path in (("POST", "/v1/ops/ReluGrad"), ("GET", "/v1/buffers")):
            answer = client.request(method, path, json={"dY": 1, "X": 1})
            assert_problem(answer, 500, "internal", "log")
            assert "secret" not in answer.text
            assert answer.headers["Connection"] == "close"
            assert client.get("/v2/health/ready").status_code == 200


GATHER = b'{"shape": [1], "indices": [0], "grad": [1.0]}'
"""A body whose request runs in the thread pool."""


class Gate:
    """A kernel that reports its start and then waits until the gate opens."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.runs = 0

    def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.runs += 1
        self.started.release()
        assert self.let_go.wait(30)
        return {}


def send(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = b"POST /v1/ops/GatherGrad HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(GATHER) + GATHER)
    return connection


def reset(connection: socket.socket) -> None:
    """Close the connection in both directions: a client that closes its own direction still gets its answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_request_abandoned_before_it_starts_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(Engine, "run", gate)
    with serving(threads=1) as url:
        running = send(url)
        assert gate.started.acquire(timeout=30)
        abandoned = [send(url) for _ in range(5)]
        wait_until(lambda: in_flight(url) == 6)
        for connection in abandoned:
            reset(connection)
        wait_until(lambda: in_flight(url) == 1)
        kept = send(url)
        wait_until(lambda: in_flight(url) == 2)
        assert httpx.get(f"{url}/v2/health/live").status_code == 200  # although the pool is full
        gate.let_go.set()
        for connection in (running, kept):
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            connection.close()
    assert gate.runs == 2


def test_stopping_finishes_running_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr(Engine, "run", gate)
    monkeypatch.setattr(Waiting, "stop", lambda _: gate.let_go.set())  # the begin of the stop
    monkeypatch.setattr(Ending, "max_seconds", 0.1)
    with serving(threads=1) as url:
        running = send(url)
        assert gate.started.acquire(timeout=30)
    assert running.recv(100).startswith(b"HTTP/1.1 200")
    running.close()


def test_a_client_that_leaves_in_its_body_harms_nobody(client: httpx.Client, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(10):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\n{")
    assert client.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}).status_code == 200
