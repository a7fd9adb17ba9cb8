"""Several jobs at the same time, in tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

T = TypeVar("T")


async def together(jobs: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Exception]:
    """Return the jobs' results or exceptions, after all jobs have ended. If it is cancelled, the jobs are, too."""
    outcomes: dict[int, T | Exception] = {}

    async def work(number: int) -> None:
        outcomes[number] = await _outcome(jobs[number])

    async with anyio.create_task_group() as group:
        for number in range(len(jobs)):
            group.start_soon(work, number)
    # An error's traceback may hold the frame of `work`, and so `outcomes`: popping leaves no cycle.
    return [outcomes.pop(number) for number in range(len(jobs))]


async def _outcome(job: Callable[[], Awaitable[T]]) -> T | Exception:
    try:
        return await job()
    except Exception as error:
        return error
