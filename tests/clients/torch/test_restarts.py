"""The README's workers in processes that are killed, and started again with the same command."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gradserve_client import Client

from tests.faults.servers import Server
from tests.trainers import SECONDS, Trainer, script, with_length

WORKERS = 3
STEPS = 60
RATE = 0.02
"""The optimizer's: the loss still falls in the last step."""

PULL = 'print("step", gradients.step, "loss", float(loss.detach()), flush=True); time.sleep(0.02); mean ='


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    """A server in a separate process, with its store on the disk."""
    with Server(tmp_path / "store") as running:
        yield running


def code(url: str) -> str:
    """Return the README's script, which prints its loss in each step and its weights in the end."""
    lines = with_length(script(), STEPS, RATE).replace("http://127.0.0.1:8000", url)
    lines = lines.replace("mean =", PULL)
    return f"import time\n{lines}\nprint('weights', model.weight.tolist(), flush=True)\n"


def losses(printed: str) -> dict[int, float]:
    """Return the loss of each step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", printed, re.MULTILINE)}


def until(trainer: Trainer, step: int) -> dict[int, float]:
    """Wait until a worker is in this step. Return its losses."""
    end = time.monotonic() + SECONDS
    while (found := losses(trainer.printed())).keys() < {step} or max(found) < step:
        assert time.monotonic() < end, trainer.printed()
        assert trainer.process.poll() is None, trainer.log.read_text()
        time.sleep(0.01)
    return found


def weights(printed: str) -> str:
    (found,) = re.findall("^weights (.*)$", printed, re.MULTILINE)
    return str(found)


def by_one_process() -> Any:
    """Return the weights that PyTorch itself comes to with all rows."""
    torch.manual_seed(0)
    rows = torch.randn(64, 3)
    labels = rows @ torch.tensor([[1.0], [-2.0], [0.5]])
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(rows) - labels).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


@pytest.fixture
def workers(durable: Server, tmp_path: Path) -> Iterator[list[Trainer]]:
    started = [Trainer(code(durable.url), tmp_path, rank, WORKERS) for rank in range(WORKERS)]
    yield started
    for worker in started:
        worker.process.kill()


def test_a_worker_that_is_killed_and_started_again_goes_on(durable: Server, workers: list[Trainer]) -> None:
    """Each is killed once, and the server, too. No step is repeated or left out, and all end with the same bits."""
    for rank, worker in enumerate(workers):
        before = until(worker, 10 * (rank + 1))
        worker.die()
        if rank == 1:
            durable.restart()
        worker.start()
        after = until(worker, max(before) + 2)
        assert max(before) - 10 <= min(after) <= max(before) + 1, "it makes up for the steps since the last state"
        assert after[max(after)] < before[max(before)]
        assert all(after[step] == before[step] for step in after.keys() & before.keys())
    printed = [worker.ends() for worker in workers]
    assert {max(losses(one)) for one in printed} == {STEPS - 1}
    assert len({weights(one) for one in printed}) == 1
    torch.testing.assert_close(torch.tensor(ast.literal_eval(weights(printed[0]))), by_one_process())
    with Client(durable.url) as server:
        info = server.buffers["line.weight"].info()
    assert (info.step, info.count) == (STEPS, 0)


def test_all_workers_are_killed_at_once_and_start_in_an_empty_directory(workers: list[Trainer], tmp_path: Path) -> None:
    for worker in workers:
        until(worker, 10)
    for worker in workers:
        worker.die()
    for worker in workers:
        worker.start()
    printed = [worker.ends() for worker in workers]
    assert len({weights(one) for one in printed}) == 1
    torch.testing.assert_close(torch.tensor(ast.literal_eval(weights(printed[0]))), by_one_process())
    assert all(re.search(r"run line goes on at step \d+", worker.log.read_text()) for worker in workers)
    workers[0].start()
    assert workers[0].process.wait(SECONDS) == 1, "the run has finished"
    assert "Give another run=, or delete this one" in workers[0].log.read_text()
