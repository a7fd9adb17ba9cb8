"""The contract of every store for what ends a step, and for contributors."""

from __future__ import annotations

import re
from typing import Any

import pytest

from service import errors
from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.names import BufferName
from service.buffers.record import Record
from service.buffers.restore import Restore
from service.buffers.rules import CloseIfDue, SetRules
from service.buffers.steps import MAX_CONTRIBUTORS, MAX_KEEP
from service.buffers.store import Store
from tests.buffers.calls import add, create, do, fails_alone, key, ones, spec, value
from tests.buffers.postgres import until
from tests.buffers.stores import Clock


def closing(store: Store, step: int = 0, name: str = "a") -> dict[str, Any]:
    """Return the receipt of a closed step."""
    (snapshot,) = store.read([name], step)
    return snapshot.receipt()


def settle(store: Store, *names: str) -> None:
    """Close what is due without waiting for the store's own thread."""
    do(store, *[CloseIfDue(name=name) for name in names])


# ----- contributors -----


def test_contributors_are_listed(store: Store) -> None:
    create(store, "a", quorum=4, contributors=("x", "y", "z"), per_contributor=2)
    add(store, "a", [1, 2], contributor="x")
    add(store, "a", [1, 2], contributor="x")
    add(store, "a", [1, 2])
    known = store.record("a").as_json()
    assert (known["contributors_in"], known["missing"], known["contributors"]) == (
        {"x": 2},
        ["y", "z"],
        ["x", "y", "z"],
    )
    with pytest.raises(errors.StepOpen, match=r"; y and z are missing$") as caught:
        store.read(["a"], 0)
    assert caught.value.context["missing"] == ["y", "z"]
    receipt = add(store, "a", [1, 2], contributor="guest")
    assert (receipt["closed_by"], receipt["contributors"]) == ("quorum", {"x": 2, "guest": 1})
    assert closing(store) == {**receipt, "updated": False}
    assert store.record("a").as_json()["contributors_in"] == {}
    assert store.record("a").as_json()["missing"] == ["x", "y", "z"]


def test_an_open_step_without_missing_contributors_says_so(store: Store) -> None:
    """It waits for more gradients of those who are in, or of others."""
    create(store, "a", quorum=3, contributors=("x", "y"), per_contributor=2)
    for name in "xy":
        add(store, "a", [1, 2], contributor=name)
    with pytest.raises(errors.StepOpen, match="count is 2 of 3; all expected contributors are in$") as caught:
        store.read(["a"], 0)
    assert caught.value.context["missing"] == []


def missing(store: Store) -> Any:
    """Return who is missing in `a`, each with the time since when."""
    known = store.record("a").as_json()
    assert (None if known["missing"] is None else [*known["missing_since"]]) == known["missing"]
    return known["missing_since"]


def test_the_missing_have_the_order_of_their_names(store: Store) -> None:
    """The order does not depend on who was first in the last step, or in those before."""
    create(store, "a", quorum=2, keep=2)
    for order in ("yx", "xy", "yx"):
        for name in order:
            add(store, "a", [1, 2], contributor=name)
        assert store.record("a").as_json()["missing"] == ["x", "y"]


def test_those_of_the_last_step_are_missing_as_long_as_nobody_else_is_in(store: Store, clock: Clock) -> None:
    create(store, "a", quorum=3)
    add(store, "a", [1, 2], contributor="x")
    assert missing(store) is None
    for name in "yz":
        add(store, "a", [1, 2], contributor=name)
    closed_at = clock.now
    assert missing(store) == dict.fromkeys("xyz", closed_at)
    clock.advance(5)
    add(store, "a", [1, 2], contributor="y")
    assert missing(store) == dict.fromkeys("xz", closed_at)
    error = fails_alone(store, errors.TooFewGradients, Take(name="a", min_count=2))
    assert error.detail.endswith("min_count is 2; x and z are missing")
    assert error.context["missing"] == ["x", "z"]
    do(store, Zero(name="a"))
    assert missing(store) == dict.fromkeys("xyz", closed_at)
    add(store, "a", [1, 2])
    assert missing(store) is None, "nobody knows who has added"
    do(store, Zero(name="a"))
    add(store, "a", [1, 2], contributor="x")
    add(store, "a", [1, 2], contributor="guest")
    assert missing(store) is None
    do(store, Take(name="a"))
    assert missing(store) == dict.fromkeys(["x", "guest"], clock.now)
    do(store, Take(name="a"))
    assert missing(store) is None, "the last step had no contributors"


