"""A signalled server finishes its requests and ends long polls. A second signal stops the server at once."""

from __future__ import annotations

import gzip
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any
from unittest.mock import create_autospec

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.api.server import SAME_SECONDS
from service.buffers.lmdb.store import LmdbStore
from service.engine.pool import Pool
from service.kernels._recurrent_pass import Forward
from service.kernels._recurrent_plan import CHUNK_ROWS
from tests.api.calls import saved
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, wait_until

SAFETENSORS = "application/vnd.safetensors"


@pytest.fixture(scope="module", params=[1, 2])
def same(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("shutdown") / "store", workers=request.param) as server:
        yield server


@pytest.fixture
def server(same: Server) -> Server:
    """Return a running server with the buffer a and no adds."""
    if same.process.poll() is not None:
        same.start()
    httpx.delete(f"{same.url}/v1/buffers/a")
    httpx.put(f"{same.url}/v1/buffers/a", json={"shape": [100_000]}).raise_for_status()
    return same


def body() -> bytes:
    return safetensors.numpy.save({"gradient": np.ones(100_000, np.float32)})


def half_sent(server: Server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/buffers/a/accumulate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body())}\r\n"
    head += f"Content-Type: {SAFETENSORS}\r\nAccept: application/json\r\nExpect: 100-continue\r\n\r\n"
    connection.sendall(head.encode())
    assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # the request is in flight
    connection.sendall(body()[:1000])
    return connection


def wait_until_nothing_is_taken(server: Server) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            httpx.get(f"{server.url}/v2/health/ready", timeout=30)
        except httpx.TransportError:
            return
        time.sleep(0.02)
    raise AssertionError("the server still accepts requests")


def runs(process: int) -> bool:
    """Return whether a process has not ended. One that nobody has waited for has no command."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_requests_in_flight_are_finished(server: Server) -> None:
    with half_sent(server) as connection:
        server.process.send_signal(signal.SIGTERM)
        wait_until_nothing_is_taken(server)
        connection.sendall(body()[1000:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert server.process.wait(30) == 0
    server.start()
    assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_long_polls_end_when_the_server_stops(server: Server, number: signal.Signals) -> None:
    paths = ["/v1/buffers/a/value?step=0&timeout=300", "/v1/buffers/a/value?step=5&timeout=300"]
    with ThreadPoolExecutor(4) as pool, httpx.Client(base_url=server.url, timeout=60) as client:
        waiting = [pool.submit(client.get, path) for path in paths]
        waiting.append(pool.submit(client.post, "/v1/buffers/a/take?min_count=3&timeout=300"))
        for _ in range(50):  # once these are answered, the long polls wait
            httpx.get(f"{server.url}/v1/buffers/a")
        server.process.send_signal(number)
        for one in waiting:
            answer = one.result(60)
            assert_problem(answer, 503, "not_ready", "stopping")
            assert answer.headers["retry-after"] == "1"
    assert server.process.wait(30) == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_an_ignored_sighup_stays_ignored(tmp_path: Path, workers: int) -> None:
    """nohup starts programs so."""
    with Server(tmp_path / "store", module="tests.api.patient", workers=workers) as server:
        for process in (server.process.pid, *server.workers()):
            os.kill(process, signal.SIGHUP)
            mask = Path(f"/proc/{process}/status").read_text().partition("SigIgn:")[2].split()[0]
            assert int(mask, 16) & 1 << signal.SIGHUP - 1  # the system delivers no such signal, now or later
        assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200


def test_the_store_stays_open_until_the_last_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read uses the store's memory map: reading on after the close would end the process."""
    began, ended, read = threading.Event(), list[object](), LmdbStore.read
    close = create_autospec(Pool.close, side_effect=Pool.close)

    def slow(*args: Any) -> Any:
        began.set()
        wait_until(lambda: close.called)
        try:
            ended.append(len(read(*args)))
        except BaseException as error:
            ended.append(error)
            raise

    monkeypatch.setattr(LmdbStore, "read", slow)
    monkeypatch.setattr(Pool, "close", close)
    with serving(store=f"lmdb:{tmp_path}/store", drain_timeout=1) as url:
        httpx.put(f"{url}/v1/buffers/a", json={"shape": [10]}).raise_for_status()
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
            connection.sendall(b"POST /v1/buffers/value?prefix=a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert began.wait(30)
    assert ended == [1]


def test_a_request_beyond_the_drain_timeout_is_answered_503(tmp_path: Path) -> None:
    with Server(tmp_path / "store", drain_timeout=1) as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [100_000]}).raise_for_status()
        with half_sent(server) as connection:
            server.process.send_signal(signal.SIGTERM)
            stream = connection.makefile("rb")
            assert stream.readline().startswith(b"HTTP/1.1 503 ")
            head = {line.lower().rstrip() for line in iter(stream.readline, b"\r\n")}
            assert {b"retry-after: 1", b"connection: close", b"content-type: application/problem+json"} <= head
            problem = stream.read()
            assert b'"not_ready"' in problem
            assert b"Idempotency-Key" in problem
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log.read_text()


