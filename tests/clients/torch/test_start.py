"""The same start for all workers of a run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gradserve_client import Client, Conflict, InvalidInput, StepOpen
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import backward, fill_with, grads, net, same, shard
from tests.serving import serving


def joined(model: Any, server: Client, run: str, **options: Any) -> GradientAccumulator:
    return GradientAccumulator(model, server, run=run, timeout=20, **options)


# ----- what is compared -----


def renamed() -> Any:
    return torch.nn.Sequential(*[torch.nn.Identity(), *net()])


def half() -> Any:
    return net().to(torch.bfloat16)


def deeper() -> Any:
    return torch.nn.Sequential(*net(), torch.nn.Linear(3, 3))


@pytest.mark.parametrize("request_bytes", [None, 400])
def test_layers_in_another_order_meet(server: Client, run: str, request_bytes: int | None) -> None:
    layers = {"b": torch.ones(2), "a": torch.zeros(3), "c": torch.ones(40)}
    models = [torch.nn.ParameterDict(layers), torch.nn.ParameterDict([*layers.items()][::-1])]
    workers = [GradientAccumulator(model, server, run=run, quorum=2, request_bytes=request_bytes) for model in models]
    for number, (worker, model) in enumerate(zip(workers, models, strict=True)):
        fill_with(model, 1.0 + 2 * number)
        worker.push()
    for worker, model in zip(workers, models, strict=True):
        assert worker.pull().count == 2
        assert {grad.unique().item() for grad in grads(model)} == {2.0}


@pytest.mark.parametrize("other", [renamed, half, deeper])
def test_another_model_is_refused_before_anything_is_created(server: Client, run: str, other: Any) -> None:
    joined(net(), server, run)
    before = [info.name for info in server.buffers.list(run)]
    for options in ({}, {"start": "any"}):
        with pytest.raises(Conflict, match="Give another run=.*of another form.* is .* here, and .* there"):
            joined(other(), server, run, **options)
    assert [info.name for info in server.buffers.list(run)] == before


def test_requests_of_another_size_are_refused(server: Client, run: str) -> None:
    joined(net(), server, run)
    with pytest.raises(Conflict, match="request_bytes is 100 here, and"):
        joined(net(), server, run, request_bytes=100)


def test_other_weights_are_refused_until_the_first_step_has_closed(server: Client, run: str) -> None:
    model = net()
    first = joined(model, server, run, quorum=2)
    with pytest.raises(Conflict, match=r"began with other weights.*broadcast_parameters\(\)"):
        joined(net(seed=1), server, run, quorum=2)
    second = joined(net(), server, run, quorum=2)
    for worker in (first, second):
        worker.push(weight=0)
    assert joined(net(seed=1), server, run, quorum=2).step == 1


def test_of_workers_that_start_at_once_one_is_first(url: str, run: str) -> None:
    models = [net(seed=number % 2) for number in range(6)]

    def start(model: Any) -> bool:
        with Client(url) as server:
            try:
                joined(model, server, run)
            except Conflict:
                return False
            return True

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(start, models))
    assert found in ([True, False] * 3, [False, True] * 3)


# ----- broadcast -----


class Kinds(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Tensors of every kind: trained, frozen, of integers, complex, empty, in half precision, and large."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.full((3, 2), value))
        self.frozen = torch.nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16), requires_grad=False)
        self.complex = torch.nn.Parameter(torch.full((2,), complex(value, -value)))
        self.wide = torch.nn.Parameter(torch.full((), value / 3, dtype=torch.float64))
        self.large = torch.nn.Parameter(torch.full((40, 50), value))
        self.register_buffer("count", torch.tensor(2**40 + int(value)))
        self.register_buffer("mask", torch.tensor([value > 1, False]))
        self.register_buffer("empty", torch.ones(0, 3))


def alike(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == twin and torch.equal(tensor, copy) for (name, tensor), (twin, copy) in pairs)


@pytest.mark.parametrize("servers", [1, 2])
def test_one_worker_sends_its_parameters_and_buffers_to_all(url: str, run: str, servers: int) -> None:
    with serving() as second:
        models = [Kinds(value) for value in (1.0, 2.0, 3.0)]

        def work(number: int) -> None:
            with Client([url, second][:servers]) as server:
                worker = joined(models[number], server, run, quorum=3, start="any", request_bytes=3000)
                worker.broadcast_parameters(send=number == 1)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, range(3)))
    assert alike(models[1], Kinds(2.0))
    assert alike(models[0], models[1])
    assert alike(models[2], models[1])


def test_a_state_is_found_that_is_sent_while_another_worker_looks_for_it(
    url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as second, Client([url, second]) as server:
        for number in range(6):  # by its name, each second buffer would be on the other server
            sender, receiver = (joined(Kinds(2.0), server, f"{run}-{number}", quorum=2, start="any") for _ in range(2))

            def places(client: Client, prefix: str, sender: Any = sender) -> dict[str, str]:
                monkeypatch.undo()
                found = client.places(prefix)
                sender.broadcast_parameters(send=True)
                return found

            monkeypatch.setattr(Client, "places", places)
            with Client([url, second]) as other:
                receiver._sent._server = other
                receiver.broadcast_parameters(send=False)


def test_a_late_worker_continues_with_the_others(server: Client, run: str) -> None:
    model, optimizers = net(), []
    first = joined(model, server, run, quorum=1)
    optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    first.broadcast_parameters(send=True)  # of step 0, which nobody late may take
    for seed in range(3):
        backward(model, 4, seed)
        first.push()
        first.pull()
        optimizers[0].step()
        optimizers[0].zero_grad()
    late = net(seed=1)
    second = joined(late, server, run, quorum=1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(second.broadcast_parameters, send=False)
        first.broadcast_parameters(send=True)
        waiting.result(20)
    assert second.step == first.step == 3
    assert alike(late, model)
    backward(late, 4, 7)
    second.push()
    for worker in (first, second):
        worker.pull()
    assert same(grads(model), grads(late))


def test_a_worker_that_is_behind_goes_on_to_the_step_of_the_parameters(server: Client, run: str) -> None:
    models = [net(), net()]
    fast, slow = [joined(model, server, run, quorum=1) for model in models]
    for seed in range(3):
        models[0].zero_grad()
        backward(models[0], 4, seed)
        fast.push()
        fast.pull()
        fast.broadcast_parameters(send=True)
    slow.broadcast_parameters(send=False)
    assert (slow.step, slow.state_dict()["pushes"]) == (3, 0)
    backward(models[1], 4, 1)
    assert slow.push().closed


def test_parameters_that_nobody_sends(server: Client, run: str) -> None:
    model = net()
    worker = GradientAccumulator(model, server, run=run, timeout=0.05)
    with pytest.raises(StepOpen, match="Nobody has sent the parameters of step 0 or later within 0.05 seconds"):
        worker.broadcast_parameters(send=False)
    assert alike(model, net())


def test_integers_that_cannot_be_sent(server: Client, run: str) -> None:
    model = Kinds(1.0)
    model.count += 2**60
    with pytest.raises(InvalidInput, match="count' has integers beyond"):
        GradientAccumulator(model, server, run=run).broadcast_parameters(send=True)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_a_dtensor_gets_its_part(server: Client, run: str) -> None:
    from torch.distributed.tensor import DTensor

    plain, sharded = net(seed=1), net()
    shard(sharded)
    joined(plain, server, run).broadcast_parameters(send=True)
    joined(sharded, server, run, start="any").broadcast_parameters(send=False)
    for found, sent in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), sent)
