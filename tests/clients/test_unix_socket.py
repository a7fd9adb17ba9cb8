"""Both clients and the command over a UNIX socket, with every form of its address."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from gradserve_client import Client, GradserveError
from gradserve_client._http.address import parsed
from gradserve_client._http.requests import Requests
from gradserve_client.errors import ConnectionFailed, InvalidInput

from service.keys import add
from tests.clients.both import connected
from tests.clients.conftest import delete_all
from tests.clients.terminal import Call
from tests.serving import serving, wait_until

LARGE = 3_000_000
"""Elements of a tensor of 12 MB: far more than a socket holds."""


@contextmanager
def made() -> Iterator[Path]:
    """Yield a short path: that of a socket has about a hundred bytes at most."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place) / "s"


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    """Yield the socket of a server."""
    with made() as path, serving(socket=path):
        yield path


@pytest.fixture(scope="module")
def server(path: Path, kind: str) -> Iterator[Any]:
    with connected(kind, f"unix:{path}", timeout=20) as server:
        yield server


@pytest.mark.parametrize("size", [1, 100_000, LARGE])
def test_tensors_of_every_size(server: Any, size: int, key: str) -> None:
    dY = np.arange(size, dtype=np.float32)
    np.testing.assert_array_equal(server.ops.relu_grad(dY, np.ones_like(dY)), dY)
    buffer = server.buffers[key]
    buffer.create(size)
    assert [buffer.accumulate(dY).count for _ in range(2)] == [1, 2]
    np.testing.assert_array_equal(buffer.value(), 2 * dY)
    delete_all(server)


def test_a_wait_ends_with_its_step(server: Any, path: Path, key: str) -> None:
    server.buffers[key].create(2)
    with Client(f"unix:{path}") as other, ThreadPoolExecutor(1) as thread:
        waits = thread.submit(other.buffers[key].value, step=0, timeout=20)
        server.buffers[key].accumulate([1, 2])
        server.buffers[key].take()
        np.testing.assert_array_equal(waits.result(), [1, 2])
    delete_all(server)


def test_every_form_names_the_same_server(path: Path, kind: str) -> None:
    for url in (f"unix:{path}", f"unix://{path}", f"http+unix://{quote(str(path), safe='')}"):
        with connected(kind, url) as server:
            assert server.url == f"unix:{path}"
            assert server.is_ready()


def test_a_relative_path(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with connected(kind, "unix:s") as server:
        assert server.is_ready()


def test_the_environment_names_the_socket(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies of the environment are for TCP."""
    monkeypatch.setenv("GRADSERVE_URL", f"unix:{path}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with connected(kind, None) as server:  # type: ignore[arg-type]
        assert (server.url, server.is_ready()) == (f"unix:{path}", True)


def test_a_prefix_behind_the_socket() -> None:
    address = parsed("http+unix://%2Frun%2Fgradserve.sock/grad/")
    assert (str(address.url), address.socket) == ("http://localhost/grad", "/run/gradserve.sock")
    assert address.text == "http+unix://%2Frun%2Fgradserve.sock/grad"
    assert parsed(address.text) == address
    assert Requests("unix:/run/a?b#c", None).place == "unix:/run/a?b#c"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix:", "must name a socket: unix:/path"),
        ("http+unix://", "must name a socket: unix:/path"),
        ("unix:/a\0b", "must name a socket: unix:/path"),
        ("http+unix://a%00b", "must name a socket: unix:/path"),
        (f"unix:/{'a' * 200}", "a path of 201 bytes, but a socket's has"),
        ("https+unix://%2Fpath", "or with unix:"),
    ],
)
def test_a_wrong_address_is_named(url: str, words: str, kind: str) -> None:
    with pytest.raises(InvalidInput) as error, connected(kind, url):
        pass
    assert repr(url) in error.value.detail
    assert words in error.value.detail


def test_a_socket_that_nobody_listens_on(kind: str) -> None:
    with made() as path, connected(kind, f"unix:{path}", max_retries=1) as server:
        with pytest.raises(ConnectionFailed) as error:
            server.ops.relu_grad([1], [1])
        assert error.value.attempts == 2


def test_a_call_waits_for_the_server(kind: str) -> None:
    """A server that is restarted is away for a moment, and so is its file."""
    with made() as path, connected(kind, f"unix:{path}", timeout=20) as server:
        ends = threading.Event()

        def serve() -> None:
            with serving(socket=path):
                ends.wait(20)

        thread = threading.Timer(0.3, serve)
        thread.start()
        try:
            np.testing.assert_array_equal(server.ops.relu_grad([1, 2], [1, -1]), [1, 0])
        finally:
            ends.set()
            thread.join()


def test_keys_hold(kind: str, tmp_path: Path) -> None:
    secret = add(tmp_path / "keys", "one", ["ops"])
    with made() as path, serving(socket=path, keys=tmp_path / "keys"):
        with connected(kind, f"unix:{path}", api_key=secret) as server:
            np.testing.assert_array_equal(server.ops.relu_grad([1, 2], [1, -1]), [1, 0])
        with connected(kind, f"unix:{path}") as server, pytest.raises(GradserveError) as error:
            server.operators()
        assert error.value.status == 401


def test_shards(path: Path, kind: str) -> None:
    """A server's errors name its socket, and each buffer is on one server."""
    with made() as second, serving(socket=second), connected(kind, [f"unix:{path}", f"unix:{second}"]) as server:
        names = [f"layer{number}" for number in range(20)]
        server.buffers.create_many({name: {"shape": 2} for name in names})
        server.buffers.accumulate({name: [1, 2] for name in names})
        assert set(server.places().values()) == {f"unix:{path}", f"unix:{second}"}
        with pytest.raises(GradserveError) as error:
            server.buffers["layer0"].create(3)
        assert error.value.detail.startswith((f"unix:{path}: ", f"unix:{second}: "))
        delete_all(server)


def test_many_connections_leave_no_descriptor_open(path: Path, kind: str) -> None:
    def use() -> None:
        with connected(kind, f"unix:{path}") as server:
            server.ops.relu_grad([1], [1])

    use()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        use()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the server notices a moment later


def test_the_command(path: Path, call: Call) -> None:
    done = call(f"unix:{path}", "info")
    assert (done.code, f"unix:{path}" in done.out) == (0, True)
    assert call("http://127.0.0.1:9", f"--url=unix:{path}", "ops").code == 0
    done = call(f"unix:{path}x", "--timeout", "0.1", "ops")
    assert (done.code, "connection" in done.err) == (6, True)
