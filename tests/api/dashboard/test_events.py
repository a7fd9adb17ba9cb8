"""The stream of samples: each sample comes, and no stream outlives its client, its hour or the server."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.dashboard import history
from service.api.dashboard.history import Events
from service.api.dashboard.sample import Sample
from service.api.server import create_app
from service.settings import Settings
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, wait_until

PATH = "/v1/service/events"
GET = f"GET {PATH} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
NEVER = 3600


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers of this process take a sample every 50 ms."""
    monkeypatch.setattr(history, "STEP_SECONDS", 0.05)


@pytest.fixture
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of a server that has two streams at most, and sends nothing on them but the first comment."""
    monkeypatch.setattr(history, "STEP_SECONDS", NEVER)
    monkeypatch.setattr(history, "HEARTBEAT_SECONDS", NEVER)
    monkeypatch.setattr(history, "MAX_STREAMS", 2)
    with serving() as url:
        yield url


@contextmanager
def stream(url: str) -> Iterator[Iterator[str]]:
    """Open a stream. Yield its lines after the first comment."""
    with httpx.stream("GET", f"{url}{PATH}", timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        assert next(lines).startswith(": ")
        assert next(lines) == ""
        yield lines


@contextmanager
def connected(url: str, request: bytes = GET) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", httpx.URL(url).port or 0))
        connection.sendall(request)
        yield connection


def status(url: str) -> int:
    """Return the status of another stream, which is closed at once."""
    with httpx.stream("GET", f"{url}{PATH}", timeout=30) as answer:
        return answer.status_code


def samples(lines: Iterator[str], count: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(count):
        assert next(lines) == "event: sample"
        name, _, data = next(lines).partition(": ")
        assert (name, next(lines)) == ("data", "")
        found.append(json.loads(data))
    return found


def test_events_are_the_new_samples_of_the_history(url: str) -> None:
    with stream(url) as lines:
        found = samples(lines, 3)
    for one in found:
        Sample.model_validate(one, strict=True)
    assert [one["at"] for one in found] == sorted({one["at"] for one in found})
    kept = httpx.get(f"{url}/v1/service/history").json()["samples"]
    assert [one for one in kept if one in found] == found


def test_proxies_pass_events_on_at_once(url: str) -> None:
    with httpx.stream("GET", f"{url}{PATH}") as answer:
        headers = answer.headers
    assert headers["content-type"] == "text/event-stream"
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-store", "no")
    assert (headers["transfer-encoding"], "content-length" in headers) == ("chunked", False)


def test_a_stream_carries_the_id_of_its_request(url: str) -> None:
    with httpx.stream("GET", f"{url}{PATH}", headers={"X-Request-ID": "watch-1"}) as answer:
        assert answer.headers["x-request-id"] == "watch-1"


def test_a_silent_stream_has_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STEP_SECONDS", NEVER)
    monkeypatch.setattr(history, "HEARTBEAT_SECONDS", 0.02)
    with serving() as url, stream(url) as lines:
        assert [next(lines) for _ in range(4)] == [":", "", ":", ""]


def test_an_open_stream_is_not_in_flight_but_counted(url: str) -> None:
    """Its time is that of its head, so that an hour does not count as the time of a request."""
    with stream(url) as lines:
        samples(lines, 1)
        wait_until(lambda: in_flight(url) == 0)
        metrics = httpx.get(f"{url}/metrics").text
        assert 'gradserve_requests_total{route="other",status="200"} 1.0' in metrics
        assert 'gradserve_request_seconds_count{route="other"} 1.0' in metrics
        sent = next(line for line in metrics.splitlines() if line.startswith("gradserve_sent_bytes_total"))
        assert float(sent.split()[1]) > 400  # the event


# ----- the ends of a stream -----


def test_more_streams_are_refused_until_a_client_leaves(silent: str) -> None:
    """Nothing is sent meanwhile: the server sees its client leave without a write that fails."""
    with stream(silent):
        with stream(silent):
            answer = httpx.get(f"{silent}{PATH}")
            assert assert_problem(answer, 429, "busy", "2 streams")["limit"] == 2
            assert answer.headers["retry-after"] == "1"
            assert httpx.get(f"{silent}/v1/service/history").status_code == 200
        wait_until(lambda: status(silent) == 200)
        wait_until(lambda: status(silent) == 200)


def test_a_client_that_closes_its_own_direction_ends_its_stream(silent: str) -> None:
    with connected(silent) as one, connected(silent) as other:
        for connection in (one, other):
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert status(silent) == 429
        one.shutdown(socket.SHUT_WR)
        assert one.makefile("rb").read().endswith(b"\r\n0\r\n\r\n")
        wait_until(lambda: status(silent) == 200)


def test_head_opens_no_stream(silent: str) -> None:
    with httpx.Client(base_url=silent) as client:
        for _ in range(5):
            answer = client.head(PATH)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-type"] == "text/event-stream"
        with stream(silent), stream(silent):
            assert client.head(PATH).status_code == 429
            assert client.get("/v2/health/live").status_code == 200


def test_http_1_0_gets_events_up_to_the_end_of_the_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STREAM_SECONDS", 0.15)
    with connected(url, f"GET {PATH} HTTP/1.0\r\nConnection: keep-alive\r\n\r\n".encode()) as connection:
        head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b": a sample follows")
    assert body.count(b"event: sample\ndata: {") == body.count(b"}\n\n") >= 1


def test_a_pipelined_request_is_answered_after_the_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STREAM_SECONDS", 0.15)
    last = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connected(url, GET + GET + last) as connection:
        answers = connection.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == answers.count(b"\r\n0\r\n\r\n") + 1 == 3
    assert answers.endswith(b'{"live":true}')


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let streams send more than any socket takes. Return the sizes of their pieces."""
    sizes: list[int] = []

    async def more(events: Events) -> bytes:
        await asyncio.sleep(0)
        sizes.append(1 << 16)
        return b":%b\n\n" % bytes(sizes[-1])

    monkeypatch.setattr(Events, "_next", more)
    return sizes


