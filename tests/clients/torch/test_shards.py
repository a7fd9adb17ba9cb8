"""GradientAccumulator over several servers: the same bits as over one, through kills and restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from gradserve_client import Client, Conflict, ConnectionFailed, InvalidInput
from gradserve_client._http import policy
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, assert_close, backward, grads, net, own, same
from tests.faults.servers import Server


@pytest.fixture
def server(urls: list[str]) -> Iterator[Client]:
    with Client(urls) as server:
        yield server


def train(server: Client, run: str, killed: Sequence[Server] = ()) -> list[Any]:
    """Train two workers, kill a server in each step, restart a worker after each, and return the final parameters."""
    models = [net(), net()]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def accumulator(worker: int) -> GradientAccumulator:
        return GradientAccumulator(models[worker], server, run=run, quorum=4, worker=f"rank{worker}", timeout=30)

    workers = [accumulator(0), accumulator(1)]
    with ThreadPoolExecutor(1) as threads:
        for step in range(3):
            killing = threads.submit(restart, killed[step]) if killed else None
            for number in range(4):
                backward(models[number % 2], 2 + number, 10 * step + number)
                assert workers[number % 2].push(weight=2 + number).count == number + 1
            for worker, optimizer in zip(workers, optimizers, strict=True):
                worker.pull()
                optimizer.step()
                optimizer.zero_grad()
            if killing:
                killing.result()
            state = workers[0].state_dict()
            workers[0] = accumulator(0)
            workers[0].load_state_dict(state)
    assert same(models[0].parameters(), models[1].parameters())
    return [*models[0].parameters()]


def restart(server: Server) -> None:
    server.restart()


def test_three_servers_and_kills_give_the_bits_of_one(
    processes: list[Server], url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "LONGEST_DELAY", 0.2)
    with Client(url) as one:
        expected = train(one, run)
    with Client([process.url for process in processes]) as server:
        found = train(server, run, processes)
        assert len({*server.places(run).values()}) == 3
        assert {info.step for info in server.buffers.list(run) if not info.name.endswith("::start")} == {3}
    assert same(found, expected)


def test_bytes_are_balanced_and_requests_are_two_for_each_server(urls: list[str], run: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(30 + number, 50) for number in range(9)])
    transport = Watched()
    with Client(urls, transport=transport) as server:
        gradients = GradientAccumulator(model, server, run=run)
        transport.sent.clear()
        gradients.push(weight=0)
        assert [path for path, _ in transport.sent] == ["/v1/buffers/accumulate"] * 6
        sizes = [size for _, size in transport.sent]
        assert max(sizes[3:]) < min(sizes[:3])  # the last part of each push is empty
        held = Counter[str]()
        for info in server.buffers.list(run):
            if "::" not in info.name:
                held[server.places(info.name)[info.name]] += info.bytes
                assert server.buffers[info.name].info().count == 1
    assert max(held.values()) - min(held.values()) <= 50 * 4 * 2
    with Client(urls[::-1]) as other:
        GradientAccumulator(model, other, run=run)
        names = [info.name for info in other.buffers.list(run) if "::" not in info.name]
        assert len(names) == 18


def test_buffers_stay_where_they_are_when_servers_are_added(urls: list[str], run: str) -> None:
    model = net()
    expected = own(model, [(4, 1), (2, 2)])
    with Client(urls[:2]) as few:
        first = GradientAccumulator(model, few, run=run, worker="0")
        backward(model, 4, 1)
        first.push(weight=4)
        state, places = first.state_dict(), few.places(run)
        assert state == {"run": ANY, "step": 0, "pushes": 1, "shards": places}
    with Client(urls) as more:
        second = GradientAccumulator(model, more, run=run, worker="0")
        assert more.places(run) == places
        second.load_state_dict(state)
        backward(model, 2, 2)
        assert second.push(weight=2).count == 2
        second.pull()
        assert_close(grads(model), expected)


def test_a_state_says_where_the_buffers_are(urls: list[str], server: Client, run: str) -> None:
    gradients = GradientAccumulator(net(), server, run=run, worker="0")
    state = gradients.state_dict()
    # elsewhere than the first parameter, whose server has a tally of its group under the same name
    new, old, *_ = sorted(urls, key=lambda url: url == state["shards"][f"{run}.0.bias"])
    moved = {f"{run}.{name}": new for name, _ in net().named_parameters()}
    gradients.load_state_dict({**state, "shards": moved})
    gradients.push(weight=0)
    assert gradients.state_dict()["shards"].items() >= moved.items()
    with Client(new) as only:
        assert {name: only.buffers[name].info().count for name in moved} == dict.fromkeys(moved, 1)
        alone = GradientAccumulator(net(), only, run=run, worker="0")
        assert "shards" not in alone.state_dict()
        with pytest.raises(InvalidInput, match=f"is on {old}, but the client's servers are {new}"):
            alone.load_state_dict({**state, "shards": dict.fromkeys(moved, old)})


def test_a_worker_that_died_between_servers_pushes_again_in_the_earlier_step(urls: list[str], run: str) -> None:
    models, transport = [net(), net()], Watched()
    expected = own(models[0], [(4, 1), (2, 2)])

    with Client(urls, transport=transport, max_retries=0) as server:

        def accumulator(worker: int) -> GradientAccumulator:
            return GradientAccumulator(models[worker], server, run=run, quorum=2, worker=str(worker), timeout=5)

        workers = [accumulator(0), accumulator(1)]
        backward(models[0], 4, 1)
        workers[0].push(weight=4)
        backward(models[1], 2, 2)
        transport.refuses = lambda request: (
            str(request.url).startswith(urls[2]) and request.url.params["part"] == request.url.params["parts"]
        )
        with pytest.raises(ConnectionFailed, match=f"^{urls[2]}: The connection failed: no route$") as caught:
            workers[1].push(weight=2)
        assert caught.value.maybe_done
        transport.refuses = lambda request: False
        assert {info.step for info in server.buffers.list(run)} == {0, 1}

        workers[1] = accumulator(1)
        assert workers[1].step == 0
        assert workers[1].push(weight=2).closed
        for worker, model in zip(workers, models, strict=True):
            worker.pull()
            assert_close(grads(model), expected)
        assert same(grads(models[0]), grads(models[1]))
        assert {info.step for info in server.buffers.list(run) if not info.name.endswith("::start")} == {1}


@pytest.mark.parametrize(("name", "steps"), [("0.weight", 2), ("0.bias", 1)], ids=["alone", "beside another"])
def test_buffers_of_different_models_are_refused(server: Client, run: str, name: str, steps: int) -> None:
    """Servers may be a step apart, but not two, and the buffers of a server not at all."""
    GradientAccumulator(net(), server, run=run)
    places = server.places(run)
    assert places[f"{run}.0.bias"] == places[f"{run}.2.bias"]
    for _ in range(steps):
        server.buffers[f"{run}.{name}"].zero()
    with pytest.raises(Conflict, match=rf"is in step 0, '.*{name}' in {steps}; use another run"):
        GradientAccumulator(net(), server, run=run)
