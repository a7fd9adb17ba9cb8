"""The thread pool: no namespace holds all threads while another one waits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from service.engine.pool import BUSY_SWITCH_SECONDS, IDLE_SWITCH_SECONDS, Pool
from tests.serving import wait_until

PATIENCE = 60
"""Seconds after which a task that does not run makes a test fail instead of hang."""


class Blocked:
    """Tasks that wait until the test lets them go, and the order of their starts."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.starts: list[str] = []
        self._started = threading.Semaphore(0)
        self._gates: dict[str, threading.Event] = {}

    def submit(self, name: str) -> Future[None]:
        """Submit a task; the first letter of its name is its namespace."""
        self._gates[name] = threading.Event()
        return self._pool.submit(partial(self._run, name), name[0])

    def _run(self, name: str) -> None:
        self.starts.append(name)
        self._started.release()
        assert self._gates[name].wait(PATIENCE)

    def wait(self, count: int) -> None:
        """Wait until `count` more tasks have started."""
        for _ in range(count):
            assert self._started.acquire(timeout=PATIENCE)

    def let_go(self, *names: str) -> None:
        for name in names or [*self._gates]:
            self._gates[name].set()


@pytest.fixture
def make() -> Iterator[Callable[[int], Blocked]]:
    pools, blocked = [], []

    def make(threads: int) -> Blocked:
        pools.append(Pool(threads))
        blocked.append(Blocked(pools[-1]))
        return blocked[-1]

    yield make
    for one in blocked:
        one.let_go()
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_another_namespace_need_not_wait_for_a_thread(make: Callable[[int], Blocked], threads: int) -> None:
    tasks = make(threads)
    for number in range(20):
        tasks.submit(f"a{number}")
    tasks.wait(threads)
    other = tasks.submit("b0")
    tasks.wait(1)
    assert tasks.starts[-1] == "b0"
    tasks.let_go("b0")
    other.result(PATIENCE)


def test_the_threads_go_round(make: Callable[[int], Blocked]) -> None:
    """Thread by thread: two namespaces wait, and the third has both threads."""
    tasks = make(2)
    for number in range(4):
        tasks.submit(f"a{number}")
    tasks.wait(2)
    for name in ("b0", "b1", "c0", "c1"):
        tasks.submit(name)
    tasks.wait(1)  # in the last thread
    assert tasks.starts == ["a0", "a1", "b0"]
    tasks.let_go("a0")
    tasks.wait(1)
    assert tasks.starts[3] == "c0"
    tasks.let_go("b0")
    tasks.wait(1)
    assert tasks.starts[4] == "b1"


def test_a_namespace_leaves_a_thread_while_others_are_present(make: Callable[[int], Blocked]) -> None:
    tasks = make(2)
    first = tasks.submit("b0")
    tasks.wait(1)
    tasks.let_go("b0")
    first.result(PATIENCE)
    futures = [tasks.submit(f"a{number}") for number in range(4)]
    tasks.wait(1)
    for number in range(1, 4):
        other = tasks.submit(f"b{number}")
        tasks.wait(1)
        tasks.let_go(f"b{number}")
        other.result(PATIENCE)
    assert tasks.starts == ["b0", "a0", "b1", "b2", "b3"]
    tasks.let_go()
    for future in futures:
        future.result(PATIENCE)


def test_an_idle_pool_is_all_of_one_namespace(make: Callable[[int], Blocked]) -> None:
    tasks = make(3)
    futures = [tasks.submit(f"a{number}") for number in range(6)]
    tasks.wait(3)
    tasks.let_go()
    for future in futures:
        future.result(PATIENCE)
    assert sorted(tasks.starts) == [f"a{number}" for number in range(6)]


def test_closing_drops_what_waits_and_finishes_what_runs(make: Callable[[int], Blocked]) -> None:
    pool = Pool(1)
    tasks = Blocked(pool)
    running, waiting = tasks.submit("a0"), [tasks.submit(f"a{number}") for number in range(1, 5)]
    tasks.wait(1)
    closing = threading.Thread(target=pool.close)
    closing.start()
    for future in waiting:
        with pytest.raises(BaseException):  # noqa: B017, PT011 - CancelledError is no Exception
            future.result(PATIENCE)
    assert not running.done()
    tasks.let_go("a0")
    closing.join(PATIENCE)
    running.result(0)
    assert tasks.starts == ["a0"]


def test_many_tasks_of_many_namespaces_all_run(make: Callable[[int], Blocked]) -> None:
    pool = Pool(2)
    futures = [pool.submit(partial(divmod, number, 7), str(number % 5)) for number in range(2000)]
    cancelled = [future.cancel() for future in futures[::3]]
    assert [f.result(PATIENCE) for n, f in enumerate(futures) if not f.cancelled()] == [
        divmod(n, 7) for n in range(2000) if not futures[n].cancelled()
    ]
    assert sum(cancelled) == sum(future.cancelled() for future in futures)
    assert pool.waiting() == pool.waiting("3") == 0
    pool.close()


def test_threads_ask_for_the_interpreter_soon_while_a_task_runs(make: Callable[[int], Blocked]) -> None:
    tasks = make(2)
    running = [tasks.submit("a0"), tasks.submit("b0")]
    tasks.wait(2)
    assert sys.getswitchinterval() == pytest.approx(BUSY_SWITCH_SECONDS)
    tasks.let_go("a0")
    running[0].result(PATIENCE)
    assert sys.getswitchinterval() == pytest.approx(BUSY_SWITCH_SECONDS)
    tasks.let_go("b0")
    running[1].result(PATIENCE)
    wait_until(lambda: sys.getswitchinterval() == pytest.approx(IDLE_SWITCH_SECONDS))  # soon after the result
