"""The contract of every store for requests for many buffers and requests repeated with a key."""

from __future__ import annotations

import math

import numpy as np
import pytest

from service import errors
from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.perform import Outcome, Request
from service.buffers.store import Store
from tests.buffers.calls import LARGE, add, create, do, fails_alone, key, ones, spec, state
from tests.buffers.stores import KEY_SECONDS, PATIENCE, Clock
from tests.kernels.equality import assert_same_bits
from tests.kernels.test_accumulate import numbers

# ----- many buffers -----


NAMES = [f"b{number}" for number in range(5)]


def test_one_request_changes_many_buffers(store: Store) -> None:
    create(store, *NAMES)
    outcome = do(
        store,
        Add(name="b0", gradient=ones(2)),
        Add(name="b1", gradient=ones(2), overwrite=True, weight=2.0, want_value=True),
        Zero(name="b2"),
        Take(name="b3"),
        Delete(name="b4"),
        Create(name="new", spec=spec((3,))),
    )
    assert list(outcome.receipts) == [*NAMES, "new"]
    assert all(outcome.receipts[name]["name"] == name for name in outcome.receipts)
    assert sorted(outcome.values) == ["b1", "b3"]
    assert [record.name for record in store.records()] == [*NAMES[:4], "new"]
    assert [one.value.tolist() for one in store.read(["b1", "b0"])] == [[2, 2], [1, 1]]


def test_all_buffers_that_differ_are_named(store: Store) -> None:
    create(store, *NAMES[:3], quorum=2)
    create(store, *NAMES[3:])
    creates = [Create(name=name, spec=spec()) for name in (*NAMES, "new")]
    error = fails_alone(store, errors.BufferExists, *creates)
    assert (error.context["buffer"], error.context["buffers"]) == ("b0", ["b0", "b1", "b2"])
    assert {name: one["created"] for name, one in do(store, *creates[3:]).receipts.items()} == {
        "b3": False,
        "b4": False,
        "new": True,
    }


FAILURES: list[tuple[type[errors.GradserveError], Change]] = [
    (errors.UnknownBuffer, Add(name="nowhere", gradient=ones(2))),
    (errors.UnknownBuffer, Zero(name="nowhere")),
    (errors.UnknownBuffer, Take(name="nowhere")),
    (errors.UnknownBuffer, Delete(name="nowhere")),
    (errors.PreconditionFailed, Add(name="last", gradient=ones(2), match=frozenset({'"9-9"'}))),
    (errors.PreconditionFailed, Delete(name="last", match=frozenset({'"9-9"'}))),
    (errors.PreconditionFailed, Create(name="nowhere", spec=spec(), match=frozenset({"*"}))),
    (errors.BufferExists, Create(name="last", spec=spec((9,)))),
    (errors.StaleStep, Add(name="last", gradient=ones(2), step=0)),
    (errors.StaleStep, Add(name="last", gradient=ones(2), step=2)),
    (errors.InvalidParameter, Add(name="last", gradient=ones(2), weight=np.nan)),
    (errors.ShapeMismatch, Add(name="last", gradient=ones(3))),
    (errors.TooFewGradients, Take(name="last", min_count=2)),
    (errors.NonfiniteGradient, Add(name="last", gradient=np.array([1, np.inf], np.float32))),
    (errors.NonfiniteGradient, Add(name="last", gradient=np.array([1, np.nan], np.float32), overwrite=True)),
    (errors.Invalid, Add(name="b0", gradient=ones(2))),
    (errors.Invalid, Zero(name="b1")),
    (errors.Invalid, Create(name="fresh", spec=spec())),
]


