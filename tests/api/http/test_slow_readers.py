"""Clients that read slowly: an answer counts as held until its client has it, and must be read at a least rate."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.api.http import wire
from service.api.http.exchange import LARGE_BYTES, TLS_TURN_BYTES
from service.codecs import safetensors
from tests.api.http.test_pipelining import resident_bytes
from tests.api.test_admission import relu, unfinished
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, wait_until

ELEMENTS = 7 << 18
"""Elements of a buffer whose value is written at once: 7 MB, more than a socket takes."""

SIZE = 4 * ELEMENTS
assert SIZE < LARGE_BYTES

MOST = 16 << 20
"""The max_bytes_in_flight of these servers: room for two values."""

READ = f"/v1/buffers/medium/value HTTP/1.1\r\nHost: x\r\nAccept: {safetensors.MEDIA_TYPE}\r\n\r\n".encode()


def create(url: str) -> None:
    for name, size in (("medium", ELEMENTS), ("large", 4 << 20)):
        httpx.put(f"{url}/v1/buffers/{name}", json={"shape": [size]}).raise_for_status()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(max_bytes_in_flight=MOST) as url:
        create(url)
        yield url


@contextmanager
def reader(url: str, name: bytes = b"medium") -> Iterator[socket.socket]:
    """Yield a connection that has asked for a value and has read nothing of it."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(30)
        host, port = url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        slow.sendall(b"GET " + READ.replace(b"medium", name))
        yield slow


def read(slow: socket.socket) -> int:
    """Read the answer; return how many bytes came before the end of the answer or the connection."""
    return len(slow.makefile("rb").read(SIZE))


def test_an_answer_is_held_until_its_client_has_it(url: str) -> None:
    with reader(url) as first, reader(url) as second:
        wait_until(lambda: in_flight(url, "_bytes") == 2 * SIZE)
        answer = httpx.get(f"{url}/v1/buffers/medium/value", headers={"Accept": safetensors.MEDIA_TYPE})
        assert_problem(answer, 429, "busy", "GRADSERVE_MAX_BYTES_IN_FLIGHT", str(2 * SIZE))
        assert read(first) >= SIZE
        wait_until(lambda: in_flight(url, "_bytes") == SIZE)
        assert read(second) >= SIZE
    wait_until(lambda: in_flight(url, "_bytes") == 0)


def test_a_computed_answer_is_held_until_its_client_has_it(url: str) -> None:
    """The body is no larger than the answer, which is twice as large as text."""
    body = b"".join(safetensors.encode({name: np.full(ELEMENTS // 2, 0.1, np.float32) for name in ("dY", "X")}))
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        head = f"POST /v1/ops/ReluGrad?encoding=list HTTP/1.1\r\nHost: x\r\nContent-Type: {safetensors.MEDIA_TYPE}\r\n"
        slow.sendall(f"{head}Accept: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert slow.recv(12) == b"HTTP/1.1 200"
        text = len(b"0.1,") * ELEMENTS // 2
        assert in_flight(url, "_bytes") >= max(len(body), text)
    wait_until(lambda: in_flight(url, "_bytes") == 0)


def held(client: httpx.Client) -> float:
    (line,) = (one for one in client.get("/metrics").text.splitlines() if one.startswith("gradserve_in_flight_bytes "))
    return float(line.split()[1])


def test_an_https_answer_is_held_until_its_client_has_it(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    context = ssl.create_default_context(cafile=str(made))
    with serving(tls_certificate=made, tls_key=key) as plain, ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=plain.replace("http:", "https:"), verify=context))
        client.put("/v1/buffers/medium", json={"shape": [ELEMENTS]}).raise_for_status()
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", int(plain.rpartition(":")[2])), timeout=30))
        secure = stack.enter_context(context.wrap_socket(slow, server_hostname="127.0.0.1"))
        secure.sendall(b"GET " + READ)
        wait_until(lambda: held(client) == SIZE)
        for _ in range(SIZE // TLS_TURN_BYTES):  # before each answer the server writes a part, if it can
            assert held(client) == SIZE
        got = 0
        while got < SIZE:
            got += len(secure.recv(1 << 16))
        wait_until(lambda: held(client) == 0)


def test_slow_readers_take_no_more_memory_than_the_limit(tmp_path: Path) -> None:
    with Server(tmp_path / "store", max_bytes_in_flight=MOST, reuse_bytes=0) as server, ExitStack() as stack:
        create(server.url)
        with reader(server.url) as slow:
            assert read(slow) >= SIZE
        before = resident_bytes(server)
        statuses = [int(stack.enter_context(reader(server.url)).recv(12)[9:]) for _ in range(40)]
        assert (statuses.count(200), statuses.count(429)) == (2, 38)
        assert resident_bytes(server) - before < 3 * MOST


@pytest.mark.parametrize("name", [b"medium", b"large"])
@pytest.mark.parametrize(("least", "pause"), [(1 << 14, 0.1), (1 << 30, 0.2)])
def test_an_answer_must_be_read_at_the_least_rate(
    name: bytes, least: int, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads a megabyte a second or more, without a longer pause."""
    monkeypatch.setattr(wire, "MIN_BYTES_PER_SECOND", least)
    with serving(keep_alive=20 if least == 1 << 14 else 1) as url, ExitStack() as stack:
        create(url)
        slow = stack.enter_context(reader(url, name))
        wait_until(lambda: in_flight(url, "_bytes") > 0)
        stream, got = slow.makefile("rb"), 0
        while in_flight(url, "_bytes"):
            got += len(stream.read(1 << 18))
            time.sleep(pause)  # the client's slowness: there is nothing to wait for
        assert (got + len(stream.read(SIZE)) >= SIZE) is (least == 1 << 14)


def test_the_metrics_tell_what_is_held_at_any_time(url: str) -> None:
    """A chunked body counts as it comes: no request begins or ends between."""
    assert in_flight(url, "_bytes") == 0
    with unfinished(url, relu(200_000), chunked=True):
        assert in_flight(url, "_bytes") > 700_000
    wait_until(lambda: in_flight(url, "_bytes") == 0)


def test_a_long_list_is_refused_while_too_much_is_held(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        for number in range(300):
            client.put(f"/v1/buffers/listed.{number:0>100}", json={"shape": [1]}).raise_for_status()
        size = len(client.get("/v1/buffers?prefix=listed.&limit=1000").content)
        assert size > 1 << 16
        with reader(url), reader(url):
            wait_until(lambda: in_flight(url, "_bytes") == 2 * SIZE)
            with unfinished(url, relu((MOST - 2 * SIZE - 1000) // 8)):
                wait_until(lambda: in_flight(url, "_bytes") > MOST - size)
                assert_problem(client.get("/v1/buffers?prefix=listed.&limit=1000"), 429, "busy", str(size))
            assert client.get("/openapi.json").status_code == 200
