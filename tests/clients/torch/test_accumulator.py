"""GradientAccumulator on real servers, compared with PyTorch's own accumulation."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gradserve_client.torch
import pytest
import torch
from gradserve_client import Client, Conflict, ConnectionFailed, InvalidInput, KeyReused, StaleStep, StepGone, StepOpen
from gradserve_client.torch import GradientAccumulator
from torch.nn import functional

from tests.clients.torch.training import Watched, assert_close, backward, exchange, fill_with, grads, net, own, same
from tests.faults.servers import Server

# ----- one worker -----


def test_micro_batches_of_any_size_are_as_pytorch_accumulates_them(server: Client, run: str) -> None:
    model, steps = net(), [[(8, 1), (3, 2), (5, 3)], [(1, 4), (6, 5)]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = GradientAccumulator(model, server, run=run)
    for step, batches in enumerate(steps):
        expected = own(model, batches)
        for number, (size, seed) in enumerate(batches):
            backward(model, size, seed)
            pushed = gradients.push(weight=size)
            assert grads(model) == [None] * 4
            assert (pushed.step, pushed.count, pushed.closed, pushed.replayed) == (step, number + 1, False, False)
        assert pushed.weight == sum(size for size, _ in batches)
        gradients.pull()
        assert_close(grads(model), expected)
        assert gradients.step == step + 1
        optimizer.step()
        optimizer.zero_grad()
    names = {one.name.removeprefix(f"{run}.") for one in server.buffers.list(run)}
    assert {name for name in names if "::" not in name} == {name for name, _ in model.named_parameters()}


def test_a_push_is_one_request_and_so_is_a_pull(url: str, run: str) -> None:
    transport = Watched()
    with Client(url, transport=transport) as server:
        model = net()
        gradients = GradientAccumulator(model, server, run=run)
        assert [path for path, _ in transport.sent].count("/v1/buffers/create") == 1
        transport.sent.clear()
        backward(model, 4, 1)
        gradients.push()
        gradients.pull()
    assert [path for path, _ in transport.sent] == ["/v1/buffers/accumulate", "/v1/buffers/take"]


class Mixed(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """Parameters of every kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(10, 4, sparse=True)
        self.same_words = self.words
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5))
        self.left_out = torch.nn.Parameter(torch.ones(2, 3))
        self.empty = torch.nn.Parameter(torch.ones(0, 3))
        self.bf16 = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.f16 = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.f64 = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.across = torch.nn.Parameter(torch.randn(4, 6).T)

    def forward(self, words: Any) -> Any:
        rows = (self.words(words) + self.same_words(words + 1)) * self.frozen
        rows = (rows * self.bf16 + rows * self.f16) * self.f64
        return (rows.float() @ self.across.T * self.scale).square().mean()


WORDS = (torch.tensor([1, 1, 4]), torch.tensor([7]))


def test_parameters_of_every_kind(server: Client, run: str) -> None:
    model, reference = Mixed(), Mixed()
    for words in WORDS:
        (reference(words) * len(words) / 4).backward()
    gradients = GradientAccumulator(model, server, run=run)
    for words in WORDS:
        model(words).backward()
        gradients.push(weight=len(words))
    gradients.pull()
    expected = dict(reference.named_parameters())
    assert expected["words.weight"].grad.coalesce().indices().tolist() == [[1, 2, 4, 5, 7, 8]]
    for name, parameter in model.named_parameters():
        if name == "frozen":
            assert parameter.grad is None
        elif name in ("left_out", "empty"):
            assert parameter.grad is expected[name].grad is None
        else:
            wanted = expected[name].grad.coalesce() if name == "words.weight" else expected[name].grad
            tolerance = {"bf16": 1e-2, "f16": 1e-3}.get(name, 1e-6)
            found = parameter.grad.coalesce() if name == "words.weight" else parameter.grad
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=1e-6)
    counts = {
        one.name.removeprefix(f"{run}."): (one.count, one.dtype)
        for one in server.buffers.list(run)
        if "::" not in one.name
    }
    assert "frozen" not in counts
    assert "same_words.weight" not in counts
    assert {dtype for name, (_, dtype) in counts.items() if name != "f64"} == {"float32"}
    assert counts["f64"] == (0, "float64")
    assert model.scale.grad.shape == ()


