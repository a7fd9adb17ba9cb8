"""Pieces of work of which some follow others, shared out over the workspace's threads."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence

from service.kernels._blocks import helpers


class Tasks:
    """A list of tasks. Each may start once those that it follows have ended; of these, the lowest rank starts first.

    In which order tasks that do not follow each other run depends on the threads; results must not.
    """

    def __init__(self) -> None:
        self._works: dict[int, Callable[[], None]] = {}
        self._ranks: list[int] = []
        self._waits: list[int] = []  # for how many tasks that have not ended
        self._followers: list[list[int]] = []

    def add(self, work: Callable[[], None], after: Sequence[int] = (), *, rank: int = 0) -> int:
        """Add a task that follows the tasks numbered `after`, and return its number."""
        number = len(self._waits)
        self._works[number] = work
        self._ranks.append(rank)
        self._waits.append(len(after))
        self._followers.append([])
        for earlier in after:
            self._followers[earlier].append(number)
        return number

    def run(self) -> None:
        """Run all tasks, here and, where more than one may run, in helpers. After one that raised none starts."""
        ready = [(self._ranks[number], number) for number, waits in enumerate(self._waits) if not waits]
        heapq.heapify(ready)
        left = len(self._waits)
        change = threading.Condition(threading.Lock())

        def take(done: int | None, *, patient: bool) -> tuple[int, Callable[[], None]] | None:
            """The next task, after `done` has ended: None if there is none, or, if impatient, none yet.

            It is no longer here then, for what it holds to be free once it has ended.
            """
            nonlocal left
            with change:
                for follower in self._followers[done] if done is not None else ():
                    self._waits[follower] -= 1
                    if not self._waits[follower]:
                        heapq.heappush(ready, (self._ranks[follower], follower))
                while patient and left and not ready:
                    change.wait()
                if not left or not ready:
                    change.notify()
                    return None
                left -= 1
                _, number = heapq.heappop(ready)
                if ready:
                    change.notify()
                    ask(help_out)
                return number, self._works.pop(number)

        def work(*, patient: bool) -> None:
            nonlocal left
            done = None
            try:
                while (taken := take(done, patient=patient)) is not None:
                    done, task = taken
                    task()
                    del taken, task
            except BaseException:
                with change:
                    left = 0
                    self._works.clear()
                    change.notify()
                raise

        def help_out() -> None:
            work(patient=False)

        with helpers() as ask:
            work(patient=True)
