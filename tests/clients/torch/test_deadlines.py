"""Workers that are slow, dead, late or gone: steps end by their rules, and say who was in them. Runs come and go."""

from __future__ import annotations

from typing import Any

import pytest
from gradserve_client import Client, DuplicateContributor, InvalidInput, StaleStep, StepOpen
from gradserve_client.torch import GradientAccumulator

from tests.clients.torch.training import assert_close, backward, grads, net, own, same

DEADLINE_SECONDS = 0.3
"""Seconds of a deadline that the tests wait for: several pushes take a tenth of it."""


@pytest.fixture
def server(one_or_three: Client) -> Client:
    return one_or_three


def workers(server: Client, run: str, number: int, **options: Any) -> list[tuple[Any, GradientAccumulator]]:
    """Return models with accumulators of workers named rank0, rank1 and so on."""
    models, options = [net() for _ in range(number)], {"timeout": 30, **options}
    return [
        (model, GradientAccumulator(model, server, run=run, worker=f"rank{rank}", **options))
        for rank, model in enumerate(models)
    ]


@pytest.mark.parametrize("request_bytes", [None, 400], ids=["one request", "many requests"])
def test_a_step_ends_without_a_dead_and_without_a_slow_worker(
    server: Client, run: str, request_bytes: int | None
) -> None:
    """Of four workers one never pushes, and one pushes after the deadline. The next step has its quorum."""
    expected = {"contributors": ["rank0", "rank1", "rank2", "rank3"]}
    rules = {"quorum": 3, "deadline_seconds": DEADLINE_SECONDS, "min_count": 2, "request_bytes": request_bytes}
    several = workers(server, run, 3, **rules, **expected)
    for _, worker in several:  # the first step has no deadline
        worker.push(weight=0)
    for model, worker in several:
        worker.pull()
        model.zero_grad()
    mean = own(several[0][0], [(4, 0), (2, 1)])
    for number, (model, worker) in enumerate(several[:2]):
        backward(model, 4 - 2 * number, number)
        worker.push(weight=4 - 2 * number)
    for model, worker in several[:2]:
        pulled = worker.pull()
        assert (pulled.step, pulled.count, pulled.weight, pulled.closed_by) == (1, 2, 6.0, "deadline")
        assert pulled.contributors == {"rank0": 1, "rank1": 1}
        assert_close(grads(model), mean)

    slow_model, slow = several[2]
    backward(slow_model, 3, 2)
    with pytest.raises(StaleStep, match="do not count; if it has closed, pull"):
        slow.push(weight=3)
    pulled = slow.pull()
    assert (pulled.contributors, pulled.closed_by, slow.step) == ({"rank0": 1, "rank1": 1}, "deadline", 2)
    assert_close(grads(slow_model), mean)

    for info in server.buffers.list(slow.prefix):
        server.buffers[info.name].set_rules(deadline_seconds=None, min_count=1)  # a busy machine would need longer
    for model, worker in several:
        backward(model, 3, 5)
        worker.push(weight=3)
    for _, worker in several:
        pulled = worker.pull()
        assert (pulled.closed_by, pulled.contributors) == ("quorum", {"rank0": 1, "rank1": 1, "rank2": 1})


def test_a_deadline_without_a_quorum_waits_for_min_count(server: Client, run: str) -> None:
    rules = {"deadline_seconds": 0.05, "min_count": 2}
    (first, one), (second, two) = workers(server, run, 2, timeout=0.2, **rules)
    backward(first, 4, 1)
    assert not one.push().closed
    with pytest.raises(StepOpen, match="whose count is 1"):
        one.pull()
    backward(second, 4, 2)
    assert two.push().closed
    for worker in (one, two):
        pulled = worker.pull()
        assert (pulled.closed_by, pulled.count, pulled.contributors) == ("deadline", 2, {"rank0": 1, "rank1": 1})


def test_an_open_step_names_the_workers_that_are_missing(server: Client, run: str) -> None:
    names = ["rank0", "rank1", "rank2"]
    ((model, worker),) = workers(server, run, 1, timeout=0, quorum=3, contributors=names)
    backward(model, 4, 1)
    worker.push()
    with pytest.raises(StepOpen, match="rank1 and rank2 are missing") as caught:
        worker.pull()
    assert caught.value.missing == ("rank1", "rank2")
    infos = [info for info in server.buffers.list(worker.prefix) if not info.name.endswith("::start")]
    assert {info.missing for info in infos} == {("rank1", "rank2")}


def test_a_smaller_quorum_ends_a_step_that_a_dead_worker_holds_up(server: Client, run: str) -> None:
    several = workers(server, run, 3, quorum=3)[:2]
    for model, worker in several:
        backward(model, 4, 1)
        worker.push()
    for info in server.buffers.list(worker.prefix):
        if info.quorum == 3:
            server.buffers[info.name].set_rules(quorum=2)
    for _, worker in several:
        pulled = worker.pull()
        assert (pulled.closed_by, pulled.contributors) == ("quorum", {"rank0": 1, "rank1": 1})
    ((_, later),) = workers(server, run, 1, quorum=2)
    assert later.step == 1
    ((_, old),) = workers(server, run, 1, quorum=3)
    assert old.step == 1
    assert {info.quorum for info in server.buffers.list(worker.prefix)} == {2}


# ----- micro-batches -----


