"""The contract of every store for requests for all buffers with a prefix at the moment of the change."""

from __future__ import annotations

from typing import Any

import pytest

from service.buffers.changes import Change, Create, Delete, Take, Zero
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.rules import SetRules
from service.buffers.store import Store
from service.errors import InvalidParameter, KeyReused, UnknownBuffer
from tests.buffers.calls import add, create, do, key, spec, state
from tests.buffers.stores import PATIENCE, Clock

MANY = 300
"""Buffers: more than the event loop looks up by itself."""


def wide(prefix: str, kind: type[Change] = Delete, *, may_fit_none: bool = True, **more: Any) -> Request:
    """Return a request for all buffers with the prefix, as a client that has seen no buffer sends it."""
    keyed = more.pop("key", None)
    return Request([], keyed, (), Wide(prefix, lambda name: kind(name=name, **more), may_fit_none))


def make(store: Store, request: Request) -> Outcome:
    return store.submit(request).result(PATIENCE)


def names(store: Store) -> list[str]:
    return [record.name for record in store.records()]


def test_it_changes_the_buffers_of_its_own_moment(store: Store) -> None:
    create(store, "a", "p", "p.a", "p.b", "p:", "q")
    create(store.within("ann"), "p.a", "p.other")
    assert list(make(store, wide("p.")).receipts) == ["p.a", "p.b"]
    assert names(store) == ["a", "p", "p:", "q"]
    assert list(make(store.within("ann"), wide("p.", Zero)).receipts) == ["p.a", "p.other"]
    assert list(make(store, wide("")).receipts) == ["a", "p", "p:", "q"]
    assert names(store) == []
    assert names(store.within("ann")) == ["p.a", "p.other"]


def test_it_sees_the_requests_before_it(store: Store) -> None:
    """They may share a transaction with it."""
    create(store, "p.a", "p.b")
    one = [
        Request([Create(name="p.c", spec=spec())]),
        Request([Delete(name="p.a")]),
        wide("p."),
        Request([Create(name="p.b", spec=spec())]),
        wide("p.", Zero),
        wide("p.", SetRules, rules={"quorum": 2}, want_metadata=False),
        Request([Create(name="p.d", spec=spec())]),
    ]
    futures = [store.submit(request) for request in one]
    receipts = [list(future.result(PATIENCE).receipts) for future in futures]
    assert receipts == [["p.c"], ["p.a"], ["p.b", "p.c"], ["p.b"], ["p.b"], ["p.b"], ["p.d"]]
    found = {record.name: (record.step, record.spec.quorum) for record in store.records()}
    assert found == {"p.b": (1, 2), "p.d": (0, None)}


def test_many_buffers_change_together(store: Store) -> None:
    many = [f"p.{number:03}" for number in range(MANY)]
    create(store, *many)
    done = make(store, wide("p.", SetRules, rules={"quorum": 3}, want_metadata=False))
    assert list(done.receipts) == many
    assert {record.spec.quorum for record in store.records("p.")} == {3}
    assert list(make(store, wide("p.")).receipts) == many
    assert names(store) == []


def test_all_change_or_none(store: Store) -> None:
    create(store, "p.a", "p.c")
    create(store, "p.b", contributors=("x",))
    before = state(store)
    with pytest.raises(InvalidParameter, match="p.b"):
        make(store, wide("p.", SetRules, rules={"quorum": 2}))
    assert state(store) == before


def test_a_repeated_request_answers_the_same(store: Store) -> None:
    create(store, "p.a", "p.b")
    add(store, "p.a", [1, 2])
    first = make(store, wide("p.", key=key()))
    create(store, "p.b", "p.c")
    again = make(store, wide("p.", key=key()))
    assert (again.receipts, again.replayed, list(first.receipts)) == (first.receipts, True, ["p.a", "p.b"])
    assert names(store) == ["p.b", "p.c"]
    with pytest.raises(KeyReused):
        make(store, wide("p.", key=key(request="another")))


def test_a_repeated_take_answers_for_the_same_buffers(store: Store) -> None:
    """More buffers may have the prefix when it comes again."""
    create(store, "p.a")
    add(store, "p.a", [1, 2])
    first = make(store, wide("p.", Take, key=key()))
    create(store, "p.b")
    again = make(store, wide("p.", Take, key=key()))
    assert (again.receipts, again.replayed) == (first.receipts, True)
    assert list(again.values) == ["p.a"]
    assert store.record("p.b").step == 0
    with pytest.raises(KeyReused):
        do(store, Take(name="p.a"), key=key(request="for one name"))


def test_a_repeated_request_for_no_buffer_answers_the_same(store: Store) -> None:
    assert make(store, wide("p.", key=key())).receipts == {}
    create(store, "p.a")
    again = make(store, wide("p.", key=key()))
    assert (again.receipts, again.replayed, names(store)) == ({}, True, ["p.a"])


@pytest.mark.parametrize("kind", [Delete, Zero, Take])
def test_an_expired_buffer_is_none(store: Store, clock: Clock, untidied: None, kind: type[Change]) -> None:
    create(store, "p.a", ttl_seconds=10)
    create(store, "p.b")
    clock.advance(11)
    assert list(make(store, wide("p.", kind)).receipts) == ["p.b"]


@pytest.mark.parametrize("created", [False, True])
def test_a_prefix_without_buffers_can_be_an_error(store: Store, clock: Clock, untidied: None, created: bool) -> None:
    if created:
        create(store, "p.a", ttl_seconds=10)
        clock.advance(11)
    with pytest.raises(UnknownBuffer, match="begins with 'p.'"):
        make(store, wide("p.", Take, may_fit_none=False, key=key()))
    create(store, "p.a")
    assert list(make(store, wide("p.", Take, may_fit_none=False, key=key())).receipts) == ["p.a"]


def test_rules_close_the_steps_that_fulfil_them(store: Store) -> None:
    create(store, "p.a", "p.b")
    add(store, "p.a", [1, 2])
    done = make(store, wide("p.", SetRules, rules={"quorum": 1}, want_metadata=False)).receipts
    assert [(one["updated"], one["closed"], one.get("closed_by"), one["step"]) for one in done.values()] == [
        (True, True, "quorum", 0),
        (True, False, None, 0),
    ]
    again = make(store, wide("p.", SetRules, rules={"quorum": 1}, want_metadata=False)).receipts
    assert [one["updated"] for one in again.values()] == [False, False]


@pytest.mark.parametrize("strange", ["\0", "a\0", "\0a", "a\0b", "a\x01", "a%", "a_", "ü", "\U0010ffff"])
def test_a_prefix_that_no_name_can_have_fits_none(store: Store, strange: str) -> None:
    create(store, "a", "a.b", "b")
    assert store.records(strange) == []
    assert [record.name for record in store.records(after=strange)] == [name for name in names(store) if name > strange]
    assert make(store, wide(strange)).receipts == {}
    with pytest.raises(UnknownBuffer):
        make(store, wide(strange, Take, may_fit_none=False))
    with pytest.raises(UnknownBuffer):
        store.record(strange)
    assert store.look([BufferName("", strange), BufferName("", "a")]).keys() == {("", "a")}
    assert store.pushes(strange) == []
    assert names(store) == ["a", "a.b", "b"]
