"""Tasks that follow others, alone and in threads."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from service.kernels import Workspace, workspace
from service.kernels._tasks import Tasks
from tests.kernels.threads import PATIENCE, threads

every_count = pytest.mark.parametrize("count", [1, 2, 5])


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads hand the interpreter over as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def many(work: Callable[[int], None], count: int = 300) -> tuple[Tasks, list[list[int]]]:
    """Tasks that call `work` with their number, at random ranks, and the numbers of up to three that each follows."""
    draw, tasks = random.Random(0), Tasks()
    after = [[draw.randrange(number) for _ in range(min(number, draw.randrange(4)))] for number in range(count)]
    for number, earlier in enumerate(after):
        assert tasks.add(partial(work, number), earlier, rank=draw.randrange(10)) == number
    return tasks, after


def test_no_tasks() -> None:
    Tasks().run()
    with threads(2):
        Tasks().run()


def test_the_lowest_rank_that_may_start_is_next() -> None:
    done: list[str] = []
    tasks = Tasks()

    def add(name: str, *after: int, rank: int) -> int:
        return tasks.add(partial(done.append, name), after, rank=rank)

    late = add("late", rank=3)
    add("after late", late, rank=0)
    first = add("first", rank=1)
    add("as first", rank=1)
    add("after first", first, rank=2)
    add("after both", late, first, rank=-1)
    tasks.run()
    assert done == ["first", "as first", "after first", "late", "after both", "after late"]


@every_count
def test_threads_take_the_lowest_rank_too(count: int) -> None:
    """All threads but one are held, and this one takes the others."""
    done: list[int] = []
    release, tasks = threading.Event(), Tasks()

    def hold() -> None:
        assert release.wait(PATIENCE)

    for rank in (4, 1, 3, 0, 2):
        tasks.add(partial(done.append, rank), rank=rank)
    tasks.add(release.set, rank=5)
    for _ in range(count - 1):
        tasks.add(hold, rank=-1)
    with threads(count):
        tasks.run()
    assert done == [0, 1, 2, 3, 4]


@every_count
@pytest.mark.usefixtures("restless")
def test_each_runs_once_and_after_all_that_it_follows(count: int) -> None:
    ended: set[int] = set()
    seen: dict[int, set[int]] = {}
    calls: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        with lock:
            calls[number] += 1
            seen[number] = ended.copy()
        with lock:
            ended.add(number)

    tasks, after = many(work)
    with threads(count):
        tasks.run()
    assert calls == Counter(range(len(after)))
    assert all(seen[number].issuperset(earlier) for number, earlier in enumerate(after))


def test_threads_join_in_once_there_is_work_for_them() -> None:
    """Each of the last three waits for the two others."""
    together, done, tasks = threading.Barrier(3), list[int](), Tasks()

    def meet() -> None:
        together.wait(PATIENCE)
        done.append(1)

    first = tasks.add(partial(done.append, 0))
    for _ in range(3):
        tasks.add(meet, [first])
    with threads(3):
        tasks.run()
    assert done == [0, 1, 1, 1]


def test_the_caller_waits_for_work() -> None:
    """The only helper has it: a task that two others follow, which wait for each other."""
    started, together, tasks = threading.Barrier(2), threading.Barrier(2), Tasks()
    caller, done = threading.current_thread(), list[str]()

    def start() -> None:
        started.wait(PATIENCE)
        if threading.current_thread() is not caller:
            threading.Event().wait(0.05)  # for the caller to find nothing
        done.append("start")

    def meet() -> None:
        together.wait(PATIENCE)
        done.append("meet")

    both = [tasks.add(start) for _ in range(2)]
    for _ in range(2):
        tasks.add(meet, both)
    with threads(2):
        tasks.run()
    assert done == ["start", "start", "meet", "meet"]


@every_count
def test_what_a_task_holds_is_free_once_it_has_run(count: int) -> None:
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def work(array: np.ndarray[Any, Any]) -> None:
        alive.append(sum(other() is not None for other in held))

    tasks, earlier = Tasks(), list[int]()
    for _ in range(10):
        array = np.zeros(3)
        held.append(weakref.ref(array))
        earlier = [tasks.add(partial(work, array), earlier)]
    del array
    with threads(count):
        tasks.run()
    assert alive == list(range(10, 0, -1))


@pytest.mark.parametrize("alone", [True, False])
def test_after_a_failure_none_starts(alone: bool) -> None:
    done: list[int] = []

    def work(number: int) -> None:
        if number == 20:
            raise ValueError("number 20")
        done.append(number)

    tasks = Tasks()
    for number in range(40):
        tasks.add(partial(work, number), range(number))
    with threads(1 if alone else 3), pytest.raises(ValueError, match="^number 20$"):
        tasks.run()
    assert done == list(range(20))


@pytest.mark.parametrize(("failing", "sign"), [("caller", "cancel"), ("helper", "set_exception")])
def test_a_failure_stops_the_other_threads(failing: str, sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread is held until `sign` is called: a failed caller cancels its helpers, a failed one is marked."""
    together, failed, caller = threading.Barrier(2), threading.Event(), threading.current_thread()
    original, done = getattr(Future, sign), list[int]()

    def signal(helper: Future[None], *failure: BaseException) -> Any:
        failed.set()
        return original(helper, *failure)

    def work() -> None:
        together.wait(PATIENCE)
        if (threading.current_thread() is caller) is (failing == "caller"):
            raise ValueError(f"in the {failing}")
        assert failed.wait(PATIENCE)

    monkeypatch.setattr(Future, sign, signal)
    tasks = Tasks()
    for _ in range(2):
        tasks.add(work)
    for number in range(20):
        tasks.add(partial(done.append, number), rank=1)
    with threads(2), pytest.raises(ValueError, match=f"^in the {failing}$"):
        tasks.run()
    assert not done


def test_a_busy_pool_cannot_deadlock() -> None:
    release, done = threading.Event(), list[int]()
    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(release.wait, PATIENCE) for _ in range(2)]
        try:
            tasks, after = many(done.append)
            with workspace(Workspace(pool, 2)):
                tasks.run()
            assert sorted(done) == list(range(len(after)))
            assert not any(future.done() for future in busy)
        finally:
            release.set()


@pytest.mark.usefixtures("restless")
def test_callers_in_the_pool_itself_cannot_deadlock() -> None:
    """As the engine calls: every thread of the pool has tasks for the same pool."""

    def call() -> None:
        done: list[int] = []
        tasks, after = many(done.append, 50)
        with workspace(Workspace(pool, 3)):
            tasks.run()
        assert sorted(done) == list(range(len(after)))

    with ThreadPoolExecutor(3) as pool:
        for result in [pool.submit(call) for _ in range(20)]:
            result.result(PATIENCE)


def test_here_each_task_runs_when_it_is_added() -> None:
    """In this thread, while somebody waits; `run` has nothing left to do."""
    ran, wanted = list[tuple[int, threading.Thread]](), [True]

    def claim(size: int) -> None:
        if not wanted:
            raise ConnectionError("nobody waits")

    def work(number: int) -> None:
        ran.append((number, threading.current_thread()))

    with ThreadPoolExecutor(1) as pool, workspace(Workspace(pool, 2, claim=claim)):
        tasks = Tasks(here=True)
        for number in range(3):
            tasks.add(partial(work, number), [0], rank=-number)
            assert ran[number:] == [(number, threading.current_thread())]
        tasks.run()
        assert len(ran) == 3
        wanted.clear()
        with pytest.raises(ConnectionError):
            tasks.add(partial(work, 3))
    assert len(ran) == 3
