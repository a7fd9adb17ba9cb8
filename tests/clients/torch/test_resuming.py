"""Workers without checkpoints: the server keeps the state of the run, and all end with the same bits."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import pytest
import torch
from gradserve_client import Client, Conflict
from gradserve_client.torch import GradientAccumulator

NAMES = ["rank0", "rank1", "rank2"]

STEPS = 14

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


@pytest.fixture
def run() -> str:
    return f"run-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def server(url: str) -> Any:
    with Client(url) as client:
        yield client


class Worker:
    """A worker of three. Its data follow from the step, as those of a program that resumes."""

    def __init__(self, server: Client, run: str, rank: int, make: Any = OPTIMIZERS["adamw"], **more: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        self.optimizer = make(self.model.parameters())
        rules: Any = {"quorum": 3, "contributors": NAMES, "deadline_seconds": 600, "min_count": 1, **more}
        self.gradients = GradientAccumulator(
            self.model, server, run=run, worker=NAMES[rank], optimizer=self.optimizer, loss=True, timeout=20, **rules
        )

    @property
    def step(self) -> int:
        return self.gradients.step

    def push(self) -> Any:
        generator = torch.Generator().manual_seed(100 * self.step + self.rank)
        x = torch.randn(8, 3, generator=generator)
        loss = (self.model.train()(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return self.gradients.push(weight=len(x), loss=loss)

    def pull(self) -> Any:
        pulled = self.gradients.pull()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)  # a part of the step that only the program knows
        self.optimizer.step()
        self.optimizer.zero_grad()
        return pulled

    def catch_up(self, step: int) -> None:
        """Make up for the steps before this one."""
        while self.step < step:
            assert not self.push().counted
            self.pull()

    def bits(self) -> list[list[float]]:
        """Return the trained parameters."""
        return [parameter.detach().reshape(-1).tolist() for parameter in self.model.parameters()]


def step(*workers: Worker) -> None:
    for one in workers:
        one.push()
    for one in workers:
        one.pull()


def started(server: Client, run: str, **more: Any) -> list[Worker]:
    return [Worker(server, run, rank, **more) for rank in range(3)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_that_die_at_once_go_on_with_the_same_bits(server: Client, run: str, name: str) -> None:
    """Also in the middle of a step."""
    undisturbed = started(server, f"{run}-whole", make=OPTIMIZERS[name])
    for _ in range(STEPS):
        step(*undisturbed)
    first = started(server, run, make=OPTIMIZERS[name])
    for _ in range(9):
        step(*first)
    first[1].push()
    again = started(server, run, make=OPTIMIZERS[name])
    assert {worker.step for worker in again} <= {5, 6, 7, 8, 9}
    for worker in again:
        worker.catch_up(9)
    pushed = [worker.push() for worker in again]
    assert [(one.counted, one.replayed) for one in pushed] == [(True, False), (True, True), (True, False)]
    for worker in again:
        worker.pull()
    while again[0].step < STEPS:
        step(*again)
    assert undisturbed[0].bits() == undisturbed[2].bits()
    assert [worker.bits() for worker in again] == [worker.bits() for worker in undisturbed]


def test_a_worker_that_comes_back_to_a_run_that_went_on(server: Client, run: str) -> None:
    workers = started(server, run)
    for _ in range(3):
        step(*workers)
    x, y, _ = workers
    for one in (x, y):
        one.push()
    x.gradients.set_rules(deadline_seconds=0.01)
    for one in (x, y):
        one.pull()
    for _ in range(9):
        step(x, y)
    x.gradients.set_rules(deadline_seconds=600)
    back = Worker(server, run, 2)
    assert server.runs.info(run).members == tuple(NAMES)
    assert 13 - 8 <= back.step <= 13
    for one in (x, y):
        one.push()
    back.catch_up(13)
    assert back.push().counted
    for one in (x, y, back):
        pulled = one.pull()
    assert pulled.contributors == dict.fromkeys(NAMES, 1)
    step(x, y, back)
    assert x.bits() == y.bits() == back.bits()


def test_the_writer_dies_and_another_takes_over(server: Client, run: str) -> None:
    workers = started(server, run)
    step(*workers)
    x, y, z = workers
    z.push()
    y.push()
    y.gradients.set_rules(deadline_seconds=0.01)
    for one in (y, z):
        one.pull()
    for _ in range(12):
        step(y, z)
    back = Worker(server, run, 0)
    assert back.step >= 14 - 8
    for one in (y, z):
        one.push()
    back.catch_up(14)
    back.push()
    for one in (y, z, back):
        one.pull()
    assert y.bits() == z.bits() == back.bits()


def test_a_slow_worker_goes_on_at_the_running_step(server: Client, run: str, caplog: pytest.LogCaptureFixture) -> None:
    x, y, slow = started(server, run)
    step(x, y, slow)
    for one in (x, y):
        one.push()
    x.gradients.set_rules(deadline_seconds=0.01)
    for one in (x, y):
        one.pull()
    x.gradients.set_rules(deadline_seconds=600)
    with caplog.at_level(logging.WARNING):
        late = slow.push()
    assert (late.counted, late.step) == (False, 1)
    assert f"step 1 of run {run} closed without this worker: the run is in step 2" in caplog.text
    slow.pull()
    step(x, y, slow)
    assert x.bits() == slow.bits()
    assert server.runs.info(run).step == 3


def test_a_slow_worker_ends_a_run_that_the_others_have_finished(server: Client, run: str) -> None:
    x, y, slow = started(server, run)
    step(x, y, slow)
    x.gradients.set_rules(deadline_seconds=0.01)
    for _ in range(3):
        for one in (x, y):
            one.push()
        for one in (x, y):
            one.pull()
    for one in (x, y):
        one.gradients.finish()
    assert server.runs.info(run).state == "finished"
    for late in range(1, 4):
        assert (slow.push().counted, slow.step) == (False, late)
        slow.pull()
    slow.gradients.finish()
    assert x.bits() == y.bits() == slow.bits()


def test_a_run_without_a_state_is_refused_at_once(server: Client, run: str) -> None:
    model = torch.nn.Linear(2, 1)
    plain = GradientAccumulator(model, server, run=run, quorum=1, worker="a", keep=18)
    plain.push(weight=0)
    plain.pull()
    with pytest.raises(
        Conflict, match=f"^Give another run=, or delete this one.*runs delete {run}.*is not on the server"
    ):
        GradientAccumulator(
            model, server, run=run, quorum=1, worker="a", optimizer=torch.optim.SGD(model.parameters(), lr=1)
        )


@pytest.mark.parametrize("state_every", [1, 3])
def test_states_are_kept_as_often_as_asked(server: Client, run: str, state_every: int) -> None:
    workers = started(server, run, state_every=state_every)
    for _ in range(8):
        step(*workers)
    kept = server.buffers[f"{run}.::kept"]
    assert kept.info().step == 1 + 7 // state_every
    assert server.buffers[f"{run}.loss"].info().keep >= state_every + 1


def test_a_second_start_without_a_state_is_told(server: Client, run: str, caplog: pytest.LogCaptureFixture) -> None:
    """A loop up to a last step would end at once, without a word."""
    model = torch.nn.Linear(2, 1)
    gradients = GradientAccumulator(model, server, run=run)
    gradients.push(weight=0)
    gradients.pull()
    assert caplog.messages == []
    assert GradientAccumulator(model, server, run=run).step == 1
    assert caplog.messages == [
        f"run {run} is in step 1, and this worker has its weights only once it loads its state_dict(); else give"
        f" another run=, or delete this one, as with `gradserve-client runs delete {run}`"
    ]
    GradientAccumulator(model, server, run=run, start="any")
    assert len(caplog.messages) == 1
