"""Pushes in parts over PostgreSQL: commits that are lost, two stores on one schema, the janitor, and damage."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
import pytest

from service.buffers.batches import Batches
from service.buffers.changes import Add, Take, Zero
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.postgres import PostgresStore, batch, janitor, writer
from service.buffers.postgres.deltas import Turns
from service.errors import BufferCorrupt, StoreFull
from tests.buffers.calls import PUSH_SECONDS, add, create, do, key, ones, part, send_part, state, value
from tests.buffers.postgres import Once, Schema, part_tables, pushes_in, until
from tests.buffers.stores import PATIENCE, Clock, Gate
from tests.network import Network

LARGE = 40_000
"""Elements of a float32 gradient that is a blob."""

ROW = 15_000
"""Elements of a float32 gradient that is in a row, beside its table."""

SIZES = [3, ROW, LARGE]


def complete(store: PostgresStore, size: int, **more: Any) -> Outcome:
    """Send a push in two parts, and check that each comes again with the answer that it had."""
    assert part(store, 1, {"a": ones(size)}, request="a", **more).staged == [1]
    assert part(store, 1, {"a": ones(size)}, request="a", **more).replayed
    done = part(store, 2, {"b": ones(size)}, request="b", **more)
    for number, name in ((1, "a"), (2, "b")):
        again = part(store, number, {name: ones(size)}, request=name, **more)
        assert (again.receipts, again.replayed) == (done.receipts, True)
    return done


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", ["request", "answer"])
def test_a_connection_lost_in_the_commit_of_a_part(
    schema: Schema, network: Network, side: Literal["request", "answer"], size: int
) -> None:
    store = schema.open(network.url)
    create(store, "a", "b", shape=(size,))
    for number, name in ((1, "a"), (2, "b")):
        lost = network.lose_commit(side)
        outcome = part(store, number, {name: ones(size)}, request=name)
        assert lost.is_set()
        assert (outcome.staged, outcome.replayed) == ([1] if number == 1 else None, False)
    assert complete_again(store, size).receipts == outcome.receipts
    assert [value(store, name).tolist() for name in "ab"] == [[1.0] * size] * 2
    assert [receipt["count"] for receipt in outcome.receipts.values()] == [1, 1]
    assert schema.faults() == []


def complete_again(store: PostgresStore, size: int) -> Outcome:
    """Send the parts of a complete push again, and return the outcome of the last."""
    outcomes = [part(store, n, {name: ones(size)}, request=name) for n, name in ((1, "a"), (2, "b"))]
    assert [one.replayed for one in outcomes] == [True, True]
    return outcomes[-1]


@pytest.mark.parametrize("point", ["made", "committed", "staged"])
@pytest.mark.parametrize("size", SIZES)
def test_backends_ended_within_a_part(schema: Schema, monkeypatch: pytest.MonkeyPatch, point: str, size: int) -> None:
    store = schema.open()
    create(store, "a", "b", shape=(size,))
    for number, name in ((1, "a"), (2, "b")):
        ended = Once(monkeypatch, point, lambda: schema.end_backends("state like 'idle%'"))
        part(store, number, {name: ones(size)}, request=name)
        assert ended.times == {"made": 2, "committed": 1, "staged": int(size == LARGE)}[point]
    assert {receipt["count"] for receipt in complete_again(store, size).receipts.values()} == {1}
    assert (value(store, "a") == 1).all()
    assert schema.faults() == []


def test_blobs_of_a_part_lost_by_a_crash_are_written_again(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    create(store, "a", "b", shape=(LARGE,))

    def lose() -> None:
        schema.ask(
            "with gone as (delete from unowned returning *) delete from chunks using gone where chunks.blob = gone.blob"
        )

    written = Once(monkeypatch, "staged", lose)
    complete(store, LARGE)
    assert written.times >= 3
    assert (value(store, "a") == 1).all()
    assert schema.faults() == []


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Return the errors of the writers' attempts, which may succeed later: a deadlock is one of them."""
    found: list[Exception] = []
    usual = writer.Writer._attempt

    def attempt(self: writer.Writer, of: batch.Batch) -> None:
        try:
            usual(self, of)
        except Exception as error:
            found.append(error)
            raise

    monkeypatch.setattr(writer.Writer, "_attempt", attempt)
    return found