def test_a_contributor_is_missing_since_the_end_of_its_last_step(store: Store, clock: Clock) -> None:
    create(store, "a", contributors=("x", "y"), ttl_seconds=1000.0)
    created = clock.now
    assert missing(store) == {"x": created, "y": created}
    ends = []
    for who in ("y", "x", "x"):
        clock.advance(5)
        add(store, "a", [1, 2], contributor=who)
        clock.advance(5)
        do(store, Take(name="a"))
        ends.append(clock.now)
    assert missing(store) == {"x": ends[2], "y": ends[0]}
    do(store, SetRules(name="a", rules={"contributors": ("z", "y")}))
    assert missing(store) == {"z": created, "y": ends[0]}
    do(store, SetRules(name="a", rules={"contributors": None}))
    assert missing(store) == {"x": ends[2]}


def test_the_deadline_says_since_when(store: Store, clock: Clock) -> None:
    create(store, "a", contributors=("x", "y"), deadline_seconds=3.0)
    add(store, "a", [1, 2], contributor="x")
    due = clock.now + 3
    clock.advance(10)
    settle(store, "a")
    assert missing(store) == {"x": due, "y": due - 3}


def test_too_few_gradients_names_the_missing(store: Store) -> None:
    create(store, "a", contributors=("x", "y"))
    add(store, "a", [1, 2], contributor="x")
    error = fails_alone(store, errors.TooFewGradients, Take(name="a", min_count=2))
    assert error.detail.endswith("; y is missing")
    assert error.context == {"buffer": "a", "step": 0, "count": 1, "min_count": 2, "missing": ["y"]}
    do(store, SetRules(name="a", rules={"quorum": 2}))
    create(store, "b", quorum=3)
    error = fails_alone(store, errors.TooFewGradients, Take(name="a"), Take(name="b", min_count=2))
    assert error.context == {"buffer": "b", "step": 0, "count": 0, "min_count": 2, "quorum": 3}


@pytest.mark.parametrize("limit", [1, 3])
def test_a_contributor_adds_only_so_often(store: Store, limit: int) -> None:
    create(store, "a", per_contributor=limit)
    again = Add(name="a", gradient=ones(2), contributor="x")
    for _ in range(limit):
        do(store, again)
    error = fails_alone(store, errors.DuplicateContributor, again)
    assert error.context == {"buffer": "a", "step": 0, "count": limit}
    add(store, "a", [1, 2], contributor="y")
    do(store, Zero(name="a"))
    assert do(store, again).receipts["a"]["count"] == 1


def test_a_duplicate_in_one_buffer_refuses_the_request(store: Store) -> None:
    create(store, "a", "b")
    add(store, "b", [1, 2], contributor="x")
    changes = [Add(name=name, gradient=ones(2), contributor="x") for name in "ab"]
    assert fails_alone(store, errors.DuplicateContributor, *changes).context["buffer"] == "b"


def test_a_repeated_request_is_no_duplicate(store: Store) -> None:
    create(store, "a", quorum=1)
    first = do(store, Add(name="a", gradient=ones(2), contributor="x"), key=key())
    again = do(store, Add(name="a", gradient=ones(2), contributor="x"), key=key())
    assert again.replayed
    assert again.receipts == first.receipts
    assert again.receipts["a"]["contributors"] == {"x": 1}