def begin_a_long_kernel(url: str, steps: int, units: int) -> socket.socket:
    """Send a GRU's zeros, and return the connection once the server holds them."""
    shapes = {"X": (steps, 1, 1), "W": (1, 3 * units, 1), "R": (1, 3 * units, units)}
    content = gzip.compress(saved({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}), 1)
    head = "POST /v1/ops/GRUTraining?outputs=HFinal HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    head += f"Content-Type: {SAFETENSORS}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=60)
    connection.sendall(head.encode() + content)
    wait_until(lambda: in_flight(url, "_bytes") > 4 * steps)
    return connection


def test_a_kernel_ends_between_chunks_once_its_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its thread, the only one of the namespace, takes the next request."""
    chunks, go_on, walk = list[slice](), threading.Event(), Forward._walk

    def held(self: Forward, d: int, chunk: slice, block: slice) -> None:
        chunks.append(chunk)
        assert go_on.wait(60)
        walk(self, d, chunk, block)

    monkeypatch.setattr(Forward, "_walk", held)
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 0.1)
    with serving(threads=1) as url:
        with begin_a_long_kernel(url, 20 * CHUNK_ROWS, 64):
            wait_until(lambda: bool(chunks))
        wait_until(lambda: in_flight(url, "_bytes") == 0)  # the server has noticed
        go_on.set()
        tensors = {"X": [[[1]]], "W": [[[1], [1], [1]]], "R": [[[1], [1], [1]]]}
        httpx.post(f"{url}/v1/ops/GRUTraining", json=tensors, timeout=60).raise_for_status()
    assert len(chunks) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kernel_ends_with_the_drain(tmp_path: Path, workers: int) -> None:
    with Server(tmp_path / "store", workers=workers, drain_timeout=2) as server:
        with begin_a_long_kernel(server.url, 40_000, 512) as connection:
            server.process.send_signal(signal.SIGTERM)
            assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        assert server.process.wait(60) == 0
        assert "Requests that threads work on are given up: 1" in server.log.read_text()


@pytest.mark.parametrize(("workers", "number", "status"), [(1, SIGTERM, 1), (2, SIGTERM, 1), (2, SIGKILL, -SIGKILL)])
def test_work_without_an_end_does_not_keep_the_server(tmp_path: Path, workers: int, number: int, status: int) -> None:
    """What was acknowledged is there, and no process is left, not even if the parent of the workers is killed."""
    with Server(tmp_path / "store", workers=workers, drain_timeout=1, module="tests.api.stuck") as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [1]}).raise_for_status()
        processes = [server.process.pid, *server.workers()]
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"POST /v1/buffers/value?prefix=a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            wait_until(lambda: "stuck" in server.log.read_text())
            assert httpx.post(f"{server.url}/v1/buffers/a/accumulate", json={"gradient": [1]}).json()["count"] == 1
            server.process.send_signal(number)
            assert server.process.wait(60) == status
        wait_until(lambda: not any(map(runs, processes)))
        assert "Work goes on 1 seconds after GRADSERVE_DRAIN_TIMEOUT" in server.log.read_text()
    with Server(tmp_path / "store") as server:
        assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == 1


def test_a_second_signal_stops_the_server_at_once_without_loss(server: Server) -> None:
    headers = {"Content-Type": SAFETENSORS, "Accept": "application/json"}
    for count in range(1, 4):
        answer = httpx.post(f"{server.url}/v1/buffers/a/accumulate", content=body(), headers=headers)
        assert answer.json()["count"] == count
    with half_sent(server):  # the first signal waits for this request
        server.process.send_signal(signal.SIGTERM)
        wait_until_nothing_is_taken(server)
        time.sleep(SAME_SECONDS + 0.1)  # the server counts sooner signals as one, and does not show when that ends
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(25) == 1
    server.start()
    assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_soon_after_the_first_stops_the_server(tmp_path: Path, workers: int) -> None:
    with Server(tmp_path / "store", workers=workers) as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [100_000]}).raise_for_status()
        with half_sent(server):  # of the signals, the first ones count as one
            wait_until(lambda: [server.process.send_signal(signal.SIGTERM)] and server.process.poll() is not None)
            assert server.process.poll() == 1


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sent_to_process_and_group_counts_once(tmp_path: Path, workers: int, number: signal.Signals) -> None:
    """coreutils' timeout signals the process and then its group; a terminal signals the group."""
    with Server(tmp_path / "store", workers=workers, module="tests.api.patient") as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [100_000]}).raise_for_status()
        with half_sent(server) as connection:
            for _ in range(2):
                for process in (server.process.pid, *server.workers()):
                    os.kill(process, number)
                wait_until(lambda: "gradserve stops" in server.log.read_text())  # the first signal is no longer pending
            wait_until_nothing_is_taken(server)
            connection.sendall(body()[1000:])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(30) == 0
