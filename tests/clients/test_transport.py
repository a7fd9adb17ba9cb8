"""Connections: slow, odd and cut answers, HTTPS, proxies, URLs with a path."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import anyio
import httpx
import numpy as np
import pytest
from gradserve_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidInput,
    ServerFailed,
    StepOpen,
    TimedOut,
    TooLarge,
)
from gradserve_client._http import transport
from gradserve_client._http.address import parsed
from gradserve_client._http.transport import EXPECT_CONTINUE_BYTES, Transport
from gradserve_client._http.wire import JOINED_BYTES
from safetensors.numpy import save

from tests.clients.both import connected
from tests.clients.proxy import Talker
from tests.serving import in_flight, serving, wait_until

READY = b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\nContent-Type: application/json\r\n\r\n{"operators": []}'


def trickling(head: bytes, drop: bytes, tail: bytes = b"") -> Callable[[socket.socket, bytes], None]:
    """Send the head at once, then a drop every 50 ms for five seconds, then the tail."""

    def talk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(head)
        for _ in range(100):
            time.sleep(0.05)
            connection.sendall(drop)
        connection.sendall(tail)

    return talk


@pytest.mark.parametrize(
    ("head", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\nX-Head: ", b"."),
        (b"", b"H"),
    ],
    ids=["body", "body to the end", "chunks", "head", "status"],
)
def test_an_answer_that_trickles_is_given_up(kind: str, head: bytes, drop: bytes) -> None:
    ways: list[Any] = [None]
    if head.endswith(b"\r\n\r\n"):  # httpx's own transports do not limit the time of a head
        ways.append(httpx.HTTPTransport() if kind == "sync" else httpx.AsyncHTTPTransport())
    for way in ways:
        settings = {"timeout": 0.5, "attempt_timeout": 0.4, "transport": way}
        with Talker(trickling(head, drop)) as talker, connected(kind, talker.url, **settings) as server:
            with pytest.raises(TimedOut):
                server.operators()


def test_a_slow_upload_is_not_silence(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        size = 20 << 20

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                got = 0
                while got < size:
                    more = len(connection.recv(1 << 18))
                    time.sleep(more / 10e6)
                    got += more
                body = b'{"name":"w","updated":true,"closed":false,"step":0,"version":1,"count":1,"weight":1.0}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with connected(kind, url, timeout=20, attempt_timeout=1.2, max_retries=0) as server:
            assert server.buffers["w"].accumulate(np.zeros(size // 2, np.float16)).count == 1
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        READY.replace(b"Content-Type", b"Server: caf\xe9\r\nContent-Type"),
        READY.replace(b"Content-Length: 17\r\n", b"Connection: close\r\n"),
        READY.replace(b"HTTP/1.1", b"HTTP/1.0"),
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"ope\r\nc\r\nrators": []}\r\n0\r\n\r\n',
        b"HTTP/1.1 100 Continue\r\n\r\n" + READY,
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </>\r\n\r\n" + READY,
    ],
    ids=["not ASCII", "to the end", "HTTP/1.0", "chunked", "after 100", "after 102 and 103"],
)
def test_answers_in_every_form(kind: str, answer: bytes) -> None:
    def talk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answer)
        if b"Content-Length" not in answer and b"chunked" not in answer or b"1.0" in answer:
            connection.shutdown(socket.SHUT_RDWR)

    with Talker(talk) as talker, connected(kind, talker.url, max_retries=0) as server:
        for _ in range(3):
            assert server.operators() == []


@pytest.mark.parametrize(
    "answer",
    [
        READY[:-4],
        READY[:20],
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/1.1 999999 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
    ],
)
def test_malformed_answers_are_retried(kind: str, answer: bytes) -> None:
    def talk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(answer if len(talker.requests) == 1 else READY)
        connection.shutdown(socket.SHUT_RDWR)

    with Talker(talk) as talker, connected(kind, talker.url) as server:
        assert server.operators() == []
        assert len(talker.requests) == 2


def test_the_answer_of_another_server_is_reported(kind: str) -> None:
    page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
    with Talker(lambda connection, request: connection.sendall(page)) as talker:
        with connected(kind, talker.url) as server, pytest.raises(ServerFailed, match="gradserve server"):
            server.operators()


def test_unexpected_outputs_are_reported(kind: str) -> None:
    body = save({"Q": np.ones(2, np.float32)})
    page = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with Talker(lambda connection, request: connection.sendall(page)) as talker:
        with connected(kind, talker.url) as server:
            with pytest.raises(ServerFailed, match="the outputs are Q, but must be dX"):
                server.ops.relu_grad([1], [1])
            with pytest.raises(ServerFailed, match="the outputs are Q, but must be A_axes, B_axes"):
                server.ops.broadcast_gradient_args([1], [1])
            with pytest.raises(ServerFailed, match="the outputs are Q, but must be update_completed, updated_weights"):
                server.ops.sgd_optimizer_v2(0.5, [[1.0]], [[1.0]])


def test_an_answer_that_ends_early_is_reported_with_its_bytes(kind: str) -> None:
    def talk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(READY[:-4])
        connection.shutdown(socket.SHUT_RDWR)

    with Talker(talk) as talker, connected(kind, talker.url, max_retries=0) as server:
        with pytest.raises(ConnectionFailed, match="after 13 of 17 bytes"):
            server.operators()


@pytest.mark.parametrize("size", [JOINED_BYTES // 8 - 40, JOINED_BYTES // 8, 1 << 18])
def test_bodies_of_every_size_arrive(kind: str, size: int) -> None:
    with serving() as url, connected(kind, url) as server:
        for _ in range(2):
            tensor = np.arange(size, dtype=np.float64)
            assert (server.ops.relu_grad(tensor, np.ones(size)) == tensor).all()


def test_too_large_requests_are_refused_and_not_retried(kind: str, url: str) -> None:
    with connected(kind, url) as server:
        for size in (3 << 18, 1 << 21, 1 << 23):
            with pytest.raises(TooLarge) as caught:
                server.ops.relu_grad(np.zeros(size), np.zeros(1))
            assert caught.value.attempts == 1
        assert server.ops.relu_grad([1], [1]).tolist() == [1.0]


class Asked:
    """A server that answers the heads of requests with `words`, one after the other.

    b"" waits for the body without a word. `heads` and `bodies` are what came, until the client went or had its answer.
    """

    def __init__(self, *words: bytes) -> None:
        self._words = words
        self.heads, self.bodies = list[bytes](), list[int]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self) -> Asked:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        self._listening.settimeout(10)
        words = list(self._words)
        while words:
            connection, _ = self._listening.accept()
            connection.settimeout(10)
            with connection, connection.makefile("rb") as file:
                while words and self._answered(connection, file, words.pop(0)):
                    pass

    def _answered(self, connection: socket.socket, file: BinaryIO, word: bytes) -> bool:
        """Take a request. Returns whether the connection can take another."""
        head = b"".join(iter(file.readline, b"\r\n")).lower()
        self.heads.append(head)
        for part in word[:9], word[9:]:  # the status comes after a while
            connection.sendall(part)
            time.sleep(0.01)
        if b"HTTP" in word and not word.startswith(b"HTTP/1.1 1"):
            self.bodies.append(len(file.read()))
            return False
        self.bodies.append(len(file.read(int(head.partition(b"content-length: ")[2].split()[0]))))
        connection.sendall(READY)
        return True


ASK = b"HTTP/1.1 100 Continue\r\n\r\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture
def transports() -> Iterator[Callable[[str], Callable[[int], int]]]:
    """Connects to a URL. The result posts a number of bytes, always over the same transport, and returns the status."""
    opened: list[Transport] = []

    def connect(url: str) -> Callable[[int], int]:
        transport = Transport(parsed(url))
        opened.append(transport)

        def post(size: int) -> int:
            limits = {"connect": 10.0, "read": 10.0}
            request = httpx.Request("POST", url, content=bytes(size), extensions={"timeout": limits})
            return transport.send(request, math.inf).status

        return post

    yield connect
    for one in opened:
        one.close()


def test_a_large_body_is_sent_when_the_server_wants_it(transports: Any) -> None:
    words = (BUSY, ASK, ASK.replace(b"100 Continue", b"103 Early Hints") + ASK, ASK)
    with Asked(*words) as server:
        post = transports(server.url)
        assert [post(EXPECT_CONTINUE_BYTES) for _ in range(4)] == [429, 200, 200, 200]
        assert server.bodies == [0, EXPECT_CONTINUE_BYTES, EXPECT_CONTINUE_BYTES, EXPECT_CONTINUE_BYTES]
        assert all(b"\nexpect: 100-continue\r" in head for head in server.heads)


def test_a_silent_server_gets_the_body_and_is_not_asked_again(transports: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONTINUE_SECONDS", 0.1)
    with Asked(b"", b"") as server:
        post = transports(server.url)
        assert [post(EXPECT_CONTINUE_BYTES) for _ in range(2)] == [200, 200]
        assert server.bodies == [EXPECT_CONTINUE_BYTES, EXPECT_CONTINUE_BYTES]
        assert [b"expect" in head for head in server.heads] == [True, False]


def test_a_server_that_refuses_to_be_asked_is_not_asked_again(transports: Any) -> None:
    refusal = b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\n\r\n"
    with Asked(refusal, b"", b"") as server:
        post = transports(server.url)
        assert [post(EXPECT_CONTINUE_BYTES) for _ in range(2)] == [200, 200]
        assert server.bodies == [0, EXPECT_CONTINUE_BYTES, EXPECT_CONTINUE_BYTES]
        assert [b"expect" in head for head in server.heads] == [True, False, False]


def test_a_small_body_is_sent_at_once(transports: Any) -> None:
    with Asked(b"") as server:
        assert transports(server.url)(EXPECT_CONTINUE_BYTES - 1) == 200
        assert server.bodies == [EXPECT_CONTINUE_BYTES - 1]
        assert b"expect" not in server.heads[0]


def test_many_waiting_calls_do_not_keep_others_from_the_server(url: str) -> None:
    async def run() -> list[float]:
        async with AsyncClient(url) as server:
            awaited = server.buffers["awaited"]
            await awaited.create((1,), quorum=1)
            waiting = [asyncio.create_task(awaited.value(step=0, timeout=60)) for _ in range(150)]
            await asyncio.to_thread(wait_until, lambda: in_flight(url) >= 150)
            try:
                await asyncio.wait_for(awaited.accumulate([7]), 15)
                return [float((await one)[0]) for one in waiting]
            finally:
                await awaited.delete()

    assert asyncio.run(run()) == [7.0] * 150


# ----- the way there -----


@pytest.mark.parametrize("path", ["", "/", "/base", "/base/", "/with%20space"])
def test_a_url_may_have_a_path(kind: str, path: str) -> None:
    with Talker(lambda connection, request: connection.sendall(READY)) as talker:
        with connected(kind, f"{talker.url}{path}", api_key="secret") as server:
            server.operators()
    (request,) = talker.requests
    assert request.startswith(f"GET {path.rstrip('/')}/v1/ops HTTP/1.1\r\n".encode())
    host = talker.url.removeprefix("http://").encode()
    assert (b"\r\nHost: " + host).lower() in request.lower()
    assert b"authorization: bearer secret\r\n" in request.lower()
    assert request.lower().count(b"\r\nhost:") == 1
    assert b"accept-encoding" not in request.lower()


@pytest.mark.parametrize("length", [10**14, 10**30])
def test_an_answer_of_impossible_length_is_refused(length: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length
    with Talker(lambda connection, request: connection.sendall(head)) as talker:
        with Client(talker.url, max_retries=0) as server:
            with pytest.raises(ConnectionFailed, match="memory|Content-Length"):
                server.operators()


def test_timeouts_may_be_infinite(kind: str, url: str) -> None:
    with connected(kind, url, timeout=math.inf, attempt_timeout=math.inf) as server:
        assert server.is_ready()


def test_a_call_that_never_connected_leaves_no_doubt(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as stack:
        for _ in range(4):  # fill the backlog, so that the next connection gets no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with connected(kind, url, timeout=2) as server, pytest.raises(TimedOut) as caught:
            server.buffers["w"].accumulate([1])
        assert (caught.value.maybe_done, caught.value.idempotency_key is None) == (False, False)


def test_missing_certificates_are_reported(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with pytest.raises(InvalidInput, match="SSL_CERT_FILE"), connected(kind, "https://127.0.0.1:1") as server:
        server.operators()


@pytest.mark.parametrize("port", [0, 99999])
def test_a_port_out_of_range_is_refused(kind: str, port: int) -> None:
    with pytest.raises(InvalidInput, match="port"), connected(kind, f"http://127.0.0.1:{port}"):
        pass


def test_an_unsupported_proxy_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(InvalidInput, match="socks5://127.0.0.1:1"), connected(kind, "http://gradserve.example"):
        pass


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_the_proxy_of_the_environment_is_used(kind: str, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "all_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Talker(lambda connection, request: connection.sendall(READY)) as talker:
        monkeypatch.setenv("http_proxy", scheme + talker.url.removeprefix("http://"))
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        with connected(kind, "http://gradserve.example") as server:
            assert server.operators() == []
        with Talker(lambda connection, request: connection.sendall(READY)) as near:
            with connected(kind, near.url) as server:
                assert server.operators() == []
            assert near.requests[0].startswith(b"GET /v1/ops HTTP/1.1\r\n")
    (request,) = talker.requests
    assert request.startswith(b"GET http://gradserve.example/v1/ops HTTP/1.1\r\n")


def test_https(kind: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as url:
        url = url.replace("http://", "https://")
        with connected(kind, url) as server, pytest.raises(ConnectionFailed, match="CERTIFICATE_VERIFY") as caught:
            server.operators()
        assert caught.value.attempts == 1
        context = ssl.create_default_context(cafile=str(made))
        given = httpx.HTTPTransport(verify=context) if kind == "sync" else httpx.AsyncHTTPTransport(verify=context)
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
        for transport in (None, given):
            with connected(kind, url, transport=transport) as server:
                tensor = np.arange(1 << 20, dtype=np.float32)
                for _ in range(3):
                    assert (server.ops.relu_grad(tensor, np.ones_like(tensor)) == tensor).all()
                server.buffers["w"].create((1,))
                with pytest.raises(StepOpen):
                    server.buffers["w"].take(min_count=1, timeout=0.2)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The connections that either client has made."""
    made: list[Any] = []
    connect, connect_async = socket.create_connection, anyio.connect_tcp

    def recorded(*arguments: Any) -> socket.socket:
        sock: socket.socket = connect(*arguments)
        made.append(sock)
        return sock

    async def recorded_async(*arguments: Any, **named: Any) -> Any:
        made.append(await connect_async(*arguments, **named))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", recorded)
    monkeypatch.setattr(anyio, "connect_tcp", recorded_async)
    return made


