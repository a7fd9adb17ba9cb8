"""The contract of every store for steps: outputs written over buffers, together, only if no source has changed."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Change, Create, Delete, Take, Zero
from service.buffers.perform import Outcome, Request
from service.buffers.record import MAX_ANSWER_BYTES, Key
from service.buffers.sets import Set, Unchanged
from service.buffers.store import Store
from service.errors import (
    GradserveError,
    Invalid,
    InvalidParameter,
    KeyReused,
    NonfiniteGradient,
    NormTooLarge,
    PreconditionFailed,
    ShapeMismatch,
    SourceChanged,
    StepGone,
    UnknownBuffer,
)
from tests.buffers.calls import LARGE, add, create, do, fails_alone, key, ones, spec, state, told, value
from tests.buffers.postgres import Schema
from tests.buffers.stores import PATIENCE, Clock
from tests.kernels.calls import FLOAT_DTYPES
from tests.kernels.equality import assert_same_bits
from tests.kernels.test_accumulate import numbers


@pytest.fixture
def store(namespace: Store) -> Store:
    return namespace


@pytest.fixture
def own(store: Store) -> Key:
    return key(caller=store.namespace)


def state_of(store: Store, name: str) -> str:
    (snapshot,) = store.read([name])
    return snapshot.state


# ----- set -----


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (LARGE,)], ids=str)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)
def test_a_set_creates_a_buffer_and_then_replaces_its_value(store: Store, dtype: Any, shape: tuple[int, ...]) -> None:
    first, second = (numbers(shape, dtype, seed) for seed in (1, 2))
    made = do(store, Set(name="w", gradient=first, spec=spec(shape, str(dtype)))).receipts["w"]
    assert made == told("w", step=0, version=1, count=1, weight=1.0, created=True)
    assert store.record("w").spec == spec(shape, str(dtype))
    assert_same_bits(value(store, "w"), first)
    add(store, "w", np.ones((), np.float32), weight=5.0)
    again = do(store, Set(name="w", gradient=second, spec=spec(shape, str(dtype)))).receipts["w"]
    assert again == told("w", step=0, version=3, count=1, weight=1.0)
    assert_same_bits(value(store, "w"), second)


def test_a_set_keeps_the_bits_of_special_values(store: Store) -> None:
    special = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
    do(store, Set(name="w", gradient=special, spec=spec((7,))))
    assert_same_bits(value(store, "w"), special)
    do(store, Set(name="w", gradient=-special))
    assert_same_bits(value(store, "w"), -special)


def test_a_set_keeps_the_dtype_and_the_rules_of_a_buffer(store: Store) -> None:
    create(store, "w", dtype="float16", keep=3, ttl_seconds=9.0)
    rules = store.record("w").spec
    do(store, Set(name="w", gradient=np.array([1e9, 0.1]), spec=spec((2,), "float64")))
    assert store.record("w").spec == rules
    assert_same_bits(value(store, "w"), np.array([np.inf, 0.1], np.float16))


def test_a_set_is_a_gradient_for_the_rules_of_a_buffer(store: Store) -> None:
    create(store, "w", quorum=1, contributors=("x",))
    receipt = do(store, Set(name="w", gradient=ones(2), contributor="x")).receipts["w"]
    assert (receipt["closed"], receipt["closed_by"], receipt["contributors"]) == (True, "quorum", {"x": 1})
    assert value(store, "w", 0).tolist() == [1, 1]
    create(store, "normed", max_norm=1.0)
    create(store, "finite", nonfinite="reject")
    fails_alone(store, NormTooLarge, Set(name="normed", gradient=ones(2)))
    fails_alone(
        store, NonfiniteGradient, Set(name="w", gradient=ones(2)), Set(name="finite", gradient=ones(2) * np.inf)
    )


def test_sets_and_adds_of_a_request_are_one(store: Store) -> None:
    create(store, "w", "g", "h")
    outcome = do(
        store,
        Set(name="w", gradient=ones(2) * 3),
        Add(name="g", gradient=ones(2), weight=2.0),
        Unchanged(name="h", state=state_of(store, "h")),
        Set(name="new", gradient=ones(1), spec=spec((1,))),
    )
    assert [*outcome.receipts] == ["w", "g", "new"]
    assert [value(store, name).tolist() for name in ("w", "g", "h", "new")] == [[3, 3], [2, 2], [0, 0], [1]]
    assert store.record("h").version == 0


STALE = frozenset({'"9-9"'})

REFUSED: dict[str, tuple[type[GradserveError], Change, str]] = {
    "missing": (UnknownBuffer, Set(name="new", gradient=ones(2)), "There is no buffer 'new'"),
    "missing source": (UnknownBuffer, Unchanged(name="new", state="1-0-0"), "There is no buffer 'new'"),
    "missing, but it was read": (
        UnknownBuffer,
        Set(name="new", gradient=ones(2), spec=spec(), state="1-0-0"),
        "There is no buffer 'new'",
    ),
    "missing, but If-Match": (
        PreconditionFailed,
        Set(name="new", gradient=ones(2), spec=spec(), match=frozenset("*")),
        "If-Match needs one",
    ),
    "no new buffer": (
        InvalidParameter,
        Set(name="new", gradient=ones(2), spec=spec(), refusal=InvalidParameter("too long", parameter="name")),
        "too long",
    ),
    "other shape": (ShapeMismatch, Set(name="w", gradient=ones(3), tensor="out"), "out has shape [3], "),
    "shape of the spec": (ShapeMismatch, Set(name="new", gradient=ones(1), spec=spec()), "buffer 'new', [2]"),
    "no broadcast": (ShapeMismatch, Set(name="w", gradient=ones(1), tensor="out"), "out has shape [1], but set= needs"),
    "no scalar": (ShapeMismatch, Set(name="w", gradient=ones()), "gradient has shape [], but set= needs"),
    "other tag": (PreconditionFailed, Set(name="w", gradient=ones(2), match=STALE), "'w' is at \"0-0\""),
    "other state": (SourceChanged, Set(name="w", gradient=ones(2), state="1-0-9"), "'w' has changed since"),
    "other state of a source": (SourceChanged, Unchanged(name="w", state="1-0-9"), "'w' has changed since"),
    "twice": (Invalid, Unchanged(name="first", state="1-0-0"), "each buffer once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_is_made_whole_or_not_at_all(store: Store, own: Key, case: str) -> None:
    create(store, "first", "w")
    error, change, words = REFUSED[case]
    others = [Set(name="fresh", gradient=ones(1), spec=spec((1,))), Set(name="first", gradient=ones(2))]
    for changes in ([*others, change], [change, *others]):
        assert words in fails_alone(store, error, *changes).detail
        with pytest.raises(error):
            do(store, *changes, key=own)
        with pytest.raises(UnknownBuffer):
            store.record("fresh")
    assert store.recall(own) is None


def test_servers_that_set_a_new_buffer_at_once_create_it_once(schema: Schema) -> None:
    first, second = schema.open(), schema.open()
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            change = Set(name=f"new.{number}", gradient=ones(2), spec=spec())
            made = [*pool.map(lambda store, change=change: do(store, change).receipts[change.name], (first, second))]
            assert sorted((each["version"], "created" in each) for each in made) == [(1, True), (2, False)]


# ----- sources -----


CHANGES: dict[str, Change] = {
    "add": Add(name="w", gradient=ones(2)),
    "empty add": Add(name="w", gradient=np.zeros((), np.float32)),
    "set": Set(name="w", gradient=np.zeros(2, np.float32)),
    "zero": Zero(name="w"),
    "take": Take(name="w"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("is_target", [False, True])
def test_a_source_that_has_changed_stops_the_step(store: Store, what: str, is_target: bool) -> None:
    create(store, "w", "out")
    seen = state_of(store, "w")
    do(store, CHANGES[what])
    step: list[Change] = [
        Set(name="w", gradient=ones(2), state=seen) if is_target else Unchanged(name="w", state=seen),
        Set(name="out", gradient=ones(2)),
    ]
    error = fails_alone(store, SourceChanged, *step)
    assert (error.code, error.status, error.context["buffer"]) == ("source_changed", 409, "w")
    step[0].state = state_of(store, "w")
    assert "out" in do(store, *step).receipts


def test_what_changes_no_value_does_not_stop_a_step(store: Store) -> None:
    create(store, "w", "out")
    seen = state_of(store, "w")
    do(store, Add(name="w", gradient=ones(2), do_update=False), Create(name="out", spec=spec()))
    store.read(["w"])
    do(store, Unchanged(name="w", state=seen), Set(name="out", gradient=ones(2)))
    assert value(store, "out").tolist() == [1, 1]


def test_a_source_that_was_created_again_has_changed(store: Store) -> None:
    create(store, "w", "out")
    seen = state_of(store, "w")
    do(store, Delete(name="w"))
    fails_alone(store, UnknownBuffer, Unchanged(name="w", state=seen), Set(name="out", gradient=ones(2)))
    create(store, "w")
    fails_alone(store, SourceChanged, Unchanged(name="w", state=seen), Set(name="out", gradient=ones(2)))


def test_a_step_that_was_due_has_changed_its_buffer(module_clock: Clock, store: Store) -> None:
    create(store, "w", deadline_seconds=5.0)
    create(store, "out")
    add(store, "w", [1, 1])
    seen = state_of(store, "w")
    module_clock.advance(6.0)
    with pytest.raises(SourceChanged):
        do(store, Unchanged(name="w", state=seen), Set(name="out", gradient=ones(2)))
    assert store.record("out").version == 0


def test_a_source_that_has_expired_is_gone(module_clock: Clock, store: Store) -> None:
    create(store, "w", ttl_seconds=5.0)
    seen = state_of(store, "w")
    module_clock.advance(6.0)
    fails_alone(store, UnknownBuffer, Unchanged(name="w", state=seen))
    made = do(store, Set(name="w", gradient=ones(2), spec=spec())).receipts["w"]
    assert made["created"]


def test_steps_of_many_threads_lose_no_update(store: Store) -> None:
    create(store, "w", "count")

    def step(_: int) -> int:
        for attempt in range(1000):
            before, counted = store.read(["w", "count"])
            changes = [
                Set(name="w", gradient=before.value * 2 + 1, state=before.state),
                Add(name="count", gradient=ones(2), state=counted.state),
            ]
            try:
                do(store, *changes)
                return attempt
            except SourceChanged:
                continue
        raise AssertionError("no attempt went through")

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(step, range(16))]
    assert value(store, "w").tolist() == [2**16 - 1] * 2
    assert value(store, "count").tolist() == [16, 16]
    assert store.record("w").version == 16


# ----- keys -----


def step_of(store: Store, *changes: Change, key: Key, sources: list[str], answer: bytes = b"") -> Outcome:
    return store.submit(Request(changes, key, sources, answer=answer, by_prefix=True)).result(PATIENCE)


@pytest.mark.parametrize("answer", [b"", b"\x00\xff[1.5]", bytes(range(256)) * (MAX_ANSWER_BYTES // 256)], ids=len)
def test_a_step_with_a_key_happens_once(store: Store, own: Key, answer: bytes) -> None:
    """The second worker has computed the same step before it knew of the first, and another from what that left."""
    create(store, "w", "g")
    seen = [state_of(store, name) for name in ("w", "g")]

    def step(seen: list[str], answer: bytes) -> Outcome:
        changes = [
            Set(name="w", gradient=ones(2), state=seen[0]),
            Unchanged(name="g", state=seen[1]),
            Set(name="new", gradient=ones(2), spec=spec()),
        ]
        return step_of(store, *changes, key=own, sources=seen, answer=answer)

    first = step(seen, answer)
    assert (first.replayed, [*first.receipts]) == (False, ["w", "new"])
    after = state(store)
    for again in (step(seen, b"lost"), step([state_of(store, name) for name in ("w", "g")], b"late")):
        assert (again.replayed, again.receipts, again.sources, again.answer) == (True, first.receipts, (*seen,), answer)
    add(store, "g", [1, 1])
    do(store, Delete(name="new"))
    assert step(seen, b"").receipts == first.receipts
    known = store.recall(own, ["w", "new"])
    assert known is not None
    assert (known.receipts, known.answer, known.sources) == (first.receipts, answer, (*seen,))
    assert state(store)["w"] == after["w"]
    with pytest.raises(KeyReused):
        step_of(store, Set(name="w", gradient=ones(2)), key=own._replace(fingerprint=bytes(16)), sources=[])


def test_a_repeated_step_has_the_names_that_it_had(store: Store, own: Key) -> None:
    """A prefix in `set=` may fit other buffers by now."""
    create(store, "m.a", "m.b", "s")
    seen = [state_of(store, "s")]
    first = step_of(store, *[Set(name=f"m.{each}", gradient=ones(2)) for each in "ab"], key=own, sources=seen)
    again = step_of(store, *[Set(name=f"m.{each}", gradient=ones(2)) for each in "0ab"], key=own, sources=seen)
    assert (again.replayed, again.receipts, [*again.receipts]) == (True, first.receipts, ["m.a", "m.b"])
    known = store.recall(own, ["m.0", "m.a"])
    assert known is not None
    assert known.receipts == first.receipts


def test_a_step_is_not_repeated_in_a_buffer_that_was_created_since(store: Store, own: Key) -> None:
    first = step_of(store, Set(name="new", gradient=ones(2), spec=spec()), key=own, sources=["1-0-0"])
    do(store, Delete(name="new"))
    create(store, "new")
    with pytest.raises(StepGone) as caught:
        step_of(store, Set(name="new", gradient=ones(2), spec=spec()), key=own, sources=["1-0-0"])
    assert caught.value.context["receipts"] == first.receipts
    assert store.record("new").version == 0
    assert math.isclose(first.receipts["new"]["weight"], 1.0)