@pytest.mark.parametrize("closes", [0, 3, 6])
def test_the_receipts_of_many_buffers_are_replayed(store: Store, closes: int) -> None:
    """Receipts that say what closed the step, and receipts of running steps, in one request."""
    names = [f"n{number}" for number in range(6)]
    for number, name in enumerate(names):
        create(store, name, quorum=1 if number < closes else None)
    changes = [Add(name=name, gradient=ones(2), contributor="x") for name in names]
    first = do(store, *changes, key=key())
    again = do(store, *changes, key=key())
    assert again.replayed
    assert again.receipts == first.receipts
    assert [receipt.get("closed_by") for receipt in again.receipts.values()].count("quorum") == closes


def test_an_overwrite_leaves_its_contributor_alone(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2], contributor="x")
    add(store, "a", [1, 2], contributor="y")
    add(store, "a", [3, 4], contributor="y", overwrite=True)
    assert store.record("a").contributors_in == {"y": 1}
    add(store, "a", [3, 4], overwrite=True)
    assert store.record("a").contributors_in == {}


def test_an_add_that_changes_nothing_has_no_contributor(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2], contributor="x")
    assert not add(store, "a", [1, 2], contributor="x", do_update=False)["updated"]
    assert store.record("a").contributors_in == {"x": 1}


def test_a_step_has_a_bounded_number_of_contributors(store: Store) -> None:
    most = MAX_CONTRIBUTORS
    create(store, "a", keep=MAX_KEEP)
    record = store.record("a")
    crowd = {f"rank{number}": 1 for number in range(most)}
    change = Add(name="a", gradient=ones(2), contributor="one more")
    with pytest.raises(errors.InvalidParameter, match=f"'one more', but step 0 of 'a' has {most} contributors"):
        change.admit(record.changed(contributors_in=crowd))
    change.admit(record.changed(contributors_in=dict([*crowd.items()][1:])))


# ----- weight -----


def test_the_quorum_of_weight_closes_the_step(store: Store) -> None:
    create(store, "a", quorum_weight=10.0)
    assert not add(store, "a", [1, 2], weight=6.0)["closed"]
    with pytest.raises(errors.StepOpen, match=r"its weight 6.0 of 10.0"):
        store.read(["a"], 0)
    receipt = add(store, "a", [1, 2], weight=5.0)
    assert (receipt["closed"], receipt["closed_by"], receipt["count"], receipt["weight"]) == (True, "quorum", 2, 11.0)
    assert value(store, "a", 0).tolist() == [11, 22]


@pytest.mark.parametrize(("shares", "whole"), [([0.1] * 10, 1.0), ([1e300 / 7] * 7, 1e300), ([0.7, 0.2, 0.1], 1.0)])
def test_shares_of_a_whole_reach_the_quorum_of_weight(store: Store, shares: list[float], whole: float) -> None:
    """Up to rounding, and not before the last share."""
    create(store, "a", dtype="float64", quorum_weight=whole)
    closed = [add(store, "a", [0, 0], weight=share)["closed"] for share in shares]
    assert closed == [False] * (len(shares) - 1) + [True]


def test_a_weight_that_is_a_billionth_short_does_not_reach_the_quorum(store: Store) -> None:
    create(store, "a", quorum_weight=2.0)
    assert not add(store, "a", [0, 0], weight=2 - 3e-9)["closed"]
    do(store, SetRules(name="a", rules={"quorum_weight": 2 - 2e-9}))
    assert store.record("a").step == 1


# ----- deadlines -----