@pytest.mark.parametrize(("error", "last"), FAILURES, ids=lambda part: getattr(part, "__name__", type(part).__name__))
def test_a_change_that_fails_undoes_the_others_and_stores_no_key(
    namespace: Store, error: type[errors.GradserveError], last: Change
) -> None:
    create(namespace, *NAMES)
    create(namespace, "last", nonfinite="reject")
    create(namespace, "old", ttl_seconds=math.ulp(0.0))
    do(namespace, Take(name="last"))
    for name in [*NAMES, "last"]:
        add(namespace, name, [1, 2])
    changes: list[Change] = [
        Add(name="b0", gradient=ones(2)),
        Add(name="b1", gradient=ones(2), overwrite=True),
        Zero(name="b2"),
        Take(name="b3"),
        Delete(name="b4"),
        Create(name="fresh", spec=spec()),
        Create(name="old", spec=spec((3,))),
    ]
    fails_alone(namespace, error, *changes, last)
    with pytest.raises(errors.UnknownBuffer):
        namespace.record("fresh")
    with pytest.raises(errors.UnknownBuffer):
        namespace.record("old")
    keyed = key(caller=namespace.namespace)
    with pytest.raises(error):
        do(namespace, *changes, last, key=keyed)
    assert namespace.recall(keyed) is None
    adds = [Add(name=name, gradient=ones(2)) for name in NAMES]
    assert not do(namespace, *adds, key=keyed._replace(fingerprint=bytes(16))).replayed


def test_a_request_may_have_no_changes(store: Store) -> None:
    assert do(store) == Outcome({})


# ----- keys -----


def test_a_repeated_request_changes_nothing(store: Store) -> None:
    create(store, "a", "b")
    changes = Add(name="a", gradient=ones(2), weight=0.1), Zero(name="b")
    first = do(store, *changes, key=key())
    before = state(store)
    again = do(store, *changes, key=key())
    assert (first.replayed, again.replayed) == (False, True)
    assert again.receipts == first.receipts
    assert state(store) == before
    add(store, "a", [1, 2])
    assert do(store, *changes, key=key()).receipts == first.receipts


@pytest.mark.parametrize(
    "change",
    [
        Create(name="new", spec=spec((2, 3), "bfloat16", quorum=2, ttl_seconds=7.25)),
        Create(name="a", spec=spec()),
        Add(name="a", gradient=ones(2), weight=0.1),
        Add(name="a", gradient=ones(2), do_update=False),
        Zero(name="a"),
        Delete(name="a"),
    ],
    ids=lambda change: type(change).__name__,
)
def test_a_repeated_request_answers_the_same_receipt(store: Store, change: Change) -> None:
    create(store, "a")
    first = do(store, change, key=key())
    before = state(store)
    assert do(store, change, key=key()) == Outcome(first.receipts, {}, True)
    assert state(store) == before


def test_a_repeated_take_answers_the_same_value(store: Store) -> None:
    create(store, "a", "b", shape=(LARGE,), keep=2)
    gradient = numbers((LARGE,), np.float32, 1)
    add(store, "a", gradient)
    changes = Take(name="a"), Take(name="b")
    first = do(store, *changes, key=key())
    for _ in range(2):
        again = do(store, *changes, key=key())
        assert again.replayed
        assert again.receipts == first.receipts
        assert_same_bits(again.values["a"], gradient)
        assert not again.values["b"].any()
        add(store, "a", ones(1))
    do(store, Take(name="a"))
    assert_same_bits(do(store, *changes, key=key()).values["a"], gradient)


def test_a_repeated_add_that_closed_the_step_answers_the_same_value(store: Store) -> None:
    create(store, "a", quorum=2)
    add(store, "a", [1, 2])
    change = Add(name="a", gradient=ones(2), want_value=True)
    first = do(store, change, key=key())
    add(store, "a", [5, 5])
    again = do(store, change, key=key())
    assert again.receipts == first.receipts
    assert first.values["a"].tolist() == again.values["a"].tolist() == [2, 3]


def test_a_take_repeated_too_late_finds_no_value(store: Store) -> None:
    create(store, "a")
    do(store, Take(name="a"), key=key())
    do(store, Take(name="a"))
    before = state(store)
    with pytest.raises(errors.StepGone):
        do(store, Take(name="a"), key=key())
    assert state(store) == before


