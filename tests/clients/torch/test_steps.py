"""What a pull brings: means, sums and nothing at all; and how the numbers travel."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from gradserve_client import AsyncClient, Client, ConnectionFailed, InvalidInput
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, assert_close, backward, fill_with, grads, net, own


def workers(server: Client, run: str, **options: Any) -> list[tuple[Any, GradientAccumulator]]:
    """Return two models with accumulators of one quorum."""
    models = [net(), net()]
    return [(model, GradientAccumulator(model, server, run=run, quorum=2, **options)) for model in models]


# ----- steps without gradients -----


@pytest.mark.parametrize("unused", ["none", "zeros"])
def test_a_step_without_weight_is_no_dead_end(server: Client, run: str, unused: Any) -> None:
    both = workers(server, run, unused=unused, worker=None)
    for model, worker in both:
        backward(model, 2, 1)
        worker.push(weight=0)
    for model, worker in both:
        pulled = worker.pull()
        assert (pulled.step, pulled.count, pulled.weight) == (0, 2, 0)
        assert grads(model) == [None] * 4
        assert worker.state_dict() == {"run": ANY, "step": 1, "pushes": 0}
    expected = own(both[0][0], [(4, 1), (2, 2)])
    for (model, worker), (size, seed) in zip(both, [(4, 1), (2, 2)], strict=True):
        backward(model, size, seed)
        worker.push(weight=size)
    for model, worker in both:
        assert worker.pull().weight == 6
        assert_close(grads(model), expected)


def test_a_single_worker_closes_a_step_without_weight(server: Client, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run)
    gradients.push(weight=0)
    assert (gradients.pull().weight, grads(model), gradients.step) == (0, [None] * 4, 1)
    backward(model, 4, 1)
    expected = grads(model)
    gradients.push()
    assert gradients.pull().weight == 1
    assert_close(grads(model), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_push_of_weight_0_sends_no_number(url: str, run: str, bad: float) -> None:
    transport = Watched()
    with Client(url, transport=transport) as server:
        (first, one), (second, two) = workers(server, run)
        backward(first, 4, 1)
        expected = grads(first)
        one.push()
        fill_with(second, bad)
        transport.sent.clear()
        two.push(weight=0)
        assert max(size for _, size in transport.sent) < 600
        assert grads(second) == [None] * 4
        for model, worker in ((first, one), (second, two)):
            worker.pull()
            assert_close(grads(model), expected)


# ----- what a pull returns, and sets -----


def test_a_pull_returns_its_step(server: Client, run: str) -> None:
    for model, worker in workers(server, run):
        backward(model, 3, 1)
        worker.push(weight=1.5)
    pulled = worker.pull()
    assert (pulled.step, pulled.count, pulled.weight) == (0, 2, 3.0)


@pytest.mark.parametrize("quorum", [None, 2])
def test_reduce_sum(server: Client, run: str, quorum: int | None) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run, quorum=quorum, reduce="sum")
    expected = [6 * gradient for gradient in own(model, [(4, 1), (2, 2)])]
    for size, seed in [(4, 1), (2, 2)]:
        backward(model, size, seed)
        gradients.push(weight=size)
    assert gradients.pull().weight == 6
    assert_close(grads(model), expected, atol=1e-5)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_parameter_that_nobody_used_is_none_or_zeros(server: Client, run: str, reduce: Any) -> None:
    """A gradient that is zero is not a missing gradient."""
    for unused in ("none", "zeros"):
        model = torch.nn.ParameterDict({"used": torch.ones(2), "zero": torch.ones(2), "unused": torch.ones(2)})
        gradients = GradientAccumulator(model, server, run=f"{run}-{unused}", quorum=2, unused=unused, reduce=reduce)
        for number in (0, 1):
            model["used"].grad = torch.ones(2) if number else None  # by one of two
            model["zero"].grad = torch.zeros(2)
            gradients.push(weight=2)
        gradients.pull()
        assert model["used"].grad.tolist() == ([0.5] * 2 if reduce == "mean" else [2.0] * 2)
        assert model["zero"].grad.tolist() == [0, 0]
        assert model["unused"].grad is None if unused == "none" else model["unused"].grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduce": "max"}, "reduce is 'max', but must be one of 'mean', 'sum'"),
        ({"unused": None}, "unused is None, but must be one of 'none', 'zeros'"),
        ({"wire_dtype": torch.float64}, "wire_dtype is torch.float64, but must be one of None, torch.float16"),
    ],
)
def test_options_that_do_not_exist(server: Client, run: str, options: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator(net(), server, run=run, **options)


@pytest.mark.parametrize(
    ("rules", "parameter", "words"),
    [
        ({"quorum": 3, "min_count": 2}, "min_count", "min_count is 2, but only a deadline asks for it"),
        ({"quorum": 2, "min_count": 5, "deadline_seconds": 9}, "min_count", "is 5, but the quorum of 2 closes"),
        (
            {"quorum": 3, "contributors": ["a", "b"], "per_contributor": 1, "worker": "a"},
            "quorum",
            "is 3, but the contributors make 2 pushes at most: 2 of them, 1 each",
        ),
        (
            {"deadline_seconds": 9, "min_count": 3, "contributors": ["a", "b"], "per_contributor": 1, "worker": "a"},
            "min_count",
            "is 3, but the contributors make 2 pushes at most",
        ),
        ({"contributors": ["a", "b"], "worker": "c"}, "worker", "'c', but must be one of the contributors.* 'a', 'b'"),
        ({"contributors": [str(one) for one in range(9)]}, "worker", "is None, but .*'0', '1', '2', ...$"),
        ({"contributors": ["a"], "worker": ""}, "worker", "must be 1 to 100 printable characters"),
    ],
)
def test_rules_that_cannot_mean_what_they_say(server: Client, run: str, rules: Any, parameter: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        GradientAccumulator(net(), server, run=run, **rules)
    assert caught.value.context == {"parameter": parameter}
    assert not server.buffers.list(run)


def test_a_quorum_of_several_pushes_of_each_contributor(server: Client, run: str) -> None:
    model = net()
    worker = GradientAccumulator(model, server, run=run, quorum=3, contributors=["a"], worker="a")
    for _ in range(3):
        fill_with(model, 1)
        worker.push()
    assert worker.pull().contributors == {"a": 3}


def test_what_is_no_model_and_no_client(server: Client, run: str) -> None:
    model, url = net(), server.url
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    faults: list[tuple[Any, Any, dict[str, Any], str]] = [
        (optimizer, server, {}, "model is of type SGD, but must be a torch.nn.Module"),
        ([*model.parameters()], server, {}, "model is of type list, but must be a torch.nn.Module"),
        (model, url, {}, r"server is of type str, but must be a Client, such as Client\(url\)"),
        (model, AsyncClient(url), {}, "server is of type AsyncClient, but must be a Client"),
        (model, server, {"run": 7}, "run is 7, but must be a name"),
        (model, server, {"prefix": 7}, "prefix is 7, but must be a string"),
    ]
    for given, client, options, words in faults:
        with pytest.raises(InvalidInput, match=words):
            GradientAccumulator(given, client, **{"run": run, **options})
    assert not server.buffers.list(run)


def test_gradients_that_megatron_keeps_apart(server: Client, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run)
    with pytest.raises(InvalidInput, match="call push after backward.*the quorum$"):
        gradients.push()
    for parameter in model.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    with pytest.raises(InvalidInput, match="have main_grad, as with Megatron: set p.grad = p.main_grad"):
        gradients.push()


def test_nonfinite_gradients_are_refused(server: Client, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run, nonfinite="reject")
    fill_with(model, math.nan)
    with pytest.raises(InvalidInput, match="infinite or NaN"):
        gradients.push()
    assert all(gradient.isnan().all() for gradient in grads(model))
    assert server.buffers[f"{run}.0.weight"].info().count == 0


def test_rules_reach_the_buffers(server: Client, run: str) -> None:
    """Those that are given, and no norm for the tallies."""
    given: dict[str, Any] = {"deadline_seconds": 5.0, "min_count": 2, "quorum_weight": 8.0}
    given |= {"contributors": ("a",), "per_contributor": 3}
    GradientAccumulator(net(), server, run=run, worker="a", quorum=3, max_norm=2.0, **given)
    found = {one.name.removeprefix(f"{run}."): one for one in server.buffers.list(run)}
    norms = {name: one.max_norm for name, one in found.items() if name != "::start"}
    names = [name for name, _ in net().named_parameters()]
    assert norms == {**dict.fromkeys(names, 2.0), "0.bias::tally": None}
    for name in norms:
        assert {rule: getattr(found[name], rule) for rule in given} == given


# ----- half precision on the wire -----


@pytest.mark.parametrize("quorum", [None, 1])
@pytest.mark.parametrize(
    ("dtype", "wire", "itemsize"),
    [
        (torch.float32, None, 4),
        (torch.bfloat16, None, 2),
        (torch.float16, None, 2),
        (torch.float32, torch.bfloat16, 2),
        (torch.complex64, torch.float16, 4),
    ],
    ids=["float32", "bfloat16", "float16", "float32 as bfloat16", "complex64 as float16"],
)
def test_half_precision_travels_as_it_is(
    url: str, run: str, quorum: int | None, dtype: Any, wire: Any, itemsize: int
) -> None:
    transport, size = Watched(), 5000
    with Client(url, transport=transport) as server:
        model = torch.nn.ParameterList([torch.zeros(size, dtype=dtype)])
        gradients = GradientAccumulator(model, server, run=run, quorum=quorum, wire_dtype=wire)
        model[0].grad = torch.arange(size).remainder(100).to(dtype)
        expected = model[0].grad
        transport.sent.clear()
        gradients.push(weight=3)
        assert 0 <= sum(size for _, size in transport.sent) - size * itemsize < 1000
        transport.answered.clear()
        gradients.pull()
        assert 0 <= sum(transport.answered) - size * itemsize < 2000
    assert model[0].grad.dtype == dtype
    assert torch.equal(model[0].grad, expected)


def test_a_pull_of_several_dtypes_is_finished_after_a_restart(url: str, run: str) -> None:
    """Without a quorum one request closes the step of all buffers. The worker dies after it."""
    transport = Watched()
    with Client(url, transport=transport, max_retries=0) as server:
        models = [torch.nn.ParameterList([torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]) for _ in range(2)]
        first = GradientAccumulator(models[0], server, run=run, worker="0")
        fill_with(models[0], 1)
        first.push()
        state = first.state_dict()
        transport.refuses = lambda request: b"dtype=bfloat16" in request.url.query
        with pytest.raises(ConnectionFailed):
            first.pull()
        transport.refuses = lambda request: False
        infos = server.buffers.list(run)
        assert {(info.step, info.count) for info in infos if not info.name.endswith("::start")} == {(1, 0)}
        second = GradientAccumulator(models[1], server, run=run, worker="0")
        second.load_state_dict(state)
        for worker, model in ((second, models[1]), (first, models[0])):
            assert worker.step == 0
            assert worker.pull().count == 1
            assert [gradient.tolist() for gradient in grads(model)] == [[1, 1], [1, 1]]
            assert worker.step == 1
