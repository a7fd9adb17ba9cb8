"""The numbers that a pull sets: of weights that cancel, in half precision, of sparse parameters, of a changed model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradserve_client import Client, InvalidInput, NothingToAverage
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import exchange, fill_with, grads, one

# ----- weights that cancel -----


def pushed(model: Any, gradients: GradientAccumulator, pushes: list[tuple[list[float | None], float]]) -> None:
    """Push these numbers, one for each parameter, with these weights."""
    for numbers, weight in pushes:
        for parameter, number in zip(model.parameters(), numbers, strict=True):
            parameter.grad = None if number is None else torch.full_like(parameter, number)
        gradients.push(weight=weight)


def values(model: Any) -> list[Any]:
    return [None if grad is None else grad.unique().tolist() for grad in grads(model)]


def two_layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False))


@pytest.mark.parametrize("options", [{}, {"quorum": 2}, {"quorum": 2, "request_bytes": 400}], ids=repr)
def test_a_sum_of_weights_that_cancel(one_or_three: Client, run: str, options: dict[str, Any]) -> None:
    model = two_layers()
    gradients = GradientAccumulator(model, one_or_three, run=run, reduce="sum", **options)
    pushed(model, gradients, [([1, 2], 1), ([10, None], -1)])
    pulled = gradients.pull()
    assert (pulled.count, pulled.weight) == (2, 0.0)
    assert values(model) == [[-9], [2]]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weights_that_cancel_for_one_layer(server: Client, run: str, reduce: Any) -> None:
    model = two_layers()
    gradients = GradientAccumulator(model, server, run=run, quorum=3, reduce=reduce)
    pushed(model, gradients, [([1, 1], 1), ([10, 10], -1), ([None, 100], 1)])
    assert gradients.pull().weight == 1
    assert values(model) == [[-9], [91]]


@pytest.mark.parametrize("weights", [(1, -1), (0.1, 0.2, -0.3)])
def test_a_mean_of_weights_that_cancel_is_refused_in_every_worker(
    one_or_three: Client, run: str, weights: tuple[float, ...]
) -> None:
    models = [two_layers(), two_layers()]
    workers = [GradientAccumulator(model, one_or_three, run=run, quorum=len(weights)) for model in models]
    pushed(models[0], workers[0], [([1, 2], weight) for weight in weights])
    for model, worker in zip(models, workers, strict=True):
        fill_with(model, 7)
        with pytest.raises(NothingToAverage, match="weights of step 0 sum to 0.*no mean.*reduce='sum'"):
            worker.pull()
        assert values(model) == [None, None]
    pushed(models[0], workers[0], [([1, 2], 1)] * len(weights))
    assert workers[1].pull().step == 1
    assert values(models[1]) == [[1], [2]]


def test_scales_are_compared_whatever_the_signs_of_the_weights(server: Client, run: str) -> None:
    model = two_layers()
    gradients = GradientAccumulator(model, server, run=run, quorum=3, reduce="sum")
    for weight in (1, -1, -0.5):
        fill_with(model, 1)
        gradients.push(weight=weight, scale=1023.9)
    assert gradients.pull().weight == -0.5
    assert values(model) == [[-0.5], [-0.5]]


# ----- half precision on the wire -----

HALF = torch.float16


@pytest.mark.parametrize("options", [{}, {"quorum": 3}, {"quorum": 3, "request_bytes": 800}], ids=repr)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_half_precision_on_the_wire_makes_no_infinity(
    one_or_three: Client, run: str, reduce: Any, options: dict[str, Any]
) -> None:
    """Neither of gradients that half precision cannot hold, nor of sums; and infinities stay."""
    model = one(torch.ones(300))
    gradients = GradientAccumulator(model, one_or_three, run=run, reduce=reduce, wire_dtype=HALF, **options)
    for _ in range(3):
        model.x.grad = torch.full((300,), 30000.0)
        model.x.grad[0], model.x.grad[1], model.x.grad[299] = 70000.0, float("inf"), 1.0
        gradients.push()
    gradients.pull()
    factor = 3 if reduce == "sum" else 1
    assert model.x.grad[[0, 1, 2, 299]].tolist() == [70000.0 * factor, float("inf"), 30000.0 * factor, factor]


@pytest.mark.parametrize(
    ("dtype", "wire", "number"), [(torch.bfloat16, None, 3e38), (torch.float64, torch.bfloat16, 1e300)], ids=str
)
def test_no_other_dtype_makes_an_infinity(server: Client, run: str, dtype: Any, wire: Any, number: float) -> None:
    model = one(torch.ones(4, dtype=dtype))
    model.x.grad = torch.full((4,), number, dtype=dtype)
    expected = model.x.grad.clone()
    exchange(model, server, run, wire_dtype=wire)
    assert torch.equal(model.x.grad, expected)


def test_sparse_rows_that_half_precision_cannot_hold(server: Client, run: str) -> None:
    model = one(torch.zeros(1000, 4))
    model.x.grad = torch.sparse_coo_tensor([[7]], torch.full((1, 4), 1e5), (1000, 4), check_invariants=True)
    exchange(model, server, run, wire_dtype=HALF)
    assert model.x.grad.to_dense()[7].tolist() == [1e5] * 4


# ----- sparse parameters -----


@pytest.mark.parametrize("steps", [1, 2])
def test_a_sparse_parameter_is_trained_as_without_the_accumulator(server: Client, run: str, steps: int) -> None:
    """The adjacency of a graph. The worker that only pulls gets the same form."""
    torch.manual_seed(0)
    features, models = torch.randn(3, 4), [one(torch.eye(3).to_sparse()) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    workers = [GradientAccumulator(model, server, run=run, quorum=1) for model in models[:2]]
    for _ in range(steps):
        for model in models[1:]:
            torch.sparse.mm(model.x, features).square().sum().backward()
        workers[1].push()
        for worker in workers:
            worker.pull()
        for model, optimizer in zip(models, optimizers, strict=True):
            assert model.x.grad.sparse_dim() == 2
            optimizer.step()
            optimizer.zero_grad()
    for model in models[:2]:
        assert torch.equal(model.x.detach().to_dense(), models[2].x.detach().to_dense())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_parameter_of_compressed_rows(server: Client, run: str) -> None:
    model = one(torch.eye(3).to_sparse(layout=torch.sparse_csr))
    torch.sparse.mm(model.x, torch.arange(6.0).reshape(3, 2)).sum().backward()
    expected = model.x.grad.to_dense()
    exchange(model, server, run, wire_dtype=HALF)
    assert model.x.grad.layout == torch.sparse_csr
    assert torch.equal(model.x.grad.to_dense(), expected)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("sparse_dim", [1, 2, 3])
def test_a_gradient_has_the_sparse_dimensions_that_were_pushed(server: Client, run: str, sparse_dim: int) -> None:
    model = one(torch.zeros(3, 4, 2))
    whole = torch.zeros(3, 4, 2)
    whole[1, 2, 0] = 5.0
    model.x.grad = whole.to_sparse(sparse_dim)
    exchange(model, server, run)
    assert model.x.grad.sparse_dim() == sparse_dim
    assert torch.equal(model.x.grad.to_dense(), whole)


# ----- a model that has changed -----


def test_a_model_that_became_double_is_noticed(server: Client, run: str) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    gradients = GradientAccumulator(model, server, run=run)
    fill_with(model.double(), 1 + 2**-30)
    for call in (gradients.push, gradients.pull):
        with pytest.raises(InvalidInput, match="'weight' is float64 now, but was float32 when"):
            call()
    assert values(model) == [[1 + 2**-30]]
    model.float()
    fill_with(model, 1.5)
    gradients.push()
    gradients.pull()
    assert values(model) == [[1.5]]


def test_a_model_that_became_half_goes_on(server: Client, run: str) -> None:
    """The sums of half precision are those of float32."""
    model = torch.nn.Linear(2, 1, bias=False)
    gradients = GradientAccumulator(model, server, run=run)
    fill_with(model.bfloat16(), 1.5)
    gradients.push()
    gradients.pull()
    assert model.weight.grad.dtype == torch.bfloat16
    assert values(model) == [[1.5]]
