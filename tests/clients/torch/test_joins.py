"""Workers that come to a run: with the run's weights, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gradserve_client import Client, Conflict, StepOpen
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import assert_close, backward, fill_with, grads, net, own, same

NAMES = ["rank0", "rank1", "rank2"]


@pytest.fixture
def server(one_or_three: Client) -> Client:
    return one_or_three


def joined(model: Any, server: Client, run: str, rank: int, **options: Any) -> GradientAccumulator:
    given = {"quorum": 2, "timeout": 20, **options}
    return GradientAccumulator(model, server, run=run, worker=NAMES[rank], **given)


def step(*workers: tuple[Any, GradientAccumulator]) -> None:
    """Let these workers push, pull and train, each on its own batch."""
    for number, (model, worker) in enumerate(workers):
        backward(model, 4, 10 * worker.step + number)
        worker.push(weight=4)
    for model, worker in workers:
        worker.pull()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()


def pair(server: Client, run: str, **options: Any) -> list[tuple[Any, GradientAccumulator]]:
    """Return two workers of one run."""
    models = [net(), net()]
    return [(model, joined(model, server, run, rank, **options)) for rank, model in enumerate(models)]


def counts(server: Client, run: str) -> set[int]:
    """Return the counts of the running step."""
    return {info.count for info in server.buffers.list(run) if "::st" not in info.name}


def test_a_worker_without_the_runs_weights_is_refused_at_its_first_push(server: Client, run: str) -> None:
    """It may pull. Each push and each sending of its parameters raises the same error."""
    both = pair(server, run)
    step(*both)
    model = net()
    late = joined(model, server, run, 1)
    backward(model, 4, 1)
    before = grads(model)
    ways = (
        rf"^Give another run=, .*gradserve-client runs delete {run}`, or give optimizer=.*in step 1"
        r".*load_state_dict\(\).*broadcast_parameters\(send=False\).*start='any'"
    )
    calls: list[Callable[[], object]] = [
        late.push,
        lambda: late.push(weight=0),
        lambda: late.push(wait=False),
        lambda: late.broadcast_parameters(send=True),
    ]
    for call in calls:
        with pytest.raises(Conflict, match=ways):
            call()
        assert grads(model) == before
    assert counts(server, run) == {0}
    step(*both)
    assert late.pull().count == 2
    with pytest.raises(Conflict, match="in step 2"):
        late.push()


@pytest.mark.parametrize("is_of_before", [False, True])  # a version before, which wrote "epoch"
def test_a_worker_that_loads_its_state_goes_on(server: Client, run: str, is_of_before: bool) -> None:
    both = pair(server, run)
    step(*both)
    model, worker = both[1]
    saved, state = {name: one.clone() for name, one in model.state_dict().items()}, worker.state_dict()
    if is_of_before:
        state["epoch"] = state.pop("step")
    other = net(seed=7)
    again = joined(other, server, run, 1)
    other.load_state_dict(saved)
    again.load_state_dict(state)
    step(both[0], (other, again))
    assert same(both[0][0].parameters(), other.parameters())


def test_a_worker_that_receives_the_parameters_goes_on(server: Client, run: str) -> None:
    both = pair(server, run)
    step(*both)
    other = net(seed=7)
    again = joined(other, server, run, 1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(again.broadcast_parameters, send=False)
        both[0][1].broadcast_parameters(send=True)
        waiting.result(20)
    step(both[0], (other, again))
    assert same(both[0][0].parameters(), other.parameters())


def test_a_worker_may_say_that_it_cares_for_its_weights_itself(server: Client, run: str) -> None:
    step(*pair(server, run))
    model = net(seed=7)
    worker = joined(model, server, run, 1, start="any")
    backward(model, 4, 1)
    assert worker.push().count == 1


def test_a_worker_that_was_there_in_step_0_may_be_late(server: Client, run: str) -> None:
    """Also one whose first push comes after other steps, and one that pushes several times."""
    several = [*pair(server, run, quorum=2, keep=3), (third := net(), joined(third, server, run, 2, keep=3))]
    step(*several[:2])
    several[2][1].pull()
    torch.optim.SGD(third.parameters(), lr=0.1).step()
    for _ in range(2):
        fill_with(third, 1)
        several[2][1].push()
    assert several[2][1].pull().contributors == {"rank2": 2}


def test_a_state_of_another_run_is_refused(server: Client, run: str) -> None:
    """And of an earlier run of the same name."""
    other = joined(net(), server, f"{run}-other", 0)
    (model, worker), _ = pair(server, run)
    with pytest.raises(Conflict, match="state of another run"):
        worker.load_state_dict(other.state_dict())
    state = worker.state_dict()
    server.buffers.delete(prefix=worker.prefix)
    (model, worker), second = pair(server, run)
    with pytest.raises(Conflict, match="state of another run"):
        worker.load_state_dict(state)
    step((model, worker), second)


# ----- a run that died, started again from nothing -----


def test_a_run_that_died_in_a_step_gives_nothing_to_a_new_one(server: Client, run: str) -> None:
    """Two of three have pushed, and all are started again. None can push until the run is deleted."""

    def start(seed: int) -> list[tuple[Any, GradientAccumulator]]:
        models = [net(seed) for _ in NAMES]
        return [(model, joined(model, server, run, rank, quorum=3)) for rank, model in enumerate(models)]

    first = start(0)
    step(*first)
    for model, worker in first[:2]:
        backward(model, 4, 1)
        worker.push()
    again = start(0)
    for model, worker in again:
        backward(model, 4, 2)
        with pytest.raises(Conflict, match=r"Give another run=, or delete this one"):
            worker.push()
        model.zero_grad()
    assert counts(server, run) == {2}
    server.buffers.delete(prefix=worker.prefix)
    again = start(3)
    expected = own(again[0][0], [(4, 0), (4, 1), (4, 2)])
    for seed, (model, worker) in enumerate(again):
        backward(model, 4, seed)
        worker.push(weight=4)
    assert worker.pull().contributors == dict.fromkeys(NAMES, 1)
    assert_close(grads(again[2][0]), expected)


# ----- what is compared -----


class Tuned(torch.nn.Module):  # type: ignore[misc]  # PyTorch is not checked
    """A small trained layer on a frozen base, with running statistics, and a cache that no checkpoint keeps."""

    def __init__(self, seed: int = 0, width: int = 7, cached: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(5, width, dtype=torch.bfloat16).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(width, dtype=torch.float8_e5m2))
        self.register_buffer("cache", torch.zeros(cached), persistent=False)
        torch.manual_seed(9)
        self.tuned = torch.nn.Linear(width, 3)

    def forward(self, samples: Any) -> Any:
        return self.norm(self.tuned(self.base(samples.bfloat16()).float()))


def other_scale(model: Any) -> None:
    model.scale = torch.zeros_like(model.scale)


def more_buffers(model: Any) -> None:
    model.register_buffer("more", torch.zeros(1))


def other_statistics(model: Any) -> None:
    model.norm.running_mean += 1


def unlike(change: Callable[[Any], None]) -> Any:
    model = Tuned()
    change(model)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tuned(seed=1), "began with other frozen weights"),
        (lambda: unlike(other_scale), "began with other buffers"),
        (lambda: unlike(other_statistics), "began with other buffers"),
        (lambda: unlike(more_buffers), "frozen and of buffers"),
    ],
    ids=["base", "scale", "statistics", "a buffer more"],
)
def test_what_is_not_trained_is_compared_too(server: Client, run: str, make: Callable[[], Any], words: str) -> None:
    joined(Tuned(), server, run, 0)
    with pytest.raises(Conflict, match=rf"(?i){words}|give another run=, or delete this one"):
        joined(make(), server, run, 1)
    joined(Tuned(cached=3), server, run, 1)
    if "began" in words:
        joined(make(), server, run, 1, start="any")


def test_a_frozen_parameter_of_another_shape_is_refused(server: Client, run: str) -> None:
    models = [torch.nn.ParameterDict({"tuned": torch.ones(2), "base": torch.ones(size)}) for size in (2, 3)]
    for model in models:
        model["base"].requires_grad_(False)
    joined(models[0], server, run, 0)
    for start in ("same", "any"):
        with pytest.raises(Conflict, match="all parameters and buffers is"):
            joined(models[1], server, run, 1, start=start)


def test_statistics_may_differ_once_a_worker_has_pushed(server: Client, run: str) -> None:
    model = Tuned()
    worker = joined(model, server, run, 0)
    backward(model, 4, 1)
    worker.push()
    joined(model, server, run, 0)
    with pytest.raises(Conflict, match="other frozen weights"):
        joined(Tuned(seed=1), server, run, 1)


def test_a_checkpoint_on_another_base_is_refused_at_the_first_push(server: Client, run: str) -> None:
    models = [Tuned(), Tuned()]
    workers = [(model, joined(model, server, run, rank)) for rank, model in enumerate(models)]
    step(*workers)
    state = workers[1][1].state_dict()
    model = Tuned(seed=1)
    again = joined(model, server, run, 1)
    again.load_state_dict(state)
    backward(model, 4, 1)
    with pytest.raises(Conflict, match=r"other frozen weights: load the same; or give start='any'"):
        again.push()
    model.base.load_state_dict(models[1].base.state_dict())
    assert again.push().count == 1
    changed = joined(Tuned(seed=1), server, run, 0, start="any")
    changed.load_state_dict(state)
    assert changed.push(weight=0).count == 2


# ----- rules that have changed -----


@pytest.mark.parametrize("request_bytes", [None, 400], ids=["one request", "many requests"])
def test_a_worker_with_its_old_arguments_follows_the_runs_rules(
    server: Client, run: str, request_bytes: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"quorum": 3, "contributors": NAMES, "deadline_seconds": 60, "min_count": 2, "request_bytes": request_bytes}
    models = [net() for _ in NAMES]
    workers = [joined(model, server, run, rank, **given) for rank, model in enumerate(models)]
    workers[0].set_rules(quorum=2, contributors=NAMES[:2], deadline_seconds=None, min_count=1, max_norm=1e9)
    assert not caplog.records
    again = joined(models[1], server, run, 1, **given)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert "contributors is ['rank0', 'rank1'], not ['rank0', 'rank1', 'rank2']" in said
    assert "deadline_seconds is None, not 60.0" in said
    assert "quorum is 2, not 3" in said
    assert "per_contributor" not in said
    again.load_state_dict(again.state_dict())
    again.set_rules(quorum_weight=8)
    step((models[0], workers[0]), (models[1], again))
    assert {info.quorum for info in server.buffers.list(run) if "::st" not in info.name} == {2}
    joined(net(), server, run, 2, **{**given, "quorum": 5}, start="any")
    with pytest.raises(Conflict, match="keep 1, not 2"):
        joined(net(), server, run, 2, **given, keep=2, start="any")


def test_a_worker_without_a_quorum_follows_a_run_that_has_one(
    server: Client, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its pull waits for the others, and does not close the step."""
    (model, worker), _ = pair(server, run, quorum=3)
    worker.set_rules(quorum=2)
    other = joined(net(), server, run, 1, quorum=None, timeout=0.05)
    backward(model, 4, 1)
    worker.push()
    with pytest.raises(StepOpen, match="1 of 2"):
        other.pull()
    assert "quorum is 2, not None" in caplog.text


