"""Pipelined requests: the server answers each in turn and reads only a few ahead."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.api.http.connection import MAX_WAITING_BYTES
from service.api.http.wire import Wire
from tests.api.http.test_connection import LIVE, POLL
from tests.api.http.test_endings import CHUNKED, KEEP_ALIVE, count
from tests.api.test_body import Connection
from tests.faults.servers import Server
from tests.serving import in_flight, serving, unread, wait_until

ADD = b"POST /v1/buffers/sum/accumulate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ADD += b'Content-Length: 18\r\n\r\n{"gradient":[1,1]}'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(keep_alive=KEEP_ALIVE) as url:
        httpx.put(f"{url}/v1/buffers/open", json={"shape": [2]}).raise_for_status()
        httpx.put(f"{url}/v1/buffers/sum", json={"shape": [2]}).raise_for_status()
        yield url


SHORT = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /v1/buffers/open/value?step=0&timeout=%d HTTP/1.1\r\nHost: x\r\n\r\n"
MORE = 10 << 20
"""Bytes that the process may grow by."""


def resident_bytes(server: Server) -> int:
    """Return the bytes of memory that the process holds."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server that already holds the memory that it keeps for good."""
    with Server(tmp_path / "store") as server:
        for name in ("open", "sum"):
            httpx.put(f"{server.url}/v1/buffers/{name}", json={"shape": [2]}).raise_for_status()
        with Connection(server.url) as connection:
            connection.send((SHORT + ADD) * 200)
            for _ in range(400):
                connection.answer()
        yield server


LONG = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n" % (b"x" * 3000)


@pytest.mark.parametrize(("more", "times"), [(SHORT * 60, 100), (LONG * 9, 400)])
def test_pipelined_requests_take_little_memory(server: Server, more: bytes, times: int) -> None:
    """The long requests, sent at once, make twelve megabytes."""
    before, after = resident_bytes(server), 0
    with Connection(server.url) as connection:
        sender = threading.Thread(target=connection.send, args=[(more + ADD) * 20] * (times // 20), kwargs={"pause": 0})
        sender.start()
        for number in range(times):
            for _ in range(more.count(b"GET")):
                assert connection.answer().body == b'{"live":true}'
            assert json.loads(connection.answer().body)["count"] == 201 + number
            after = max(after, resident_bytes(server))
        sender.join()
    assert after - before < MORE


@pytest.mark.parametrize(
    "sent", [WAIT % 300 + SHORT * 10_000, b"GET /v1/buffers?limit=1 HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000]
)
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_never_stops_sending_takes_little_memory(server: Server, sent: bytes, reads: bool) -> None:
    before, end = resident_bytes(server), time.monotonic() + 1
    with Connection(server.url) as connection:
        connection.socket.setblocking(False)
        while time.monotonic() < end:
            try:
                sent = sent[connection.socket.send(sent) :] or SHORT * 10_000
            except BlockingIOError:
                with suppress(BlockingIOError):
                    if reads:
                        connection.socket.recv(1 << 20)
                time.sleep(0.001)
        assert resident_bytes(server) - before < MORE


def test_requests_behind_a_waiting_request_are_answered(url: str) -> None:
    before, many = count(url), 2 * MAX_WAITING_BYTES // len(ADD)
    with Connection(url) as connection:
        connection.send(WAIT % 1 + ADD * 3, ADD * many + ADD[:20], ADD[20:], pause=0.1)
        assert connection.answer().status == 409
        for number in range(many + 4):
            assert json.loads(connection.answer().body)["count"] == before + number + 1


def test_requests_may_be_cut_anywhere(url: str) -> None:
    before, pair = count(url), LIVE + CHUNKED % b"" + b"0\r\n\r\n"
    with Connection(url) as connection:
        for place in range(len(pair)):
            connection.send(pair[:place], pair[place:] + pair[:place], pair[place:])
            for number in (1, 2):
                assert connection.answer().body == b'{"live":true}'
                assert json.loads(connection.answer().body)["count"] == before + 2 * place + number


@pytest.mark.parametrize("behind", [LIVE, POLL, LIVE * (MAX_WAITING_BYTES // len(LIVE))])
def test_a_client_that_leaves_pipelined_requests_is_noticed(url: str, behind: bytes) -> None:
    with Connection(url) as connection:
        connection.send(POLL)
        wait_until(lambda: in_flight(url) == 1)
        connection.send(behind)
        wait_until(lambda: unread(url) == 0)
    wait_until(lambda: in_flight(url) == 0)


def test_a_client_that_left_takes_nothing(url: str) -> None:
    with Connection(url) as connection:
        connection.send(b"POST /v1/buffers/open/take?min_count=1&timeout=300 HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: in_flight(url) == 1)
        connection.send(LIVE)
        wait_until(lambda: unread(url) == 0)
    wait_until(lambda: in_flight(url) == 0)
    receipt = httpx.post(f"{url}/v1/buffers/open/accumulate", json={"gradient": [1, 1]}).json()
    assert (receipt["step"], receipt["count"]) == (0, 1)


def test_a_broken_chunk_in_a_later_request_is_answered_in_turn(url: str) -> None:
    before = count(url)
    with Connection(url) as connection:
        connection.send(LIVE + CHUNKED % b"" + b"zz\r\n")
        assert connection.answer().status == 200
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert connection.is_closed()
    assert count(url) == before


def test_nonsense_in_a_pipeline_does_not_lose_the_earlier_answer(url: str) -> None:
    with Connection(url) as connection:
        connection.send(LIVE + b"nonsense\r\n\r\n")
        connection.wait_for_end()
        connection.send(bytes(1 << 20))
        assert connection.answer().status == 200
        assert connection.answer().status == 400
        assert connection.is_closed()


@pytest.mark.parametrize("sent", [POLL * 3, LIVE + CHUNKED % b"" + b"zz\r\n", b"nonsense\r\n\r\n"])
def test_a_lost_connection_is_freed_without_the_garbage_collector(
    url: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector is off: no reference cycle holds the connection."""
    alive: weakref.WeakSet[Wire] = weakref.WeakSet()
    made, most = Wire.connection_made, 0

    def connection_made(wire: Wire, transport: asyncio.BaseTransport) -> None:
        nonlocal most
        alive.add(wire)
        most += 1
        made(wire, transport)

    monkeypatch.setattr(Wire, "connection_made", connection_made)
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 0.1)  # a timer holds the connection so long
    gc.disable()
    try:
        for _ in range(20):
            with Connection(url) as connection:
                connection.send(sent)
                time.sleep(0.02)
        wait_until(lambda: in_flight(url) == 0)
        wait_until(lambda: len(alive) < 10)
    finally:
        gc.enable()
    assert most >= 20
