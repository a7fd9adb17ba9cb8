"""The trainers of graphs, in three languages: a worker and the server are killed, and the losses are those without."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from tests.faults.servers import PATIENCE, Server

FOLDER = Path(__file__).parents[2] / "examples" / "graphs"
STEPS, WORKERS, ROWS = 12, 2, 32

pytestmark = pytest.mark.processes


@cache
def models() -> ModuleType:
    """Return the module that makes the models."""
    spec = importlib.util.spec_from_file_location("models", FOLDER / "models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undisturbed(name: str) -> list[float]:
    """Return the loss of each step of a single process, which sees the rows of all workers at once."""
    model, of = models().made(name), models().MODELS[name][1]
    rows, labels = models().data()[of].values()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        places = torch.arange(step * WORKERS * ROWS, (step + 1) * WORKERS * ROWS) % len(rows)
        batch = rows[places].float() if of == "digits" else rows[places]
        loss = functional.cross_entropy(model(batch), labels[places])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Worker:
    """A trainer in a process of its own. It prints each step with its loss."""

    def __init__(self, command: Sequence[str], name: str, url: str, rank: int, place: Path) -> None:
        of = models().MODELS[name][1]
        files = [str(FOLDER / f"{name}.onnx"), str(FOLDER / f"{of}.json")]
        self._command = [*command, url, *files, "run", str(rank), str(WORKERS), str(STEPS)]
        self._place, self._out, self._log = place, place / f"out{rank}", place / f"log{rank}"
        self.start()

    def start(self) -> None:
        with self._out.open("ab") as out, self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=self._place, stdout=out, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def lines(self) -> list[list[str]]:
        """Return the steps and the losses that are there."""
        return [line.split() for line in self._out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def reach(self, step: int) -> None:
        """Wait until the worker has printed this step."""
        end = time.monotonic() + PATIENCE
        while not any(int(number) >= step for number, _ in self.lines()):
            assert time.monotonic() < end, self._log.read_text()
            assert self._process.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def finish(self) -> None:
        assert self._process.wait(PATIENCE) == 0, self._log.read_text()


def built(place: Path) -> str:
    """Return the trainer in Go as a program."""
    program = place / "train"
    subprocess.run(["go", "build", "-o", program, FOLDER / "train.go"], check=True)
    return str(program)


@pytest.mark.parametrize(("language", "name"), [("python", "cnn"), ("go", "chars"), ("node", "mlp")])
def test_the_losses_of_killed_workers_are_those_of_one_process(language: str, name: str, tmp_path: Path) -> None:
    if shutil.which(language) is None:
        pytest.skip(f"{language} is not installed")
    command = {
        "python": lambda: [sys.executable, str(FOLDER / "train.py")],
        "go": lambda: [built(tmp_path)],
        "node": lambda: ["node", str(FOLDER / "train.mjs")],
    }[language]()
    with Server(tmp_path / "store") as server:
        workers = [Worker(command, name, server.url, rank, tmp_path) for rank in range(WORKERS)]
        try:
            workers[1].reach(3)
            workers[1].kill()
            workers[1].start()
            workers[0].reach(6)
            server.restart()
            for worker in workers:
                worker.finish()
        finally:
            for worker in workers:
                worker.kill()
    losses: dict[int, set[float]] = defaultdict(set)
    for worker in workers:
        for step, loss in worker.lines():
            losses[int(step)].add(round(float(loss), 6))  # a loss that is printed twice is the same
    # The killed worker does not print the loss of a step that ended before it was there again.
    means = {step: sum(each) / WORKERS for step, each in losses.items() if len(each) == WORKERS}
    expected = undisturbed(name)
    assert len(means) >= STEPS - 1
    assert max(map(len, losses.values())) == WORKERS
    assert means == pytest.approx({step: expected[step] for step in means}, abs=1e-5)
    (checkpoint,) = [path for path in tmp_path.iterdir() if path.name.startswith("run.")]
    assert checkpoint.stat().st_size > sum(parameter.nbytes for parameter in models().made(name).parameters())


def test_the_files_are_those_that_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in models().data().items():
        assert json.loads((FOLDER / f"{name}.json").read_text()) == {key: one.tolist() for key, one in rows.items()}
    assert all(len(path.read_text().splitlines()) <= 80 for path in FOLDER.glob("train.*"))