@pytest.mark.parametrize("since", ["expired", "deleted", "created again", "created again, and taken"])
def test_a_take_repeated_after_its_buffer_has_gone_finds_no_value(store: Store, clock: Clock, since: str) -> None:
    create(store, "a", ttl_seconds=10.0)
    add(store, "a", [1, 2])
    do(store, Take(name="a"), key=key())
    if since == "expired":
        clock.advance(10)
    else:
        do(store, Delete(name="a"))
    if since.startswith("created"):
        create(store, "a")
        add(store, "a", [5, 5])
    if since.endswith("taken"):
        do(store, Take(name="a"))
    with pytest.raises((errors.StepGone, errors.UnknownBuffer)):
        do(store, Take(name="a"), key=key())


def test_a_key_is_for_one_request(store: Store) -> None:
    create(store, "a")
    do(store, Add(name="a", gradient=ones(2)), key=key())
    before = state(store)
    with pytest.raises(errors.KeyReused, match="'k' was used for another request"):
        do(store, Add(name="a", gradient=ones(2)), key=key(request="another"))
    for names in ("ab", "b", ""):
        with pytest.raises(errors.KeyReused):
            do(store, *[Add(name=name, gradient=ones(2)) for name in names], key=key(request="for other buffers"))
    assert state(store) == before


def test_each_caller_has_its_own_keys(store: Store) -> None:
    create(store, "a")
    for caller in ("ann", "bob", ""):
        outcome = do(store, Add(name="a", gradient=ones(2)), key=key(caller=caller, request=f"of {caller}"))
        assert not outcome.replayed
    assert store.record("a").count == 3


def test_a_key_stores_the_receipts(store: Store) -> None:
    create(store, "a")
    assert store.recall(key()) is None
    outcome = do(store, Add(name="a", gradient=ones(2)), key=key())
    known = store.recall(key(), ["a"])
    assert known is not None
    assert known[:2] == (key().fingerprint, outcome.receipts)
    assert store.recall(key(request="another"), ["a"]) == known
    assert store.recall(key(caller="bob")) is None


@pytest.mark.parametrize("namespace", ["", "team"])
def test_a_key_stores_the_sources_of_its_request(store: Store, namespace: str) -> None:
    store = store.within(namespace)
    create(store, "a")
    states: list[str] = []

    def look() -> str:
        (snapshot,) = store.read(["a"])
        states.append(snapshot.state)
        return snapshot.state

    def ask() -> Outcome:
        return store.submit(Request([Add(name="a", gradient=ones(2))], key(caller=""), [look(), "more"])).result(
            PATIENCE
        )

    assert not ask().replayed
    again = ask()
    assert (again.replayed, again.sources) == (True, (states[0], "more"))
    known = store.recall(key(caller=""))
    assert known is not None
    assert known.sources == again.sources
    for change in (Zero(name="a"), Delete(name="a"), Create(name="a", spec=spec()), Take(name="a")):
        do(store, change)
        if not isinstance(change, Delete):
            look()
    assert len(set(states)) == 5


def test_a_key_expires_after_its_time_to_live_only(store: Store, clock: Clock) -> None:
    create(store, "a")
    change = Add(name="a", gradient=ones(2))
    do(store, change, key=key())
    clock.advance(KEY_SECONDS - 0.25)
    do(store, change, key=key("younger"))
    assert do(store, change, key=key()).replayed
    assert store.recall(key()) is not None
    clock.advance(0.5)
    assert store.recall(key()) is None
    assert not do(store, change, key=key(request="another")).replayed
    assert do(store, change, key=key("younger")).replayed
    assert store.record("a").count == 3


def test_an_expired_key_can_be_used_again(store: Store, clock: Clock) -> None:
    create(store, "a")
    change = Add(name="a", gradient=ones(2))
    for number in range(1, 4):
        assert not do(store, change, key=key()).replayed
        for _ in range(3):
            assert do(store, change, key=key()).replayed
            add(store, "a", [0, 0], overwrite=False, do_update=False)
        assert store.record("a").count == number
        clock.advance(KEY_SECONDS + 1)