@pytest.mark.parametrize("secure", [False, True])
def test_a_connection_is_used_again(
    kind: str, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, connections: list[Any], secure: bool
) -> None:
    made, key = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(made))
    with serving(**({"tls_certificate": made, "tls_key": key} if secure else {})) as url:
        connections.clear()
        with connected(kind, url.replace("http://", "https://") if secure else url) as server:
            for _ in range(4):
                server.ops.relu_grad([1], [1])
        assert len(connections) == 1


def test_connections_are_closed_with_their_transport(url: str, connections: list[Any]) -> None:
    transport = Transport(parsed(url))
    limits = {"connect": 10.0, "read": 10.0}
    request = httpx.Request("GET", f"{url}/v1/ops", extensions={"timeout": limits})
    assert transport.send(request, math.inf).status == 200
    assert [sock.fileno() == -1 for sock in connections] == [False]
    transport.close()
    assert [sock.fileno() == -1 for sock in connections] == [True]
    assert transport.send(request, math.inf).status == 200  # as a call that ran while the client was closed
    assert [sock.fileno() == -1 for sock in connections] == [True, True]


@pytest.mark.parametrize("more", [b"HTTP/1.1 500", bytes(1 << 19)], ids=["a few", "many"])
def test_an_answer_with_more_bytes_than_it_announces_ends_its_connection(
    kind: str, connections: list[Any], more: bytes
) -> None:
    with Talker(lambda connection, request: connection.sendall(READY + more)) as talker:
        with connected(kind, talker.url, max_retries=0) as server:
            for _ in range(3):
                assert server.operators() == []
        assert len(connections) == 3


def test_a_connection_that_the_server_has_closed_is_not_used(kind: str, connections: list[Any]) -> None:
    def talk(connection: socket.socket, request: bytes) -> None:
        connection.sendall(READY)
        connection.shutdown(socket.SHUT_RDWR)

    with Talker(talk) as talker, connected(kind, talker.url, max_retries=0) as server:
        for _ in range(3):
            assert server.operators() == []
            time.sleep(0.05)  # until the end of the connection has come
    assert len(connections) == 3
