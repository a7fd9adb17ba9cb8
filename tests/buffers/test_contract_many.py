"""The contract of every store for records at their limits: they are counted, bounded and listed by their bytes."""

from __future__ import annotations

import pytest

from service import errors
from service.buffers import closing, perform
from service.buffers.changes import Add, Create, Take, Zero
from service.buffers.perform import Request, Wide
from service.buffers.rules import SetRules
from service.buffers.steps import MAX_CONTRIBUTORS_BYTES, MAX_KEEP
from service.buffers.store import Store
from tests.buffers.calls import add, create, do, ones, spec, state
from tests.buffers.stores import PATIENCE, Clock

CROWD = tuple(f"{number:0100}" for number in range(MAX_CONTRIBUTORS_BYTES // 100))
"""The longest names of contributors, as many as a buffer may expect."""


def test_the_names_of_contributors_to_a_step_are_bounded_in_bytes(store: Store) -> None:
    most = MAX_CONTRIBUTORS_BYTES
    create(store, "a", keep=MAX_KEEP, per_contributor=2)
    record = store.record("a").changed(contributors_in={"x" * (most - 3): 1, "y": 1})
    Add(name="a", gradient=ones(2), contributor="é").admit(record)
    Add(name="a", gradient=ones(2), contributor="y").admit(record)
    with pytest.raises(errors.InvalidParameter, match=f"'éx', .* bytes; the limit is {most}") as caught:
        Add(name="a", gradient=ones(2), contributor="éx").admit(record)
    assert caught.value.context["limit"] == most


@pytest.mark.parametrize(("limit", "most"), [("MAX_KEPT_CONTRIBUTORS", 4), ("MAX_KEPT_CONTRIBUTORS_BYTES", 8)])
def test_the_oldest_steps_lose_the_names_of_too_many_contributors(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(closing, limit, most)
    create(store, "a", keep=4, quorum=2, per_contributor=2)
    for step in range(5):
        for name in ("xx", "yy") if step < 4 else ("xx", "xx"):
            add(store, "a", [1, 2], contributor=name)
    found = store.record("a").closed
    assert [(each.step, each.count, dict(each.contributors)) for each in found] == [
        (1, 2, {}),
        (2, 2, {}),
        (3, 2, {"xx": 1, "yy": 1}),
        (4, 2, {"xx": 2}),
    ]


def test_several_steps_are_read_at_once(store: Store) -> None:
    create(store, "a", keep=3, quorum=1)
    create(store, "b", keep=1, quorum=1)
    for number in range(3):
        add(store, "a", [number, 0])
    add(store, "b", [7, 0])
    found = store.read(["a", "b", "a"], [2, 0, 1])
    assert [(each.record.name, each.of and each.of.step, each.value.tolist()) for each in found] == [
        ("a", 2, [2, 0]),
        ("b", 0, [7, 0]),
        ("a", 1, [1, 0]),
    ]
    with pytest.raises(errors.StepOpen):
        store.read(["a", "a"], [1, 3])


def test_the_names_of_expected_contributors_are_bounded_in_bytes(store: Store) -> None:
    create(store, "a")
    create(store, "b", contributors=(*CROWD, "x" * 100))  # as an older version allowed
    do(store, SetRules(name="a", rules={"contributors": CROWD}))
    with pytest.raises(errors.InvalidParameter, match=f"may expect {MAX_CONTRIBUTORS_BYTES}"):
        do(store, SetRules(name="a", rules={"contributors": (*CROWD, "x" * 100)}))
    do(store, SetRules(name="b", rules={"quorum": 3}))
    assert (store.record("a").spec.contributors, store.record("b").spec.quorum) == (CROWD, 3)


def test_the_bytes_of_records_are_known(store: Store) -> None:
    create(store, "p.a", "p.b")
    plain = store.record_bytes(["p.a"])
    assert 0 < plain < 300
    assert store.record_bytes(["p.a", "p.b", "p.c"]) == 2 * plain
    assert store.within("ann").record_bytes(["p.a"]) == 0
    do(store, SetRules(name="p.a", rules={"contributors": CROWD}))
    assert MAX_CONTRIBUTORS_BYTES - 100 < store.record_bytes(["p.a"]) - plain < 1.1 * MAX_CONTRIBUTORS_BYTES


def test_names_are_listed_without_records(store: Store, clock: Clock, untidied: None) -> None:
    create(store, "a", "p", "p.b", "p.a")
    create(store, "p.c", ttl_seconds=10)
    create(store.within("ann"), "p.d")
    assert store.names("p.") == ["p.a", "p.b", "p.c"]
    assert (store.names("p.", 2), store.names("p.", 0), store.names("q")) == (["p.a", "p.b"], [], [])
    clock.advance(11)
    assert (store.names("p."), store.names("")) == (["p.a", "p.b"], ["a", "p", "p.a", "p.b"])


def test_a_page_ends_by_bytes(store: Store) -> None:
    names = [f"n{number}" for number in range(9)]
    create(store, *names)
    one = store.record_bytes(names[:1])

    def listed(most_bytes: int, after: str = "", limit: int | None = None) -> list[str]:
        return [record.name for record in store.records("n", after, limit, most_bytes)]

    assert [len(listed(most)) for most in (0, one - 1, one, 2 * one, 9 * one, 10**9)] == [1, 1, 2, 3, 9, 9]
    assert listed(2 * one, "n3") == ["n4", "n5", "n6"]
    assert listed(2 * one, "n3", 2) == ["n4", "n5"]


@pytest.mark.parametrize("wide", [False, True])
def test_a_request_changes_a_bounded_number_of_bytes(store: Store, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its buffers stay as they were. A buffer alone may have a larger record."""
    create(store, "a", "b", "c", contributors=CROWD[:10])
    monkeypatch.setattr(perform, "MAX_CHANGED_BYTES", 2 * store.record_bytes(["a"]))
    before = state(store)
    adds = [Add(name=name, gradient=ones(2), contributor="x") for name in "abc"]
    request = Request([], wide=Wide("", lambda name: Zero(name=name))) if wide else Request(adds)
    for _ in range(2):  # the store may remember the records
        with pytest.raises(errors.TooManyTensors, match="send it in parts"):
            store.submit(request).result(PATIENCE)
    assert state(store) == before
    do(store, *adds[:2])
    do(store, SetRules(name="a", rules={"contributors": CROWD}))
    with pytest.raises(errors.TooManyTensors):
        do(store, Take(name="a"), Take(name="b"))
    assert add(store, "b", [1, 2])["count"] == 2


def test_requests_for_large_records_are_made_one_after_another(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together their records would take too much memory."""
    names = [f"n{number}" for number in range(20)]
    do(store, *[Create(name=name, spec=spec(contributors=CROWD)) for name in names])
    monkeypatch.setattr(perform, "MAX_CHANGED_BYTES", 3 * store.record_bytes(names[:1]))
    made = [store.submit(Request([Add(name=name, gradient=ones(2))])) for name in names for _ in range(3)]
    assert [each.result(PATIENCE).receipts[name]["count"] for each, name in zip(made[2::3], names, strict=True)] == [
        3
    ] * 20
