"""Worker processes: readiness reports a missing worker, the other workers serve on, and all end with the parent."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api.server import SILENT_SECONDS, server_config
from service.settings import Settings
from tests.api.test_shutdown import body, half_sent, runs, wait_until_nothing_is_taken
from tests.faults.servers import PATIENCE, Server, kill
from tests.serving import wait_until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    """Yield a server with two workers, which every test leaves as found."""
    with Server(directory / "store", workers=2, log_level="debug", module="tests.api.patient") as server:
        yield server


def ready(server: Server) -> httpx.Response | None:
    try:
        return httpx.get(f"{server.url}/v2/health/ready", timeout=30)
    except httpx.TransportError:
        return None


def until(server: Server, status: int) -> httpx.Response:
    """Return the readiness answer, once its status is `status`."""
    answer = wait_until(lambda: answer if (answer := ready(server)) and answer.status_code == status else None)
    assert answer is not None
    return answer


def wait_for_parent(server: Server) -> None:
    """Send the parent a signal that it only logs, and wait for the line. Then it asks whether the workers live."""
    line = "Received signal WINCH"  # of waiting signals, Python takes the largest number last
    before = server.log.read_text().count(line)
    server.process.send_signal(signal.SIGWINCH)
    wait_until(lambda: server.log.read_text().count(line) > before)


def silence(server: Server) -> list[int]:
    """Stop the workers, and return them once the parent waits for an answer."""
    workers = server.workers()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    wait_for_parent(server)
    wait_until(lambda: "State:\tS" in Path(f"/proc/{server.process.pid}/status").read_text())  # it sleeps
    return workers


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
    """The parent asks whether it lives, and waits for the answer, at this server for an hour."""
    said = server.log.stat().st_size
    for worker in silence(server):
        kill(worker)
    wait_until(lambda: server.log.read_text()[said:].count("is replaced") == 2)
    until(server, 200)


def test_the_log_says_what_to_do_when_a_second_worker_crashes(server: Server) -> None:
    """LMDB ends the process that reads some damaged pages. Other crashes may come between."""
    said = server.log.stat().st_size
    for number in (signal.SIGKILL, signal.SIGBUS, signal.SIGABRT, signal.SIGBUS):
        assert "gradserve doctor" not in server.log.read_text()[said:]
        worker = server.workers()[0]
        os.kill(worker, number)
        wait_until(lambda worker=worker: worker not in server.workers())  # type: ignore[misc]
        until(server, 200)
    wait_until(lambda: "Worker processes die of SIGBUS" in server.log.read_text()[said:])
    assert "run gradserve doctor" in server.log.read_text()[said:]


def test_the_server_is_not_ready_before_all_workers_serve(server: Server) -> None:
    def late_worker() -> int:
        """Start the server, stop its second worker, and return it; 0 if it serves already."""
        server.kill()
        server.launch()
        wait_until(lambda: len(server.workers()) == 2)
        _, late = server.workers()
        os.kill(late, signal.SIGSTOP)
        answer = wait_until(lambda: ready(server))
        return late if answer and answer.status_code == 503 else 0

    late = wait_until(late_worker)
    assert "1 of 2 worker processes" in until(server, 503).json()["error"]
    os.kill(late, signal.SIGCONT)
    until(server, 200)


def test_a_worker_that_is_silent_for_some_seconds_is_kept(server: Server) -> None:
    """A worker on a busy machine starts so slowly. If it were replaced then, the server would never be ready."""
    config = server_config(Settings(workers=2, store="lmdb:here"))
    assert config.timeout_worker_healthcheck == SILENT_SECONDS > 5  # with 5, as of uvicorn alone, it would be replaced
    workers = silence(server)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    for _ in range(2):  # until the parent has asked all workers
        wait_for_parent(server)
    assert server.workers() == workers
    until(server, 200)


def test_signals_do_not_change_the_number_of_workers(server: Server) -> None:
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTTIN):
        server.process.send_signal(number)
    wait_for_parent(server)
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
        wait_until(lambda: not any(map(runs, workers)))
    finally:
        for pid in filter(runs, workers):
            kill(pid)
    server.start()
    assert httpx.get(f"{server.url}/v1/buffers/a").json()["count"] == 1


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