def test_other_rules_are_refused_while_those_of_the_first_worker_hold(server: Client, run: str) -> None:
    pair(server, run, quorum=3, deadline_seconds=5, min_count=2)
    joined(net(), server, run, 1, quorum=3, deadline_seconds=5.0, min_count=2, max_norm=None)
    for other in ({"quorum": 2}, {"quorum": 3, "min_count": 1}, {"quorum": 3, "contributors": NAMES}):
        with pytest.raises(Conflict, match=r"There is a buffer.*All workers of a run give the same.*runs delete"):
            joined(net(), server, run, 1, deadline_seconds=5, **{"min_count": 2, **other})


@pytest.mark.parametrize("start", ["same", "any"])
def test_a_worker_that_leaves_means_out_lacks_the_runs_weights(server: Client, run: str, start: str) -> None:
    (model, fast), (_, slow) = pair(server, run, quorum=1, start=start)
    for _ in range(2):
        step((model, fast))
    assert slow.catch_up() == 2
    if start == "any":
        assert slow.push(weight=0).step == 2
        return
    with pytest.raises(Conflict, match="in step 2, and this worker has not got its weights"):
        slow.push(weight=0)
    fast.broadcast_parameters(send=True)
    slow.broadcast_parameters(send=False)
    assert slow.catch_up() == slow.push(weight=0).step == 2
