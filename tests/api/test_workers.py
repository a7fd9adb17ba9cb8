"""Worker processes: readiness reports a missing worker, the other workers serve on, and all end with the parent."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from service.api.server import SILENT_SECONDS
from tests.api.test_shutdown import body, half_sent, wait_until_nothing_is_taken
from tests.faults.servers import PATIENCE, Server, kill

R = TypeVar("R")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    """Yield a server with two workers, which every test leaves as found."""
    with Server(directory / "store", fork=False, workers=2) as server:
        yield server


def ready(server: Server) -> httpx.Response | None:
    try:
        return httpx.get(f"{server.url}/v2/health/ready", timeout=30)
    except httpx.TransportError:
        return None


def until(server: Server, status: int) -> httpx.Response:
    """Return the readiness answer, once its status is `status`."""
    return first(lambda: answer if (answer := ready(server)) is not None and answer.status_code == status else None)


def first(attempt: Callable[[], R | None]) -> R:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (found := attempt()) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("the condition never held")


def test_a_server_serves_but_is_not_ready_while_a_worker_is_replaced(server: Server) -> None:
    server.process.send_signal(signal.SIGSTOP)  # delays the replacement until SIGCONT
    kill(server.workers()[0])
    answer = until(server, 503)
    assert answer.json() == {"error": "1 of 2 worker processes is starting, or being replaced"}
    assert answer.headers["retry-after"] == "1"
    for _ in range(20):  # each on a new connection
        assert ready(server).status_code == 503  # type: ignore[union-attr]
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
        answer = httpx.post(f"{server.url}/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1, -1]})
        assert answer.json()["dX"]["data"] == [1.0, 0.0]
    server.process.send_signal(signal.SIGCONT)
    until(server, 200)
    assert len(server.workers()) == 2
    for _ in range(20):
        assert ready(server).status_code == 200  # type: ignore[union-attr]


def test_a_worker_that_dies_before_it_answers_is_replaced_soon(server: Server) -> None:
    """The parent asks whether it lives, and waits for the answer."""
    said = server.log.stat().st_size
    worker = server.workers()[0]
    os.kill(worker, signal.SIGSTOP)
    time.sleep(1)  # the parent asks twice a second
    kill(worker)
    end = time.monotonic() + SILENT_SECONDS / 2
    while "is replaced" not in server.log.read_text()[said:]:
        assert time.monotonic() < end
        time.sleep(0.01)
    until(server, 200)


def test_the_log_says_what_to_do_when_a_second_worker_crashes(server: Server) -> None:
    """LMDB ends the process that reads some damaged pages. Other crashes may come between."""
    said = server.log.stat().st_size
    for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGABRT, signal.SIGBUS):
        assert "gradserve doctor" not in server.log.read_text()[said:]
        worker = server.workers()[0]
        os.kill(worker, number)
        first(lambda worker=worker: worker not in server.workers() or None)  # type: ignore[misc]
        until(server, 200)
    first(lambda: "Worker processes die of SIGBUS" in server.log.read_text()[said:] or None)
    assert "run gradserve doctor" in server.log.read_text()[said:]


def test_the_server_is_not_ready_before_all_workers_serve(server: Server) -> None:
    server.kill()
    server.launch()
    _, late = first(lambda: workers if len(workers := server.workers()) == 2 else None)
    # Stop the parent, too: it replaces a worker that is silent. The first worker needs no parent now.
    stopped = server.process.pid, late
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert "1 of 2 worker processes" in until(server, 503).json()["error"]
    finally:
        for pid in stopped[::-1]:
            os.kill(pid, signal.SIGCONT)
    until(server, 200)


def test_a_worker_that_is_silent_for_some_seconds_is_kept(server: Server) -> None:
    """A worker on a busy machine starts so slowly. If it were replaced then, the server would never be ready."""
    workers = server.workers()
    os.kill(workers[0], signal.SIGSTOP)
    time.sleep(7)  # uvicorn alone would replace it after 5
    os.kill(workers[0], signal.SIGCONT)
    time.sleep(1)  # the parent looks for workers twice a second
    assert server.workers() == workers
    until(server, 200)


def test_signals_do_not_change_the_number_of_workers(server: Server) -> None:
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTTIN):
        server.process.send_signal(number)
    time.sleep(1)  # the parent looks for signals twice a second
    assert len(server.workers()) == 2
    until(server, 200)


def test_workers_finish_their_requests_and_end_when_the_parent_is_killed(server: Server) -> None:
    httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [100_000]}).raise_for_status()
    workers = server.workers()
    assert len(workers) == 2
    try:
        with half_sent(server) as connection:
            server.process.kill()
            server.process.wait(PATIENCE)
            wait_until_nothing_is_taken(server)
            connection.sendall(body()[1000:])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        first(lambda: True if not any(map(lives, workers)) else None)
    finally:
        for pid in filter(lives, workers):
            kill(pid)
    server.start()
    assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == 1


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_directory_that_workers_share_is_locked(server: Server, directory: Path) -> None:
    """systemd-tmpfiles leaves locked directories alone. Those of killed servers are not locked."""
    assert [is_locked(path) for path in directory.glob("gradserve-*")].count(True) == 1


def is_locked(path: Path) -> bool:
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)  # the question that systemd-tmpfiles asks
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(directory)
