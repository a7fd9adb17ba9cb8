"""Runs come and go: buffers by their prefix, in both clients, over one server and several."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from gradserve_client import Client, Conflict, InvalidInput, KeyReused, NotFound
from gradserve_client.torch import GradientAccumulator

from tests.clients.conftest import delete_all
from tests.clients.test_torch import backward, grads, net

RUN = [f"run7.{number}" for number in range(8)]
"""Names that three servers share out."""


@pytest.fixture
def server(one_or_three: Any) -> Any:
    return one_or_three


@pytest.fixture
def run(server: Any) -> list[str]:
    """The buffers of a run, in their order, beside those of another."""
    server.buffers.create_many({name: {"shape": 2} for name in [*RUN, "run70.a"]})
    return RUN


def names(server: Any, prefix: str = "") -> list[str]:
    return [info.name for info in server.buffers.list(prefix)]


# ----- deletes -----


def test_a_run_is_deleted(server: Any, run: list[str]) -> None:
    server.buffers.accumulate({run[0]: 1})
    deleted = server.buffers.delete(prefix="run7.")
    assert (list(deleted), deleted[run[0]].count, deleted[run[1]].count) == (run, 1, 0)
    assert names(server) == ["run70.a"]
    assert server.buffers.delete(prefix="run7.") == {}


def test_a_repeated_delete_keeps_newer_buffers(server: Any, run: list[str], key: str) -> None:
    first = server.buffers.delete(prefix="run7.", idempotency_key=key)
    server.buffers[run[0]].create(2)
    again = server.buffers.delete(prefix="run7.", idempotency_key=key)
    assert list(again) == list(first)
    assert all(receipt.replayed for receipt in again.values())
    assert names(server, "run7.") == run[:1]
    with pytest.raises(KeyReused):
        server.buffers.delete(prefix="run70.", idempotency_key=key)


@pytest.mark.parametrize("given", [{}, {"prefix": ""}, {"prefix": None}, {"prefix": "run7.", "all": True}])
def test_everything_is_only_deleted_plainly(server: Any, run: list[str], given: dict[str, Any]) -> None:
    for call in (server.buffers.delete, lambda **given: server.buffers.set_rules(quorum=2, **given)):
        with pytest.raises(InvalidInput, match="prefix that is not empty, or all=True"):
            call(**given)
    with pytest.raises(InvalidInput, match="prefix is 7, but must be a string"):
        server.buffers.delete(prefix=7)
    assert {info.quorum for info in server.buffers.list()} == {None}
    assert len(server.buffers.set_rules(all=True, quorum=2)) == len(run) + 1
    assert len(server.buffers.delete(all=True)) == len(run) + 1
    assert names(server) == []


# ----- rules -----


def test_the_rules_of_a_run_change(server: Any, run: list[str]) -> None:
    server.buffers.accumulate({run[0]: 1})
    changed = server.buffers.set_rules(prefix="run7.", quorum=1, ttl_seconds=None)
    assert list(changed) == run
    assert [changed[name].closed_by for name in run[:2]] == ["quorum", None]
    assert {info.quorum for info in server.buffers.list("run7.")} == {1}
    assert server.buffers["run70.a"].info().quorum is None


def test_the_rules_of_named_buffers_change(server: Any, run: list[str], key: str) -> None:
    named = [run[5], run[0], run[3]]
    for replayed in (False, True):
        changed = server.buffers.set_rules(named, deadline_seconds=60, idempotency_key=key)
        assert [(name, receipt.replayed) for name, receipt in changed.items()] == [(name, replayed) for name in named]
    assert [info.name for info in server.buffers.list() if info.deadline_seconds == 60] == sorted(named)
    with pytest.raises(NotFound):
        server.buffers.set_rules([run[0], "no.such"], quorum=3)
    with pytest.raises(NotFound, match=r"begins with 'nothing\.'"):
        server.buffers.set_rules(prefix="nothing.", quorum=3)


def test_mistaken_rules_are_refused(server: Any, run: list[str]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep'"):
        server.buffers.set_rules(run, keep=3)
    with pytest.raises(InvalidInput, match=r"min_count is 1\.5, but must be an integer"):
        server.buffers.set_rules(run, min_count=1.5)
    with pytest.raises(InvalidInput, match="names is 'run7.0', but must be a list of names"):
        server.buffers.set_rules("run7.0", quorum=3)
    with pytest.raises(InvalidInput, match="or names"):
        server.buffers.set_rules(run, prefix="run7.", quorum=3)
    with pytest.raises(InvalidInput, match="'run7 0' is not a buffer name"):
        server.buffers.set_rules(["run7 0"], quorum=3)


# ----- models -----


@pytest.fixture(params=[1, 3], ids=["one server", "three servers"])
def plain(request: pytest.FixtureRequest, three_urls: list[str]) -> Iterator[Client]:
    with Client(three_urls[: request.param], timeout=20) as server:
        yield server
        delete_all(server)


def accumulator(server: Client, run: str, seed: int = 0, **options: Any) -> tuple[Any, GradientAccumulator]:
    model = net(seed)
    return model, GradientAccumulator(model, server, run=run, timeout=5, **options)


@pytest.mark.parametrize("request_bytes", [None, 400], ids=["one request", "many requests"])
def test_a_worker_leaves_and_the_quorum_follows(plain: Client, request_bytes: int | None) -> None:
    run = uuid.uuid4().hex
    workers = [accumulator(plain, run, quorum=3, request_bytes=request_bytes) for _ in range(2)]
    for seed, (model, worker) in enumerate(workers):
        backward(model, 2, seed)
        worker.push(weight=2)
    workers[0][1].set_rules(quorum=2, max_norm=1e9)
    pulled = [worker.pull() for _, worker in workers]
    assert [(one.count, one.closed_by) for one in pulled] == [(2, "quorum")] * 2
    assert all((one == other).all() for one, other in zip(*(grads(model) for model, _ in workers), strict=True))
    infos = [info for info in plain.buffers.list(run) if not info.name.endswith("::start")]
    assert {info.quorum for info in infos} == {2}
    assert {(info.name.endswith("::tally"), info.max_norm) for info in infos} == {(True, None), (False, 1e9)}
    accumulator(plain, run, start="any", quorum=2, max_norm=1e9, request_bytes=request_bytes)
    with pytest.raises(Conflict, match="quorum 2, not 3"):
        accumulator(plain, run, start="any", quorum=3, max_norm=1e9, request_bytes=request_bytes)


def test_whether_epochs_close_by_themselves_stays(plain: Client) -> None:
    run = uuid.uuid4().hex
    _, closing = accumulator(plain, run, quorum=3)
    _, taking = accumulator(plain, f"{run}-x")
    for worker, rules in ((closing, {"quorum": None}), (taking, {"deadline_seconds": 3.0})):
        with pytest.raises(InvalidInput, match="whether epochs close by themselves"):
            worker.set_rules(**rules)
    closing.set_rules(quorum=None, quorum_weight=7.0)
    assert {info.quorum_weight for info in plain.buffers.list(run) if info.name.endswith("::tally")} == {7.0, None}


def test_all_buffers_of_a_run_expire(plain: Client) -> None:
    run = uuid.uuid4().hex
    model, worker = accumulator(plain, run, ttl_seconds=1000.0)
    backward(model, 2, 0)
    worker.push()
    worker.broadcast_parameters(send=True)
    infos = plain.buffers.list(run)
    assert {info.name.rpartition("::")[2].partition(".")[0] for info in infos} >= {"start", "state", "tally"}
    assert {info.ttl_seconds for info in infos} == {1000.0}


def test_a_broadcast_survives_the_expiry_of_the_last(plain: Client) -> None:
    run = uuid.uuid4().hex
    workers = [accumulator(plain, run, seed, start="any", ttl_seconds=1000.0) for seed in range(2)]
    for _ in range(2):
        workers[0][1].broadcast_parameters(send=True)
        workers[1][1].broadcast_parameters(send=False)
        ours, theirs = (list(model.parameters()) for model, _ in workers)
        assert all((one == other).all() for one, other in zip(ours, theirs, strict=True))
        plain.buffers.delete(prefix=f"{workers[0][1].prefix}::state")


def test_a_run_is_deleted_by_its_prefix(plain: Client) -> None:
    run = uuid.uuid4().hex
    model, worker = accumulator(plain, run)
    backward(model, 2, 0)
    worker.push()
    plain.buffers.delete(prefix=worker.prefix)
    assert plain.buffers.list(run) == []
    accumulator(plain, run, seed=1)
