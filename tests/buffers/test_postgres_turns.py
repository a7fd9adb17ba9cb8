"""Exchanges with a PostgreSQL database, and the turns of small and large requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import pytest
from psycopg import errors

from service.buffers import batches
from service.buffers.changes import Add
from service.buffers.gradients import Gradient
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import PostgresStore, deltas
from service.buffers.postgres.blobs import Blobs
from service.buffers.postgres.connections import Database
from service.buffers.postgres.deltas import Turns
from service.buffers.postgres.exchange import Connection, Statement
from service.buffers.postgres.statements import COMMIT
from tests.buffers.calls import add, create, ones, value
from tests.buffers.postgres import Schema
from tests.buffers.stores import PATIENCE, Gate

LARGE = 40_000
"""Elements of a float32 gradient that is staged."""

NAMES = [f"b{number}" for number in range(20)]

DIVIDE = Statement("select 1 / $1::bigint")
HALVE = Statement("select $1::double precision / 2")
ARRAYS = Statement("select $1::text[], $2::bigint[], $3::bytea[]")


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with Database(postgres_url, "public", replicated=False).connect() as connection:
        yield connection


@pytest.fixture
def store(schema: Schema) -> PostgresStore:
    return schema.open()


@pytest.mark.parametrize("prepares", [True, False])
def test_an_exchange_returns_the_rows_of_each_statement(connection: Connection, prepares: bool) -> None:
    if not prepares:
        connection.prepared = None
    for _ in range(2):
        rows = connection.exchange([Statement("begin")(), DIVIDE(1), None, HALVE(3.0), HALVE(None), COMMIT()])
        assert rows == [[], [(1,)], [], [(1.5,)], [(None,)], []]
    strange = ["", "ü, \"'{}\\", "NULL"], [-(1 << 63), None, 7], [b"", None, bytes(range(256)) * 300]
    assert connection.exchange([ARRAYS(*strange), ARRAYS([], [], [])]) == [[strange], [([], [], [])]]


def test_a_statement_that_fails_leaves_the_connection_usable(connection: Connection) -> None:
    """The database does not prepare what comes after the failure."""
    for _ in range(2):
        with pytest.raises(errors.DivisionByZero):
            connection.exchange([Statement("begin")(), DIVIDE(0), HALVE(1.0), COMMIT()])
        connection.execute("rollback")
        assert connection.exchange([HALVE(1.0), DIVIDE(1)]) == [[(0.5,)], [(1,)]]


def test_an_ended_backend_fails_the_exchange(connection: Connection) -> None:
    end = Statement("select pg_terminate_backend(pg_backend_pid()), $1::bigint")
    with pytest.raises((errors.AdminShutdown, errors.OperationalError)):
        connection.exchange([end(1), HALVE(1.0)])


def test_a_large_gradient_waits_for_small_requests_at_each_turn(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "TURN_SECONDS", PATIENCE)
    monkeypatch.setattr(deltas, "RECENT_SECONDS", PATIENCE)
    size = 4 * deltas.TURN_BYTES // 4
    create(store, "small")
    create(store, "large", shape=(size,))
    add(store, "small", 1.0)
    large: Future[Outcome] = store.submit(Request([Add(name="large", gradient=ones(size))]))
    count = 1
    while not large.done():
        count = add(store, "small", 1.0)["count"]
    assert count > 4
    assert large.result().receipts["large"]["count"] == 1
    assert (value(store, "large") == 1).all()


def test_a_large_gradient_alone_waits_for_nobody(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "TURN_SECONDS", 10 * PATIENCE)
    monkeypatch.setattr(deltas, "RECENT_SECONDS", 0.0)
    create(store, "large", shape=(deltas.TURN_BYTES,))
    assert add(store, "large", ones(deltas.TURN_BYTES))["count"] == 1


def test_a_small_add_waits_for_one_large_request_of_another_namespace(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large requests name many buffers."""
    monkeypatch.setattr(batches, "MOST_SHARED_BYTES", 1 << 18)
    gate, order = Gate(monkeypatch, "made"), list[int]()
    one, other = store.within("one"), store.within("other")
    create(one, *NAMES)
    create(other, "w")
    with gate.holding(store):
        futures = [one.submit(Request([Add(name=name, gradient=ones(2)) for name in NAMES])) for _ in range(10)]
        futures.append(other.submit(Request([Add(name="w", gradient=ones(2))])))
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    for future in futures:
        future.result(PATIENCE)
    assert order.index(10) <= 3
    assert value(one, "b7")[0] == 10


def test_gradients_that_are_staged_do_not_delay_those_of_another_namespace(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, go_on = Blobs.write, threading.Event()

    def write(
        self: Blobs, connection: Connection, sources: Iterable[tuple[int, Gradient]], turns: Turns | None = None
    ) -> None:
        all_sources = [*sources]
        if len(all_sources) > 1:
            assert go_on.wait(PATIENCE)
        usual(self, connection, all_sources, turns)

    monkeypatch.setattr(Blobs, "write", write)
    one, other = store.within("one"), store.within("other")
    create(one, *NAMES, shape=(LARGE,))
    create(other, "w", shape=(LARGE,))
    sent = Request([Add(name=name, gradient=ones(LARGE)) for name in NAMES])
    futures = [one.submit(sent) for _ in range(10)]
    assert add(other, "w", ones(LARGE))["count"] == 1
    assert not any(future.done() for future in futures)
    go_on.set()
    assert {future.result(PATIENCE).replayed for future in futures} == {False}
    assert value(one, "b7")[0] == 10