def test_sparse_gradients_stay_sparse_for_sparse_adam(server: Client, run: str) -> None:
    """Also for a worker that had no sparse gradient."""
    models = [torch.nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SparseAdam(model.parameters()) for model in models]
    workers = [GradientAccumulator(model, server, run=run, quorum=2) for model in models]
    before = models[0].weight.detach().clone()
    models[0](torch.tensor([3, 5, 3])).sum().backward()
    workers[0].push(weight=3)
    workers[1].push(weight=0)
    for worker, model, optimizer in zip(workers, models, optimizers, strict=True):
        worker.pull()
        assert model.weight.grad.layout == torch.sparse_coo
        assert model.weight.grad.coalesce().indices().tolist() == [[3, 5]]
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    assert (models[0].weight != before).any(dim=1).tolist() == [False, False, False, True, False, True]


def test_gradients_are_as_sparse_as_they_were_pushed(server: Client, run: str) -> None:
    model, words = torch.nn.Module(), torch.tensor([1])
    model.functional = torch.nn.Parameter(torch.ones(3, 2))
    model.tied = torch.nn.Embedding(3, 2, sparse=True)
    rows = model.tied(words) @ model.tied.weight.T  # the second use makes the gradient dense
    (rows.sum() + functional.embedding(words, model.functional, sparse=True).sum()).backward()
    layouts = [torch.sparse_coo, torch.strided]
    assert [one.layout for one in grads(model)] == layouts
    exchange(model, server, run)
    assert [one.layout for one in grads(model)] == layouts


def test_a_layer_unused_in_a_step_still_counts(server: Client, run: str) -> None:
    used, unused = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    gradients = GradientAccumulator(torch.nn.ModuleList([used, unused]), server, run=run, quorum=2)
    ones = torch.ones(1, 1)
    used(ones).sum().backward()
    assert not gradients.push().closed
    (used(ones) + unused(ones)).sum().backward()
    assert gradients.push().closed
    gradients.pull()
    assert (used.weight.grad.item(), unused.weight.grad.item()) == (1.0, 0.5)


def test_small_gradients_do_not_vanish_in_half_precision(server: Client, run: str) -> None:
    model = torch.nn.Module()
    model.x = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    gradients = GradientAccumulator(model, server, run=run)
    for one in [1024.0] + [1.0] * 8:
        model.x.grad = torch.full_like(model.x, one)
        gradients.push()
    gradients.pull()
    assert server.buffers[f"{run}.x"].value(step=0).item() == 1032
    assert model.x.grad.dtype == torch.bfloat16


def test_infinity_and_nan_come_back(server: Client, run: str) -> None:
    model = torch.nn.Embedding(3, 1, sparse=True)
    gradients = GradientAccumulator(model, server, run=run)
    (model(torch.tensor([0, 2])) * torch.tensor([[torch.inf], [torch.nan]])).sum().backward()
    gradients.push()
    gradients.pull()
    assert torch.equal(model.weight.grad.to_dense().isnan(), torch.tensor([[False], [False], [True]]))
    assert model.weight.grad.to_dense()[0, 0] == torch.inf


# ----- several workers -----


@pytest.mark.parametrize("count", [2, 4])
def test_all_workers_get_the_same_correct_bits(url: str, run: str, count: int) -> None:
    steps, micro_batches = 3, 2
    models = [net() for _ in range(count)]  # not in the threads, which share PyTorch's seed

    def batches(worker: int, step: int) -> list[tuple[int, int]]:
        return [(1 + worker + number, 100 * worker + 10 * step + number) for number in range(micro_batches)]

    def work(worker: int, model: Any) -> tuple[list[list[Any]], list[list[Any]], int, Any]:
        found, expected, closed = [], [], 0
        optimizer = torch.optim.Adam(model.parameters())
        with Client(url) as server:
            quorum = count * micro_batches
            gradients = GradientAccumulator(model, server, run=run, quorum=quorum, timeout=20)
            for step in range(steps):
                expected.append(own(model, [one for other in range(count) for one in batches(other, step)]))
                for size, seed in batches(worker, step):
                    backward(model, size, seed)
                    closed += gradients.push(weight=size).closed
                gradients.pull()
                found.append(grads(model))
                optimizer.step()
                optimizer.zero_grad()
        return found, expected, closed, model

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(work, range(count), models))
    for found, _, _, model in results:
        for step in range(steps):
            assert_close(found[step], results[0][1][step])
            assert same(found[step], results[0][0][step])
        first = results[0][3].parameters()
        assert same(model.parameters(), first)
    assert sum(closed for _, _, closed, _ in results) == steps


