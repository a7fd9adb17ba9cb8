"""Tasks that depend on other tasks, shared out over the workspace's threads."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence

from service.kernels._blocks import check_wanted, helpers


class Tasks:
    """A list of tasks. A task is ready once all tasks that it follows have ended. The lowest rank starts first.

    The order of tasks that do not follow each other depends on the threads, so results must not depend on that order.
    """

    def __init__(self, *, here: bool = False) -> None:
        """With `here`, this thread runs each task as soon as it is added: the order must be one that fits."""
        self._here = here
        self._functions: dict[int, Callable[[], None]] = {}
        self._ranks: list[int] = []
        self._blockers: list[int] = []
        """For each task, how many of the tasks that it follows have not ended."""
        self._followers: list[list[int]] = []

    def add(self, function: Callable[[], None], after: Sequence[int] = (), *, rank: int = 0) -> int:
        """Add a task that calls `function` and follows the tasks numbered `after`. Return its number."""
        if self._here:
            check_wanted()
            function()
            return 0
        number = len(self._blockers)
        self._functions[number] = function
        self._ranks.append(rank)
        self._blockers.append(len(after))
        self._followers.append([])
        for earlier in after:
            self._followers[earlier].append(number)
        return number

    def run(self) -> None:
        """Run all tasks, in this thread and, while several tasks are ready, in helpers.

        Once a task has raised an error, no other task starts.
        """
        if self._here:
            return
        ready = [(self._ranks[number], number) for number, blockers in enumerate(self._blockers) if not blockers]
        heapq.heapify(ready)
        remaining = len(self._blockers)
        change = threading.Condition(threading.Lock())

        def take(ended: int | None, *, wait: bool) -> tuple[int, Callable[[], None]] | None:
            """Record that the task `ended` has ended, and remove the next task. Return its number and its function.

            Return None if no task remains, or, unless `wait`, if none is ready. The thread then has the only reference
            to the function, so that ending the task frees everything that the function holds.
            """
            nonlocal remaining
            with change:
                for follower in self._followers[ended] if ended is not None else ():
                    self._blockers[follower] -= 1
                    if not self._blockers[follower]:
                        heapq.heappush(ready, (self._ranks[follower], follower))
                while wait and remaining and not ready:
                    change.wait()
                if not remaining or not ready:
                    change.notify()
                    return None
                remaining -= 1
                _, number = heapq.heappop(ready)
                if ready:
                    change.notify()
                    start_helper(help_out)
                return number, self._functions.pop(number)

        def run_tasks(*, wait: bool) -> None:
            nonlocal remaining
            ended = None
            try:
                while (task := take(ended, wait=wait)) is not None:
                    ended, function = task
                    check_wanted()
                    function()
                    del task, function
            except BaseException:
                with change:
                    remaining = 0
                    self._functions.clear()
                    change.notify()
                raise

        def help_out() -> None:
            run_tasks(wait=False)

        with helpers() as start_helper:
            run_tasks(wait=True)
