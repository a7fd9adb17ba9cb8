"""HTTPS, with small and large bodies."""

from __future__ import annotations

import gc
import os
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.api.http import connection
from tests.api.http.test_endings import assert_lives, errors, logged, secure
from tests.serving import serving, wait_until

__all__ = ["logged"]  # a fixture


def test_tensors_travel_by_https(certificate: tuple[Path, Path]) -> None:
    made, key = certificate
    with serving(tls_certificate=made, tls_key=key) as url:
        url = url.replace("http://", "https://")
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(made)), timeout=30) as client:
            for size in (10, 1_000_000, 5_000_000):
                dY = np.arange(size, dtype=np.float32)
                body = safetensors.numpy.save({"dY": dY, "X": np.ones_like(dY)})
                headers = {"Content-Type": "application/vnd.safetensors"}
                answer = client.post("/v1/ops/ReluGrad", content=body, headers=headers)
                assert (safetensors.numpy.load(answer.content)["dX"] == dY).all()
            assert client.get("/v2/health/ready").json() == {"ready": True}
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(url)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_without_a_handshake_ends_soon(
    sent: bytes, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, an older connection stays, which is idle after its handshake."""
    made, key = certificate
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 0.5)
    with serving(tls_certificate=made, tls_key=key) as url, secure(url, made) as idle:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as silent:
            silent.sendall(sent)
            try:
                assert b"HTTP" not in silent.recv(1000)
            except ConnectionResetError:
                pass
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert_lives(idle)


def test_a_handshake_does_not_delay_the_stop(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    made, key = certificate
    monkeypatch.setattr(connection, "HANDSHAKE_SECONDS", 100)
    with serving(tls_certificate=made, tls_key=key, drain_timeout=20) as url:
        with secure(url, made):  # so that the server has accepted the next one
            silent = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30)
            secure(url, made).close()
    assert errors(logged) == []  # a stop that waits for the drain is an error
    assert silent.recv(1) == b""
    silent.close()


def hello() -> bytes:
    """Return the first message of a handshake."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(received, sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Let Python search for no cycles meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_connections() -> int:
    return sum(type(one) is connection.Connection for one in gc.get_objects())


def test_handshakes_that_fail_leave_nothing(certificate: tuple[Path, Path], uncollected: None) -> None:
    made, key = certificate
    first = hello()
    with serving(tls_certificate=made, tls_key=key) as url, secure(url, made) as other:
        before, connections = len(os.listdir("/proc/self/fd")), count_connections()
        for number in range(400):
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as client:
                client.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", first[:50], first)[number % 4])
                if number % 3 == 0:  # close with a reset
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif number % 4 == 3:
                    assert client.recv(3000)
                    client.sendall(b"\x17\x03\x03\x00\x05wrong")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        wait_until(lambda: count_connections() <= connections)
        other.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert_lives(other)
