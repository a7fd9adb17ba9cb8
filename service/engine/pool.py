"""The threads that compute, shared out by namespace."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

from service.engine.fair_queue import FairQueue

R = TypeVar("R")

BUSY_SWITCH_SECONDS = 0.0005
"""How long a thread waits for the interpreter's lock before it asks for it, while a task runs.

A small request waits several times. Python's own 5 ms make a list wait several times as long beside another tenant's
Python code in the pool.
"""

IDLE_SWITCH_SECONDS = 0.005
"""The same while no task runs: Python's own. With 0.5 ms the store's writer thread interrupts the event loop so often
that it commits a third fewer adds at once, and the server makes a sixth fewer adds of 4 KB a second.
"""

SLICE_SECONDS = 0.05
"""How long a task runs, at least, before it gives way. While it waits, it looks as often whether it is still wanted."""


class _Task(Future[R]):
    """The future of a task that waits for a thread, or with its thread for its turn."""

    turn: threading.Event | None = None  # set when it may go on; None before it has given way

    def __init__(self, namespace: str, work: Callable[[], R]) -> None:
        super().__init__()
        self.namespace = namespace
        self.work: Callable[[], R] | None = work
        self.submitted = self.began = time.perf_counter()

    def run(self) -> None:
        """Call the work, unless the future was cancelled. Afterwards nothing refers to the work."""
        if not self.set_running_or_notify_cancel():
            return
        work, self.work = self.work, None
        assert work is not None
        try:
            result = work()
        except BaseException as error:
            self.set_exception(error)
            del self, work  # the error's traceback has this frame: a cycle that only the garbage collector would free
        else:
            self.set_result(result)


class Pool:
    """`threads` threads that call tasks, and one more.

    A free thread serves a namespace that has no thread, and of several the one that has computed least. The last free
    thread serves no others: a new namespace need not wait for the end of others' long tasks. While several namespaces
    send tasks, none has all `threads`: beside Python code in all of them, even a small task takes three times as long.
    A task that gives way keeps its thread, and a new one stands in. Until it ends, later ones of its namespace wait.
    """

    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(threads + 1, thread_name_prefix="gradserve")
        """The threads. What is submitted here directly waits behind all tasks that were started before."""
        self._threads, self._changed = threads, threading.Condition(threading.Lock())
        self._queue: FairQueue[_Task[Any]] = FairQueue()
        self._running: Counter[str] = Counter()  # tasks by namespace, without zeros
        self._own = threading.local()  # the task of a thread
        self.begun = 0  # tasks that run or have given way

    def waiting(self, namespace: str | None = None) -> int:
        """Return how many tasks, of one namespace or of all, wait for a thread or for their turn."""
        with self._changed:
            return len(self._queue) if namespace is None else self._queue.count(namespace)

    def submit(self, work: Callable[[], R], namespace: str = "") -> Future[R]:
        """Call `work` in a thread, in turns with other namespaces. Cancelling drops work that has not started."""
        with self._changed:
            task = _Task(namespace, work)
            self._queue.put(namespace, task)
            self._start()
        task.add_done_callback(self._drop)
        return task

    def give_way(self, claim: Callable[[int], None]) -> None:
        """Let others have their turns if this thread's task has run for `SLICE_SECONDS`. Raises what `claim` raises."""
        task: _Task[Any] | None = getattr(self._own, "task", None)
        if task is None or time.perf_counter() - task.began < SLICE_SECONDS:
            return
        with self._changed:
            task.turn = threading.Event()
            self._stop(task)
            self._queue.put(task.namespace, task, attrgetter("submitted"))
            self._start()
        try:
            while not task.turn.wait(SLICE_SECONDS):
                claim(0)
        finally:
            with self._changed:
                if not task.turn.is_set():  # it ends
                    self._queue.remove(task.namespace, task)
                    self._go_on(task)

    def _drop(self, ended: Future[Any]) -> None:
        if ended.cancelled() and isinstance(ended, _Task):
            ended.work = None
            with self._changed, suppress(KeyError, ValueError):  # it may have been started
                self._queue.remove(ended.namespace, ended)

    def _start(self) -> None:
        """Start the tasks that may run, or let them go on."""
        while self._running.total() <= self._threads and (task := self._next()) is not None:
            self._go_on(task)
            if task.turn is None:
                self.begun += 1
                if self.begun <= self._threads + 1:
                    self.executor.submit(self._run, [task])
                else:
                    threading.Thread(target=self._run, args=([task],)).start()
        sys.setswitchinterval(BUSY_SWITCH_SECONDS if self._running else IDLE_SWITCH_SECONDS)

    def _next(self) -> _Task[Any] | None:
        total = self._running.total()
        most = 1 if total >= self._threads else max(1, self._threads - self._queue.is_shared())
        task = self._queue.take([name for name, count in self._running.items() if count >= most], last=self._running)
        begun = total < self._threads and task is None  # then one that has begun, rather than an idle thread
        return self._queue.take(fits=lambda first: first.turn is not None) if begun else task

    def _go_on(self, task: _Task[Any]) -> None:
        self._running[task.namespace] += 1
        task.began = time.perf_counter()
        if task.turn is not None:
            task.turn.set()

    def _stop(self, task: _Task[Any]) -> None:
        self._queue.charge(task.namespace, time.perf_counter() - task.began)
        self._running -= Counter([task.namespace])  # without zeros

    def _run(self, only: list[_Task[Any]]) -> None:
        """Run the only task of the list. An error's traceback has this frame and its caller's: neither may keep it."""
        self._own.task = task = only.pop()
        task.run()
        del self._own.task
        with self._changed:
            self._stop(task)
            del task
            self.begun -= 1
            self._start()
            self._changed.notify_all()

    def close(self) -> None:
        """Finish the tasks that have begun, drop the others, and end the threads."""
        with self._changed:
            waiting = [*iter(self._queue.take, None)]
            for task in filter(attrgetter("turn"), waiting):
                self._go_on(task)
        for task in waiting:
            task.cancel()  # unless it has begun
        with self._changed:
            self._changed.wait_for(lambda: not self.begun)
        self.executor.shutdown()
