"""Models larger than a request: a push and a pull take several requests, and still count once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gradserve_client import Client, ConnectionFailed, InvalidInput, KeyReused, StaleEpoch, TooLarge
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
        assert len(sizes) == 7
        assert max(sizes) < BODY_BYTES
        second = fill(model, 2)
        assert gradients.push(weight=1).closed == (quorum is not None)
        assert gradients.pull().count == 2
        assert_close(grads(model), [(3 * one + two) / 4 for one, two in zip(first, second, strict=True)])
        infos = [info for info in server.buffers.list(run) if not info.name.endswith("start")]
        assert {(info.epoch, info.count, info.closed_epochs) for info in infos} == {(1, 0, (0,))}


@pytest.mark.parametrize("done", range(1, 7))
def test_a_worker_that_dies_between_requests_repeats_its_push(
    urls: list[str], server: Client, run: str, done: int
) -> None:
    """The other worker has pushed before, so that some epochs close and others stay open."""
    models, transport = [wide(), wide()], Watched()
    expected = [fill(model, seed) for seed, model in enumerate(models)]
    other = accumulator(models[0], server, run, quorum=2, worker="0")
    other.push(weight=1)
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        worker = accumulator(models[1], mortal, run, quorum=2, worker="1")
        state, transport.left = worker.state_dict(), done
        with pytest.raises(ConnectionFailed):
            worker.push(weight=3)
    epochs = {info.epoch for info in server.buffers.list(run) if not info.name.endswith("start")}
    assert epochs == {0, 1}
    model = wide()
    fill(model, 1)
    again = accumulator(model, server, run, quorum=2, worker="1")
    assert again.epoch == 0
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


def test_a_push_with_other_gradients_counts_where_the_first_did_not(urls: list[str], server: Client, run: str) -> None:
    """Each buffer gets one push, so its epoch can close."""
    model, transport = wide(), Watched()
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        gradients = accumulator(model, mortal, run, quorum=1, worker="0")
        first = fill(model, 1)
        transport.left = 3
        with pytest.raises(ConnectionFailed):
            gradients.push()
        transport.left = 1 << 30
        second = fill(model, 2)
        with pytest.raises(KeyReused, match="push 0 of epoch 0 before"):
            gradients.push()
        gradients.pull()
    found, height = grads(model)[0], 50_000 // (4 * 600)
    assert torch.equal(found[: 3 * height], first[0][: 3 * height])
    assert torch.equal(found[3 * height :], second[0][3 * height :])
    assert_close(grads(model)[1:], second[1:])


def test_a_late_push_does_not_keep_its_other_requests_back(urls: list[str], server: Client, run: str) -> None:
    """Of the fast worker's push, one request came through. All buffers end in the same epoch."""
    fast, slow, transport = wide(), wide(), Watched()
    with Client(urls[0], transport=transport, max_retries=0) as mortal:
        late = accumulator(slow, server, run, quorum=1, worker="1")
        first = accumulator(fast, mortal, run, quorum=1, worker="0")
        transport.left = 1
        fill(fast, 1)
        with pytest.raises(ConnectionFailed):
            first.push()
    fill(slow, 2)
    with pytest.raises(StaleEpoch):
        late.push()
    late.pull()
    assert {info.epoch for info in server.buffers.list(run) if not info.name.endswith("start")} == {1}


def test_a_gradient_that_is_refused_leaves_no_epoch_open(server: Client, run: str) -> None:
    model = wide()
    gradients = accumulator(model, server, run, quorum=1, nonfinite="reject")
    fill(model, 1)
    model[3].grad[0, 0] = torch.nan
    with pytest.raises(InvalidInput, match="infinite or NaN"):
        gradients.push()
    with pytest.raises(KeyReused):
        gradients.push(weight=0)
    gradients.pull()
    assert model[3].grad is None
    assert {info.epoch for info in server.buffers.list(run) if not info.name.endswith("start")} == {1}


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