def test_a_deadline_closes_the_step(store: Store, clock: Clock) -> None:
    """The deadline counts from the first add, and the next step has one of its own."""
    create(store, "a", deadline_seconds=10.0, quorum=5)
    begun = clock.now
    assert store.record("a").as_json()["deadline_at"] is None
    for _ in range(2):
        add(store, "a", [1, 2], contributor=f"{clock.now}")
        clock.advance(4)
    assert store.record("a").as_json()["deadline_at"] == begun + 10
    clock.advance(1.999)
    settle(store, "a")
    assert store.record("a").step == 0
    clock.advance(0.002)
    receipt = add(store, "a", [5, 5])
    assert (receipt["step"], receipt["count"], receipt["version"]) == (1, 1, 4)
    old = closing(store)
    assert (old["closed_by"], old["count"], old["weight"], old["version"]) == ("deadline", 2, 2.0, 3)
    assert old["contributors"] == {f"{begun}": 1, f"{begun + 4}": 1}
    assert value(store, "a", 0).tolist() == [2, 4]
    assert store.record("a").deadline_at == clock.now + 10


def test_a_step_without_adds_has_no_deadline(store: Store, clock: Clock) -> None:
    create(store, "a", deadline_seconds=10.0)
    clock.advance(100)
    settle(store, "a")
    assert store.record("a").step == 0
    add(store, "a", [1, 2])
    do(store, Zero(name="a"))
    clock.advance(100)
    settle(store, "a")
    assert store.record("a").step == 1


def test_an_add_to_a_step_whose_deadline_is_over_is_late(store: Store, clock: Clock) -> None:
    create(store, "a", deadline_seconds=10.0)
    add(store, "a", [1, 2], step=0)
    clock.advance(10)
    with pytest.raises(errors.StaleStep):
        do(store, Add(name="a", gradient=ones(2), step=0))
    settle(store, "a")
    assert closing(store)["count"] == 1


def test_the_deadline_waits_for_min_count(store: Store, clock: Clock) -> None:
    create(store, "a", deadline_seconds=10.0, min_count=3)
    add(store, "a", [1, 2])
    clock.advance(11)
    assert not add(store, "a", [1, 2], step=0)["closed"]
    receipt = add(store, "a", [1, 2], step=0)
    assert (receipt["closed"], receipt["closed_by"], receipt["count"]) == (True, "deadline", 3)
    assert store.record("a").step == 1


