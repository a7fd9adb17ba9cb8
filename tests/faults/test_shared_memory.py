"""Shared memory in server processes: clients truncate it, workers die, and nothing stays behind."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.host.shared_memory import OBJECTS
from tests.faults.servers import LONG, Server, kill
from tests.serving import in_flight, open_files, wait_until
from tests.shared_objects import RELU, SHARED, Object, expected, numbers, register, relu, shared

pytestmark = pytest.mark.skipif(not OBJECTS.is_dir(), reason="needs /dev/shm")

ROUNDS = 10_000 if LONG else 300


def test_the_server_lives_while_clients_truncate_what_it_reads_and_writes(tmp_path: Path) -> None:
    """Mapped memory would end the process by SIGBUS."""
    elements = 1 << 20
    made, ended = Object(numbers(elements).tobytes() + bytes(4 * elements)), threading.Event()

    def truncate() -> None:
        while not ended.is_set():
            os.truncate(made.path, 1 << 20)
            os.truncate(made.path, 12 * elements)

    try:
        with Server(tmp_path / "store", shared_memory="true") as server, ThreadPoolExecutor(1) as pool:
            with httpx.Client(base_url=server.url, timeout=30) as http:
                register(http, "r", made.key, 12 * elements).raise_for_status()
                truncating = pool.submit(truncate)
                statuses = set()
                for _ in range(100):
                    answer = http.post(RELU, json=relu(elements))
                    statuses.add(answer.status_code)
                    assert answer.status_code == 200 or "region 'r'" in answer.json()["error"], answer.text
                ended.set()
                truncating.result()
                assert 400 in statuses
                assert http.post(RELU, json=relu(elements)).status_code == 200
                assert server.process.poll() is None
    finally:
        ended.set()
        made.path.unlink()


def test_every_worker_serves_every_region(tmp_path: Path) -> None:
    both = numbers(1000)
    made = Object(both.tobytes() + bytes(4000))

    def answers(server: Server) -> set[int]:
        """Return the statuses of requests on new connections, which either worker may take."""
        return {httpx.post(f"{server.url}{RELU}", json=relu(1000), timeout=30).status_code for _ in range(20)}

    try:
        with Server(tmp_path / "store", workers=2, shared_memory="true") as server:
            with httpx.Client(base_url=server.url) as http:
                register(http, "r", made.key, 12_000).raise_for_status()
            assert answers(server) == {200}
            assert np.array_equal(made.array(8000), expected(both))
            before = server.workers()
            for worker in before:
                kill(worker)
            wait_until(lambda: server.is_ready() and not {*server.workers()} & {*before})
            assert answers(server) == {200}  # these workers have not seen the registration
            httpx.post(f"{server.url}{SHARED}/region/r/unregister").raise_for_status()
            assert answers(server) == {404}
    finally:
        made.path.unlink()


def test_no_descriptor_and_no_memory_stays_behind(tmp_path: Path) -> None:
    both = numbers(1000)
    made = Object(both.tobytes() + bytes(4000))
    try:
        with Server(tmp_path / "store", shared_memory="true") as server, httpx.Client(base_url=server.url) as http:

            def round() -> None:
                register(http, "r", made.key, 12_000).raise_for_status()
                assert http.post(RELU, json=relu(1000)).status_code == 200
                assert http.post(RELU, json={"inputs": [shared("dY", 1, 12_000)]}).status_code == 400
                assert register(http, "r", made.key, 12_000).status_code == 409
                http.post(f"{SHARED}/region/r/unregister").raise_for_status()

            round()
            before = open_files(server.process.pid)
            for _ in range(ROUNDS):
                round()
            assert open_files(server.process.pid) == before
            assert in_flight(server.url, "_bytes") == 0
            notes = [path for path in tmp_path.glob("gradserve-regions-*/regions/*/*")]
            assert notes == []
    finally:
        made.path.unlink()