@pytest.mark.parametrize("size", [3, LARGE])
def test_two_stores_take_the_parts_of_many_pushes(schema: Schema, failures: list[Exception], size: int) -> None:
    """Each part goes to both stores at once, beside adds. All have the same buffers, each in an order of its own."""
    stores, names, chance = [schema.open(), schema.open()], [*"abcdef"], random.Random(1)
    create(stores[0], *names, shape=(size,))
    pushes = [f"push {number}" for number in range(8)]
    sent: list[tuple[str, Future[Outcome]]] = []
    for number in range(len(names)):
        for place, push in enumerate(pushes):
            name = names[(number + place) % len(names)]
            for store in chance.sample(stores, 2):
                part_of = send_part(store, number, {name: ones(size)}, push=push, parts=len(names), request=name)
                sent.append((push, part_of))
        for place, store in enumerate(stores):
            adds = [Add(name=name, gradient=ones(size)) for name in chance.sample(names, len(names))]
            sent.append(("", store.submit(Request(adds, key(f"{number} {place}")))))
            sent.append(
                ("", store.submit(Request([], wide=Wide("", lambda name: Add(name=name, gradient=ones(size))))))
            )
    outcomes = [(push, one.result(PATIENCE)) for push, one in sent]
    for push in pushes:
        own = [outcome for name, outcome in outcomes if name == push]
        assert sum(not outcome.replayed for outcome in own) == len(names)
        made = [outcome.receipts for outcome in own if outcome.receipts]
        assert made
        assert all(receipts == made[0] for receipts in made)
        assert len({receipt["version"] for receipt in made[0].values()}) == 1
    total = len(pushes) + 4 * len(names)
    for name in names:
        assert stores[1].record(name).count == total
        assert (value(stores[0], name) == total).all()
    assert stores[0].pushes() == stores[1].pushes() == []
    assert failures == []
    assert schema.faults() == []


