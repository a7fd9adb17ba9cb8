"""Commits of a PostgreSQL store whose outcome is unknown, connections that are lost, and work that fails half-way."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest

from service.buffers.changes import Add, Zero
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import PostgresStore, batch, connections, exchange, failures, janitor, store, writer
from service.buffers.postgres.batch import Submission
from service.errors import StoreFailed
from tests.buffers.calls import add, create, do, key, ones, value
from tests.buffers.postgres import Once, Schema, part_tables, until, until_changed
from tests.buffers.stores import PATIENCE, Clock
from tests.network import Network

LARGE = 40_000
DAY = 24 * 3600.0


def added(store: PostgresStore, size: int, text: str | None) -> Future[Outcome]:
    return store.submit(Request([Add(name="w", gradient=ones(size))], None if text is None else key(text)))


@pytest.mark.parametrize("text", [None, "a key"])
@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize("side", ["request", "answer"])
def test_a_connection_lost_in_a_commit_counts_once(
    schema: Schema, network: Network, side: Literal["request", "answer"], size: int, text: str | None
) -> None:
    store = schema.open(network.url)
    create(store, "w", shape=(size,))
    lost = network.lose_commit(side)
    outcome = added(store, size, text).result(PATIENCE)
    assert lost.is_set()
    assert outcome.receipts["w"]["count"] == 1
    if text is not None:
        assert added(store, size, text).result(PATIENCE).replayed
    assert (store.record("w").count, value(store, "w").tolist()) == (1, [1.0] * size)
    assert schema.faults() == []


@pytest.mark.parametrize("side", ["request", "answer"])
def test_a_batch_lost_in_its_commit_counts_once(
    schema: Schema, network: Network, side: Literal["request", "answer"]
) -> None:
    store = schema.open(network.url)
    create(store, "w")
    network.stall()
    made = [added(store, 2, None if number % 2 else f"{number}") for number in range(20)]
    network.lose_commit(side)
    network.flow()
    assert [one.result(PATIENCE).receipts["w"]["count"] for one in made] == list(range(1, 21))
    network.lose_commit(side)
    again = [added(store, 2, f"{number}").result(PATIENCE).replayed for number in range(0, 22, 2)]
    assert again == [True] * 10 + [False]


def test_a_server_leaves_one_mark_of_all_its_transactions(schema: Schema, network: Network) -> None:
    """A transaction's own mark says that it was committed, as its keys do. Only the last transaction is asked for."""
    stores = [schema.open(network.url), schema.open()]
    create(stores[0], "w")
    for number in range(20):
        side: Literal["request", "answer"] = "request" if number % 4 else "answer"
        lost = network.lose_commit(side) if number % 2 else None
        for one in stores:
            added(one, 2, None if number % 3 else f"{number}").result(PATIENCE)
        assert lost is None or lost.is_set()
    assert stores[0].record("w").count == 20 + 13
    assert schema.ask("select count(*) filter (where outcome = ''), count(*) from keys") == [(2, 2 + 7)]


@pytest.mark.parametrize("point", ["made", "committed", "staged"])
@pytest.mark.parametrize("size", [3, LARGE])
def test_backends_ended_within_a_request(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, point: str, size: int
) -> None:
    store = schema.open()
    create(store, "w", shape=(size,))
    ended = Once(monkeypatch, point, lambda: schema.end_backends("state like 'idle%'"))
    assert added(store, size, "k").result(PATIENCE).receipts["w"]["count"] == 1
    assert ended.times == {"made": 2, "committed": 1, "staged": int(size == LARGE)}[point]
    assert added(store, size, "k").result(PATIENCE).replayed
    assert (value(store, "w") == 1).all()
    assert schema.faults() == []


