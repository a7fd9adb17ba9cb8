"""Pushes that travel while the next forward pass runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
import torch
from gradserve_client import Client, ConnectionFailed, KeyReused, NotFound, StaleEpoch
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import assert_close, backward, grads, net, own


class Gate(httpx.HTTPTransport):
    """Holds adds back until the gate is open, and counts how many are on their way at once."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.down = False
        self.running = self.most = self.adds = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/accumulate"):
            return super().handle_request(request)
        self.running += 1
        self.adds += 1
        self.most = max(self.most, self.running)
        try:
            assert self.open.wait(30)
            if self.down:
                raise httpx.ConnectError("no route")
            return super().handle_request(request)
        finally:
            self.running -= 1


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def server(url: str, gate: Gate) -> Iterator[Client]:
    with Client(url, transport=gate, max_retries=0) as server:
        yield server


def test_the_next_forward_and_backward_run_while_a_push_is_on_its_way(server: Client, gate: Gate, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run)
    batches = [(4, 1), (2, 2), (3, 3)]
    expected = own(model, batches)
    gate.most = 0
    for size, seed in batches:
        backward(model, size, seed)  # into new gradients: those of the last push, held at the gate, were handed over
        gate.open.set()  # or else the next push would wait for ever
        gradients.state_dict()
        gate.open.clear()
        assert gradients.push(weight=size, wait=False) is None
        assert grads(model) == [None] * 4
    gate.open.set()
    assert gradients.pull().count == 3
    assert gate.most == 1
    assert_close(grads(model), expected)


def test_a_pull_waits_for_the_push(server: Client, gate: Gate, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run, quorum=1)
    backward(model, 4, 1)
    expected = grads(model)
    gate.open.clear()
    gradients.push(wait=False)
    assert server.buffers[f"{run}.0.weight"].info().count == 0
    threading.Timer(0.05, gate.open.set).start()
    gradients.pull()
    assert_close(grads(model), expected)


def test_an_error_of_the_thread_is_raised_by_the_next_call_and_the_push_sent_again(
    server: Client, gate: Gate, run: str
) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run)
    backward(model, 4, 1)
    expected = grads(model)
    gate.down = True
    gradients.push(wait=False)
    for call in (gradients.pull, gradients.state_dict, gradients.push):
        with pytest.raises(ConnectionFailed):
            call()
    gate.down = False
    assert gradients.state_dict() == {"epoch": 0, "pushes": 1}
    assert gradients.pull().count == 1
    assert_close(grads(model), expected)


def test_a_late_push_is_forgotten_after_its_error(server: Client, run: str) -> None:
    models = [net(), net()]
    fast, slow = [GradientAccumulator(model, server, run=run, quorum=1, timeout=20) for model in models]
    backward(models[0], 4, 1)
    fast.push(wait=False)
    fast.pull()
    backward(models[1], 4, 1)
    slow.push(wait=False)
    with pytest.raises(StaleEpoch, match=r"pull\(\) fetches its mean"):
        slow.pull()
    slow.pull()
    assert_close(grads(models[1]), grads(models[0]))


def test_a_push_that_was_made_before_counts_and_is_forgotten(server: Client, run: str) -> None:
    for seed in (1, 2):
        model = net()
        gradients = GradientAccumulator(model, server, run=run, worker="0")
        backward(model, 4, seed)
        gradients.push(wait=False)
        if seed == 1:
            expected = own(model, [(4, 1)])
            assert gradients.state_dict()["pushes"] == 1
    with pytest.raises(KeyReused, match="push 0 of epoch 0 before"):
        gradients.pull()
    gradients.pull()
    assert_close(grads(model), expected)


def test_a_push_that_cannot_succeed_is_forgotten(server: Client, run: str) -> None:
    model = torch.nn.Linear(1, 1)
    gradients = GradientAccumulator(model, server, run=run)
    server.buffers[f"{run}.weight"].delete()
    gradients.push(weight=0, wait=False)
    with pytest.raises(NotFound):
        gradients.state_dict()
    assert gradients.state_dict() == {"epoch": 0, "pushes": 0}
