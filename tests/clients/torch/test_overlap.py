"""Pushes that travel while the next forward pass runs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest.mock import ANY

import httpx
import pytest
import torch
from gradserve_client import Client, Conflict, ConnectionFailed, KeyReused, StaleStep, StepOpen
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, assert_close, backward, fill_with, grads, net, own


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
    assert gradients.state_dict() == {"run": ANY, "step": 0, "pushes": 1}
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
    with pytest.raises(StaleStep, match=r"pull\(\) fetches its mean"):
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
    with pytest.raises(KeyReused, match="push 0 of step 0 before"):
        gradients.pull()
    gradients.pull()
    assert_close(grads(model), expected)


def test_a_push_that_cannot_succeed_is_forgotten(server: Client, run: str) -> None:
    model = torch.nn.Linear(1, 1)
    gradients = GradientAccumulator(model, server, run=run)
    server.buffers[f"{run}.weight"].delete()
    gradients.push(weight=0, wait=False)
    with pytest.raises(Conflict, match="was deleted since"):
        gradients.state_dict()
    assert gradients.state_dict() == {"run": ANY, "step": 0, "pushes": 0}


# ----- pushes that nobody asks about -----

SCRIPT = """
import atexit, sys
import torch
from gradserve_client import Client, GradserveError
from gradserve_client.torch import GradientAccumulator
atexit.register(print, "a handler of the program", flush=True)
url, run, status, *numbers = sys.argv[1:]
for number in numbers:
    model = torch.nn.Linear(2, 1)
    gradients = GradientAccumulator(model, Client(url), run=f"{run}.{number}", nonfinite="reject")
    model(torch.full((1, 2), float(number))).sum().backward()
    gradients.push(wait=False)
    if number == "-nan":  # its error is heard
        try:
            gradients.pull()
        except GradserveError:
            pass
sys.exit(int(status))
"""


def script(url: str, *arguments: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of a trainer."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, url, *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_push_that_fails_at_the_end_of_a_script_is_heard(url: str, run: str) -> None:
    returncode, output, errors = script(url, run, "3", "nan")
    assert returncode == 120
    assert output == "a handler of the program\n"
    at_once, at_the_end = errors.splitlines()
    assert at_once.startswith("Push 0 of step 0 failed in its thread: InvalidInput: The gradient would")
    assert at_the_end == f"gradserve_client: {at_once}. No later call of the accumulator asked for it"


def test_an_error_that_was_raised_and_a_push_that_succeeds_leave_the_status(url: str, run: str) -> None:
    returncode, output, errors = script(url, run, "0", "-nan", "1")
    assert (returncode, output) == (0, "a handler of the program\n")
    (at_once,) = errors.splitlines()
    assert at_once.startswith("Push 0 of step 0 failed in its thread: InvalidInput: The gradient would")


def test_a_push_that_fails_is_logged_at_once(
    server: Client, gate: Gate, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(1, 1)
    gradients = GradientAccumulator(model, server, run=run)
    gate.down = True
    gradients.push(weight=0, wait=False)
    end = time.monotonic() + 20
    while not caplog.records and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(ConnectionFailed):
        gradients.pull()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    text = record.getMessage()
    assert text.startswith("Push 0 of step 0 failed in its thread: ConnectionFailed: ")


def test_a_push_of_another_worker_of_the_same_name(server: Client, run: str, caplog: pytest.LogCaptureFixture) -> None:
    """With other bits it raises KeyReused. With the same bits it cannot be told from a restart without a state."""
    workers = []
    for seed in (1, 1):
        model = net()
        backward(model, 4, seed)
        workers.append(GradientAccumulator(model, server, run=run, worker="rank0", quorum=2, timeout=0))
    first, second = workers
    assert not first.push().replayed
    assert not caplog.records
    assert second.push().replayed
    (record,) = caplog.records
    assert "push 0 of step 0 of 'rank0' from an earlier request" in record.getMessage()
    with pytest.raises(StepOpen, match="count is 1 of 2.*another worker may have the same name"):
        second.pull()
    with pytest.raises(StepOpen) as caught:
        first.pull()
    assert "the same name" not in str(caught.value)


@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_worker_that_repeats_its_own_push_is_not_taken_for_another(
    url: str, run: str, is_restarted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart with its state, or after a push whose answer was lost."""
    model, transport = net(), Watched()
    with Client(url, transport=transport, max_retries=0) as server:
        gradients = GradientAccumulator(model, server, run=run, worker="rank0")
        state = gradients.state_dict()
        fill_with(model, 1)
        if is_restarted:
            gradients.push()
            gradients.load_state_dict(state)
            fill_with(model, 1)
        else:
            transport.losing = True
            with pytest.raises(ConnectionFailed):
                gradients.push()
            transport.losing = False
        assert gradients.push().replayed
    assert not caplog.records
