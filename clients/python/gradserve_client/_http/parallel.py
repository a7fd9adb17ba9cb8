"""Several jobs at the same time, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def together(jobs: Sequence[Callable[[], T]]) -> list[T | Exception]:
    """Return the jobs' results or exceptions, after all jobs have ended."""
    if len(jobs) == 1:
        return [_outcome(jobs[0])]
    outcomes: dict[int, T | Exception] = {}

    def work(number: int) -> None:
        outcomes[number] = _outcome(jobs[number])

    # Daemons, so that Ctrl-C ends a program whose jobs still wait.
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # An error's traceback holds the frame of `work`, and so `outcomes`: popping leaves no cycle.
    return [outcomes.pop(number) for number in range(len(jobs))]


def _outcome(job: Callable[[], T]) -> T | Exception:
    try:
        return job()
    except Exception as error:
        return error