@pytest.mark.parametrize("quorum", [None, 5])
def test_micro_batches_of_a_worker_all_count(server: Client, run: str, quorum: int | None) -> None:
    (model, worker), (other, two) = workers(server, run, 2, quorum=quorum)
    for number in range(3):
        backward(model, 2, number)
        assert worker.push(weight=2).count == number + 1
    for number in range(2):
        backward(other, 2, 3 + number)
        two.push(weight=2)
    pulled = worker.pull()
    assert (pulled.count, pulled.contributors) == (5, {"rank0": 3, "rank1": 2})
    assert pulled.closed_by == ("take" if quorum is None else "quorum")


def test_a_limit_of_pushes_of_a_worker(server: Client, run: str) -> None:
    (model, worker), (other, two) = workers(server, run, 2, quorum=2, per_contributor=1)
    backward(model, 4, 1)
    worker.push()
    backward(model, 4, 2)
    before = grads(model)
    with pytest.raises(DuplicateContributor, match="'rank0' has added 1 gradient to step 0"):
        worker.push()
    assert_close(grads(model), before)
    backward(other, 4, 3)
    assert two.push().closed
    assert worker.pull().contributors == {"rank0": 1, "rank1": 1}
    backward(model, 4, 2)
    assert worker.push().count == 1


def test_workers_without_names_are_no_contributors(server: Client, run: str) -> None:
    model = net()
    gradients = GradientAccumulator(model, server, run=run, quorum=2)
    for seed in range(2):
        backward(model, 4, seed)
        gradients.push()
    pulled = gradients.pull()
    assert (pulled.count, pulled.contributors, pulled.closed_by) == (2, {}, "quorum")


@pytest.mark.parametrize("worker", ["", "rank\n0", "x" * 101, 3])
def test_names_that_a_contributor_cannot_have_are_refused_at_once(server: Client, run: str, worker: Any) -> None:
    with pytest.raises(InvalidInput, match="worker is .*, but must be 1 to 100 printable characters"):
        GradientAccumulator(net(), server, run=run, worker=worker)


def test_a_mistaken_rule_fails_before_any_request(server: Client, run: str) -> None:
    for mistaken, error in ({"quorm": 3}, TypeError), ({"deadline_seconds": "soon"}, InvalidInput):
        with pytest.raises(error, match=next(iter(mistaken))):
            workers(server, run, 1, **mistaken)
    assert server.buffers.list(run) == []


# ----- a run comes and goes -----


def accumulator(server: Client, run: str, seed: int = 0, **options: Any) -> tuple[Any, GradientAccumulator]:
    model = net(seed)
    return model, GradientAccumulator(model, server, run=run, timeout=5, **options)


@pytest.mark.parametrize("request_bytes", [None, 400], ids=["one request", "many requests"])
def test_a_worker_leaves_and_the_quorum_follows(server: Client, run: str, request_bytes: int | None) -> None:
    workers = [accumulator(server, run, quorum=3, request_bytes=request_bytes) for _ in range(2)]
    for seed, (model, worker) in enumerate(workers):
        backward(model, 2, seed)
        worker.push(weight=2)
    workers[0][1].set_rules(quorum=2, max_norm=1e9)
    pulled = [worker.pull() for _, worker in workers]
    assert [(one.count, one.closed_by) for one in pulled] == [(2, "quorum")] * 2
    assert same(*(grads(model) for model, _ in workers))
    infos = [info for info in server.buffers.list(run) if not info.name.endswith("::start")]
    assert {info.quorum for info in infos} == {2}
    assert {(info.name.endswith("::tally"), info.max_norm) for info in infos} == {(True, None), (False, 1e9)}
    accumulator(server, run, start="any", quorum=2, max_norm=1e9, request_bytes=request_bytes)
    accumulator(server, run, start="any", quorum=3, max_norm=1e9, request_bytes=request_bytes)
    infos = [info for info in server.buffers.list(run) if not info.name.endswith("::start")]
    assert {info.quorum for info in infos} == {2}


def test_whether_steps_close_by_themselves_stays(server: Client, run: str) -> None:
    _, closing = accumulator(server, run, quorum=3)
    _, taking = accumulator(server, f"{run}-x")
    for worker, rules in ((closing, {"quorum": None}), (taking, {"deadline_seconds": 3.0})):
        with pytest.raises(InvalidInput, match="whether steps close by themselves"):
            worker.set_rules(**rules)
    closing.set_rules(quorum=None, quorum_weight=7.0)
    assert {info.quorum_weight for info in server.buffers.list(run) if info.name.endswith("::tally")} == {7.0, None}


def test_all_buffers_of_a_run_expire(server: Client, run: str) -> None:
    model, worker = accumulator(server, run, ttl_seconds=1000.0)
    backward(model, 2, 0)
    worker.push()
    worker.broadcast_parameters(send=True)
    infos = server.buffers.list(run)
    assert {info.name.rpartition("::")[2].partition(".")[0] for info in infos} >= {"state", "tally"}
    assert {info.ttl_seconds for info in infos} == {1000.0}


def test_a_broadcast_survives_the_expiry_of_the_last(server: Client, run: str) -> None:
    workers = [accumulator(server, run, seed, start="any", ttl_seconds=1000.0) for seed in range(2)]
    for _ in range(2):
        workers[0][1].broadcast_parameters(send=True)
        workers[1][1].broadcast_parameters(send=False)
        ours, theirs = (list(model.parameters()) for model, _ in workers)
        assert same(ours, theirs)
        server.buffers.delete(prefix=f"{workers[0][1].prefix}::state")


def test_a_run_is_deleted_by_its_prefix(server: Client, run: str) -> None:
    model, worker = accumulator(server, run)
    backward(model, 2, 0)
    worker.push()
    server.buffers.delete(prefix=worker.prefix)
    assert server.buffers.list(run) == []
    accumulator(server, run, seed=1)
