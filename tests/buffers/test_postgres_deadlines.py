"""Deadlines over PostgreSQL: by the database's clock, once, whichever server lives."""

from __future__ import annotations

import pytest

from service.buffers.postgres import janitor
from service.buffers.rules import SetRules
from tests.buffers.calls import add, create, do, value
from tests.buffers.postgres import Schema, until


def test_two_servers_close_a_step_once(schema: Schema) -> None:
    stores = [schema.open(), schema.open()]
    names = [f"b{number}" for number in range(10)]
    create(stores[0], *names, deadline_seconds=600.0)
    for name in names:
        for store in stores:
            add(store, name, [1, 2])
    do(stores[0], *[SetRules(name=name, rules={"deadline_seconds": 0.1}) for name in names])
    before = [store.generation() for store in stores]
    until(lambda: {store.record(name).step for store in stores for name in names} == {1}, "a step stays open")
    assert {stores[0].record(name).version for name in names} <= {3, 4}
    assert value(stores[1], "b0", 0).tolist() == [2, 4]
    until(lambda: all(store.generation() > old for store, old in zip(stores, before, strict=True)), "nobody is told")


def test_another_server_honours_the_deadline(schema: Schema) -> None:
    """The server that has set it is gone, and so is the row's time in the memory of every other."""
    first, second = schema.open(), schema.open()
    create(second, "a", deadline_seconds=0.3)
    add(first, "a", [1, 2])
    first.close()
    schema.stores.remove(first)
    until(lambda: second.record("a").step == 1, "the step stays open")
    schema.close()
    assert schema.faults() == []


def test_a_deadline_passes_while_no_server_runs(schema: Schema) -> None:
    store = schema.open()
    create(store, "a", deadline_seconds=0.2)
    add(store, "a", [1, 2])
    schema.close()
    is_due = "select 1 from buffers where due < extract(epoch from clock_timestamp())"
    until(lambda: schema.ask(is_due), "the step is not due")
    store = schema.open()
    until(lambda: store.record("a").step == 1, "the step stays open")
    assert store.record("a").closed[0].closed_by == "deadline"


def test_the_janitor_delays_no_deadline(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts all keys and gradients, and may wait long for a lock."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.01)
    store = schema.open()
    with schema.connected() as other, other.transaction():
        other.execute("lock table unowned in access exclusive mode")
        until(
            lambda: schema.ask("select count(*) from pg_locks where not granted") == [(1,)], "the janitor does not wait"
        )
        create(store, "a", deadline_seconds=0.1)
        add(store, "a", [1, 2])
        until(lambda: store.record("a").step == 1, "the step stays open")
        assert schema.ask("select count(*) from pg_locks where not granted") == [(1,)]