def test_a_pull_waits_for_all_pushes_and_can_be_repeated(server: Client, run: str) -> None:
    models = [net(), net()]
    first, second = [GradientAccumulator(one, server, run=run, quorum=2, timeout=0.05) for one in models]
    backward(models[0], 4, 1)
    assert not first.push().closed
    with pytest.raises(StepOpen, match="1 of 2") as caught:
        first.pull()
    assert caught.value.context["count"] == 1
    backward(models[1], 4, 2)
    assert second.push().closed
    for worker in (first, second):
        worker.pull()
        assert worker.step == 1
    assert same(grads(models[0]), grads(models[1]))


def test_a_late_push_is_refused_and_the_error_names_the_remedy(server: Client, run: str) -> None:
    models = [net(), net()]
    fast, slow = [GradientAccumulator(one, server, run=run, quorum=1) for one in models]
    backward(models[1], 4, 2)
    backward(models[0], 4, 1)
    fast.push()
    fast.pull()
    late = grads(models[1])
    with pytest.raises(StaleStep, match=r"pull\(\) fetches its mean"):
        slow.push()
    assert grads(models[1]) == late
    slow.pull()
    assert same(grads(models[0]), grads(models[1]))
    for seed in (3, 4):
        backward(models[0], 4, seed)
        fast.push()
        fast.pull()
    with pytest.raises(StepGone, match="too far behind"):
        slow.pull()
    assert slow.step == 1


def test_keep_says_how_far_behind_a_worker_may_be(server: Client, run: str) -> None:
    models = [net(), net()]
    fast, slow = [GradientAccumulator(one, server, run=run, quorum=1, keep=2) for one in models]
    for seed in (1, 2):
        models[0].zero_grad()
        backward(models[0], 4, seed)
        fast.push()
        fast.pull()
    slow.pull()
    slow.pull()
    assert same(grads(models[0]), grads(models[1]))


# ----- failures and restarts -----


@pytest.mark.parametrize("worker", [None, "rank3"])
def test_a_push_repeated_after_a_lost_answer_counts_once(url: str, run: str, worker: str | None) -> None:
    transport = Watched()
    with Client(url, transport=transport, max_retries=0) as server:
        model = net()
        expected = own(model, [(4, 1), (2, 2)])
        gradients = GradientAccumulator(model, server, run=run, worker=worker)
        backward(model, 4, 1)
        transport.losing = True
        with pytest.raises(ConnectionFailed):
            gradients.push(weight=4)
        transport.losing = False
        again = gradients.push(weight=4)
        assert (again.replayed, again.count) == (True, 1)
        backward(model, 2, 2)
        assert gradients.push(weight=2).count == 2
        transport.losing = True
        with pytest.raises(ConnectionFailed):
            gradients.pull()
        transport.losing = False
        gradients.pull()
        assert_close(grads(model), expected)
        assert server.buffers[f"{run}.0.weight"].info().step == gradients.step == 1


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[Server]:
    """A server in a separate process, with its store on the disk."""
    with Server(tmp_path / "store") as running:
        yield running


def test_the_server_is_killed_between_push_and_pull(durable: Server, run: str) -> None:
    model, other = net(), net()
    expected = own(model, [(4, 1), (2, 2)])
    with Client(durable.url) as server, ThreadPoolExecutor(1) as threads:
        first = GradientAccumulator(model, server, run=run, quorum=2, worker="0", timeout=30)
        backward(model, 4, 1)
        first.push(weight=4)
        durable.kill()
        waiting = threads.submit(first.pull)  # the server is down
        durable.start()
        second = GradientAccumulator(other, server, run=run, quorum=2, worker="1", timeout=30)
        backward(other, 2, 2)
        assert second.push(weight=2).closed
        durable.restart()
        second.pull()
        waiting.result(30)
    assert_close(grads(model), expected)
    assert same(grads(model), grads(other))


def trainer(server: Client, run: str, **options: Any) -> tuple[Any, GradientAccumulator]:
    model = net()
    return model, GradientAccumulator(model, server, run=run, worker="rank3", **options)


def test_a_restarted_trainer_counts_once(server: Client, run: str) -> None:
    model, gradients = trainer(server, run)
    expected = own(model, [(4, 1), (2, 2), (3, 3)])
    for size, seed in [(4, 1), (2, 2)]:
        backward(model, size, seed)
        gradients.push(weight=size)

    model, gradients = trainer(server, run)
    found = []
    for size, seed in [(4, 1), (2, 2), (3, 3)]:
        backward(model, size, seed)
        found.append(gradients.push(weight=size))
    assert [(one.count, one.replayed) for one in found] == [(1, True), (2, True), (3, False)]
    gradients.pull()
    assert_close(grads(model), expected)

    for replayed in (False, True):
        model.zero_grad()
        backward(model, 4, 1)  # as in the first step, whose keys are others
        pushed = gradients.push(weight=4)
        assert (pushed.step, pushed.count, pushed.replayed) == (1, 1, replayed)
        model, gradients = trainer(server, run, start="any")


