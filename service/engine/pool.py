"""The threads that compute, shared out by namespace."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
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


class _Task(Future[R]):
    """The future of a task that waits for a thread."""

    def __init__(self, namespace: str, work: Callable[[], R]) -> None:
        super().__init__()
        self.namespace = namespace
        self.work: Callable[[], R] | None = work

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
    """

    def __init__(self, threads: int) -> None:
        self.executor = ThreadPoolExecutor(threads + 1, thread_name_prefix="gradserve")
        """The threads. What is submitted here directly waits behind all tasks that were submitted before."""
        self._threads, self._lock = threads, threading.Lock()
        self._queue: FairQueue[_Task[Any]] = FairQueue()
        self._running: Counter[str] = Counter()  # tasks by namespace, without zeros
        self._skipped = 0
        """Calls of a thread that found only namespaces that may have no more threads."""

    def waiting(self, namespace: str | None = None) -> int:
        """Return how many tasks, of one namespace or of all, have neither started nor been cancelled."""
        with self._lock:
            return len(self._queue) if namespace is None else self._queue.count(namespace)

    @property
    def running(self) -> int:
        """How many tasks run."""
        with self._lock:
            return self._running.total()

    def submit(self, work: Callable[[], R], namespace: str = "") -> Future[R]:
        """Call `work` in a thread, in turns with other namespaces. Cancelling drops work that has not started."""
        task = _Task(namespace, work)
        with self._lock:
            self._queue.put(namespace, task)
        task.add_done_callback(self._drop)
        self.executor.submit(self._run_next)
        return task

    def _drop(self, ended: Future[Any]) -> None:
        if ended.cancelled() and isinstance(ended, _Task):
            ended.work = None
            with self._lock, suppress(ValueError):  # a thread may have taken it
                self._queue.remove(ended.namespace, ended)

    def _with_most_threads(self) -> Collection[str]:
        """Return the namespaces that may have no more threads."""
        if self._running.total() >= self._threads:
            return self._running
        most = max(self._threads - 1, 1) if self._queue.is_shared() else self._threads
        return [namespace for namespace, count in self._running.items() if count >= most]

    def _run_next(self) -> None:
        """Run the next task that may run, and call threads for tasks that may run after it."""
        with self._lock:
            task = self._queue.take(self._with_most_threads(), last=self._running)
            if task is None:
                self._skipped = min(self._skipped + 1, len(self._queue))
                return
            if not self._running:
                sys.setswitchinterval(BUSY_SWITCH_SECONDS)
            namespace = task.namespace
            self._running[namespace] += 1
        began = time.perf_counter()
        task.run()
        del task
        with self._lock:
            self._ended(namespace, time.perf_counter() - began)
            again = min(self._skipped, 2)  # two, for the namespace may have all threads by now
            self._skipped -= again
        for _ in range(again):
            self.executor.submit(self._run_next)

    def _ended(self, namespace: str, seconds: float) -> None:
        self._queue.charge(namespace, seconds)
        self._running[namespace] -= 1
        if not self._running[namespace]:
            del self._running[namespace]
        if not self._running:
            sys.setswitchinterval(IDLE_SWITCH_SECONDS)

    def close(self) -> None:
        """Finish the running tasks, drop the waiting ones, and end the threads."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        while True:
            with self._lock:
                task = self._queue.take()
            if task is None:
                break
            task.cancel()
        self.executor.shutdown()
