"""Parameters that one worker sends to the others: those of this call, all of them, and in time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from gradserve_client import Client, Conflict, ConnectionFailed, InvalidInput, StepOpen
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, backward, net, same
from tests.serving import in_flight, wait_until

MOST_REQUESTS = 30
"""Requests of a worker that waits half a second for parameters. One that asks without a pause sends hundreds."""


def joined(model: Any, server: Client, run: str, **options: Any) -> GradientAccumulator:
    return GradientAccumulator(model, server, run=run, **{"timeout": 20, "start": "any", **options})


def pair(server: Client, run: str, seeds: tuple[int, int] = (0, 1), **options: Any) -> Iterator[Any]:
    """Yield two workers of a run with different weights, each after its model."""
    for seed in seeds:
        model = net(seed)
        yield model
        yield joined(model, server, run, **options)


def shift(model: Any) -> None:
    """Change all parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)


def alike(model: Any, other: Any) -> bool:
    return same(model.parameters(), other.parameters())


# ----- the broadcast of this call -----


def test_a_receiver_waits_for_the_second_broadcast_of_a_step(server: Client, url: str, run: str) -> None:
    """It is faster than the sender, which loads a checkpoint in between."""
    sent, sender, model, receiver = pair(server, run)
    sender.broadcast_parameters(send=True)
    receiver.broadcast_parameters(send=False)
    assert alike(model, sent)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.broadcast_parameters, send=False)
        wait_until(lambda: in_flight(url) >= 1)
        assert not waiting.done()
        shift(sent)
        sender.broadcast_parameters(send=True)
        waiting.result(20)
    assert alike(model, sent)


def test_a_receiver_that_is_slower_than_the_sender_gets_the_last_broadcast(server: Client, run: str) -> None:
    sent, sender, model, receiver = pair(server, run)
    for _ in range(3):
        shift(sent)
        sender.broadcast_parameters(send=True)
    for _ in range(3):
        receiver.broadcast_parameters(send=False)
        assert alike(model, sent)
    late = net()
    joined(late, server, run).broadcast_parameters(send=False)
    assert alike(late, sent)


def test_workers_send_by_turns(server: Client, run: str) -> None:
    model, one, twin, other = pair(server, run)
    for sender, receiver in ((one, other), (other, one)):
        shift(model if sender is one else twin)
        sender.broadcast_parameters(send=True)
        receiver.broadcast_parameters(send=False)
        assert alike(model, twin)


def test_the_next_step_counts_its_broadcasts_from_the_first(server: Client, run: str) -> None:
    sent, sender, model, receiver = pair(server, run, quorum=2)
    for _ in range(2):
        for _ in range(2):
            shift(sent)
            sender.broadcast_parameters(send=True)
            receiver.broadcast_parameters(send=False)
            assert alike(model, sent)
        for worker in (sender, receiver):
            worker.push(weight=0)
        for worker in (sender, receiver):
            worker.pull()


# ----- the broadcast of an earlier job -----


def test_parameters_do_not_begin_in_a_step_that_has_others(server: Client, run: str) -> None:
    """A job dies in its first step, and is started again with another seed. The sender says what to do."""
    _, sender, _, receiver = pair(server, run)
    sender.broadcast_parameters(send=True)
    receiver.broadcast_parameters(send=False)

    for _ in range(2):
        _, sender, _, receiver = pair(server, run, (2, 3))
        with pytest.raises(Conflict, match=r"Step 0 .* has begun with other parameters.*give another run=, or delete"):
            sender.broadcast_parameters(send=True)
    server.buffers.delete(prefix=sender.prefix)
    sent, sender, model, receiver = pair(server, run, (2, 3))
    sender.broadcast_parameters(send=True)
    receiver.broadcast_parameters(send=False)
    assert alike(model, sent)


def test_parameters_do_not_begin_in_a_step_that_has_pushes(server: Client, run: str) -> None:
    model, dead, _, sender = pair(server, run, quorum=3)
    backward(model, 4, 1)
    dead.push()
    with pytest.raises(Conflict, match=r"Step 0 .* has begun with other parameters"):
        sender.broadcast_parameters(send=True)
    assert server.buffers[f"{run}.0.weight"].info().count == 1


def test_a_worker_with_the_runs_parameters_sends_them_in_every_step(server: Client, run: str) -> None:
    """Also beside pushes, and after a restart with its state."""
    model, _, _, other = pair(server, run, quorum=3)
    worker = joined(model, server, run, worker="0", quorum=3)
    worker.broadcast_parameters(send=True)
    other.push(weight=0)
    worker.broadcast_parameters(send=True)
    state = worker.state_dict()
    again = joined(model, server, run, worker="0", quorum=3)
    again.load_state_dict(state)
    again.broadcast_parameters(send=True)


