"""Runs come and go: buffers by their prefix, in both clients, over one server and several."""

from __future__ import annotations

from typing import Any

import pytest
from gradserve_client import InvalidInput, KeyReused, NotFound

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
