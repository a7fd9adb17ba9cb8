"""Workers that train in processes of their own, and faults that come in the midst of their steps."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from tests.examples.running import PRELOADED
from tests.faults.printing import GATE
from tests.faults.servers import LONG, Server
from tests.trainers import Trainer
from tests.zygote import ROOT

STILL_SECONDS = 600 if LONG else 60
"""Seconds without a line of a worker that make a test fail."""

Fault: TypeAlias = Callable[[int], None]
"""A fault that comes while the worker of this rank is in the midst of a step."""


class Workers:
    """The workers, each with its server. They print `step N` when they begin a step, and more lines in each."""

    def __init__(
        self,
        servers: Sequence[Server],
        place: Path,
        steps: int,
        module: str,
        *given: object,
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        """Start workers that call `train(url, *given)` of a module."""
        self.place, self.servers, self.steps = place, servers, steps
        self.open(0)
        path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        codes = [f"{path}from {module} import train\ntrain(*{(server.url, *given)!r})\n" for server in servers]
        count = len(servers)
        self._workers = [Trainer(code, place, rank, count, preloaded) for rank, code in enumerate(codes)]

    def kill_worker(self, rank: int) -> None:
        self._workers[rank].die()
        self._workers[rank].start()

    def kill_server(self, rank: int) -> None:
        self.servers[rank].kill()
        self.servers[rank].launch()

    def open(self, gate: int) -> None:
        """Let the workers begin the steps before this one."""
        self.gate = gate
        (self.place / f"{GATE}.new").write_text(str(gate))
        os.replace(self.place / f"{GATE}.new", self.place / GATE)

    def suffer(self, chance: random.Random, faults: Sequence[Fault], lines: int, more: int = 1) -> None:
        """Cause the faults in a random order, each in its share of the steps, when a worker has come so far.

        `lines` is about how many a worker writes in a step. Faults let the workers make `more` steps in all.
        """
        for number, fault in enumerate(chance.sample(faults, len(faults))):
            step = int((number + chance.random()) * (self.steps - 1 - more) / len(faults))
            rank = chance.randrange(len(self._workers))
            self.open(max(self.gate, step + 1))
            self._reach(rank, step, chance.randrange(lines))
            fault(rank)

    def finish(self) -> None:
        """Let the workers make the last step, and wait for their ends."""
        self.open(self.steps - 1)
        for rank in range(len(self._workers)):
            self._reach(rank, self.steps, 0)
        self.open(self.steps)
        for worker in self._workers:
            worker.ends()

    def _reach(self, rank: int, step: int, lines: int) -> None:
        """Wait until a worker has written this many lines since it began the step, or waits at the gate."""
        worker, seen, end = self._workers[rank], "", time.monotonic() + STILL_SECONDS
        while not self._has_come(printed := worker.printed(), step, lines):
            if printed != seen:
                seen, end = printed, time.monotonic() + STILL_SECONDS
            assert worker.process.poll() is None, worker.log.read_text()
            assert time.monotonic() < end, f"rank {rank} does not come to step {step}: {printed[-1000:]}"
            time.sleep(0.002)

    def _has_come(self, printed: str, step: int, lines: int) -> bool:
        """Return whether a worker has written this many lines since it began this step or a later one."""
        written = printed.splitlines()
        begun = [at for at, line in enumerate(written) if line.startswith("step ") and int(line[5:]) >= step]
        return bool(begun and len(written) > begun[0] + lines) or printed.endswith(f"step {self.gate}\n")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.die()
