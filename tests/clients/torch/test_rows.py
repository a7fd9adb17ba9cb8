"""Sparse gradients of PyTorch models: they travel as rows, among dense gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import Watched, assert_close, exchange, grads


class Words(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """An embedding, sparse or not, among dense parameters."""

    def __init__(self, *, sparse: bool, count: int = 1000, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(count, width, sparse=sparse)
        self.head = torch.nn.Linear(width, 3)

    def forward(self, words: Any) -> Any:
        return self.head(self.words(words)).tanh().mean()


def whole(gradients: list[Any]) -> list[Any]:
    return [gradient.to_dense() for gradient in gradients]


BATCHES = [torch.tensor([3, 999, 3, 0]), torch.tensor([3, 500])]


@pytest.mark.parametrize("options", [{}, {"reduce": "sum"}, {"unused": "zeros"}, {"request_bytes": 10_000}], ids=repr)
def test_a_sparse_embedding_gets_the_gradient_of_a_dense_one(server: Client, run: str, options: dict[str, Any]) -> None:
    found = []
    for sparse in (True, False):
        model = Words(sparse=sparse)
        gradients = GradientAccumulator(model, server, run=f"{run}-{sparse}.", **options)
        for batch in BATCHES:
            model(batch).backward()
            assert (model.words.weight.grad.layout == torch.sparse_coo) is sparse
            gradients.push(weight=len(batch))
        gradients.pull()
        assert (model.words.weight.grad.layout == torch.sparse_coo) is sparse
        found.append(whole(grads(model)))
    assert_close(found[0], found[1])


def test_workers_with_sparse_and_dense_gradients_meet(server: Client, run: str) -> None:
    models = [Words(sparse=True), Words(sparse=False)]
    workers = [GradientAccumulator(model, server, run=run, quorum=3) for model in models]
    expected = []
    for worker, model, batch in zip(workers, models, BATCHES, strict=True):
        model(batch).backward()
        expected.append(whole(grads(model)))
        worker.push()
    workers[0].push(weight=0)
    for worker in workers:
        worker.pull()
    for model in models:
        assert_close(whole(grads(model)), [(one + two) / 2 for one, two in zip(*expected, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("wire", [None, torch.float16])
def test_sparse_gradients_of_every_dtype(server: Client, run: str, dtype: Any, wire: Any) -> None:
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(40, 20, dtype=dtype))
    values = torch.tensor([[1.0], [2.0], [4.0]]).to(dtype).expand(3, 20) * (1j if dtype.is_complex else 1)
    model.x.grad = torch.sparse_coo_tensor(torch.tensor([[7, 30, 7]]), values, (40, 20), check_invariants=True)
    expected = model.x.grad.to_dense()
    transport = Watched()
    with Client(server.url, transport=transport) as noting:
        gradients = GradientAccumulator(model, noting, run=run, wire_dtype=wire)
        gradients.push()
        gradients.pull()
    assert (model.x.grad.layout, model.x.grad.dtype) == (torch.sparse_coo, dtype)
    assert torch.equal(model.x.grad.to_dense(), expected)


def test_only_rows_travel(server: Client, run: str) -> None:
    transport = Watched()
    with Client(server.url, transport=transport) as noting:
        model = Words(sparse=True, count=3000)
        gradients = GradientAccumulator(model, noting, run=run)
        for wait in (True, False):
            model(BATCHES[0]).backward()
            transport.sent.clear()
            gradients.push(wait=wait)
            gradients.state_dict()  # waits
            ((path, size),) = transport.sent
            assert path == "/v1/buffers/accumulate"
            assert size < 2000  # of 192,000: three rows of 64 bytes, their indices, the head, and names


def test_a_split_embedding_sends_each_part_in_the_shorter_form(server: Client, run: str) -> None:
    """The first parts get all rows, as numbers; the others get few. Rows of one number take 12 bytes, not 4."""
    transport = Watched()
    with Client(server.url, transport=transport) as noting:
        model = Words(sparse=True, count=20_000, width=1)
        gradients = GradientAccumulator(model, noting, run=run, request_bytes=10_000)
        batch = torch.cat([torch.arange(6000), torch.tensor([17_000])])
        model(batch).backward()
        expected = whole(grads(model))
        transport.sent.clear()
        gradients.push()
        sizes = [size for path, size in transport.sent if path.endswith("accumulate")]
        assert 10_000 < max(sizes) < 11_000
        assert sum(sizes) < 3 * 11_000 + 6 * 1000
        gradients.pull()
    assert_close(whole(grads(model)), expected)
    assert model.words.weight.grad.coalesce().indices().shape == (1, 6001)


@pytest.mark.parametrize(
    "gradient",
    [
        torch.eye(4).to_sparse(),  # two sparse dimensions
        torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 4), (4, 4), check_invariants=True),
    ],
    ids=["sparse in both", "empty"],
)
def test_other_sparse_gradients_travel(server: Client, run: str, gradient: Any) -> None:
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(4, 4))
    model.x.grad = gradient
    expected = gradient.to_dense()
    exchange(model, server, run)
    assert torch.equal(model.x.grad.to_dense(), expected)


def test_a_row_larger_than_a_request_is_divided(server: Client, run: str) -> None:
    model = Words(sparse=True, count=4, width=600)
    gradients = GradientAccumulator(model, server, run=run, request_bytes=1000)
    model(torch.tensor([3])).backward()
    expected = whole(grads(model))
    gradients.push()
    gradients.pull()
    assert_close(whole(grads(model)), expected)


def test_a_repeated_sparse_push_counts_once(server: Client, run: str) -> None:
    models = [Words(sparse=True) for _ in range(2)]
    expected = []
    for number, model in enumerate(models):
        worker = GradientAccumulator(model, server, run=run, worker="0")
        model(BATCHES[0]).backward()
        expected = whole(grads(model))
        assert worker.push().replayed is bool(number)
    worker.pull()
    assert_close(whole(grads(models[1])), expected)


def test_rules_hold_for_sparse_gradients(server: Client, run: str) -> None:
    model = torch.nn.Embedding(100, 4, sparse=True)
    gradients = GradientAccumulator(model, server, run=run, max_norm=1.0)
    (100 * model(torch.tensor([1, 1])).sum()).backward()
    with pytest.raises(Exception, match="2-norm 400"):
        gradients.push()
    model.zero_grad()
    (0.1 * model(torch.tensor([1, 1])).sum()).backward()
    assert gradients.push().count == 1
