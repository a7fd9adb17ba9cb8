"""Sums are exact on a network that resets, stalls, cuts and repeats, and when the server is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gradserve_client import AsyncClient, Client, ConnectionFailed, StepOpen
from gradserve_client._http import policy

from tests.clients.both import adding, connected, go_on
from tests.clients.proxy import FAULTS, Proxy
from tests.faults.servers import Server
from tests.serving import serving, wait_until

WORKERS, ADDS = 4, 15


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a separate process, with its store on the disk."""
    with Server(tmp_path_factory.mktemp("faults") / "store", keep_alive=1) as server:
        yield server


@pytest.fixture
def plain(process: Server) -> Iterator[Client]:
    """A client without faults, and the empty buffers w and v."""
    with Client(process.url) as plain:
        for name, shape in {"w": (3,), "v": (100_000,)}.items():
            plain.buffers[name].create(shape, dtype="float64")
        yield plain
        for one in plain.buffers.list():
            plain.buffers[one.name].delete()


def gradient(worker: int, number: int) -> Any:
    return np.full(3, 1.0 + worker * ADDS + number)


TOTAL = float(sum(gradient(worker, number)[0] for worker in range(WORKERS) for number in range(ADDS)))


def test_threads_add_exactly_on_a_bad_network(process: Server, plain: Client) -> None:
    with Proxy(process.port) as proxy, Client(proxy.url, attempt_timeout=0.5) as server:

        def work(worker: int) -> None:
            for number in range(ADDS):
                server.buffers.accumulate({"w": gradient(worker, number), "v": gradient(worker, number)[:1]}, weight=2)

        with ThreadPoolExecutor(WORKERS) as threads:
            list(threads.map(work, range(WORKERS)))
    assert set(proxy.met) == {"", *FAULTS}
    for name in ("w", "v"):
        assert plain.buffers[name].info().count == WORKERS * ADDS
        assert (plain.buffers[name].value() == 2 * TOTAL).all()


def test_tasks_add_exactly_on_a_bad_network(process: Server, plain: Client) -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url, attempt_timeout=0.5) as server:

            async def work(worker: int) -> None:
                for number in range(ADDS):
                    await server.buffers["w"].accumulate(gradient(worker, number))
                    await server.ops.relu_grad(gradient(worker, number), np.ones(3), into="v" if not number else "w")

            async with asyncio.TaskGroup() as group:
                for worker in range(WORKERS):
                    group.create_task(work(worker))

    plain.buffers["v"].delete()
    plain.buffers["v"].create((3,), dtype="float64")
    with Proxy(process.port) as proxy:
        asyncio.run(run(proxy.url))
    assert set(proxy.met) == {"", *FAULTS}
    infos = {name: plain.buffers[name].info() for name in ("w", "v")}
    assert {name: one.count for name, one in infos.items()} == {"w": WORKERS * (2 * ADDS - 1), "v": WORKERS}
    assert (plain.buffers["w"].value() + plain.buffers["v"].value() == 2 * TOTAL).all()


def test_takes_on_a_bad_network_lose_and_repeat_nothing(process: Server, plain: Client, kind: str) -> None:
    taken: list[Any] = []
    with Proxy(process.port, one_in=2) as proxy, connected(kind, proxy.url, attempt_timeout=2) as server:

        def take() -> None:
            while sum(one.count for one in taken) < 2 * ADDS:
                try:
                    taken.append(server.buffers["w"].take(min_count=1, timeout=0.2))
                except StepOpen:
                    pass

        def add(worker: int) -> None:
            with Client(process.url) as other:
                for number in range(ADDS):
                    other.buffers["w"].accumulate(gradient(worker, number))

        with ThreadPoolExecutor(3) as threads:
            for done in [threads.submit(take), *(threads.submit(add, worker) for worker in range(2))]:
                done.result(60)
    assert [one.step for one in taken] == list(range(len(taken)))
    expected = sum(gradient(worker, number) for worker in range(2) for number in range(ADDS))
    assert (sum(one.value for one in taken) == expected).all()


def test_adds_through_kills_of_the_server_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LONGEST_DELAY", 0.2)
    with Server(tmp_path / "store") as process, Client(process.url) as server:
        server.buffers["w"].create((3,), dtype="float64")
        with adding(process.url, lambda mine, value: mine.buffers["w"].accumulate(np.full(3, value))) as counts:
            for _ in range(2):
                go_on(counts)
                process.restart()
        assert all(counts)
        assert server.buffers["w"].info().count == sum(counts)
        assert (server.buffers["w"].value() == counts[0] + 2 * counts[1] + 3 * counts[2]).all()


def test_connections_closed_by_the_server_cause_no_error(process: Server, kind: str) -> None:
    with connected(kind, process.url, max_retries=0) as server:
        server.operators()
        wait_until(lambda: not open_to(process.port))
        server.operators()


def open_to(port: int) -> list[str]:
    """Return the connections of this machine to the port of a server whose end has not come yet."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return [line[1] for line in lines if line[2].endswith(f":{port:04X}") and line[3] == "01"]


def test_a_stopped_server_fails_the_call_after_retries(kind: str) -> None:
    with serving() as url, connected(kind, url, timeout=20) as server:
        server.operators()
    with connected(kind, url, max_retries=2) as server, pytest.raises(ConnectionFailed) as caught:
        server.operators()
    assert caught.value.attempts > 1
    assert isinstance(caught.value.__cause__, httpx.TransportError)
