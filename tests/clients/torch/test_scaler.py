"""GradScaler and autocast: scaled gradients are pushed, and the scaler steps after the pull."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gradserve_client import Client, Conflict, InvalidInput
from gradserve_client.torch import GradientAccumulator
from torch.nn import functional

from tests.clients.torch.training import assert_close, batch, fill_with, grads, net, same


class Worker:
    """A worker that trains with autocast and a scaler."""

    def __init__(self, server: Client, run: str, dtype: torch.dtype, scale: float = 1024.0) -> None:
        self.model, self.dtype = net(), dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        self.gradients = GradientAccumulator(self.model, server, run=run, quorum=2)

    def push(self, size: int, seed: int, factor: float = 1.0) -> None:
        samples, labels = batch(size, seed)
        with torch.autocast("cpu", self.dtype):
            loss = functional.cross_entropy(self.model(samples), labels)
        self.scaler.scale(loss * factor).backward()
        self.gradients.push(weight=size, scale=self.scaler.get_scale())

    def step(self) -> None:
        self.gradients.pull()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_gradients_train_all_workers_alike(server: Client, run: str, dtype: torch.dtype) -> None:
    """As one process does. A push with an infinite gradient makes every worker skip the step and halve its scale."""
    workers = [Worker(server, run, dtype), Worker(server, run, dtype)]
    own, factors = net(), [1.0, 1.0, math.inf, 1.0]
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step, factor in enumerate(factors):
        for number, worker in enumerate(workers):
            worker.push(2 + number, 10 * step + number, factor if number else 1.0)
        for worker in workers:
            worker.step()
        if factor == 1:
            for number in range(2):
                samples, labels = batch(2 + number, 10 * step + number)
                with torch.autocast("cpu", dtype):
                    loss = functional.cross_entropy(own(samples), labels)
                (loss * (2 + number) / 5).backward()
            optimizer.step()
            optimizer.zero_grad()
        first, second = (list(worker.model.parameters()) for worker in workers)
        assert same(first, second)
        assert_close(first, [*own.parameters()], atol=1e-3)
    assert [worker.scaler.get_scale() for worker in workers] == [1024.0, 1024.0]  # doubled once, halved once


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("scale", [2048.0, 1023.9])
def test_different_scales_are_noticed_by_all(server: Client, run: str, reduce: Any, scale: float) -> None:
    models = [net(), net()]
    workers = [GradientAccumulator(model, server, run=run, quorum=2, reduce=reduce) for model in models]

    def push(scales: list[float]) -> None:
        for worker, model, one in zip(workers, models, scales, strict=True):
            fill_with(model, 1)
            worker.push(weight=0.7, scale=one)

    push([1024.0, scale])
    for worker, model in zip(workers, models, strict=True):
        with pytest.raises(Conflict, match="step 0 had gradients of different scales.*update the scaler"):
            worker.pull()
        assert grads(model) == [None] * 4
    push([scale, scale])
    for worker in workers:
        assert worker.pull().step == 1


def test_a_push_of_weight_0_has_no_scale(server: Client, run: str) -> None:
    model = net()
    worker = GradientAccumulator(model, server, run=run, quorum=2)
    worker.push(weight=0, scale=3.0)
    fill_with(model, 1)
    worker.push(scale=2.0)
    assert worker.pull().weight == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scales_that_cannot_be(server: Client, run: str, scale: float) -> None:
    worker = GradientAccumulator(net(), server, run=run)
    with pytest.raises(InvalidInput, match="scale is"):
        worker.push(weight=0, scale=scale)
