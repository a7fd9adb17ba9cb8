"""The thread pool: no namespace holds all threads while another one waits."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import pytest

from service.engine import pool as pools
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
    made, blocked = [], []

    def make(threads: int) -> Blocked:
        made.append(Pool(threads))
        blocked.append(Blocked(made[-1]))
        return blocked[-1]

    yield make
    for one in blocked:
        one.let_go()
    for pool in made:
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
    threads = set[str]()

    def work(number: int) -> tuple[int, int]:
        threads.add(threading.current_thread().name)
        return divmod(number, 7)

    futures = [pool.submit(partial(work, number), str(number % 5)) for number in range(2000)]
    cancelled = [future.cancel() for future in futures[::3]]
    assert [f.result(PATIENCE) for n, f in enumerate(futures) if not f.cancelled()] == [
        divmod(n, 7) for n in range(2000) if not futures[n].cancelled()
    ]
    assert sum(cancelled) == sum(future.cancelled() for future in futures)
    assert pool.waiting() == pool.waiting("3") == 0
    assert len(threads) <= 3
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


# ----- tasks that give way -----


def nobody_leaves(size: int) -> None:
    assert size == 0


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Pool]]:
    """Yield a maker of pools whose tasks give way as often as they can."""
    monkeypatch.setattr(pools, "SLICE_SECONDS", 1e-6)
    made = list[Pool]()

    def make(threads: int) -> Pool:
        made.append(Pool(threads))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
        assert (pool.begun, pool.waiting(), pool._running.total()) == (0, 0, 0)


class Long:
    """Tasks in many parts that end when the test says so."""

    def __init__(self, pool: Pool, claim: Callable[[int], None] = nobody_leaves) -> None:
        self._pool, self._claim, self.enough = pool, claim, threading.Event()
        self.parts: Counter[str] = Counter()
        self.ended: list[str] = []

    def submit(self, name: str, parts: int = 1 << 30) -> Future[str]:
        """Submit a task; the first letter of its name is its namespace."""
        return self._pool.submit(partial(self._run, name, parts), name[0])

    def _run(self, name: str, parts: int) -> str:
        thread, end = threading.get_ident(), time.monotonic() + 2 * PATIENCE
        while self.parts[name] < parts and not self.enough.wait(0.0001):
            assert time.monotonic() < end
            self.parts[name] += 1
            self._pool.give_way(self._claim)
            assert threading.get_ident() == thread
        self.ended.append(name)
        return name

    def wait(self, *names: str) -> None:
        """Wait until each of these tasks has had two more parts."""
        before = self.parts.copy()
        wait_until(lambda: all(self.parts[name] > before[name] + 1 for name in names))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_tasks_of_many_namespaces_let_others_go_first(sliced: Callable[[int], Pool], threads: int) -> None:
    """All threads have tasks without an end. Each namespace still gets turns, and so does one that comes later."""
    pool = sliced(threads)
    tasks = Long(pool)
    futures = [tasks.submit(f"{namespace}{number}") for number in range(2) for namespace in "abcd"]
    for _ in range(20):
        assert pool.submit(lambda: "small", "z").result(PATIENCE) == "small"
    tasks.wait("a0", "b0", "c0", "d0")  # none stands still
    assert not any(future.done() for future in futures)
    tasks.enough.set()
    assert [future.result(PATIENCE) for future in futures] == [f"{n}{i}" for i in range(2) for n in "abcd"]


def test_a_single_task_has_its_share_beside_many(sliced: Callable[[int], Pool]) -> None:
    pool = sliced(1)
    tasks = Long(pool)
    many = [tasks.submit(f"a{number}") for number in range(50)] + [tasks.submit(f"b{number}") for number in range(50)]
    tasks.wait("a0", "b0")
    assert tasks.submit("c0", 200).result(PATIENCE) == "c0"
    assert tasks.ended == ["c0"]
    # Others of a namespace wait for its first: they hold no memory before.
    assert {*tasks.parts} == {"a0", "b0", "c0"}
    assert pool.begun == 2
    assert pool.waiting("a") in (49, 50)
    tasks.enough.set()
    for future in many:
        future.result(PATIENCE)


def test_the_oldest_task_of_a_namespace_goes_on_first(sliced: Callable[[int], Pool]) -> None:
    pool = sliced(2)
    tasks = Long(pool)
    futures = [tasks.submit("a0"), tasks.submit("a1")]
    tasks.wait("a0", "a1")
    futures += [tasks.submit("b0"), tasks.submit("c0"), tasks.submit("a2")]
    for _ in range(10):
        tasks.wait("a0", "b0", "c0")
    assert tasks.parts["a2"] == 0
    tasks.enough.set()
    for future in futures:
        future.result(PATIENCE)


def test_tasks_that_have_begun_leave_no_thread_idle(sliced: Callable[[int], Pool]) -> None:
    """Two tasks that need each other run at once, although another namespace sends a small task now and then."""
    pool, meeting, rounds = sliced(2), threading.Barrier(2), 30

    def work() -> None:
        for _ in range(rounds):
            meeting.wait(PATIENCE)
            pool.give_way(nobody_leaves)

    futures = [pool.submit(work, "a") for _ in range(2)]
    while not all(future.done() for future in futures):
        pool.submit(lambda: None, "b").result(PATIENCE)
    for future in futures:
        future.result()


def test_a_task_whose_client_leaves_ends_while_it_waits(sliced: Callable[[int], Pool]) -> None:
    pool, asked = sliced(1), threading.Event()

    def leave(size: int) -> None:
        asked.set()
        raise TimeoutError

    waiting, blocked = Long(pool, leave), Blocked(pool)
    gone = waiting.submit("a0")
    wait_until(lambda: waiting.parts["a0"])
    others = [blocked.submit("b0"), blocked.submit("c0")]
    with pytest.raises(TimeoutError):
        gone.result(PATIENCE)
    assert asked.is_set()
    wait_until(lambda: pool.begun == 2)
    assert not any(other.done() for other in others)
    assert pool.waiting() == 0
    blocked.let_go()


def test_what_gives_way_leaves_no_threads_behind(sliced: Callable[[int], Pool]) -> None:
    before = threading.active_count()
    pool = sliced(2)
    tasks = Long(pool)
    futures = [tasks.submit(f"{namespace}{number}") for namespace in "abcdef" for number in range(5)]
    tasks.wait("a0", "b0", "c0", "d0", "e0", "f0")
    tasks.enough.set()
    for future in futures:
        future.result(PATIENCE)
    wait_until(lambda: threading.active_count() <= before + 3)


def test_many_tasks_that_give_way_fail_or_leave(sliced: Callable[[int], Pool]) -> None:
    pool = sliced(2)

    def claim(number: int, size: int) -> None:
        if number % 5 == 0:
            raise TimeoutError

    def work(number: int) -> int:
        for _ in range(number % 11):
            pool.give_way(partial(claim, number))
        return 1 // (number % 7)

    futures = [pool.submit(partial(work, number), str(number % 6)) for number in range(1500)]
    for future in futures[::4]:
        future.cancel()
    for number, future in enumerate(futures):
        with suppress(TimeoutError, ZeroDivisionError):
            assert future.cancelled() or future.result(PATIENCE) == 1 // (number % 7)
    assert pool.waiting() == 0


def test_closing_finishes_what_waits_for_its_turn(sliced: Callable[[int], Pool]) -> None:
    pool = sliced(1)
    tasks = Long(pool)
    begun = [tasks.submit(name) for name in ("a0", "b0", "c0", "d0")]
    tasks.wait("a0", "b0", "c0", "d0")
    last = Long(pool)
    begun.append(last.submit("e0"))
    last.wait("e0")
    dropped = [tasks.submit("a1"), tasks.submit("d1")]
    closing = threading.Thread(target=pool.close)
    closing.start()
    wait_until(lambda: all(future.cancelled() for future in dropped))
    assert not any(future.done() for future in begun)
    tasks.enough.set()
    assert [future.result(PATIENCE) for future in begun[:4]] == ["a0", "b0", "c0", "d0"]
    closing.join(0.1)
    assert closing.is_alive()
    last.enough.set()
    closing.join(PATIENCE)
    assert begun[4].result(0) == "e0"


def test_a_task_keeps_its_thread_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SLICE_SECONDS", 2 * PATIENCE)
    pool = Pool(1)
    tasks = Long(pool)
    futures = [tasks.submit("a0"), tasks.submit("b0")]
    other = pool.submit(str, "c")
    tasks.wait("a0", "b0")
    assert not other.done()
    tasks.enough.set()
    for future in [*futures, other]:
        future.result(PATIENCE)
    pool.close()


def test_a_thread_keeps_nothing_of_its_task(sliced: Callable[[int], Pool]) -> None:
    class Value:
        pass

    future = sliced(1).submit(Value, "a")
    value = weakref.ref(future.result(PATIENCE))
    del future
    wait_until(lambda: value() is None)
