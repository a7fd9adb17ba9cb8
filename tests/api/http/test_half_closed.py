"""Clients that close their own direction after their requests, as `nc -N` does: each complete request is answered."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import httpx
import pytest

from service.api.http.connection import Connection as ServerConnection
from service.engine.engine import Engine
from tests.api.http.test_connection import LIVE, POLL
from tests.api.http.test_endings import CHUNKED, count, counted, errors, logged
from tests.api.http.test_pipelining import ADD
from tests.api.test_body import LARGE, SMALL, Connection, Make, assert_right, v1, v2
from tests.serving import in_flight, serving, wait_until

__all__ = ["logged"]  # a fixture

LAST = CHUNKED % b"" + b"0\r\n\r\n"
"""An add, whose body is chunked."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer to begin an answer than a server waits."""
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        for name, size in (("open", 2), ("sum", 2), ("large", 4 << 20)):
            httpx.put(f"{url}/v1/buffers/{name}", json={"shape": [size]}).raise_for_status()
        yield url


def half_close(connection: Connection, *sent: bytes, pause: float = 0) -> None:
    connection.send(*sent, pause=pause)
    connection.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("add", [ADD, LAST])
@pytest.mark.parametrize("times", [1, 30])
def test_adds_are_answered(url: str, add: bytes, times: int, logged: pytest.LogCaptureFixture) -> None:
    before, gone = count(url), counted(url, 499)
    for number in range(50 // times):
        with Connection(url) as connection:
            half_close(connection, add * times)
            for turn in range(times):
                answer = connection.answer()
                assert (answer.status, answer.headers.get("connection")) == (200, None)
                assert json.loads(answer.body)["count"] == before + times * number + turn + 1
            assert connection.is_closed()
    wait_until(lambda: in_flight(url) == 0)
    assert counted(url, 499) == gone
    assert errors(logged) == []


@pytest.mark.parametrize("make", [v1, v2])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n", b"Expect: 100-continue\r\n"])
def test_large_and_small_bodies_are_answered(url: str, make: Make, size: int, more: bytes) -> None:
    message = make(size)
    with Connection(url) as connection:
        connection.send(LIVE)
        half_close(connection, message.whole(more))
        assert connection.answer().status == 200
        if b"Expect" in more and size == LARGE:
            assert connection.head()[0] == 100
        assert_right(connection.answer(), message)
        assert connection.is_closed()


def test_a_large_answer_arrives_whole(url: str) -> None:
    with Connection(url) as connection:
        accept = b"Accept: application/vnd.safetensors\r\n\r\n"
        half_close(connection, LIVE, b"GET /v1/buffers/large/value HTTP/1.1\r\nHost: x\r\n" + accept + LIVE)
        for size in (13, 16 << 20, 13):
            assert len(connection.answer().body) >= size
        assert connection.is_closed()


GATHER_BODY = b'{"shape": [1], "indices": [0], "grad": [1.0]}'
GATHER = b"POST /v1/ops/GatherGrad HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(GATHER_BODY) + GATHER_BODY


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let operators run until the event is set."""
    event = threading.Event()

    def run(*_: Any, **__: Any) -> dict[str, Any]:
        assert event.wait(30)
        return {}

    monkeypatch.setattr(Engine, "run", run)
    return event


def test_requests_in_the_pool_are_answered(let_go: threading.Event) -> None:
    """The clients have closed their direction before any of the requests has begun."""
    with serving(threads=1) as url:
        connections = [Connection(url) for _ in range(3)]
        for connection in connections:
            half_close(connection, GATHER)
        wait_until(lambda: in_flight(url) == 3)
        let_go.set()
        for connection in connections:
            with connection:
                assert connection.answer().status == 200
                assert connection.is_closed()


def test_an_answer_that_does_not_begin_soon_is_given_up(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends while the kernel still runs. An answer that has begun arrives whole."""
    give_up = create_autospec(ServerConnection._give_up, side_effect=ServerConnection._give_up)
    monkeypatch.setattr(ServerConnection, "_give_up", give_up)
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 0.2)
    value = b"GET /v1/buffers/large/value HTTP/1.1\r\nHost: x\r\nAccept: application/vnd.safetensors\r\n\r\n"
    with serving(threads=1) as url:
        httpx.put(f"{url}/v1/buffers/large", json={"shape": [4 << 20]}).raise_for_status()
        with Connection(url) as connection:
            half_close(connection, GATHER)
            assert connection.is_closed()
        wait_until(lambda: in_flight(url) == 0)
        assert counted(url, 499) == 1
        let_go.set()
        with Connection(url) as connection:
            connection.send(value)
            size = int(connection.head()[1]["content-length"])
            connection.socket.shutdown(socket.SHUT_WR)
            wait_until(lambda: give_up.call_count == 2)
            assert len(connection._stream.read(size)) == size


@pytest.mark.parametrize("sent", [ADD[:-1], ADD[:40], LAST[:-2], v1(LARGE).whole()[:-1]])
@pytest.mark.parametrize("before", [b"", ADD, LIVE + ADD])
def test_an_incomplete_request_is_given_up(url: str, sent: bytes, before: bytes) -> None:
    start = count(url)
    with Connection(url) as connection:
        half_close(connection, before + sent)
        for _ in range(before.count(b"HTTP/1.1")):
            assert connection.answer().status == 200
        assert connection.is_closed()
    wait_until(lambda: in_flight(url) == 0)
    assert count(url) == start + before.count(b"POST")


@pytest.mark.parametrize("before", [b"", LIVE, LIVE * 3])
@pytest.mark.parametrize("behind", [b"", LIVE, POLL])
def test_a_wait_is_given_up(url: str, before: bytes, behind: bytes, logged: pytest.LogCaptureFixture) -> None:
    gone = counted(url, 499)
    with Connection(url) as connection:
        half_close(connection, before + POLL + behind)
        for _ in range(before.count(b"GET")):
            assert connection.answer().status == 200
        assert connection.is_closed()
    wait_until(lambda: in_flight(url) == 0)
    assert counted(url, 499) == gone + 1
    assert errors(logged) == []


def test_a_request_that_need_not_wait_is_answered(url: str) -> None:
    path = b"POST /v1/buffers/sum/take?min_count=1&timeout=300 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    for _ in range(10):
        with Connection(url) as connection:
            half_close(connection, ADD + path)
            assert connection.answer().status == 200
            assert connection.answer().status == 200
    assert count(url) == 0


def test_a_client_that_left_altogether_ends_its_connection(url: str) -> None:
    """A client that closes its socket looks the same until the server writes."""
    for _ in range(5):
        with Connection(url) as connection:
            connection.send(LIVE + ADD * 20)
    with Connection(url) as connection:
        connection.send(LIVE)
        assert connection.answer().status == 200
    wait_until(lambda: in_flight(url) == 0)