def test_the_only_worker_sends_its_parameters_after_some_steps(server: Client, run: str) -> None:
    """Also with running statistics, which no gradient tells."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    worker = joined(model, server, run, quorum=1)
    for step in range(2):
        backward(model, 4, step)
        worker.push(weight=4)
        worker.pull()
        shift(model)
    worker.broadcast_parameters(send=True)
    twin = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    late = joined(twin, server, run, quorum=1)
    late.broadcast_parameters(send=False)
    assert late.step == 2
    assert same(twin.state_dict().values(), model.state_dict().values())


def test_a_broadcast_that_broke_off_can_be_repeated(url: str, run: str) -> None:
    transport = Watched()
    with Client(url, transport=transport, max_retries=0) as server:
        sent, sender, model, receiver = pair(server, run)
        transport.losing = True
        with pytest.raises(ConnectionFailed):
            sender.broadcast_parameters(send=True)
        transport.losing = False
        sender.broadcast_parameters(send=True)
        receiver.broadcast_parameters(send=False)
    assert alike(model, sent)


# ----- the wait ends -----


def waits(server: Client, transport: Watched, run: str) -> None:
    """Check that a receiver gives up in time, and asks little meanwhile. It waits for what is left of its time."""
    receiver, asked = joined(net(), server, run, timeout=0.5), list[float]()

    def note(request: httpx.Request) -> bool:
        asked.extend(map(float, request.url.params.get_list("timeout")))
        return False

    transport.refuses = note
    transport.sent.clear()
    with pytest.raises(StepOpen, match="Nobody has sent the parameters of step"):
        receiver.broadcast_parameters(send=False)
    assert 0.5 >= asked[0]
    assert asked == sorted({*asked}, reverse=True)
    assert len(transport.sent) < MOST_REQUESTS


def test_parameters_that_were_zeroed_are_not_waited_for_in_a_loop(url: str, run: str) -> None:
    transport = Watched()
    with Client(url, transport=transport) as server:
        sent, sender, _, _ = pair(server, run)
        sender.broadcast_parameters(send=True)
        server.buffers.zero(prefix=sender.prefix)
        waits(server, transport, run)
        model = net(1)
        receiver = joined(model, server, run)
        joined(sent, server, run).broadcast_parameters(send=True)
        receiver.broadcast_parameters(send=False)
        assert alike(model, sent)


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_sender_that_dies_in_the_middle_of_its_parameters(url: str, run: str, deaths: int) -> None:
    """Nothing of what it has sent counts: others get the parameters before."""
    transport = Watched()
    with Client(url, transport=transport, max_retries=0) as server:
        sent, sender, model, receiver = pair(server, run, request_bytes=100)
        sender.broadcast_parameters(send=True)
        receiver.broadcast_parameters(send=False)
        transport.refuses = lambda request: request.url.params.get("part") == "2"
        for _ in range(deaths):
            shift(sent)
            with pytest.raises(ConnectionFailed):
                sender.broadcast_parameters(send=True)
        transport.refuses = lambda request: False
        late = net(5)
        joined(late, server, run, request_bytes=100).broadcast_parameters(send=False)
        assert alike(late, model)
        sender.broadcast_parameters(send=True)
        receiver.broadcast_parameters(send=False)
    assert alike(model, sent)


# ----- all tensors or none -----


def spread(value: float) -> Any:
    """Return a model with a buffer whose elements share their memory."""
    model = net()
    torch.nn.init.constant_(model[0].weight, value)
    model.register_buffer("spread", torch.full((1,), value).expand(4))
    return model


def test_a_tensor_that_cannot_be_set_is_refused_before_any_is(server: Client, run: str) -> None:
    models = [spread(1.0), spread(2.0)]
    for model, send in zip(models, (True, False), strict=True):
        worker = joined(model, server, run, timeout=0.1)
        with pytest.raises(InvalidInput, match=r"'spread' has elements that share memory.*clone\(\)"):
            worker.broadcast_parameters(send=send)
    assert models[1][0].weight.eq(2).all()
    for model, send in zip(models, (True, False), strict=True):
        model.spread = model.spread.clone()
        joined(model, server, run).broadcast_parameters(send=send)
    assert models[1][0].weight.eq(1).all()
    assert models[1].spread.eq(1).all()


@pytest.mark.parametrize(
    ("tensor", "shares"),
    [
        (torch.zeros(1).expand(4), True),
        (torch.zeros(6).unfold(0, 3, 1), True),
        (torch.zeros(2, 1).expand(2, 3), True),
        (torch.zeros(()), False),
        (torch.zeros(0, 3), False),
        (torch.zeros(1).expand(1, 1), False),
        (torch.zeros(4, 6).T[::2, 1:], False),
        (torch.eye(3).to_sparse(), False),
    ],
)
def test_which_tensors_share_memory(server: Client, run: str, tensor: Any, shares: bool) -> None:
    model = net()
    model.register_buffer("one", tensor)
    worker = joined(model, server, run)
    if shares:
        with pytest.raises(InvalidInput, match="share memory"):
            worker.broadcast_parameters(send=True)
    else:
        worker.broadcast_parameters(send=True)


def test_parameters_do_not_begin_after_a_step_that_closed(server: Client, run: str) -> None:
    """The sender of a run is killed, and started again with the same command. After a zero it begins."""
    sent, sender, model, receiver = pair(server, run, quorum=2)
    sender.broadcast_parameters(send=True)
    receiver.broadcast_parameters(send=False)
    for worker in (sender, receiver):
        worker.push(weight=0)
    receiver.pull()
    again = joined(net(5), server, run, quorum=2)
    with pytest.raises(
        Conflict, match=r"Step 1 .* has begun with other parameters.*broadcast_parameters\(send=False\)"
    ):
        again.broadcast_parameters(send=True)
    shift(model)
    receiver.broadcast_parameters(send=True)
    again.broadcast_parameters(send=False)
    again.broadcast_parameters(send=True)
    server.buffers.zero(prefix=sender.prefix)
    joined(net(6), server, run, quorum=2).broadcast_parameters(send=True)