def wait_until_full(sizes: list[int]) -> None:
    """Return once the server has sent all that the client's socket takes."""
    seen = 0
    while seen != len(sizes) or not sizes:
        seen = len(sizes)
        time.sleep(0.1)


@pytest.mark.usefixtures("endless")
def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_STREAMS", 1)
    with serving(keep_alive=1) as url, connected(url) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert status(url) == 429
        wait_until(lambda: status(url) == 200)


def test_streams_end_when_the_server_stops(tmp_path: Path) -> None:
    with Server(tmp_path / "store", drain_timeout=600) as server, ExitStack() as stack:
        streams = [stack.enter_context(stream(server.url)) for _ in range(6)]
        server.process.send_signal(signal.SIGTERM)
        for lines in streams:
            list(lines)  # httpx raises an error unless the last chunk comes
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log.read_text()


def test_a_client_that_does_not_read_does_not_delay_the_stop(
    endless: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        with serving(drain_timeout=10, log_level="debug") as url:
            connection = stack.enter_context(connected(url))
            assert connection.recv(12) == b"HTTP/1.1 200"
            wait_until_full(endless)
    said = capfd.readouterr().err
    assert "Application shutdown complete" in said
    assert "exceeded" not in said
    assert "Traceback" not in said


def test_a_stream_over_tls(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as plain:
        secure = plain.replace("http:", "https:")
        context = ssl.create_default_context(cafile=str(made))
        with httpx.stream("GET", f"{secure}{PATH}", verify=context, timeout=30) as answer:
            assert "event: sample" in answer.iter_lines()


def test_a_stream_works_without_our_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "STREAM_SECONDS", 0.15)
    app = create_app(Settings(store="memory:"))

    async def check() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            head = await client.head(PATH)
            assert (head.status_code, head.content) == (200, b"")
            return await client.get(PATH)

    answer = asyncio.run(check())
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text.count("event: sample\n") >= 1
