"""Workers of the README's training, each in a process of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.documentation import README, blocks
from tests.examples.running import PRELOADED
from tests.zygote import Forked

SECONDS = 100
"""Seconds that a worker may take: some, but its machine may be busy."""


def with_length(code: str, steps: int, rate: float) -> str:
    """Return the code with these steps at this rate: readers look at its training for minutes."""
    return re.sub(r"lr=[\d.]+", f"lr={rate}", re.sub(r"step < \w+", f"step < {steps}", code))


def is_trainer(code: str) -> bool:
    """Return whether this example is for processes with a rank each."""
    return "from_env" in code


def script() -> str:
    """Return the README's example of several workers."""
    (found,) = (block.text for block in blocks(README.read_text()) if is_trainer(block.text))
    return found


class Trainer:
    """A worker that runs a script in a directory. It can be killed, and started again with the same command."""

    def __init__(
        self, code: str, directory: Path, rank: int, workers: int, preloaded: Sequence[str] = PRELOADED
    ) -> None:
        self._path, self._out = directory / f"train{rank}.py", directory / f"out{rank}"
        self.log = directory / f"log{rank}"
        self._path.write_text(f"import os\nos.chdir({str(directory)!r})\n{code}")
        self._preloaded, self._environment = preloaded, {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(workers)}
        self.start()

    def start(self) -> None:
        self._out.unlink(missing_ok=True)
        options: Any = {"arguments": (), "out": str(self._out), "preloaded": self._preloaded}
        self.process = Forked(str(self._path), self._environment, self.log, **options)

    def die(self) -> None:
        """Kill -9 the process, and wait for its end."""
        self.process.kill()
        self.process.wait(SECONDS)

    def printed(self) -> str:
        """Return what the process has printed since its last start."""
        return self._out.read_text() if self._out.exists() else ""

    def ends(self) -> str:
        """Return what the process has printed at its end."""
        assert self.process.wait(SECONDS) == 0, self.log.read_text()
        return self.printed()


def last(printed: str) -> str:
    """Return what a worker has printed without the lines of its progress."""
    return re.sub(r"^step .*\n", "", printed, flags=re.MULTILINE)


def trained(code: str, directory: Path, workers: int) -> str:
    """Return what all workers print in the end, in the order of their ranks."""
    started = [Trainer(code, directory, rank, workers) for rank in range(workers)]
    try:
        return "".join(last(trainer.ends()) for trainer in started)
    finally:
        for trainer in started:
            trainer.process.kill()