def test_a_restarted_trainer_with_other_gradients_learns_that_its_push_counts(server: Client, run: str) -> None:
    model, gradients = trainer(server, run)
    expected = own(model, [(4, 1), (2, 2)])
    backward(model, 4, 1)
    gradients.push(weight=4)

    model, gradients = trainer(server, run)
    backward(model, 4, 7)
    with pytest.raises(KeyReused, match="push 0 of step 0 before.*that push counts"):
        gradients.push(weight=4)
    backward(model, 2, 2)
    assert gradients.push(weight=2).count == 2
    gradients.pull()
    assert_close(grads(model), expected)


def test_a_trainer_continues_from_its_checkpoint_after_the_step_has_closed(server: Client, run: str) -> None:
    model, gradients = trainer(server, run, quorum=2)
    expected = own(model, [(4, 1), (2, 2)])
    backward(model, 4, 1)
    gradients.push(weight=4)
    checkpoint = gradients.state_dict()
    backward(model, 2, 2)
    assert gradients.push(weight=2).closed

    model, gradients = trainer(server, run, quorum=2)
    assert gradients.step == 1
    gradients.load_state_dict(checkpoint)
    assert gradients.step == 0
    backward(model, 2, 2)
    pushed = gradients.push(weight=2)
    assert (pushed.replayed, pushed.closed, pushed.count) == (True, True, 2)
    gradients.pull()
    assert_close(grads(model), expected)
    assert server.buffers[f"{run}.0.weight"].info().count == 0


def test_a_trainer_returns_to_an_older_checkpoint_in_a_new_step(server: Client, run: str) -> None:
    model, gradients = trainer(server, run)
    for seed in (1, 2):
        backward(model, 4, seed)
        gradients.push()
    server.buffers.zero(prefix=f"{run}.")
    model, gradients = trainer(server, run, start="any")
    expected = own(model, [(4, 3)])
    backward(model, 4, 3)
    assert gradients.push().count == 1
    gradients.pull()
    assert_close(grads(model), expected)


def test_a_new_run_under_old_names_counts_again(server: Client, run: str) -> None:
    for _ in range(2):
        model, gradients = trainer(server, run)
        backward(model, 4, 1)
        pushed = gradients.push(weight=4)
        assert (pushed.count, pushed.replayed) == (1, False)
        for one in server.buffers.list(run):
            server.buffers[one.name].delete()
    backward(model, 4, 1)
    with pytest.raises(Conflict, match="was deleted since"):
        gradients.push(weight=4)


def test_workers_without_names_are_distinct(server: Client, run: str) -> None:
    for count in (1, 2):
        model = net()
        backward(model, 4, 1)
        assert GradientAccumulator(model, server, run=run).push().count == count


# ----- mistakes -----


def freeze(model: Any) -> Any:
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (torch.nn.Sequential(), "no parameter that requires a gradient"),
        (freeze(net()), "no parameter that requires a gradient"),
    ],
    ids=["empty", "frozen"],
)
def test_models_that_cannot_be_accumulated(server: Client, model: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        GradientAccumulator(model, server, run="wrong")


def test_different_buffers_are_refused(server: Client, run: str) -> None:
    GradientAccumulator(net(), server, run=run, quorum=2)
    with pytest.raises(Conflict, match="quorum"):
        GradientAccumulator(net(), server, run=run, quorum=3)
    server.buffers[f"{run}.0.bias"].zero()
    with pytest.raises(Conflict, match=r"0\.bias' is in step 1|0\.bias' in 1"):
        GradientAccumulator(net(), server, run=run, quorum=2)


def unfreeze(model: Any) -> None:
    model[2].requires_grad_(True)
    backward(model, 2, 1)


def replaced(model: Any) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)
    backward(model, 2, 1)


