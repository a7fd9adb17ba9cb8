"""Pushes in parts: staged at once, added together or not at all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.buffers import perform
from service.buffers.changes import Add, Delete
from service.buffers.gradients import Rows
from service.buffers.parts import Forget
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import Part
from service.buffers.rules import SetRules
from service.buffers.store import Store
from service.errors import (
    BufferCorrupt,
    DuplicateContributor,
    GradserveError,
    Invalid,
    InvalidParameter,
    KeyReused,
    MissingTensor,
    NonfiniteGradient,
    NormTooLarge,
    PushesFull,
    ShapeMismatch,
    StaleStep,
    StepGone,
    TooManyTensors,
    UnknownBuffer,
)
from tests.buffers.calls import LARGE, PUSH_SECONDS, add, create, do, ones, part, state, told, value
from tests.buffers.stores import KEY_SECONDS, MAX_BYTES, PATIENCE, Clock


def refused(error: type[GradserveError], store: Store, *arguments: Any, **more: Any) -> GradserveError:
    """Return the error of a part, after a check that no buffer changed."""
    before = state(store)
    with pytest.raises(error) as caught:
        part(store, *arguments, **more)
    assert state(store) == before
    return caught.value


def test_the_last_part_adds_all(namespace: Store) -> None:
    create(namespace, "a", "b")
    before = state(namespace)
    outcome = part(namespace, 2, {"b": [3, 4]}, weight=2)
    assert (outcome.receipts, outcome.staged, outcome.replayed) == ({}, [2], False)
    assert state(namespace) == before
    outcome = part(namespace, 1, {"a": [1, 2]}, weight=2)
    assert outcome.receipts == {"a": told("a", 0, 1, 1, 2.0), "b": told("b", 0, 1, 1, 2.0)}
    assert outcome.staged is None
    assert value(namespace, "a").tolist() == [2, 4]
    assert value(namespace, "b").tolist() == [6, 8]
    assert namespace.pushes() == []


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1, 2, 3), (3, 0, 1)])
def test_parts_come_in_any_order(namespace: Store, numbers: tuple[int, ...]) -> None:
    create(namespace, "a", "b", "c")
    outcomes = [part(namespace, n, {name: 1}, parts=3) for n, name in zip(numbers, "abc", strict=True)]
    assert [outcome.staged for outcome in outcomes] == [[numbers[0]], sorted(numbers[:2]), None]
    assert sorted(outcomes[-1].receipts) == ["a", "b", "c"]


def test_a_push_of_one_part_is_an_add(namespace: Store) -> None:
    create(namespace, "a")
    assert part(namespace, 1, {"a": 1}, parts=1).receipts == {"a": told("a", 0, 1, 1, 1.0)}


def test_a_part_that_comes_again_counts_once(namespace: Store) -> None:
    create(namespace, "a", "b")
    part(namespace, 1, {"a": [1, 2]})
    again = part(namespace, 1, {"a": [1, 2]})
    assert (again.staged, again.replayed) == ([1], True)
    done = part(namespace, 2, {"b": [3, 4]})
    for number, gradients in ((1, {"a": [1, 2]}), (2, {"b": [3, 4]})):
        again = part(namespace, number, gradients)
        assert (again.receipts, again.replayed) == (done.receipts, True)
    assert value(namespace, "a").tolist() == [1, 2]
    assert value(namespace, "b").tolist() == [3, 4]


def test_other_bytes_under_a_part_are_refused_and_change_nothing(namespace: Store) -> None:
    create(namespace, "a", "b")
    part(namespace, 1, {"a": [1, 2]})
    refused(KeyReused, namespace, 1, {"a": [9, 9]})
    part(namespace, 2, {"b": [3, 4]})
    refused(KeyReused, namespace, 1, {"a": [9, 9]})
    refused(KeyReused, namespace, 0, {"a": [1, 2]})
    assert value(namespace, "a").tolist() == [1, 2]


def test_a_push_is_its_callers(namespace: Store) -> None:
    other = namespace.within(f"{namespace.namespace}-2")
    for store in (namespace, other):
        create(store, "a")
    part(namespace, 1, {"a": 1})
    assert part(other, 1, {"a": [2, 2]}).staged == [1]
    part(other, 2, {})
    assert value(other, "a").tolist() == [2, 2]
    assert value(namespace, "a").tolist() == [0, 0]
    assert [name for name, _ in namespace.pushes()] == ["p"]
    assert other.pushes() == []


def test_an_empty_part_completes(namespace: Store) -> None:
    create(namespace, "a")
    part(namespace, 1, {"a": 1})
    assert part(namespace, 2, {}).receipts == {"a": told("a", 0, 1, 1, 1.0)}


def test_a_push_without_tensors_is_refused(namespace: Store) -> None:
    part(namespace, 1, {})
    refused(MissingTensor, namespace, 2, {})
    refused(MissingTensor, namespace, 2, {})


@pytest.mark.parametrize(
    ("error", "gradients", "rules", "more"),
    [
        (UnknownBuffer, {"a": 1, "other": 1}, {}, {}),
        (ShapeMismatch, {"a": [1, 2, 3]}, {}, {}),
        (StaleStep, {"a": 1}, {}, {"step": 7}),
        (DuplicateContributor, {"a": 1}, {}, {"contributor": "ann"}),
        (NonfiniteGradient, {"a": [1, np.nan]}, {"nonfinite": "reject"}, {}),
        (NormTooLarge, {"a": [3, 4]}, {"max_norm": 4.9}, {}),
        (NormTooLarge, {"a": [3, np.inf]}, {"max_norm": 4.9}, {}),
        (InvalidParameter, {"a": 1}, {}, {"parts": 3}),
        (InvalidParameter, {"a": 1}, {}, {"weight": 0.5}),
    ],
)
def test_a_refused_part_drops_the_push(
    namespace: Store, error: type[GradserveError], gradients: Any, rules: Any, more: dict[str, Any]
) -> None:
    same = {name: more[name] for name in ("step", "contributor") if name in more}
    create(namespace, "a", **rules)
    create(namespace, "first")
    if "contributor" in more:
        add(namespace, "a", 0, contributor="ann")
    if "step" not in more:
        part(namespace, 1, {"first": 1}, **same)
    why = refused(error, namespace, 2, gradients, **more)
    for number, each in ((2, gradients), (1, {"first": 1}), (0, {})):
        later = refused(error, namespace, number, each, **same)
        assert (later.detail, later.code, later.context) == (why.detail, why.code, why.context)
    assert value(namespace, "first").tolist() == [0, 0]
    ((name, push),) = namespace.pushes()
    assert (name, push.nbytes, push.as_json(name)["refused"]) == ("p", 0, error.code)


def test_a_push_that_is_late_counts_nowhere(namespace: Store) -> None:
    create(namespace, "a", "b", quorum=2)
    part(namespace, 1, {"a": 1}, step=0)
    for name in ("a", "b"):
        add(namespace, name, 10)
        add(namespace, name, 10)
    refused(StaleStep, namespace, 2, {}, step=0)
    refused(StaleStep, namespace, 2, {"b": 1}, step=0)
    assert value(namespace, "a", 0).tolist() == value(namespace, "b", 0).tolist() == [20, 20]
    assert value(namespace, "a").tolist() == [0, 0]


def test_a_buffer_may_be_in_one_part(namespace: Store) -> None:
    create(namespace, "a")
    part(namespace, 1, {"a": 1})
    assert "1 and 2" in refused(Invalid, namespace, 2, {"a": 1}).detail


def test_a_push_has_a_bounded_number_of_gradients(namespace: Store) -> None:
    create(namespace, "a", "b", "c", "d")
    part(namespace, 1, {"a": 1, "b": 1}, parts=3, most=3)
    part(namespace, 2, {"c": 1}, parts=3, most=3)
    error = refused(TooManyTensors, namespace, 3, {"d": 1}, parts=3, most=3)
    assert error.context["limit"] == 3
    assert "the push has 4 gradients" in error.detail
    part(namespace, 1, {"a": 1, "b": 1, "c": 1}, push="q", parts=1, most=3)
    assert [name for name, _ in namespace.pushes()] == ["p"]  # the refusal of the first


def test_a_push_changes_a_bounded_number_of_bytes(namespace: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    create(namespace, "a", "b", "c")
    monkeypatch.setattr(perform, "MAX_CHANGED_BYTES", 2 * namespace.record_bytes(["a"]))
    part(namespace, 1, {"a": 1, "b": 1})
    refused(TooManyTensors, namespace, 2, {"c": 1})
    part(namespace, 1, {"a": 1}, push="q")
    assert list(part(namespace, 2, {"b": 1}, push="q").receipts) == ["a", "b"]


def test_a_buffer_that_is_made_again_has_no_staged_gradient(namespace: Store) -> None:
    create(namespace, "a", "b")
    part(namespace, 1, {"a": 1})
    do(namespace, Delete(name="a"))
    create(namespace, "a")
    refused(UnknownBuffer, namespace, 2, {"b": 1})
    assert value(namespace, "a").tolist() == [0, 0]


def test_a_complete_push_does_not_answer_for_another_buffer(namespace: Store) -> None:
    create(namespace, "a")
    part(namespace, 1, {"a": 1}, parts=1)
    do(namespace, Delete(name="a"))
    assert part(namespace, 1, {"a": 1}, parts=1).replayed
    create(namespace, "a")
    refused(StepGone, namespace, 1, {"a": 1}, parts=1)


def test_the_norm_is_that_of_all_gradients_with_a_limit(namespace: Store) -> None:
    create(namespace, "a", max_norm=5)
    create(namespace, "b", max_norm=100)
    create(namespace, "tally")
    part(namespace, 1, {"b": [4, 0], "tally": [1e9, 1]})
    part(namespace, 2, {"a": [3, 0]})
    assert value(namespace, "a").tolist() == [3, 0]
    part(namespace, 1, {"b": [4, 0]}, push="q")
    error = refused(NormTooLarge, namespace, 2, {"a": [3, 1], "tally": [1e9, 1]}, push="q")
    assert error.context["norm"] == pytest.approx(26**0.5)


def test_a_limit_that_comes_while_a_push_is_staged_holds_for_it(namespace: Store) -> None:
    create(namespace, "a", "b", max_norm=100)
    create(namespace, "c")
    part(namespace, 1, {"a": [3, 0], "b": [9, 0], "c": [4, 0]})
    do(namespace, SetRules(name="c", rules={"max_norm": 4.0}), SetRules(name="b", rules={"max_norm": None}))
    error = refused(NormTooLarge, namespace, 2, {})
    assert (error.context["norm"], error.context["buffer"]) == (5.0, "c")


def forget(store: Store, push: str = "p") -> Outcome:
    place = Part(push, 0, 1, store.namespace, b"", 0.0)
    return store.submit(Request([Forget()], part=place)).result(PATIENCE)


def test_a_damaged_push_can_be_forgotten(reopen_damaged: Callable[..., Store]) -> None:
    store = reopen_damaged()
    create(store, "a", "b")
    for push in ("hurt", "well"):
        part(store, 1, {"a": [1, 2]}, push=push, contributor=f"who {push}")
    store = reopen_damaged(b"who hurt")
    with pytest.raises(BufferCorrupt, match="damaged on the disk"):
        part(store, 2, {}, push="hurt", contributor="who hurt")
    assert forget(store, "hurt").staged == []
    part(store, 1, {"a": [3, 4]}, push="hurt", contributor="who hurt")
    assert part(store, 2, {}, push="hurt", contributor="who hurt").receipts["a"]["count"] == 1
    assert part(store, 2, {}, push="well", contributor="who well").receipts["a"]["count"] == 2
    assert value(store, "a").tolist() == [4, 6]


def test_a_push_that_is_forgotten_has_a_new_id(namespace: Store) -> None:
    create(namespace, "a", "b", nonfinite="reject")
    assert forget(namespace).staged == []
    part(namespace, 1, {"a": 1})
    assert forget(namespace).staged == [1]
    assert namespace.pushes() == []
    part(namespace, 1, {"a": 2}, weight=3)
    refused(NonfiniteGradient, namespace, 2, {"b": np.nan}, weight=3)
    assert forget(namespace).staged == []
    part(namespace, 1, {"a": 2})
    done = part(namespace, 2, {"b": 5})
    assert forget(namespace).staged == []
    assert part(namespace, 2, {"b": 5}).receipts == done.receipts
    assert value(namespace, "a").tolist() == [2, 2]


def test_a_sum_that_is_not_finite_drops_the_push(namespace: Store) -> None:
    create(namespace, "a", dtype="float16", nonfinite="reject")
    create(namespace, "b")
    part(namespace, 1, {"a": 60000, "b": 1})
    part(namespace, 2, {})
    part(namespace, 1, {"a": 60000, "b": 1}, push="q")
    refused(NonfiniteGradient, namespace, 2, {}, push="q")
    assert value(namespace, "b").tolist() == [1, 1]


def test_the_last_push_closes_a_step(namespace: Store) -> None:
    create(namespace, "a", "b", quorum=2, contributors=("ann", "bob"))
    for name in ("ann", "bob"):
        part(namespace, 1, {"a": [1, 2]}, push=name, contributor=name, step=0)
        outcome = part(namespace, 2, {"b": [3, 4]}, push=name, contributor=name, step=0)
    assert all(
        receipt["closed"] and receipt["contributors"] == {"ann": 1, "bob": 1} for receipt in outcome.receipts.values()
    )
    assert value(namespace, "a", 0).tolist() == [2, 4]
    assert value(namespace, "b", 0).tolist() == [6, 8]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("pushed", [np.float16, np.float32, np.float64])
def test_pushes_equal_adds_to_the_bit(namespace: Store, dtype: str, pushed: Any) -> None:
    """Large values, whole and broadcast, of any dtype; several wait for one sum."""
    create(namespace, "by adds", "by parts", shape=(2, LARGE // 2), dtype=dtype)
    rng = np.random.default_rng(7)
    for number, shape in enumerate([(2, LARGE // 2), (1, LARGE // 2), (2, 1), (), (2, LARGE // 2), (2, LARGE // 2)]):
        gradient, weight = rng.standard_normal(shape).astype(pushed), (1.0, 0.3)[number % 2]
        add(namespace, "by adds", gradient, weight=weight)
        part_of = Part(f"push {number}", 1, 2, namespace.namespace, bytes(16), PUSH_SECONDS, weight)
        change = Add(name="by parts", gradient=gradient, weight=weight)
        namespace.submit(Request([change], part=part_of)).result(PATIENCE)
        part(namespace, 2, {}, push=f"push {number}", weight=weight)
        if number in (2, 5):
            assert value(namespace, "by parts").tobytes() == value(namespace, "by adds").tobytes()
    add(namespace, "by adds", 1)
    add(namespace, "by parts", 1)
    assert value(namespace, "by parts").tobytes() == value(namespace, "by adds").tobytes()


def test_sparse_gradients_are_staged(namespace: Store) -> None:
    create(namespace, "a", "b", shape=(LARGE // 8, 8))
    rows = Rows(np.array([5, 1, 5]), np.arange(24, dtype=np.float32).reshape(3, 8))
    add(namespace, "a", rows)
    add(namespace, "a", rows, weight=2)
    for push, weight in (("p", 1), ("q", 2)):
        part(namespace, 1, {"b": rows}, push=push, weight=weight)
        part(namespace, 2, {}, push=push, weight=weight)
    assert value(namespace, "b").tobytes() == value(namespace, "a").tobytes()


def test_small_gradients_and_zeros(namespace: Store) -> None:
    create(namespace, "empty", shape=(0, 3))
    create(namespace, "one", "scalar", "none", shape=())
    part(namespace, 1, {"empty": ones(0, 3), "one": 2.5, "scalar": 0, "none": np.nan}, weight=0)
    done = part(namespace, 2, {}, weight=0)
    assert {name: receipt["count"] for name, receipt in done.receipts.items()} == dict.fromkeys(done.receipts, 1)
    part(namespace, 1, {"empty": ones(0, 3), "one": 2.5, "scalar": 0}, push="q")
    part(namespace, 2, {}, push="q")
    assert [value(namespace, name).tolist() for name in ("one", "scalar", "none")] == [2.5, 0, 0]


def test_a_push_is_forgotten_in_time(store: Store, clock: Clock) -> None:
    create(store, "a", shape=(LARGE,))
    empty = store.size()[1]
    part(store, 1, {"a": ones(LARGE)}, request="one")
    ((name, push),) = store.pushes()
    assert push.as_json(name) == {
        "push": "p",
        "parts": 2,
        "staged": [1],
        "bytes": 4 * LARGE,
        "buffers": ["a"],
        "weight": 1.0,
        "step": None,
        "contributor": None,
        "began_at": clock.now,
        "expires_at": clock.now + PUSH_SECONDS,
        "refused": None,
    }
    assert store.size()[1] >= empty + 4 * LARGE
    clock.advance(PUSH_SECONDS + 1)
    assert part(store, 2, {}, request="two").staged == [2]
    assert value(store, "a").sum() == 0
    assert store.size()[1] < empty + 4 * LARGE


def test_an_id_is_free_again_in_time(store: Store, clock: Clock) -> None:
    """As free as an Idempotency-Key is."""
    create(store, "a", "b", "c")
    part(store, 1, {"a": 1})
    part(store, 2, {"b": 1})
    clock.advance(KEY_SECONDS + 1)
    assert part(store, 1, {"c": 1}).staged == [1]
    assert [*part(store, 2, {}).receipts] == ["c"]
    assert [value(store, name).tolist() for name in "abc"] == [[1, 1]] * 3


def test_pushes_are_listed(namespace: Store) -> None:
    create(namespace, "a", "b", "other")
    for push, name in (("1", "a"), ("2", "b"), ("3", "other")):
        part(namespace, 1, {name: 1}, push=push)
    assert [name for name, _ in namespace.pushes()] == ["1", "2", "3"]
    assert [name for name, _ in namespace.pushes(limit=2)] == ["1", "2"]
    assert [name for name, _ in namespace.pushes(prefix="o")] == ["3"]


def test_a_list_of_pushes_takes_no_memory_for_those_beyond_its_limit(store: Store) -> None:
    """Each names hundreds of buffers, whatever their gradients have in bytes."""
    names = [f"layers.{number}.weight" for number in range(500)]
    create(store, *names)
    for push in range(60):
        part(store, 1, dict.fromkeys(names, ones(2)), push=f"{push}", request="a")
    tracemalloc.start()
    try:
        found = store.pushes("layers.4", 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(name, len(push.gradients)) for name, push in found] == [("0", 500), ("1", 500)]
    assert peak < 4 << 20


def test_staged_gradients_have_a_share_of_the_store(store: Store) -> None:
    """A part that finds no room does not drop its push."""
    quarter = MAX_BYTES // 4
    create(store, *"abcde", shape=(quarter // 16,))
    for number, name in enumerate("abcd"):
        part(store, number, {name: ones(quarter // 16)}, parts=6, request=name)
    with pytest.raises(PushesFull, match="incomplete pushes"):
        part(store, 4, {"e": ones(quarter // 16)}, parts=6, request="e")
    part(store, 4, {"e": 0}, parts=6)
    assert set(part(store, 5, {}, parts=6).receipts) == set("abcde")
    assert part(store, 1, {"e": ones(quarter // 16)}, push="q", request="e").staged == [1]
