"""Workers go, come back and lag behind, and every step of their gradients still ends.

Six processes train one network on handwritten digits. Each adds its gradients to a step, which all take with
their mean. A step closes once all six are in, or `--deadline` seconds after the first of them. Who misses a deadline
is not waited for again, until it comes back.

The first run is undisturbed. In the second run one process is killed and comes back without a file, another is slow for
a while, and two are killed. The others go on with the mean of the gradients that are in. For both runs the example
prints who was in each step, what closed it, and the losses.

    python examples/elastic_workers.py [--url http://127.0.0.1:8000] [--steps 60] [--deadline 0.4] [--plot loss.png]
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from _digits import Digits, network, parameter_bytes, processes  # type: ignore[import-not-found]  # beside this file
from _server import server as running_server  # type: ignore[import-not-found]  # beside this file
from digits_data_parallel import load  # type: ignore[import-not-found]  # beside this file
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

WORKERS = [f"rank{rank}" for rank in range(6)]
REPORTER = WORKERS[0]
SLOW = WORKERS[2]
KILLED = WORKERS[3:5]
RETURNS = WORKERS[5]

BATCH = 360  # 60 rows for each worker
RATE = 0.5

LARGEST_DIFFERENCE = 0.1
"""How far the loss of the disturbed run may be above that of the undisturbed run: three times what was measured."""


@dataclass(frozen=True)
class Plan:
    """The rules of a run, and the steps before which its workers are disturbed."""

    steps: int
    deadline: float
    disturbed: bool

    @property
    def leaves(self) -> int:
        return self.steps // 10

    @property
    def returns(self) -> int:
        return self.steps // 5

    @property
    def slow(self) -> range:
        return range(self.steps * 4 // 10, self.steps * 6 // 10)

    @property
    def kills(self) -> int:
        return self.steps * 7 // 10


@dataclass(frozen=True)
class Step:
    """A step as the first worker saw it: who was in it, what closed it, and the loss after it."""

    members: frozenset[str]
    closed_by: str | None
    seconds: float
    loss: float
    accuracy: float


# ----- a worker -----


def work(name: str, url: str, run: str, arrays: Any, plan: Plan, results: Connection) -> None:
    """Train as one of the processes. The first sends each step, and all send their parameters in the end."""
    torch.set_num_threads(1)
    model, digits = network(), Digits(arrays)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with (
        Client(url) as server,
        GradientAccumulator(
            model,
            server,
            run=run,
            worker=name,
            contributors=WORKERS,
            quorum=len(WORKERS),
            deadline_seconds=plan.deadline,
            optimizer=optimizer,  # the server keeps the state, for a worker that comes back
            loss=True,  # the page draws the mean loss of each step
        ) as gradients,
    ):
        while (step := gradients.step) < plan.steps:
            began = time.monotonic()
            rows = digits.share(step, BATCH, WORKERS.index(name), len(WORKERS))
            own = digits.loss(model, rows)
            own.backward()
            if plan.disturbed and name == SLOW and step in plan.slow:
                time.sleep(2 * plan.deadline)
            gradients.push(weight=len(rows), loss=own)
            pulled = gradients.pull()
            optimizer.step()
            optimizer.zero_grad()
            if name == REPORTER:
                members, seconds = frozenset(pulled.contributors or ()), time.monotonic() - began
                results.send(Step(members, pulled.closed_by, seconds, *digits.evaluate(model)))
    results.send(parameter_bytes(model))


# ----- the launcher -----


class Launcher:
    """Starts the processes of a run, and disturbs them."""

    def __init__(self, url: str, run: str, arrays: Any, plan: Plan) -> None:
        self._context, self._plan = processes(), plan
        self._arguments = (url, run, arrays, plan)
        self._processes: dict[str, ForkServerProcess] = {}
        self._results: dict[str, Connection] = {}

    def run(self) -> list[Step]:
        """Return the steps of the run, after a check that the workers end with the same bits."""
        try:
            for name in WORKERS:
                self.start(name)
            steps = []
            for number in range(self._plan.steps):
                if self._plan.disturbed:
                    self.disturb(number)
                steps.append(self.result(REPORTER))
            if len({self.result(name) for name in self._results}) > 1:
                sys.exit("The workers ended with different parameters")
            return steps
        finally:
            for process in self._processes.values():
                process.kill()
                process.join()

    def start(self, name: str) -> None:
        self._results[name], results = self._context.Pipe(duplex=False)
        self._processes[name] = self._context.Process(target=work, args=(name, *self._arguments, results))
        self._processes[name].start()
        results.close()  # so that the end of the process ends the pipe

    def result(self, name: str) -> Any:
        """Return the next result of a worker."""
        try:
            return self._results[name].recv()
        except EOFError:
            sys.exit(f"{name} failed")

    def disturb(self, number: int) -> None:
        """Do what the plan says before this step."""
        if number == self._plan.leaves:
            self.kill(number, RETURNS)
        if number == self._plan.returns:
            self.start(RETURNS)
            print(f"step {number:2}: {RETURNS} starts again")
        if number in (self._plan.slow.start, self._plan.slow.stop):
            print(f"step {number:2}: {SLOW} is {'slow' if number in self._plan.slow else 'fast again'}")
        if number == self._plan.kills:
            for name in KILLED:
                self.kill(number, name)
        sys.stdout.flush()

    def kill(self, number: int, name: str) -> None:
        self._processes[name].kill()
        self._results.pop(name)
        print(f"step {number:2}: killed {name}, process {self._processes[name].pid}")


# ----- what is printed -----


def print_members(name: str, steps: Sequence[Step]) -> None:
    """Print who was in each step. Steps that are alike share a line."""
    print(f"\n{name:11}  {' '.join(WORKERS)}  closed by  longest")
    numbered = groupby(enumerate(steps), key=lambda one: (one[1].members, one[1].closed_by))
    for (members, closed_by), group in numbered:
        numbers, alike = zip(*group, strict=True)
        marks = " ".join(f"{'x' if name in members else '-':^5}" for name in WORKERS)
        longest = max(step.seconds for step in alike)
        print(f"step {numbers[0]:2} - {numbers[-1]:2} {marks}  {closed_by or '':9}  {longest:.2f} s")


def print_losses(runs: Mapping[str, Sequence[Step]]) -> None:
    """Print the loss of the held-out digits after some steps, as numbers and bars."""
    highest = max(step.loss for steps in runs.values() for step in steps)
    print(f"\nloss     {'  '.join(f'{name:28}' for name in runs)}".rstrip())
    count = min(map(len, runs.values()))
    for number in sorted({*range(0, count, count // 12 + 1), count - 1}):
        losses = [steps[number].loss for steps in runs.values()]
        bars = "  ".join(f"{loss:.3f} {'#' * round(22 * loss / highest):22}" for loss in losses)
        print(f"step {number:2}  {bars}".rstrip())


def plot_losses(runs: Mapping[str, Sequence[Step]], path: str) -> None:
    """Draw the curves of the losses into an image, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"\n{path} is not written: pip install matplotlib")
        return
    figure = Figure()
    axes = figure.subplots()
    for name, steps in runs.items():
        axes.plot([step.loss for step in steps], label=name)
    axes.set(xlabel="step", ylabel="loss of held-out digits")
    axes.legend()
    figure.savefig(path)
    print(f"\n{path} shows the losses")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server; by default that at GRADSERVE_URL, or a new one")
    parser.add_argument("--steps", type=int, default=60, help="from 20 to 1000")
    parser.add_argument("--deadline", type=float, default=0.4, help="seconds after which a step closes")
    parser.add_argument("--plot", metavar="FILE", help="an image for the losses, with matplotlib")
    options = parser.parse_args()
    if not 20 <= options.steps <= 1000:  # the server keeps up to 1000 closed steps
        parser.error(f"--steps is {options.steps}, but must be from 20 to 1000")
    run, arrays = f"elastic_workers-{uuid.uuid4().hex[:8]}", load()
    runs: dict[str, list[Step]] = {}
    with running_server(options.url) as url:
        for name in "undisturbed", "disturbed":
            plan = Plan(options.steps, options.deadline, name == "disturbed")
            runs[name] = Launcher(url, f"{run}-{name}", arrays, plan).run()
        with Client(url) as server:
            for name in runs:
                server.runs.delete(f"{run}-{name}")
    for name, steps in runs.items():
        print_members(name, steps)
    print_losses(runs)
    if options.plot:
        plot_losses(runs, options.plot)
    undisturbed, disturbed = (steps[-1] for steps in runs.values())
    print(f"\nheld-out accuracy {disturbed.accuracy:.1%}, undisturbed {undisturbed.accuracy:.1%}")
    if not disturbed.loss <= undisturbed.loss + LARGEST_DIFFERENCE:
        sys.exit(f"The loss of the disturbed run is over {LARGEST_DIFFERENCE} above that of the undisturbed run")


if __name__ == "__main__":
    main()