def test_blobs_lost_by_a_crash_are_staged_again(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    create(store, "w", shape=(LARGE,))

    def lose() -> None:
        schema.ask(
            "with gone as (delete from unowned returning *) delete from chunks using gone where chunks.blob = gone.blob"
        )

    staged = Once(monkeypatch, "staged", lose)
    assert added(store, LARGE, "k").result(PATIENCE).receipts["w"]["count"] == 1
    assert staged.times == 2
    assert (value(store, "w") == 1).all()
    assert schema.faults() == []


def test_the_writer_outlives_a_gradient_that_cannot_be_staged_again(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = schema.open()
    create(store, "w", shape=(LARGE,))
    create(store, "small")

    def lose() -> None:
        schema.ask("delete from unowned")
        schema.ask("alter table unowned rename to elsewhere")

    Once(monkeypatch, "staged", lose)
    with pytest.raises(StoreFailed):
        added(store, LARGE, "k").result(PATIENCE)
    assert add(store, "small", 1.0)["count"] == 1
    schema.ask("alter table elsewhere rename to unowned")
    assert added(store, LARGE, "k").result(PATIENCE).receipts["w"]["count"] == 1


def test_a_stalled_network_ends_requests_and_is_outlived(
    schema: Schema, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that loses everything says nothing. Then only a time-out frees the threads that wait."""
    monkeypatch.setattr(exchange.Connection, "patience", 1.0)
    monkeypatch.setattr(connections, "CONNECT_SECONDS", 1)
    monkeypatch.setattr(connections, "HANGING_SECONDS", 2)  # a transaction that has stalled holds its locks so long
    monkeypatch.setattr(store, "READ_SECONDS", 0.5)
    behind, other = schema.open(network.url), schema.open()
    create(behind, "w")
    network.stall()
    waiting = added(behind, 2, "k")
    with pytest.raises(StoreFailed):
        behind.record("w")
    with pytest.raises(StoreFailed):
        behind.check()
    assert add(other, "w", 1.0)["count"] == 1
    network.flow()
    assert waiting.result(PATIENCE).receipts["w"]["count"] == 2
    assert added(other, 2, "k").result(PATIENCE).replayed

    def reads() -> bool:
        with suppress(StoreFailed):  # until the thread that asks whether the database is back has its answer
            return behind.record("w").count == 2
        return False

    until(reads, "the store does not read again")


def test_cut_connections_lose_no_note_of_changes(schema: Schema, network: Network) -> None:
    behind, other = schema.open(network.url), schema.open()
    create(behind, "w")
    for _ in range(3):
        before = behind.generation()
        network.cut()
        add(other, "w", 1.0)
        until_changed(behind, before)
        assert behind.record("w").count == other.record("w").count


def test_a_busy_row_is_waited_for_and_then_refused(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.3)
    monkeypatch.setattr(failures.retried, "__defaults__", (lambda: False, 0.5))
    store = schema.open()
    create(store, "w", "free")
    with schema.connected() as other, other.transaction():
        other.execute("select 1 from buffers where name = 'w' for update")
        with pytest.raises(StoreFailed, match="lock"):
            add(store, "w", 1.0)
        assert add(store, "free", 1.0)["count"] == 1
    assert add(store, "w", 1.0)["count"] == 1


def test_the_wait_for_the_database_includes_the_queue(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has waited long behind another one is tried once."""
    seconds = 1.0
    monkeypatch.setattr(connections, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(failures.retried, "__defaults__", (lambda: False, seconds))
    store = schema.open()
    create(store, "w")
    attempts: list[int] = []
    behind: list[Future[Outcome]] = []
    usual = writer.Writer._attempt

    def attempt(self: writer.Writer, batch: batch.Batch) -> None:
        if not behind:
            behind.append(added(store, 2, "behind"))
            time.sleep(seconds)  # as long as the server waits for the database: the wait is what the test is about
        attempts.append(id(batch.submissions[0].request))
        usual(self, batch)

    monkeypatch.setattr(writer.Writer, "_attempt", attempt)
    with schema.connected() as other, other.transaction():
        other.execute("select 1 from buffers where name = 'w' for update")
        with pytest.raises(StoreFailed, match="lock"):
            added(store, 2, "first").result(PATIENCE)
        with pytest.raises(StoreFailed, match="lock"):
            behind[0].result(PATIENCE)
    of_first, of_behind = Counter(attempts).values()
    assert (of_first, of_behind) == (1, 1)


def test_a_staged_blob_that_nobody_takes_is_swept(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch)
    monkeypatch.setattr(writer, "STAGED_SECONDS", 0.5)
    store = schema.open()
    create(store, "w", shape=(LARGE,))

    def fail() -> None:
        raise MemoryError

    Once(monkeypatch, "staged", fail)
    with pytest.raises(MemoryError):
        added(store, LARGE, None).result(PATIENCE)
    assert schema.ask("select bytes from unowned where bytes > 0") == [(4 * LARGE,)]
    until(lambda: schema.ask("select count(*) from chunks") == [(0,)], "the blob is not swept")
    assert added(store, LARGE, None).result(PATIENCE).receipts["w"]["count"] == 1
    create(store, "z", shape=(LARGE,))
    add(store, "z", np.ones(LARGE, np.float32))
    do(store, *[Add(name="z", gradient=ones(LARGE), overwrite=True)])
    until(lambda: schema.ask("select count(distinct blob) from chunks") == [(2,)], "a freed blob is not swept")
    assert (value(store, "w") == 1).all()
    assert schema.faults() == []


def test_a_long_round_of_the_janitor_does_not_put_off_the_next(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is freed meanwhile fills the disk. By its clock each round takes an hour, and the first fails."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.05)
    began: list[object] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600 * len(began))
    monkeypatch.setattr(janitor, "time", clock)

    def sweep(each: object) -> None:
        began.append(each)
        if len(began) == 1:
            raise StoreFailed("The database is silent")

    monkeypatch.setattr(janitor, "drop_free", sweep)
    schema.open()
    until(lambda: len(began) >= 3, "the janitor rests")


def test_keys_go_with_their_partitions(schema: Schema, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """An add at a time without a partition makes one; the janitor drops those whose keys have all expired."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.05)
    store = schema.open(clock=clock, key_seconds=DAY)
    create(store, "w")
    partitions = "select count(*) from pg_inherits where inhparent = 'keys'::regclass"
    for day in range(4):
        sent = Request([Add(name="w", gradient=ones(2))], key(f"{day}"))
        assert not store.submit(sent).result(PATIENCE).replayed
        clock.advance(DAY - 1)
        assert store.submit(sent).result(PATIENCE).replayed
        clock.advance(1)
        assert store.recall(key(f"{day}")) is None
    until(lambda: schema.ask(partitions)[0][0] <= 6, "no partition is dropped")
    assert store.record("w").count == 4


def test_keys_are_forgotten_by_age_and_namespace(schema: Schema, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(janitor, "KEYS_AT_ONCE", 2)
    clock.now = time.time() - 550
    store = schema.open(clock=clock)
    create(store, "w")
    for text in "abcdef":
        for caller in ("", "ann"):
            do(store, Zero(name="w"), key=key(text, caller=caller))
        clock.advance(100)

    def left(seconds: float, namespace: str | None) -> tuple[int, str, str]:
        count = janitor.forget(schema.url, schema.name, seconds, namespace)
        kept = ["".join(text for text in "abcdef" if store.recall(key(text, caller=who))) for who in ("", "ann")]
        return count, kept[0], kept[1]

    assert left(700, None) == (0, "abcdef", "abcdef")
    assert left(500, "ann") == (1, "abcdef", "bcdef")
    assert left(300, None) == (5, "def", "def")
    assert left(0, "") == (3, "", "def")
    assert do(store, Zero(name="w"), key=key("d", caller="")).replayed is False
    assert do(store, Zero(name="w"), key=key("d", caller="ann")).replayed is True


def test_an_add_does_not_wait_for_partitions_of_later(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make or drop a partition, the janitor locks the keys. It may not keep all adds waiting for a slow reader."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.05)
    clock = Clock()
    store = schema.open(clock=clock)
    create(store, "w")
    with schema.connected() as other, other.transaction():
        other.execute("select count(*) from keys")
        clock.advance(6 * 3600)  # the partition of the present is there, that of the next hours is not
        until(
            lambda: schema.ask("select count(*) from pg_locks where not granted") != [(0,)], "the janitor does not try"
        )
        monkeypatch.setattr(connections, "LOCK_SECONDS", connections.LOCK_SECONDS / 2)  # a longer wait is an error
        monkeypatch.setattr(failures.retried, "__defaults__", (lambda: False, 0.0))
        assert add(store, "w", 1.0)["count"] == 1


def test_inline_gradients_of_many_requests_fit_into_transactions(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_BYTES_IN_BATCH", 1 << 21)
    store = schema.open()
    names, sizes = [f"b{number}" for number in range(10)], list[int]()
    create(store, *names, shape=(16_000,))
    usual = writer.Writer._make

    def make(self: writer.Writer, submissions: list[Submission]) -> None:
        sizes.append(len(submissions))
        usual(self, submissions)

    monkeypatch.setattr(writer.Writer, "_make", make)
    adds = [Add(name=name, gradient=ones(16_000)) for name in names]
    sent = [store.submit(Request(adds)) for _ in range(12)]
    assert [one.result(PATIENCE).receipts["b3"]["count"] for one in sent] == list(range(1, 13))
    assert max(sizes) == 2
