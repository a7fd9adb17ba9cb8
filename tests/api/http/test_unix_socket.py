"""Requests over a UNIX socket: the same as over TCP."""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.keys import add
from tests.api.http.test_connection import LIVE, POLL
from tests.api.http.test_pipelining import ADD
from tests.api.test_body import EITHER_API, LARGE, SMALL, Connection, Make, assert_right
from tests.serving import assert_problem, in_flight, serving, wait_until

ROUNDS = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    """Yield a server with the URL `tcp`, and its socket as `path` and as the URL `unix`."""
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/s"
        with serving(socket=Path(path)) as url:
            for name in ("open", "sum"):
                httpx.put(f"{url}/v1/buffers/{name}", json={"shape": [2]}).raise_for_status()
            yield SimpleNamespace(tcp=url, path=path, unix=f"unix:{path}")


def client(path: str | Path) -> httpx.Client:
    return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)), timeout=30)


@EITHER_API
@pytest.mark.parametrize("size", [SMALL, LARGE, 3_000_000])
@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"])
def test_bodies_of_every_size(server: SimpleNamespace, make: Make, size: int, more: bytes) -> None:
    message = make(size)
    with Connection(server.unix) as connection:
        for _ in range(2):
            connection.send(message.head + more + b"Content-Length: %d\r\n\r\n" % len(message.body))
            if more:
                assert connection.head()[0] == 100
            connection.send(message.body)
            assert_right(connection.answer(), message)


def test_a_connection_ends_if_its_client_wants_so(server: SimpleNamespace) -> None:
    with Connection(server.unix) as connection:
        connection.send(LIVE)
        assert connection.answer().headers.get("connection") is None
        connection.send(LIVE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert connection.is_closed()


def test_a_client_that_closes_its_direction_is_answered(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 30)
    with Connection(server.unix) as connection:
        connection.send(ADD * 30)
        connection.socket.shutdown(socket.SHUT_WR)
        assert [connection.answer().status for _ in range(30)] == [200] * 30
        assert connection.is_closed()


def test_a_long_poll_ends_with_its_step_and_with_its_client(server: SimpleNamespace) -> None:
    with Connection(server.unix) as gone:
        gone.send(POLL)
        wait_until(lambda: in_flight(server.tcp) == 1)
    wait_until(lambda: in_flight(server.tcp) == 0)
    with client(server.path) as other, ThreadPoolExecutor(1) as thread:
        step = other.get("/v1/buffers/open").json()["step"]
        waits = thread.submit(other.get, f"/v1/buffers/open/value?step={step}&timeout=30")
        wait_until(lambda: in_flight(server.tcp) == 1)
        other.post("/v1/buffers/open/accumulate", json={"gradient": [1, 2]}).raise_for_status()
        other.post("/v1/buffers/open/take").raise_for_status()
        assert waits.result().json()["value"]["data"] == [1, 2]


@pytest.mark.parametrize("host", ["localhost", "", "%2Frun%2Fgradserve.sock", "anything:80"])
def test_any_valid_host_will_do(server: SimpleNamespace, host: str) -> None:
    with Connection(server.unix) as connection:
        connection.send(LIVE.replace(b"test", host.encode()))
        assert connection.answer().status == 200


def test_connections_leave_no_descriptor_open(server: SimpleNamespace) -> None:
    """Of a client that asks, one that says nothing, and one that leaves in the middle of a body."""
    cut = ADD[:-5]
    before = len(os.listdir("/proc/self/fd"))
    for number in range(ROUNDS):
        with Connection(server.unix) as connection:
            if number % 3 == 0:
                connection.send(LIVE)
                assert connection.answer().status == 200
            elif number % 3 == 1:
                connection.send(cut)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_keys_hold_over_the_socket(tmp_path: Path) -> None:
    secret = add(tmp_path / "keys", "one", ["ops"])
    path = tmp_path / "s"
    with serving(keys=tmp_path / "keys", socket=path), client(path) as asking:
        assert asking.get("/v2/health/ready").status_code == 200
        assert_problem(asking.get("/v1/ops"), 401, "unauthorized")
        authorized = {"Authorization": f"Bearer {secret}"}
        assert asking.get("/v1/ops", headers=authorized).status_code == 200
        assert_problem(asking.get("/v1/buffers", headers=authorized), 403, "forbidden")


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({}, {}, 200),
        ({}, {"X-Forwarded-For": "192.0.2.1"}, 401),
        ({"socket_mode": "0660"}, {}, 401),
        ({"metrics_open": "never"}, {}, 401),
        ({"metrics_open": "always", "socket_mode": "0660"}, {}, 200),
    ],
    ids=["private", "proxy", "shared", "never", "always"],
)
def test_metrics_are_open_to_who_may_open_a_private_socket(
    settings: dict[str, str], headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    add(tmp_path / "keys", "one", ["ops"])
    with serving(keys=tmp_path / "keys", socket=tmp_path / "s", **settings), client(tmp_path / "s") as asking:
        assert asking.get("/metrics", headers=headers).status_code == status


def test_only_the_port_has_tls(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    made, key = certificate
    dY = np.arange(1_000_000, dtype=np.float32)
    body = safetensors.numpy.save({"dY": dY, "X": np.ones_like(dY)})
    given = {"content": body, "headers": {"Content-Type": "application/vnd.safetensors"}}
    with serving(tls_certificate=made, tls_key=key, socket=tmp_path / "s") as url:
        tls = ssl.create_default_context(cafile=str(made))
        secure = httpx.Client(base_url=url.replace("http://", "https://"), verify=tls, timeout=30)
        with client(tmp_path / "s") as plain, secure:
            for asking in (plain, secure):
                answer = asking.post("/v1/ops/ReluGrad", **given)  # type: ignore[arg-type]
                assert (safetensors.numpy.load(answer.content)["dX"] == dY).all()
