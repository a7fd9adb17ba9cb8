"""File descriptors: more clients than the process may have never keep out a probe."""

from __future__ import annotations

import errno
import resource
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.http.descriptors import max_connections, raise_limit
from service.api.telemetry.metrics import Metrics
from tests.api.http.test_connection import LIVE, POLL
from tests.api.http.test_endings import assert_lives, secure
from tests.api.test_body import Connection
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, unread, wait_until

SOFT, HARD = 128, 256
"""Limits of the descriptors of these servers, which leave room for 192 connections."""

PROBES = ("/v2/health/live", "/v2/health/ready", "/metrics", "/v1/limits")


class Limited(Server):
    """A server that begins with the soft limit SOFT, under the hard limit HARD."""

    def __init__(self, store: Path, **settings: object) -> None:
        super().__init__(store, descriptors=(SOFT, HARD), **settings)  # type: ignore[arg-type]


class Secure(Limited):
    """The same with HTTPS."""

    def is_ready(self) -> bool:
        return self.log.exists() and "page at /" in self.log.read_text()


@pytest.fixture(scope="module", params=[1, 2])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    patient = {"module": "tests.api.patient", "keep_alive": 2 * 3600}
    with Limited(tmp_path_factory.mktemp("limited") / "store", workers=request.param, **patient) as server:
        httpx.put(f"{server.url}/v1/buffers/open", json={"shape": [2]}).raise_for_status()
        yield server


@contextmanager
def clients(url: str, count: int) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Connection(url)) for _ in range(count)]


def assert_serves(url: str, verify: ssl.SSLContext | bool = True) -> None:
    for _ in range(10):
        for path in PROBES:
            assert httpx.get(url + path, timeout=60, verify=verify).status_code == 200


def is_open(connection: Connection) -> bool:
    connection.socket.setblocking(False)
    try:
        return connection.socket.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_the_soft_limit_is_raised_to_the_hard_limit(server: Server) -> None:
    for pid in (server.process.pid, *server.workers()):
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("Max open files"))
        assert line.split()[3:5] == [str(HARD)] * 2


def test_idle_connections_keep_nobody_out(server: Server) -> None:
    """The connections come at once, so that even those that one look at the sockets finds are too many."""
    with clients(server.url, 5) as asked:
        for connection in asked:
            connection.send(LIVE)
            assert connection.answer().status == 200
        with clients(server.url, 10 * HARD) as idle:
            assert_serves(server.url)
            wait_until(lambda: not any(map(is_open, idle[: 2 * HARD])))  # the other worker may have to look yet
            assert any(map(is_open, idle[-HARD:]))
        for connection in asked:
            connection.send(LIVE)
            assert connection.answer().status == 200
    assert_serves(server.url)


def test_idle_connections_that_have_asked_keep_nobody_out(server: Server) -> None:
    """They are closed after those that never asked. A request that waits is not idle."""
    with ExitStack() as stack:
        waiting = stack.enter_context(Connection(server.url))
        waiting.send(POLL)
        wait_until(lambda: in_flight(server.url) == 1)
        asked = stack.enter_context(clients(server.url, 2 * HARD))
        for connection in asked:
            try:
                connection.send(LIVE)
            except ConnectionError:
                continue  # closed, before it could ask
        assert_serves(server.url)
        assert is_open(waiting)
    assert_serves(server.url)


def test_connections_that_end_keep_nobody_out(server: Server) -> None:
    """A client that has its last answer may stay, for an hour at these servers."""
    with ExitStack() as stack:
        for _ in range(2 * HARD):
            connection = stack.enter_context(Connection(server.url))
            connection.send(b"nonsense\r\n\r\n")
            assert connection.answer().status == 400
        assert_serves(server.url)


def test_clients_that_read_nothing_keep_nobody_out(server: Server) -> None:
    """The page and the documentation need no key, so that anyone can ask for much of them."""
    with clients(server.url, 2 * HARD) as silent:
        for connection in silent:
            with suppress(ConnectionError):
                connection.send(LIVE.replace(b"/v2/health/live", b"/docs/swagger-ui-bundle.js") * 10)
        wait_until(lambda: unread(server.url) == 0)
        assert_serves(server.url)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", LIVE])
def test_connections_without_a_handshake_keep_nobody_out(
    sent: bytes, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """With TLS, connections count from the moment they are accepted."""
    made, key = certificate
    trust = ssl.create_default_context(cafile=str(made))
    with (
        Secure(tmp_path / "store", tls_certificate=made, tls_key=key) as server,
        secure(server.url, made) as asked,
        clients(server.url, 4 * HARD) as silent,
    ):
        for connection in silent:
            with suppress(ConnectionError):
                connection.send(sent)
        assert_serves(server.url.replace("http:", "https:"), trust)
        asked.sendall(LIVE)
        assert_lives(asked)


@pytest.mark.parametrize(("path", "name"), [(PROBES[1], "check_workers"), (PROBES[2], "text")])
def test_a_probe_without_a_free_descriptor_is_503(path: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files", "secret")

    monkeypatch.setattr(Metrics, name, fail)
    with serving() as url:
        answer = httpx.get(url + path)
        if path.startswith("/v2"):
            assert (answer.status_code, "Too many open files" in answer.json()["error"]) == (503, True)
        else:
            assert_problem(answer, 503, "not_ready", "Too many open files")
        assert (answer.headers["retry-after"], "secret" in answer.text) == ("1", False)


def test_a_limit_that_the_system_refuses_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hard limit of macOS is infinite, although its kernel refuses large numbers."""
    limits = [(256, resource.RLIM_INFINITY)]

    def setrlimit(_: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 20_000:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    raise_limit()
    assert limits[-1] == (1 << 14, resource.RLIM_INFINITY)
    assert max_connections() == (1 << 14) * 7 // 8
