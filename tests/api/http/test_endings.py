"""How connections end: a client that sends an unwanted body still reads the answer, and the server keeps nothing."""

from __future__ import annotations

import json
import logging
import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import create_autospec

import httpx
import pytest

from service.api.http.wire import Ending, Wire
from tests.api.http.test_connection import LIVE, POLL
from tests.api.test_body import Answer, Connection, v1
from tests.faults.servers import Server
from tests.serving import in_flight, serving, wait_until

KEEP_ALIVE = 1
"""Seconds that this server keeps an idle connection."""

MOST = 1 << 20
"""The max_body_bytes of this server."""

MORE = 12 << 20
"""Bytes of a body larger than the socket buffers: the server must read."""

CHUNKED = b"POST /v1/buffers/sum/accumulate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b"
CHUNKED += b'Transfer-Encoding: chunked\r\n\r\n17\r\n{"gradient": [1, 1]}   \r\n'
"""An add without its last chunk, with a place for more headers."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(keep_alive=KEEP_ALIVE, max_body_bytes=MOST, max_bytes_in_flight=MOST, access_log=True) as url:
        httpx.put(f"{url}/v1/buffers/open", json={"shape": [2]}).raise_for_status()
        httpx.put(f"{url}/v1/buffers/sum", json={"shape": [2]}).raise_for_status()
        yield url


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Capture the server's log, although the server sets up its own handlers."""
    loggers = [logging.getLogger(name) for name in ("", "uvicorn.error", "gradserve.access")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def errors(logged: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in logged.records if one.levelno >= logging.ERROR]


def count(url: str, name: str = "sum") -> int:
    number: int = httpx.get(f"{url}/v1/buffers/{name}").json()["count"]
    return number


def counted(url: str, status: int) -> float:
    """Return how many requests the metrics count under this status."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    wanted = [one for one in lines if one.startswith("gradserve_requests_total") and f'status="{status}"' in one]
    return sum(float(one.split()[-1]) for one in wanted)


# ----- unwanted bodies -----


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(("path", "status"), [("/nope", 404), ("/v1/ops/ReluGrad", 413), ("/v1/ops", 405)])
def test_a_client_that_sends_an_unwanted_body_reads_the_answer(url: str, path: str, status: int, version: str) -> None:
    with Connection(url) as connection:
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: close\r\nContent-Length: {MORE}\r\n\r\n"
        connection.send(head.encode())
        connection.wait_for_end()
        connection.send(bytes(MORE), b"and what", b"is no body", pause=0.1)
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert json.loads(answer.body)["status"] == status
        assert connection.is_closed()


@pytest.mark.parametrize("pause", [0.3, 0.01])
def test_an_unwanted_body_is_cut_off_after_a_while(url: str, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ending, "max_seconds", 1.0)
    with Connection(url) as connection:
        connection.send(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MORE)
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (404, "close")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.send(*[b"x"] * 2000, pause=pause)


def test_an_unwanted_body_is_cut_off_after_some_bytes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ending, "max_bytes", MOST)
    with Connection(url) as connection:
        connection.send(b"nonsense\r\n\r\n")
        assert connection.answer().status == 400
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.send(*[bytes(MOST)] * 50)


def test_a_client_that_sends_on_after_nonsense_reads_the_answer(url: str) -> None:
    with Connection(url) as connection:
        connection.send(b"nonsense\r\n\r\n")
        connection.wait_for_end()
        connection.send(bytes(1 << 20))
        assert connection.answer().status == 400
        assert connection.is_closed()


def test_an_unread_body_counts_no_bytes_in_flight(url: str) -> None:
    with Connection(url) as connection:
        connection.send(POLL[:-2] + b"Content-Length: %d\r\n\r\n" % MOST)
        wait_until(lambda: in_flight(url) == 1)
        assert in_flight(url, "_bytes") == 0


# ----- trailers -----


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    "trailer",
    [
        b"Idempotency-Key: in-the-trailer",
        b"Content-Encoding: br",
        b'If-Match: "9-9"',
        b"Request-Timeout: x",
        b"Authorization: Bearer x",
        b"Expect: 100-continue",
        b"Connection: close",
    ],
)
def test_a_trailer_is_not_taken_for_a_header(url: str, trailer: bytes, pieces: int) -> None:
    before = count(url)
    message = CHUNKED % b"" + b"0\r\n" + trailer + b"\r\n\r\n"
    cut = len(message) if pieces == 1 else message.index(b"\r\n\r\n") + 4
    with Connection(url) as connection:
        for number in (1, 2):
            connection.send(*filter(None, [message[:cut], message[cut:]]), pause=0.05)
            assert connection.answer().status == 200
            assert count(url) == before + number


# ----- the last answer -----


def test_requests_after_connection_close_are_not_run(url: str) -> None:
    before = count(url)
    body = json.dumps({"dY": [1] * 100_000, "X": [1] * 100_000}).encode()  # takes a while to decode
    head = b"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with Connection(url) as connection:
        connection.send(sent[:1000], sent[1000:] + (CHUNKED % b"" + b"0\r\n\r\n") * 3, pause=0.1)
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert connection.is_closed()
    assert count(url) == before


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([b"nonsense\r\n" * 5000], 400),
        ([CHUNKED % b"Expect: 100-continue\r\n" + b"zz\r\n"], 400),
        ([b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n", bytes(100_000) + LIVE], 404),
        ([b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n" + LIVE], 404),
    ],
)
def test_a_request_gets_one_answer(url: str, sent: list[bytes], status: int, logged: pytest.LogCaptureFixture) -> None:
    with Connection(url) as connection:
        connection.send(*sent, pause=0.1)
        assert connection.answer().status == status
        assert connection.is_closed()
    assert errors(logged) == []


# ----- Expect: 100-continue -----


def test_a_head_request_with_an_unread_body_closes_the_connection(url: str) -> None:
    with Connection(url) as connection:
        connection.send(b"HEAD /v1/ops HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 49\r\n\r\n")
        status, headers = connection.head()
        assert (status, headers["connection"]) == (200, "close")
        assert connection.is_closed()


# ----- metrics and log -----


def broken_off(url: str, sent: bytes) -> Answer:
    with Connection(url) as connection:
        connection.send(sent)
        answer = connection.answer()
        assert connection.is_closed()
        return answer


@pytest.mark.parametrize(
    "head", [CHUNKED % b"", b"GET /v1/ops HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"]
)
def test_an_unreadable_body_is_counted_under_its_status(url: str, head: bytes) -> None:
    before, gone = counted(url, 400), counted(url, 499)
    assert broken_off(url, head + b"zz\r\n").status == 400
    wait_until(lambda: counted(url, 400) == before + 1)
    assert counted(url, 499) == gone


def test_an_unreadable_request_is_logged(url: str, logged: pytest.LogCaptureFixture) -> None:
    answer = broken_off(url, b"nonsense\r\n\r\n")
    assert f". The request id of its answer is {answer.headers['x-request-id']}." in logged.text


def test_a_client_that_left_before_its_answer_is_counted_as_499(url: str) -> None:
    before = counted(url, 499)
    for _ in range(5):
        with Connection(url) as connection:
            connection.send(POLL)
    wait_until(lambda: in_flight(url) == 0)
    assert counted(url, 499) == before + 5


def test_a_cut_answer_is_logged_with_the_bytes_sent(url: str, logged: pytest.LogCaptureFixture) -> None:
    size, gone = 16 << 20, counted(url, 499)
    httpx.put(f"{url}/v1/buffers/large", json={"shape": [size]}).raise_for_status()
    with Connection(url) as connection:
        accept = b"Accept: application/vnd.safetensors\r\n\r\n"
        connection.send(b"GET /v1/buffers/large/value HTTP/1.1\r\nHost: x\r\n" + accept)
        connection.head()
    wait_until(lambda: counted(url, 499) == gone + 1)
    every = [vars(record).get("fields", {}) for record in logged.records]
    fields = next(one for one in every if one.get("path") == "/v1/buffers/large/value")
    assert fields["status"] == 499
    assert 0 < fields["bytes_sent"] < 4 * size


# ----- the stop -----


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server wait for half a second only until it aborts a connection that its client does not close."""
    monkeypatch.setattr(Ending, "max_seconds", 0.5)


def test_an_idle_client_does_not_delay_the_stop(
    logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ending, "max_seconds", 100.0)
    with serving(drain_timeout=20) as url:
        connection = Connection(url)
        connection.send(LIVE)
        assert connection.answer().status == 200
    assert errors(logged) == []  # a stop that waits for the drain is an error
    connection.socket.close()


@pytest.mark.parametrize("read", [False, True])
def test_a_missing_body_does_not_delay_the_stop(read: bool, soon: None, logged: pytest.LogCaptureFixture) -> None:
    with serving(drain_timeout=20) as url:
        connection = Connection(url)
        connection.send(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        if read:
            assert connection.answer().status == 404
    assert errors(logged) == []
    if not read:
        assert connection.answer().status == 404
    assert connection.is_closed()
    connection.socket.close()


def test_a_connection_that_the_stop_closed_runs_no_request(tmp_path: Path) -> None:
    with Server(tmp_path / "store") as server:
        httpx.put(f"{server.url}/v1/buffers/sum", json={"shape": [2]}).raise_for_status()
        with Connection(server.url) as connection:
            connection.send(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n")
            assert connection.answer().status == 404
            server.process.terminate()
            wait_until(lambda: "gradserve stops" in server.log.read_text())
            connection.send(bytes(10) + CHUNKED % b"" + b"0\r\n\r\n")
            assert connection.is_closed()
        assert server.process.wait(30) == 0
    with Server(tmp_path / "store") as server:
        assert count(server.url) == 0


# ----- TLS -----


def test_an_https_client_that_leaves_in_a_later_body_is_noticed(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key, request_timeout=300) as url:
        context = ssl.create_default_context(cafile=made)
        for _ in range(10):
            with secure(url, made) as connection:
                message = v1(100_000)
                connection.sendall(LIVE + message.whole()[:500])
                connection.shutdown(socket.SHUT_RDWR)
        with httpx.Client(base_url=url.replace("http:", "https:"), verify=context) as client:
            wait_until(lambda: "gradserve_in_flight 1.0" in client.get("/metrics").text)


def secure(url: str, made: Path) -> ssl.SSLSocket:
    port = int(url.rpartition(":")[2])
    context = ssl.create_default_context(cafile=str(made))
    plain = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
    connection.sendall(LIVE)
    assert_lives(connection)
    return connection


def assert_lives(connection: socket.socket) -> None:
    answer = b""
    while not answer.endswith(b'{"live":true}'):
        part = connection.recv(1 << 16)
        assert part, answer
        answer += part
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_an_idle_https_client_does_not_delay_the_stop(
    certificate: tuple[Path, Path], soon: None, logged: pytest.LogCaptureFixture
) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key, drain_timeout=20) as url:
        connection = secure(url, made)
    assert errors(logged) == []
    connection.close()


@pytest.mark.parametrize("more", [b"", b"nonsense\r\n\r\n"])
def test_an_https_client_that_sends_on_reads_the_last_answer(certificate: tuple[Path, Path], more: bytes) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as url, secure(url, made) as connection:
        connection.sendall(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + more)
        assert select.select([connection], [], [], 30)[0]  # the answer has come
        with suppress(OSError):
            connection.sendall(bytes(1 << 20))
        assert_lives(connection)


def test_https_clients_that_leave_cause_no_error(
    certificate: tuple[Path, Path], logged: pytest.LogCaptureFixture, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, key = certificate
    lost = create_autospec(Wire.connection_lost, side_effect=Wire.connection_lost)
    monkeypatch.setattr(Wire, "connection_lost", lost)
    with serving(tls_certificate=made, tls_key=key) as url:
        for sent in (b"nonsense\r\n\r\n", LIVE, b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"):
            for reads in (False, True):
                with secure(url, made) as connection:
                    connection.sendall(sent)
                    if reads:
                        assert connection.recv(1 << 16)
        wait_until(lambda: lost.call_count == 6)
    assert errors(logged) == []


def test_a_slow_https_client_gets_the_whole_answer(
    certificate: tuple[Path, Path], soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads the last bytes when the server has given up waiting for its close."""
    made, key = certificate
    size, lost = 4 << 20, create_autospec(Ending.connection_lost, side_effect=Ending.connection_lost)
    monkeypatch.setattr(Ending, "connection_lost", lost)
    with serving(tls_certificate=made, tls_key=key) as url:
        context = ssl.create_default_context(cafile=made)
        client = httpx.Client(base_url=url.replace("http:", "https:"), verify=context)
        with client, secure(url, made) as slow:
            client.put("/v1/buffers/large", json={"shape": [size]}).raise_for_status()
            accept = b"Accept: application/vnd.safetensors\r\nConnection: close\r\n\r\n"
            slow.sendall(b"GET /v1/buffers/large/value HTTP/1.1\r\nHost: x\r\n" + accept)
            stream = slow.makefile("rb")
            lines = [*iter(stream.readline, b"\r\n")]
            length = next(int(line.split()[1]) for line in lines if line.lower().startswith(b"content-length"))
            got = 0
            while "gradserve_in_flight 1.0" not in client.get("/metrics").text:  # another request beside this one
                got += len(stream.read(1 << 18))
            got += len(stream.read((length - got) // 2))  # so that the transport hides nothing any more
            wait_until(lambda: lost.called)
            assert length > got
            assert got + len(stream.read(length - got)) == length > 4 * size