@pytest.mark.parametrize("size", SIZES)
def test_a_push_within_one_transaction(schema: Schema, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Its gradients are added, read and freed before any of them is in the database."""
    store, gate, queued = schema.open(), Gate(monkeypatch, "made"), list[object]()
    create(store, "a", shape=(size,), nonfinite="reject")
    create(store, "b", "c", shape=(size,))
    part(store, 1, {"a": ones(size)}, push="before", request="a")
    usual = Batches.put

    def put(self: Batches[Any], one: Any) -> bool:
        is_open = usual(self, one)
        queued.append(one)
        return is_open

    monkeypatch.setattr(Batches, "put", put)

    def queue(number: int, name: str, parts: int = 2, push: str = "p") -> Future[Outcome]:
        count = len(queued)
        sent = send_part(store, number, {name: ones(size)}, push=push, request=name, parts=parts)
        until(lambda: len(queued) > count, "the part does not get into the queue")
        return sent

    with gate.holding(store):
        last = queue(2, "b", push="before")
        parts = [queue(number, name, 3) for number, name in ((1, "a"), (2, "b"), (3, "c"))]
        added = store.submit(Request([Add(name="a", gradient=np.array(0.5, np.float32))]))
        taken = store.submit(Request([Take(name="b")]))
        zeroed = store.submit(Request([Zero(name="c")]))
        late = queue(1, "c", push="late"), queue(2, "other", push="late")
    assert [one.result(PATIENCE).staged for one in (last, *parts)] == [None, [1], [1, 2], None]
    assert added.result().receipts["a"]["count"] == 3
    assert (taken.result().values["b"] == 2).all()
    assert (zeroed.result().receipts["c"]["step"], late[0].result().staged) == (1, [1])
    assert "'other'" in str(late[1].exception())
    assert (value(store, "a") == 2.5).all()
    assert (value(store, "b", 0) == 2).all()
    assert (value(store, "c") == 0).all()
    assert schema.faults() == []


def test_parts_in_one_transaction_share_the_room(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store, gate = schema.open(max_bytes=1 << 20), Gate(monkeypatch, "made")
    create(store, *"abcd", shape=(ROW,))
    with gate.holding(store):
        full = [send_part(store, 1, {name: ones(ROW) for name in "abc"}, push=push) for push in "pq"]
        small = send_part(store, 1, {"d": ones(ROW)}, push="q")
        completing = send_part(store, 2, {}, push="p")
        last = send_part(store, 2, {name: ones(ROW) for name in "abc"}, push="q")
    assert full[0].result(PATIENCE).staged == small.result(PATIENCE).staged == [1]
    assert isinstance(full[1].exception(PATIENCE), StoreFull)
    assert [*completing.result(PATIENCE).receipts] == [*"abc"]
    assert [*last.result(PATIENCE).receipts] == [*"dabc"]
    assert (store.pushes(), schema.faults()) == ([], [])


@pytest.mark.parametrize(("size", "count"), [(ROW, 100), (1 << 20, 4)])
def test_the_last_part_moves_no_bytes(schema: Schema, size: int, count: int) -> None:
    store = schema.open()
    names = [f"b{number}" for number in range(count)]
    create(store, *names, shape=(size,))
    log = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"

    def written(number: int, gradients: dict[str, Any]) -> int:
        ((before,),) = schema.ask(log)
        part(store, number, gradients, request=f"{number}")
        return int(schema.ask(log)[0][0]) - int(before)

    staging = written(1, {name: ones(size) for name in names})
    assert store.measures()["unfolded_bytes"] == 0
    completing = written(2, {})
    assert staging > 4 * size * count > 10 * completing
    assert store.measures()["unfolded_bytes"] == 4 * size * count
    assert (value(store, names[-1]) == 1).all()


def test_the_janitor_forgets_pushes_in_time(schema: Schema, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    part_tables(monkeypatch)
    monkeypatch.setattr(janitor, "EXPIRED_BYTES", 300)  # two pushes
    stores = [schema.open(clock=clock), schema.open(clock=clock)]
    create(stores[0], "a", "b", shape=(LARGE,))
    for number in range(5):
        part(stores[0], 1, {"a": ones(LARGE), "b": 1}, push=f"{number}", request="a")
    clock.advance(PUSH_SECONDS - 1)
    part(stores[0], 1, {"a": ones(LARGE)}, push="young", request="a")
    schema.ask("update buffers set record = '[' where name = '3'")
    assert [name for name, _ in stores[1].pushes()] == ["0", "1", "2", "4", "young"]
    with pytest.raises(BufferCorrupt, match="parts of the push '3' are damaged"):
        part(stores[1], 2, {}, push="3")
    clock.advance(1)
    assert [name for name, _ in stores[1].pushes()] == ["young"]
    until(lambda: pushes_in(schema) == ["young"], "the pushes are not forgotten")
    until(lambda: schema.ask("select count(distinct blob) from chunks") == [(2,)], "their blobs stay")
    assert part(stores[1], 1, {"a": 1}, push="3").staged == [1]
    part(stores[1], 2, {}, push="young")
    assert (value(stores[0], "a") == 1).all()
    assert len(schema.faults()) == 2  # the gradients of the damaged push


def test_the_janitor_frees_few_gradients_at_once(schema: Schema, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(janitor.Janitor, "_round", lambda self: None)
    monkeypatch.setattr(janitor, "EXPIRED_BYTES", 300)
    store = schema.open(clock=clock)
    create(store, "a", "b")
    for number in range(3):
        part(store, 1, {"a": 1, "b": 1}, push=f"{number}", request="a")
    clock.advance(PUSH_SECONDS)
    assert store._janitor._expire(clock.now)
    assert pushes_in(schema) == ["2"]


def test_the_janitor_leaves_a_push_that_is_completed_just_now(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    store = schema.open(clock=clock)
    create(store, "a", "b", shape=(LARGE,))
    part(store, 1, {"a": ones(LARGE)}, request="a")
    part(store, 1, {"a": ones(LARGE)}, push="other", request="a")
    left: list[str] = []

    def forget() -> None:
        clock.advance(PUSH_SECONDS)
        other = janitor.Janitor(store._database, Turns(), max_bytes=1 << 30, key_seconds=PUSH_SECONDS)
        other.close()
        other._expire(clock.now)
        left.extend(pushes_in(schema))

    Once(monkeypatch, "made", forget)
    assert part(store, 2, {"b": ones(LARGE)}, request="b").receipts["a"]["count"] == 1
    assert left == ["p"]
    assert (value(store, "a") == 1).all()
    assert schema.faults() == []


def test_a_lost_gradient_lets_no_push_complete(schema: Schema) -> None:
    store = schema.open()
    create(store, "a", "b", shape=(LARGE,))
    part(store, 1, {"a": ones(LARGE), "b": 1}, request="a")
    schema.ask("delete from deltas where blob is not null")
    before = state(store)
    for _ in range(2):
        with pytest.raises(BufferCorrupt, match="lacks the gradient of 'a'"):
            part(store, 2, {})
    assert state(store) == before
    assert add(store, "b", 1.0)["count"] == 1
    assert do(store, Zero(name="a")).receipts["a"]["updated"]
