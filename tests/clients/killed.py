"""Processes that a test kills and starts again, as a supervisor does it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.faults.servers import PATIENCE
from tests.zygote import Forked


class Workers:
    """The processes of a run: `python -m MODULE` with the arguments of each."""

    def __init__(self, module: str, arguments: Sequence[Sequence[str]], log: Path) -> None:
        self._module, self._arguments, self._log = module, arguments, log
        self._processes = [self._started(rank) for rank in range(len(arguments))]

    def _started(self, rank: int) -> Forked:
        return Forked(self._module, os.environ, self._log, arguments=self._arguments[rank])

    def kill(self, rank: int) -> None:
        """Kill a worker, and start the same command again."""
        self._processes[rank].kill()
        self._processes[rank].wait()
        self._processes[rank] = self._started(rank)

    def end(self) -> list[int]:
        """Wait for the ends of all, and return their exit codes. Their errors are in the log."""
        return [process.wait(PATIENCE) for process in self._processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def until(is_reached: Callable[[], bool]) -> None:
    """Wait until the workers have come so far."""
    end = time.monotonic() + PATIENCE
    while not is_reached():
        assert time.monotonic() < end
        time.sleep(0.005)
