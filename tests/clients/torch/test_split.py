"""Models larger than a request: a push takes several requests, which count together, once or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from gradserve_client import Client, Conflict, ConnectionFailed, InvalidInput, KeyReused, StaleStep, StepOpen, TooLarge
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, assert_close, fill_with, grads
from tests.serving import serving

BODY_BYTES = 1 << 16


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Yield the URLs of servers that take small bodies only."""
    limits = {"max_body_bytes": BODY_BYTES, "max_inflated_bytes": BODY_BYTES, "max_bytes_in_flight": 8 * BODY_BYTES}
    with serving(**limits) as one, serving(**limits) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def server(urls: list[str]) -> Iterator[Client]:
    with Client(urls[0]) as server:
        yield server


def wide(seed: int = 0) -> Any:
    """Return a model whose parameters have 40 bytes to 5 times the size of a request."""
    torch.manual_seed(seed)
    shapes = [(100, 600), (10,), (5000,), (16, 256), (300, 20), (1,)]
    return torch.nn.ParameterList([torch.randn(shape) for shape in shapes])


def fill(model: Any, seed: int) -> list[Any]:
    """Set gradients, and return them."""
    torch.manual_seed(seed)
    for parameter in model:
        parameter.grad = torch.randn(parameter.shape)
    return grads(model)


def accumulator(model: Any, server: Client, run: str, **options: Any) -> GradientAccumulator:
    given = {"request_bytes": 50_000, "timeout": 20, **options}
    return GradientAccumulator(model, server, run=run, **given)


