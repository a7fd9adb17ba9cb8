"""The contract of every store for steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Take, Zero
from service.buffers.store import Store
from service.errors import StaleStep, StepGone, StepOpen, TooFewGradients
from tests.buffers.calls import add, create, do, fails_alone, ones, told, value
from tests.buffers.stores import Clock
from tests.kernels.equality import assert_same_bits


def test_zero_begins_the_next_step(store: Store, clock: Clock) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    clock.advance(5)
    receipt = do(store, Zero(name="a")).receipts["a"]
    assert receipt == told("a", step=1, version=2, count=0, weight=0.0)
    assert_same_bits(value(store, "a"), np.zeros(2, np.float32))
    assert store.record("a").updated == clock.now
    with pytest.raises(StepGone):
        store.read(["a"], 0)


def test_a_take_closes_the_step(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2], weight=2.0)
    outcome = do(store, Take(name="a"))
    closed: dict[str, Any] = {"closed": True, "closed_by": "take", "contributors": {}}
    assert outcome.receipts["a"] == told("a", step=0, version=2, count=1, weight=2.0, **closed)
    assert outcome.values["a"].tolist() == [2, 4]
    record = store.record("a")
    assert (record.step, record.version, record.count, record.weight) == (1, 2, 0, 0.0)
    assert not value(store, "a").any()
    (snapshot,) = store.read(["a"], 0)
    assert snapshot.receipt() == {**outcome.receipts["a"], "updated": False}
    assert (snapshot.receipt()["weight"], snapshot.value.tolist()) == (2.0, [2, 4])
    assert snapshot.etag.startswith('"0-2-')


def test_a_take_without_adds_answers_zeros(store: Store) -> None:
    create(store, "a")
    assert not do(store, Take(name="a")).values["a"].any()
    assert not value(store, "a", 0).any()


def test_a_take_needs_min_count_adds(store: Store) -> None:
    create(store, "a")
    add(store, "a", [1, 2])
    error = fails_alone(store, TooFewGradients, Take(name="a", min_count=2))
    assert error.context == {"buffer": "a", "step": 0, "count": 1, "min_count": 2}
    add(store, "a", [1, 2])
    assert do(store, Take(name="a", min_count=2)).receipts["a"]["count"] == 2


def test_the_quorum_closes_the_step(store: Store) -> None:
    create(store, "a", quorum=3)
    for step in range(3):
        receipts = [add(store, "a", [1, 2], step=step, weight=0.5) for _ in range(3)]
        assert [one["closed"] for one in receipts] == [False, False, True]
        assert {one["step"] for one in receipts} == {step}
        assert receipts[-1]["version"] == 3 * step + 3
        assert (receipts[-1]["count"], receipts[-1]["weight"]) == (3, 1.5)
        assert value(store, "a", step).tolist() == [1.5, 3.0]
        assert not value(store, "a").any()
        assert store.record("a").count == 0


def test_an_overwrite_restarts_the_count_at_one(store: Store) -> None:
    create(store, "a", quorum=2)
    for _ in range(3):
        assert not add(store, "a", [1, 2], overwrite=True)["closed"]
    assert add(store, "a", [1, 2])["closed"]
    create(store, "b", quorum=1)
    assert add(store, "b", [1, 2], overwrite=True)["closed"]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_last_closed_steps_are_kept(store: Store, keep: int) -> None:
    create(store, "a", keep=keep)
    for step in range(8):
        add(store, "a", [step, 1])
        do(store, Take(name="a"))
        kept = range(max(0, step + 1 - keep), step + 1)
        assert store.record("a").as_json()["closed_steps"] == list(kept)
        for old in range(step + 1):
            if old in kept:
                assert value(store, "a", old).tolist() == [old, 1]
            else:
                with pytest.raises(StepGone, match=rf"^Step {old} of 'a' is no longer kept: .* the last {keep} closed"):
                    store.read(["a"], old)


def test_zero_keeps_the_closed_steps(store: Store) -> None:
    create(store, "a", keep=2)
    add(store, "a", [1, 2])
    do(store, Take(name="a"))
    for _ in range(5):
        add(store, "a", [9, 9])
        do(store, Zero(name="a"))
    assert value(store, "a", 0).tolist() == [1, 2]


@pytest.mark.parametrize("step", [1, 2])
def test_reading_an_open_step_is_refused(store: Store, step: int) -> None:
    """The error names the buffer's step, count and quorum, also for a later step."""
    create(store, "a", quorum=5)
    do(store, Take(name="a"))
    add(store, "a", [1, 2])
    with pytest.raises(StepOpen, match=r"^Step \d of 'a' .* in step 1\b.* of 5$") as caught:
        store.read(["a"], step)
    assert caught.value.context == {"buffer": "a", "step": 1, "count": 1, "quorum": 5}


@pytest.mark.parametrize(("step", "message"), [(0, "has passed"), (2, "has not begun")])
@pytest.mark.parametrize("do_update", [True, False])
def test_an_add_to_another_step_is_refused(store: Store, step: int, message: str, do_update: bool) -> None:
    create(store, "a")
    do(store, Take(name="a"))
    change = Add(name="a", gradient=ones(2), step=step, do_update=do_update)
    error = fails_alone(store, StaleStep, change)
    assert error.detail == f"Step {step} of 'a' {message}: the buffer is in step 1"
    assert error.context == {"buffer": "a", "step": 1}
    assert add(store, "a", [1, 2], step=1)["count"] == 1