def test_a_quorum_before_the_deadline_ends_it(store: Store, clock: Clock) -> None:
    create(store, "a", deadline_seconds=10.0, quorum=2, keep=5)
    for _ in range(3):
        add(store, "a", [1, 2])
        clock.advance(6)
        assert add(store, "a", [1, 2])["closed_by"] == "quorum"
    clock.advance(100)
    settle(store, "a")
    assert store.record("a").step == 3
    assert [closing(store, step)["count"] for step in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("change", [Take(name="a"), Zero(name="a"), Delete(name="a"), SetRules(name="a")])
def test_every_change_finds_the_next_step(store: Store, clock: Clock, change: Any) -> None:
    create(store, "a", deadline_seconds=10.0, keep=3)
    add(store, "a", [1, 2])
    clock.advance(10)
    do(store, change)
    if isinstance(change, Delete):
        with pytest.raises(errors.UnknownBuffer):
            store.record("a")
        return
    assert closing(store)["closed_by"] == "deadline"
    assert store.record("a").step == (2 if isinstance(change, Take | Zero) else 1)


def test_the_store_closes_by_itself(store: Store, clock: Clock, at_once: None) -> None:
    create(store, "a", deadline_seconds=10.0)
    create(store, "b", deadline_seconds=20.0)
    add(store, "a", [1, 2])
    add(store, "b", [1, 2])
    clock.advance(15)
    until(lambda: store.record("a").step == 1, "a step stays open")
    assert store.record("b").step == 0
    clock.advance(15)
    until(lambda: store.record("b").step == 1, "a step stays open")
    assert (store.record("a").updated, store.record("b").updated) == (clock.now - 20, clock.now - 10)


def test_a_deadline_is_a_change(store: Store, clock: Clock) -> None:
    """The time to live counts from it, also if nobody looks meanwhile; a buffer that expires first is gone."""
    create(store, "a", deadline_seconds=10.0, ttl_seconds=15.0)
    create(store, "b", deadline_seconds=20.0, ttl_seconds=15.0)
    add(store, "a", [1, 2])
    add(store, "b", [1, 2])
    assert (store.record("a").expires, store.record("b").expires) == (clock.now + 25, clock.now + 15)
    clock.advance(22)
    settle(store, "a")
    assert store.record("a").as_json()["expires_at"] == clock.now + 3
    assert closing(store)["count"] == 1
    with pytest.raises(errors.UnknownBuffer):
        store.record("b")
    clock.advance(3)
    with pytest.raises(errors.UnknownBuffer):
        store.record("a")


def test_many_steps_are_due_together(store: Store, clock: Clock) -> None:
    names = [f"n{number}" for number in range(20)]
    create(store, *names, deadline_seconds=10.0)
    do(store, *[Add(name=name, gradient=ones(2)) for name in names])
    clock.advance(10)
    settle(store, *names)
    assert {store.record(name).step for name in names} == {1}


# ----- other rules -----


def test_rules_are_set(store: Store, clock: Clock) -> None:
    create(store, "a", quorum=5)
    add(store, "a", [1, 2])
    clock.advance(3)
    rules: dict[str, Any] = {
        "quorum": 3,
        "deadline_seconds": 99.0,
        "min_count": 2,
        "contributors": ("x",),
        "per_contributor": 4,
        "ttl_seconds": 60.0,
    }
    answer = do(store, SetRules(name="a", rules=rules)).receipts["a"]
    assert answer == store.record("a").as_json()
    assert {name: answer[name] for name in rules} == {**rules, "contributors": ["x"]}
    assert (answer["version"], answer["updated_at"], answer["step"], answer["count"]) == (2, clock.now, 0, 1)
    assert do(store, SetRules(name="a", rules=rules)).receipts["a"]["version"] == 2
    do(store, Create(name="a", spec=spec(**rules)))
    add(store, "a", [1, 2])
    assert add(store, "a", [1, 2])["closed_by"] == "quorum"


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"min_count": 2}, "min_count", "min_count is 2, but only a deadline asks for it"),
    ({"min_count": 2, "quorum": 2}, "min_count", "min_count is 2, but only a deadline"),
    ({"min_count": 5, "quorum": 2, "deadline_seconds": 9.0}, "min_count", "is 5, but the quorum of 2 closes a step"),
    ({"quorum": 3, "contributors": ("x", "y")}, "quorum", "is 3, but the expected contributors add 2 .*: 2 of them, 1"),
    (
        {"quorum": 7, "contributors": ("x", "y"), "per_contributor": 3},
        "quorum",
        "add 6 gradients .*: 2 of them, 3 each",
    ),
    (
        {"min_count": 5, "contributors": ("x", "y"), "per_contributor": 2, "deadline_seconds": 9.0},
        "min_count",
        "min_count is 5, but the expected contributors add 4 gradients",
    ),
]
"""Rules that cannot mean what they say, the parameter that the error names, and its words."""


@pytest.mark.parametrize(("rules", "parameter", "words"), CONTRADICTIONS)
def test_rules_that_contradict_each_other_are_refused(
    store: Store, rules: dict[str, Any], parameter: str, words: str
) -> None:
    create(store, "a")
    for change in (SetRules(name="a", rules=rules), Create(name="new", spec=spec(**rules))):
        error = fails_alone(store, errors.InvalidParameter, change)
        assert error.context["parameter"] == parameter
        assert re.search(words, error.detail)
    name, rule = [*rules.items()][0]
    others = {key: value for key, value in rules.items() if key != name}
    if name != "min_count":  # whose others mean something
        do(store, SetRules(name="a", rules=others))
        fails_alone(store, errors.InvalidParameter, SetRules(name="a", rules={name: rule}))