def removed(model: Any) -> None:
    backward(model, 2, 1)
    model[0] = torch.nn.Identity()


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lambda model: None, "call push after backward"),
        (lambda model: unfreeze(model), r"2\.(weight|bias)' requires a gradient now"),
        (lambda model: replaced(model), r"0\.(weight|bias)' is another parameter"),
        (lambda model: removed(model), r"0\.(weight|bias)' is not in the model any more"),
    ],
    ids=["no backward", "unfrozen", "replaced", "removed"],
)
def test_mistaken_pushes_are_refused(server: Client, run: str, happens: Callable[[Any], None], words: str) -> None:
    model = net()
    model[2].requires_grad_(False)
    gradients = GradientAccumulator(model, server, run=run)
    happens(model)
    with pytest.raises(InvalidInput, match=words):
        gradients.push()
    assert server.buffers[f"{run}.0.weight"].info().count == 0
    if "push" not in words:
        with pytest.raises(InvalidInput, match=words):
            gradients.pull()


def test_a_layer_frozen_later_is_not_changed(server: Client, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run)
    model[2].requires_grad_(False)
    backward(model, 2, 1)
    gradients.push()
    gradients.pull()
    assert [one is None for one in grads(model)] == [False, False, True, True]


def test_a_pull_without_pushes_fails_at_once(server: Client, run: str) -> None:
    with pytest.raises(StepOpen, match="0"):
        GradientAccumulator(net(), server, run=run).pull()


def test_a_worker_whose_step_another_client_closed_gets_stale_step(server: Client, run: str) -> None:
    model = net()
    first = GradientAccumulator(model, server, run=run)
    server.buffers.zero(prefix=f"{run}.")
    backward(model, 2, 1)
    second = GradientAccumulator(model, server, run=run, start="any")
    second.push()
    backward(model, 2, 2)
    with pytest.raises(StaleStep, match=r"its gradients do not count; catch_up\(\) goes on in the running step$"):
        first.push()
    with pytest.raises(StaleStep, match="without a quorum, only one worker may pull"):
        first.pull()
    assert (first.catch_up(), first.catch_up()) == (1, 1)
    assert first.push().count == 2
    assert first.catch_up() == 1
    backward(model, 2, 2)
    assert first.push().count == 3
    assert second.pull().count == 3


def test_runs_of_different_names_do_not_mix_and_workers_of_one_run_meet(server: Client, run: str) -> None:
    for value, name in enumerate([f"{run}-one", f"{run}-läuft/2.1"]):
        models = [net(), net()]
        for number, model in enumerate(models):
            gradients = GradientAccumulator(model, server, run=name, quorum=2)  # the second is late
            fill_with(model, float(10 * value + number))
            assert gradients.push().count == number + 1
        gradients.pull()
        assert {gradient.mean().item() for gradient in grads(model)} == {10 * value + 0.5}
        assert {info.count for info in server.buffers.list(gradients.prefix) if not info.name.endswith("start")} == {0}
    assert gradients.prefix == f"{run}-l:C3:A4uft:2F2:2E1."


def test_another_run_does_not_take_the_buffers_of_a_prefix(server: Client, run: str) -> None:
    for _ in range(2):
        gradients = GradientAccumulator(net(), server, run="one", prefix=f"{run}-shared.")
        assert {one.name for one in server.buffers.list(run)} >= {f"{run}-shared.0.weight", f"{run}-shared.2.bias"}
    with pytest.raises(Conflict, match="belongs to the run 'one', not 'two'"):
        GradientAccumulator(net(), server, run="two", prefix=f"{run}-shared.")
    server.buffers.delete(prefix=gradients.prefix)
    GradientAccumulator(net(), server, run="two", prefix=f"{run}-shared.")


def test_a_state_without_a_worker_is_refused(server: Client, run: str) -> None:
    gradients = GradientAccumulator(net(), server, run=run)
    with pytest.raises(InvalidInput, match="has no name.*worker=f'rank"):
        gradients.load_state_dict(gradients.state_dict())


def test_without_pytorch_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import gradserve_client.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'gradserve-client[torch]'" in done.stderr


def test_the_example_in_its_docstring(server: Client) -> None:
    server.buffers.delete(prefix="linear.")
    found = doctest.testmod(gradserve_client.torch, extraglobs={"server": server})
    assert found.attempted > 3
    assert not found.failed


def test_an_accumulator_says_where_it_is(server: Client, run: str) -> None:
    named = GradientAccumulator(net(), server, run=run, worker="rank0")
    assert repr(named) == f"GradientAccumulator('rank0', prefix='{run}.', step=0, server=Client({server.url!r}))"
    assert repr(GradientAccumulator(net(), server, run=run)).startswith(f"GradientAccumulator(prefix='{run}.'")
