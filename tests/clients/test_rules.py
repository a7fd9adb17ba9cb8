"""What ends a step, who is in it, and rules that change: in both clients, and over several servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gradserve_client import (
    Conflict,
    DuplicateContributor,
    InvalidInput,
    NotFound,
    NothingToAverage,
    PreconditionFailed,
    StepGone,
    StepOpen,
)

from tests.clients.both import connected
from tests.clients.conftest import delete_all

RULES: dict[str, Any] = {
    "quorum": 4,
    "ttl_seconds": 1000.0,
    "deadline_seconds": 60.5,
    "min_count": 2,
    "quorum_weight": 99.5,
    "contributors": ("rank0", "Jürgen 1"),
    "per_contributor": 3,
    "max_norm": 7.5,
}
"""All rules that can change."""


def rules(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in RULES}


@pytest.fixture
def server(one_or_three: Any) -> Any:
    return one_or_three


# ----- creation -----


def test_every_rule_of_a_new_buffer(server: Any) -> None:
    made = server.buffers["w"].create(2, **RULES)
    assert rules(made) == RULES
    assert (made.contributors_in, made.missing, made.deadline_at) == ({}, RULES["contributors"], None)
    assert rules(server.buffers["w"].info()) == RULES
    many = server.buffers.create_many({"w": {"shape": 2, **RULES}, "b": {"shape": 1}})
    assert rules(many["w"]) == RULES
    assert (many["b"].deadline_seconds, many["b"].min_count, many["b"].contributors) == (None, 1, None)
    assert (many["b"].per_contributor, many["b"].missing) == (1, None)
    assert len({made, server.buffers["w"].info()}) == 1
    with pytest.raises(Conflict):
        server.buffers["w"].create(2, **{**RULES, "min_count": 1})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"contributors": "rank0"}, "contributors is 'rank0', but must be a list of names"),
        ({"contributors": ["a\n"]}, "contributors is 'a.n', but must be 1 to 100 printable characters"),
        ({"contributors": [3]}, "contributors is 3, but must be 1 to 100 printable characters"),
        ({"min_count": 1.5}, "min_count is 1.5, but must be an integer"),
        ({"per_contributor": "1"}, "per_contributor is '1', but must be an integer"),
        ({"deadline_seconds": "soon"}, "deadline_seconds cannot be a float"),
        ({"quorum_weight": []}, "quorum_weight cannot be a float"),
        ({"contributors": ["a", "a"]}, "contributors has 'a' 2 times"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
    ],
)
def test_rules_that_cannot_be(server: Any, rule: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        server.buffers["w"].create(2, **rule)
    server.buffers["w"].create(2)
    with pytest.raises(InvalidInput, match=words):
        server.buffers["w"].set_rules(**rule)
    with pytest.raises(InvalidInput, match=words):
        server.buffers.create_many({"x": {"shape": 2, **rule}})


# ----- contributors -----


def test_every_add_lists_its_contributor(server: Any) -> None:
    w = server.buffers["w"]
    w.create(2, contributors=["rank0", "Jürgen 1", "rank2", "rank3"])
    w.accumulate([1, 2], contributor="rank0")
    server.buffers.accumulate({"w": [1, 2]}, contributor="Jürgen 1")
    server.ops.relu_grad([1, 2], [1, 1], into=w, contributor="rank2")
    server.run("ReluGrad", {"dY": [1, 2], "X": [1, 1]}, into={"dX": w}, contributor="stranger")
    info = w.info()
    assert info.contributors_in == {"rank0": 1, "Jürgen 1": 1, "rank2": 1, "stranger": 1}
    assert info.missing == ("rank3",)
    with pytest.raises(DuplicateContributor, match="'rank0' has added 1 gradient to step 0") as caught:
        w.accumulate([1, 2], contributor="rank0")
    assert (caught.value.status, caught.value.context["step"]) == (409, 0)
    taken = w.take()
    assert (taken.closed_by, taken.contributors) == ("take", info.contributors_in)
    assert w.accumulate([1, 2], contributor="rank0").contributors is None


@pytest.mark.parametrize("name", ["", "a\tb", "x" * 101, 7])
def test_contributors_have_printable_names(server: Any, name: Any) -> None:
    w = server.buffers["w"]
    w.create(2)
    adds: list[Callable[[], object]] = [
        lambda: w.accumulate(1.0, contributor=name),
        lambda: server.buffers.accumulate({"w": 1.0}, contributor=name),
        lambda: server.ops.relu_grad([1, 2], [1, 1], into=w, contributor=name),
    ]
    for add in adds:
        with pytest.raises(InvalidInput, match="contributor is .*, but must be 1 to 100 printable characters"):
            add()
    with pytest.raises(InvalidInput, match="contributor is not an attribute of an operator"):
        server.run("ReluGrad", {"dY": 1.0, "X": 1.0}, {"contributor": "rank0"})


def test_an_open_step_says_who_is_missing(server: Any) -> None:
    w = server.buffers["w"]
    w.create(2, quorum=3, contributors=["rank0", "rank1", "rank2"])
    w.accumulate([1, 2], contributor="rank1")
    reads: list[Callable[[], object]] = [
        lambda: w.value(step=0),
        lambda: w.info(step=0),
        lambda: server.buffers.value(["w"], step=0),
        lambda: w.take(min_count=2),
        lambda: server.buffers.take(["w"], min_count=2),
    ]
    for read in reads:
        with pytest.raises(StepOpen, match="rank0 and rank2 are missing") as caught:
            read()
        assert caught.value.missing == ("rank0", "rank2")
        assert caught.value.context["quorum"] == 3
    server.buffers["b"].create(2, quorum=1)
    with pytest.raises(StepOpen) as caught:
        server.buffers["b"].value(step=0)
    assert caught.value.missing == ()


def test_the_missing_of_several_servers_are_joined(kind: str, urls: list[str]) -> None:
    with connected(kind, urls) as server:
        server.place({"miss.a": urls[0], "miss.b": urls[1]})
        expected = {"shape": 1, "quorum": 3, "contributors": ["rank0", "rank1", "rank2"]}
        server.buffers.create_many(dict.fromkeys(["miss.a", "miss.b"], expected))
        server.buffers["miss.a"].accumulate(1.0, contributor="rank0")
        server.buffers["miss.b"].accumulate(1.0, contributor="rank2")
        with pytest.raises(StepOpen) as caught:
            server.buffers.value(["miss.a", "miss.b"], step=0)
        assert sorted(caught.value.missing) == ["rank0", "rank1", "rank2"]
        delete_all(server)  # other clients do not know these places


# ----- what ends a step -----


def test_a_deadline_ends_a_step(server: Any) -> None:
    w = server.buffers["w"]
    w.create(2, quorum=3, deadline_seconds=0.2, min_count=2)
    w.accumulate([1, 2], contributor="a")
    assert w.info().deadline_at >= w.info().updated_at
    w.accumulate([1, 2], weight=3, contributor="b")
    receipt = w.info(step=0, timeout=20)
    assert (receipt.closed, receipt.closed_by, receipt.contributors) == (True, "deadline", {"a": 1, "b": 1})
    assert (receipt.step, receipt.count, receipt.weight, receipt.value) == (0, 2, 4.0, None)
    assert receipt.etag == w.info().etag
    assert w.value(step=0).tolist() == [4, 8]


def test_a_weight_ends_a_step(server: Any) -> None:
    w = server.buffers["w"]
    w.create(1, quorum_weight=10)
    assert not w.accumulate(1.0, weight=9).closed
    last = w.accumulate(1.0, weight=2, contributor="a")
    assert (last.closed, last.closed_by, last.contributors) == (True, "quorum", {"a": 1})


def test_a_mean_of_nothing_has_its_receipt(server: Any) -> None:
    w = server.buffers["w"]
    w.create(1, quorum=1)
    w.accumulate(1.0, weight=0, contributor="a")
    reads: list[Callable[[], object]] = [
        lambda: w.value(step=0, reduce="mean"),
        lambda: server.buffers.value(["w"], step=0, reduce="mean"),
    ]
    for read in reads:
        with pytest.raises(NothingToAverage) as caught:
            read()
        assert caught.value.receipt == w.info(step=0)
    assert w.info(step=0).contributors == {"a": 1}
    with pytest.raises(NothingToAverage) as caught:
        w.take(reduce="mean")
    assert caught.value.receipt is None


def test_receipts_of_steps_that_cannot_be_read(server: Any) -> None:
    w = server.buffers["w"]
    with pytest.raises(NotFound):
        w.info(step=0)
    w.create(1, quorum=1)
    with pytest.raises(StepOpen):
        w.info(step=1, timeout=0.01)
    for _ in range(2):
        w.accumulate(1.0)
    assert w.info(step=1).closed_by == "quorum"
    with pytest.raises(StepGone):
        w.info(step=0)


# ----- rules that change -----


def test_every_rule_changes_and_goes_away(server: Any) -> None:
    w = server.buffers["w"]
    before = w.create(2, quorum=9, keep=2)
    info = w.set_rules(**RULES)
    assert rules(info) == RULES
    assert (info.keep, info.shape, info.version) == (2, (2,), before.version + 1)
    assert w.info() == info
    gone = dict.fromkeys(
        ["quorum", "ttl_seconds", "deadline_seconds", "quorum_weight", "contributors", "max_norm"], None
    )
    with pytest.raises(InvalidInput, match="min_count is 2, but only a deadline asks for it"):
        w.set_rules(**gone)
    assert rules(w.set_rules(**gone, min_count=1)) == {**RULES, **gone, "min_count": 1}
    assert w.set_rules(per_contributor=3).per_contributor == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'shape'"):
        w.set_rules(shape=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'quorm'"):
        w.create(2, quorm=3)
    with pytest.raises(NotFound):
        server.buffers["nothing"].set_rules(quorum=1)


def test_a_rule_that_is_fulfilled_closes_the_step(server: Any, key: str) -> None:
    w = server.buffers["w"]
    w.create(1, quorum=3)
    w.accumulate(1.0)
    with pytest.raises(PreconditionFailed):
        w.set_rules(quorum=1, if_match='"0-0"')
    for _ in range(2):  # the second call is a repetition
        info = w.set_rules(quorum=1, if_match='"0-1"', idempotency_key=key)
        assert (info.step, info.quorum, info.closed_steps) == (1, 1, (0,))
    assert w.info(step=0).closed_by == "quorum"


def test_rules_of_buffers_on_several_servers(kind: str, urls: list[str]) -> None:
    names = [f"spread.{number}" for number in range(30)]  # all on one server once in 3^29
    with connected(kind, urls) as server:
        server.buffers.create_many({name: {"shape": 1, "quorum": 9} for name in names})
        assert len(set(server.places("spread.").values())) > 1
        for name in names:
            server.buffers[name].set_rules(quorum=2)
        assert [info.quorum for info in server.buffers.list("spread.")] == [2] * 30