@pytest.mark.parametrize(
    "rules",
    [
        {"min_count": 2, "quorum": 2, "deadline_seconds": 9.0},
        {"min_count": 5, "quorum_weight": 2.0, "deadline_seconds": 9.0},
        {"quorum": 6, "contributors": ("x", "y"), "per_contributor": 3},
        {"quorum": 2, "contributors": ("x", "y", "z")},
        {"min_count": 4, "contributors": ("x", "y"), "per_contributor": 2, "deadline_seconds": 9.0},
    ],
)
def test_rules_on_the_brink_are_taken(store: Store, rules: dict[str, Any]) -> None:
    create(store, "a", **rules)
    create(store, "b")
    do(store, SetRules(name="b", rules=rules))
    assert store.record("b").spec == store.record("a").spec


@pytest.mark.parametrize("rules", [rules for rules, _, _ in CONTRADICTIONS])
def test_a_buffer_of_an_older_version_keeps_its_contradicting_rules(store: Store, rules: dict[str, Any]) -> None:
    old = Record(BufferName("", "a"), spec(**rules), 1, 1.0, 1.0)
    do(store, Restore(name="a", record=old, value=ones(2)))
    do(store, Create(name="a", spec=spec(**rules)))
    assert do(store, SetRules(name="a", rules={"ttl_seconds": 1e6})).receipts["a"]["ttl_seconds"] == 1e6
    assert add(store, "a", [1, 2])["count"] == 1
    assert value(store, "a").tolist() == [2, 3]
    do(store, SetRules(name="a", rules={"min_count": 1, "quorum": None}))
    fails_alone(store, errors.InvalidParameter, SetRules(name="a", rules=rules))


@pytest.mark.parametrize(
    ("rules", "by"),
    [({"quorum": 2, "min_count": 1}, "quorum"), ({"quorum_weight": 1.5}, "quorum"), ({"min_count": 2}, "deadline")],
)
def test_a_rule_that_is_fulfilled_closes_the_step(store: Store, clock: Clock, rules: dict[str, Any], by: str) -> None:
    create(store, "a", quorum=5, deadline_seconds=10.0, min_count=3)
    add(store, "a", [1, 2])
    add(store, "a", [1, 2])
    clock.advance(10)
    assert do(store, SetRules(name="a", rules=rules)).receipts["a"]["step"] == 1
    assert closing(store)["closed_by"] == by


def test_a_step_without_adds_fulfils_nothing(store: Store) -> None:
    create(store, "a")
    assert do(store, SetRules(name="a", rules={"quorum": 1})).receipts["a"]["step"] == 0


@pytest.mark.parametrize(("before", "start"), [(60.0, 0), (None, 8)])
def test_another_deadline_counts_from_the_first_add(
    store: Store, clock: Clock, before: float | None, start: int
) -> None:
    create(store, "a", deadline_seconds=before)
    begun = clock.now
    add(store, "a", [1, 2])
    clock.advance(8)
    answer = do(store, SetRules(name="a", rules={"deadline_seconds": 10.0})).receipts["a"]
    assert answer["deadline_at"] == begun + start + 10
    clock.advance(start + 1.999)
    settle(store, "a")
    assert store.record("a").step == 0
    clock.advance(0.001)
    settle(store, "a")
    assert closing(store)["closed_by"] == "deadline"


def test_a_deadline_is_taken_away(store: Store, clock: Clock) -> None:
    create(store, "a", deadline_seconds=10.0)
    add(store, "a", [1, 2])
    assert do(store, SetRules(name="a", rules={"deadline_seconds": None})).receipts["a"]["deadline_at"] is None
    clock.advance(100)
    settle(store, "a")
    assert store.record("a").step == 0


def test_a_shorter_time_to_live_counts(store: Store, clock: Clock, at_once: None) -> None:
    create(store, "a", "b", ttl_seconds=500.0)
    create(store, "c")
    for name in "ac":
        do(store, SetRules(name=name, rules={"ttl_seconds": 5.0}))
    clock.advance(5)
    assert [record.name for record in store.records()] == ["b"]
    create(store, "a", "c")
