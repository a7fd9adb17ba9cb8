"""A client in many threads, after a fork and after an interrupt. It leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from gradserve_client import AsyncClient, Client, GradserveError, InvalidInput

from tests.clients.both import connected
from tests.clients.proxy import Proxy
from tests.faults.servers import Server
from tests.serving import in_flight, open_files, wait_until
from tests.zygote import ROOT


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in a separate process, so that only the client's sockets are counted."""
    with Server(tmp_path_factory.mktemp("sharing") / "store") as server:
        yield server


def test_threads_share_a_client(process: Server) -> None:
    with Client(process.url) as server:
        server.buffers["shared"].create((1,), dtype="float64")

        def work(number: int) -> None:
            tensor = np.arange(number + 1, dtype=np.float64)
            for _ in range(10):
                assert (server.ops.relu_grad(tensor, np.ones_like(tensor)) == tensor).all()
            server.buffers["shared"].accumulate([number])

        with ThreadPoolExecutor(24) as threads:
            list(threads.map(work, range(48)))
        assert server.buffers["shared"].value().tolist() == [float(sum(range(48)))]


def test_a_fork_shares_a_client(process: Server) -> None:
    program = f"""
        import os
        from gradserve_client import Client

        with Client({process.url!r}, max_retries=0) as server:
            buffer = server.buffers["forked"]
            buffer.create((1,), dtype="float64")
            children = []
            for number in range(3):
                pid = os.fork()
                if pid == 0:
                    for _ in range(5):
                        buffer.accumulate([10.0 ** number])
                    server.close()
                    os._exit(0)
                children.append(pid)
                for _ in range(5):
                    buffer.accumulate([0.5])
            assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
            assert buffer.value().tolist() == [562.5], buffer.value()
            assert buffer.info().count == 30
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_open(process: Server, kind: str) -> None:
    def call(server: Client, number: int) -> None:
        try:
            server.ops.relu_grad([1, 2], [1, 2] if number % 3 else [1])
        except GradserveError:
            pass

    before = len(open_files())
    with connected(kind, process.url) as server:
        call(server, 0)
        during = len(open_files())
        for number in range(200):
            call(server, number)
        assert len(open_files()) <= during
    with Proxy(process.port, faults=("refused", "lost answer", "cut answer"), one_in=2) as proxy:
        with connected(kind, proxy.url, max_retries=0) as server:
            call(server, 0)
            for number in range(60):
                call(server, number)
    with connected(kind, "http://127.0.0.1:1", max_retries=0) as server:
        for number in range(50):
            call(server, number)
    gc.collect()
    assert len(open_files()) <= before + 1


def test_connections_are_kept_but_not_many(process: Server, kind: str) -> None:
    def addresses() -> set[str]:
        """Return the sockets of this process."""
        return {one for one in open_files() if one.startswith("socket:")}

    with connected(kind, process.url) as server:
        before = addresses()
        assert server.is_ready()
        one = addresses() - before
        assert len(one) == 1
        for _ in range(20):
            assert server.is_ready()
        assert addresses() - before == one
        buffer = server.buffers["kept"]
        buffer.create((1,))
        with ThreadPoolExecutor(40) as pool:
            waiting = [pool.submit(buffer.take, min_count=1, timeout=0.5, idempotency_key=str(k)) for k in range(40)]
            for call in waiting:
                assert isinstance(call.exception(), GradserveError)
        assert len(addresses() - before) == 16


def test_memory_is_given_back(process: Server, kind: str) -> None:
    """In a process of its own: `tracemalloc` counts what every thread allocates."""
    program = f"""
        import gc
        import tracemalloc
        import numpy as np
        from gradserve_client import GradserveError
        from tests.clients.both import connected

        tensor = np.ones(100_000)

        def call(server):
            server.ops.relu_grad(tensor, tensor)
            try:
                server.ops.relu_grad(tensor, tensor[1:])
            except GradserveError:
                return
            raise AssertionError("a wrong shape is accepted")

        def traced(server, calls):
            for _ in range(calls):
                call(server)
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        with connected({kind!r}, {process.url!r}) as server:
            traced(server, 10)
            tracemalloc.start()
            before = traced(server, 1)
            grown = traced(server, 40) - before
        assert grown < tensor.nbytes // 2, grown
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_interrupted_call_leaves_the_client_usable(process: Server) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, interrupt)
    before = len(open_files())
    try:
        with Client(process.url, max_retries=0) as server:
            buffer = server.buffers["interrupted"]
            buffer.create((1,))
            for count in range(1, 4):
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                with pytest.raises(KeyboardInterrupt):
                    buffer.take(min_count=100, timeout=20)
                assert server.ops.relu_grad([count], [1]).tolist() == [count]
                assert buffer.accumulate([1]).count == count
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert len(open_files()) <= before


def test_a_cancelled_call_leaves_the_client_usable(process: Server) -> None:
    async def run() -> None:
        async with AsyncClient(process.url, max_retries=0) as server:
            buffer = server.buffers["cancelled"]
            await buffer.create((1,))
            before = len(open_files())
            for count in range(1, 11):
                waiting = [asyncio.create_task(buffer.take(min_count=100, timeout=20)) for _ in range(5)]
                await asyncio.sleep(0.02)
                for one in waiting:
                    one.cancel()
                assert await asyncio.gather(*waiting, return_exceptions=True) != []
                assert all(one.cancelled() for one in waiting)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(buffer.take(min_count=100, timeout=20), 0.01)
                assert (await server.ops.relu_grad([count], [1])).tolist() == [count]
                assert (await buffer.accumulate([1])).count == count
            assert len(open_files()) <= before

    asyncio.run(run())


def test_a_call_cancelled_at_any_moment_leaves_no_connection(process: Server) -> None:
    """Also between making its connection and using it, where a shared pool of httpx would leave it open."""
    random = np.random.default_rng(0)

    async def run() -> None:
        async with AsyncClient(process.url) as server:
            buffer = server.buffers["often"]
            await buffer.create((1,))
            before, cancelled = len(open_files()), 0
            for number, wait in enumerate(random.uniform(0.0003, 0.005, 800)):
                task = asyncio.create_task(buffer.accumulate([1]))
                if number % 2:
                    await asyncio.sleep(wait)
                else:
                    for _ in range(number // 2 % 40):
                        await asyncio.sleep(0)
                cancelled += task.cancel()
                await asyncio.wait([task])
            assert cancelled > 100
            await buffer.info()
            assert len(open_files()) <= before

    asyncio.run(run())


def test_closing_the_client_ends_a_running_call(process: Server) -> None:
    async def run() -> None:
        server = AsyncClient(process.url)
        buffer = server.buffers["closed"]
        await buffer.create((1,))
        waiting = [asyncio.create_task(buffer.take(min_count=100, timeout=60)) for _ in range(3)]
        await asyncio.to_thread(wait_until, lambda: in_flight(process.url) >= 3)
        before = len(open_files())
        await server.close()
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(one, InvalidInput)
            assert (str(one), one.maybe_done) == ("The client is closed: create a new one", True)
            assert one.idempotency_key is not None
        assert len(open_files()) <= before - 3

    asyncio.run(run())


def test_closing_a_client_closes_its_connections(process: Server, kind: str) -> None:
    before = len(open_files())
    for _ in range(20):
        with connected(kind, process.url) as server:
            assert server.is_ready()
    assert len(open_files()) <= before
    assert Path("/proc/self/fd").is_dir()