@pytest.mark.parametrize("quorum", [None, 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_model_of_many_requests(urls: list[str], run: str, quorum: int | None, servers: int) -> None:
    transport = Watched()
    with Client(urls[:servers], transport=transport) as server:
        model = wide()
        gradients = accumulator(model, server, run, quorum=quorum)
        transport.sent.clear()
        first, second = fill(model, 1), None
        assert gradients.push(weight=3).count == 1
        sizes = [size for path, size in transport.sent if path.endswith("accumulate")]
        assert len(sizes) == 7 + servers  # the last on each server is empty
        assert max(sizes) < BODY_BYTES
        second = fill(model, 2)
        assert gradients.push(weight=1).closed == (quorum is not None)
        assert gradients.pull().count == 2
        assert_close(grads(model), [(3 * one + two) / 4 for one, two in zip(first, second, strict=True)])
        infos = [info for info in server.buffers.list(run) if not info.name.endswith("start")]
        assert {(info.step, info.count, info.closed_steps) for info in infos} == {(1, 0, (0,))}


@pytest.mark.parametrize("done", range(1, 8))
def test_a_worker_that_dies_between_requests_repeats_its_push(
    urls: list[str], server: Client, run: str, done: int
) -> None:
    """The other worker has pushed before, so that the step closes with the push of this worker."""
    models, transport = [wide(), wide()], Watched()
    expected = [fill(model, seed) for seed, model in enumerate(models)]
    other = accumulator(models[0], server, run, quorum=2, worker="0")
    other.push(weight=1)
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        worker = accumulator(models[1], mortal, run, quorum=2, worker="1")
        state, transport.left = worker.state_dict(), done
        with pytest.raises(ConnectionFailed):
            worker.push(weight=3)
    assert states(server, run) == {(0, 1)}
    model = wide()
    fill(model, 1)
    again = accumulator(model, server, run, quorum=2, worker="1")
    assert again.step == 0
    again.load_state_dict(state)
    pushed = again.push(weight=3)
    assert (pushed.count, pushed.closed, pushed.replayed) == (2, True, False)
    for gradients, one in [(other, models[0]), (again, model)]:
        assert gradients.pull().weight == 4
        assert_close(grads(one), [(one + 3 * two) / 4 for one, two in zip(*expected, strict=True)])


def test_a_pull_that_breaks_off_sets_no_gradient(urls: list[str], run: str) -> None:
    transport = Watched()
    with Client(urls[0], transport=transport, max_retries=0) as server:
        model = wide()
        gradients = accumulator(model, server, run)
        expected = fill(model, 1)
        gradients.push()
        for done in range(7):
            transport.left = done
            with pytest.raises(ConnectionFailed):
                gradients.pull()
            assert grads(model) == [None] * 6
        transport.left = 1 << 30
        gradients.pull()
        assert_close(grads(model), expected)


@pytest.mark.parametrize("done", [3, 8])
def test_one_push_counts_if_another_comes_after_it_broke_off(
    urls: list[str], server: Client, run: str, done: int
) -> None:
    """The first broke off before it was complete, or its last answer was lost."""
    model, transport = wide(), Watched()
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        gradients = accumulator(model, mortal, run, quorum=1, worker="0")
        first = fill(model, 1)
        sent = len(transport.sent)

        def fail(_: Any) -> bool:
            transport.losing = len(transport.sent) - sent == 7
            return len(transport.sent) - sent == done

        transport.refuses = fail
        with pytest.raises(ConnectionFailed) as caught:
            gradients.push()
        assert caught.value.maybe_done == (done == 8)
        transport.refuses, transport.losing = lambda request: False, False
        second = fill(model, 2)
        if done == 8:
            with pytest.raises(KeyReused, match="push 0 of step 0 before.*that push counts"):
                gradients.push()
        else:
            gradients.push()
        assert gradients.pull().count == 1
    assert_close(grads(model), first if done == 8 else second)


def states(server: Client, run: str) -> set[tuple[int, int]]:
    """Return the steps and counts of the gradients' buffers."""
    return {(info.step, info.count) for info in server.buffers.list(run) if not info.name.endswith("start")}


def layers(*values: float) -> Any:
    """Return a model of several requests whose gradients have these values, a layer each."""
    model = torch.nn.ParameterList([torch.zeros(100) for _ in values])
    for parameter, value in zip(model, values, strict=True):
        parameter.grad = torch.full((100,), float(value))
    return model


def means(model: Any) -> list[float]:
    """Return the gradients of the layers, which have one value each."""
    assert all((parameter.grad == parameter.grad[0]).all() for parameter in model)
    return [float(parameter.grad[0]) for parameter in model]


def test_a_push_that_is_refused_counts_in_no_layer(one_or_three: Client, run: str) -> None:
    models = [layers(100, torch.nan, 100), layers(2, 2, 2)]
    workers = [
        accumulator(model, one_or_three, run, quorum=2, worker=f"{rank}", request_bytes=800, nonfinite="reject")
        for rank, model in enumerate(models)
    ]
    for _ in range(2):
        with pytest.raises(InvalidInput, match="infinite or NaN"):
            workers[0].push()
    assert one_or_three.buffers.pushes() == []
    assert workers[0].push(weight=0).count == 1
    assert workers[1].push().closed
    for worker, model in zip(workers, models, strict=True):
        pulled = worker.pull()
        assert (pulled.count, pulled.weight, means(model)) == (2, 1.0, [2, 2, 2])


@pytest.mark.parametrize("request_bytes", [800, 50_000])
def test_the_norm_is_that_of_all_layers(server: Client, run: str, request_bytes: int) -> None:
    """Each layer is below the limit. The tallies have no part in the norm, nor has the weight."""
    model = layers(10, 10, 10)
    gradients = accumulator(model, server, run, max_norm=173.3, request_bytes=request_bytes)
    assert gradients.push(weight=1e6).count == 1
    for parameter, value in zip(model, (10, 10, 10.1), strict=True):
        parameter.grad = torch.full((100,), float(value))
    with pytest.raises(InvalidInput, match="The push has the 2-norm 173.7"):
        gradients.push()
    assert gradients.push(weight=0).count == 2
    gradients.pull()
    assert means(model) == [10, 10, 10]


def test_a_dead_workers_push_has_a_place_for_another(urls: list[str], server: Client, run: str) -> None:
    models = [layers(*[value] * 5) for value in (1.0, 10.0, 100.0)]
    transport = Watched()
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        options: Any = {"quorum": 2, "request_bytes": 800}
        first, third = (accumulator(models[n], server, run, worker=f"{n}", **options) for n in (0, 2))
        second = accumulator(models[1], mortal, run, worker="1", **options)
        first.push()
        transport.left = 3
        with pytest.raises(ConnectionFailed):
            second.push()
        assert third.push().closed
        transport.left = 1 << 30
        with pytest.raises(StaleStep, match="its gradients do not count; if it has closed, pull"):
            second.push()
    for worker, model in [(first, models[0]), (third, models[2])]:
        assert worker.pull().contributors == {"0": 1, "2": 1}
        assert means(model) == [50.5] * 5
    assert states(server, run) == {(1, 0)}


def test_a_push_that_a_deadline_overtakes_counts_in_no_layer(urls: list[str], server: Client, run: str) -> None:
    models, transport = [layers(1, 1, 1, 1), layers(3, 3, 3, 3)], Watched()
    options: Any = {"quorum": 2, "deadline_seconds": 0.5, "request_bytes": 800}
    with Client(urls[0], transport=transport) as slowly:
        fast = accumulator(models[0], server, run, worker="fast", **options)
        slow = accumulator(models[1], slowly, run, worker="slow", **options)
        for worker in (fast, slow):  # the first step has no deadline
            worker.push(weight=0)
        for worker in (fast, slow):
            worker.pull()
        for model, number in zip(models, (1.0, 3.0), strict=True):
            fill_with(model, number)
        fast.push()

        def wait(request: Any) -> bool:
            if request.url.params.get("part") == "3":
                server.buffers[f"{run}.0"].info(step=1, timeout=10)
            return False

        transport.refuses = wait
        with pytest.raises(StaleStep, match="its gradients do not count"):
            slow.push()
        for worker, model in zip([fast, slow], models, strict=True):
            pulled = worker.pull()
            assert (pulled.count, pulled.closed_by, pulled.contributors) == (1, "deadline", {"fast": 1})
            assert means(model) == [1, 1, 1, 1]


def test_every_pull_has_whole_pushes(server: Client, run: str) -> None:
    """A server of parameters pulls while others push. They go on in its next step."""
    model = layers(0, 0, 0, 0)
    puller = accumulator(model, server, run, reduce="sum", request_bytes=800)
    ended, counted = threading.Event(), list[int]()

    def push(rank: int) -> None:
        own = layers(0, 0, 0, 0)
        mine = accumulator(own, server, run, worker=f"{rank}", start="any", request_bytes=800)
        while not ended.is_set():
            fill_with(own, 1)
            try:
                mine.push()
                counted.append(rank)
            except StaleStep:
                before = mine.step
                assert mine.catch_up() == mine.step > before

    pulled = list[int]()
    with ThreadPoolExecutor(2) as threads:
        pushing = [threads.submit(push, rank) for rank in range(2)]
        try:
            while len(pulled) < 30:
                with suppress(StepOpen):
                    pulled.append(puller.pull().count)
                    assert len({*means(model)}) == 1
        finally:
            ended.set()
        for one in pushing:
            one.result(30)
    with suppress(StepOpen):
        pulled.append(puller.pull().count)
    assert sum(pulled) == len(counted) >= 30


def test_a_server_that_takes_less_says_so_in_the_constructor(server: Client, run: str) -> None:
    with pytest.raises(TooLarge, match="request_bytes is 64999, but the server takes 65536"):
        accumulator(wide(), server, run, request_bytes=64_999)


def test_requests_fit_the_server_by_default(server: Client, run: str) -> None:
    model = wide()
    gradients = accumulator(model, server, run, request_bytes=None)
    expected = fill(model, 1)
    gradients.push()
    gradients.pull()
    assert_close(grads(model), expected)


@pytest.mark.parametrize("size", [1, 10, 64_000])
def test_requests_of_any_size(server: Client, run: str, size: int) -> None:
    model = torch.nn.ParameterList([torch.zeros(5), torch.zeros(size // 4)])
    gradients = accumulator(model, server, run, request_bytes=size)
    fill_with(model, 1)
    gradients.push()
    gradients.pull()
    assert all(gradient.eq(1).all() for gradient in grads(model))


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_request_bytes_that_cannot_be(server: Client, run: str, size: Any) -> None:
    with pytest.raises(InvalidInput, match="request_bytes"):
        accumulator(wide(), server, run, request_bytes=size)


def test_another_shape_of_as_many_numbers_is_refused(server: Client, run: str) -> None:
    """Also if its rows are larger than a request, so that the buffers are the same."""
    accumulator(torch.nn.ParameterList([torch.zeros(2, 100)]), server, run, request_bytes=200)
    with pytest.raises(Conflict, match="all parameters and buffers is"):
        accumulator(torch.nn.ParameterList([torch.zeros(1, 200)]), server, run, request_bytes=200)
