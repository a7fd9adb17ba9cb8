"""The tables of blobs over PostgreSQL: when they are made, dropped and emptied, and what may run beside that."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Delete, Take, Zero
from service.buffers.doctor import examine
from service.buffers.perform import Request
from service.buffers.postgres import PostgresStore, blobs, compactor, deltas, janitor, writer
from service.buffers.postgres.readonly import opened_readonly
from service.errors import BufferCorrupt
from tests.buffers.calls import add, create, do, key, ones, part, value
from tests.buffers.postgres import Once, Schema, part_tables, until, until_called
from tests.buffers.stores import PATIENCE

LARGE = 100_000
"""Elements of a float32 gradient of 400 KB, which is a blob."""

NAMES = ["a", "b", "c", "d"]


def add_all(store: PostgresStore, *names: str) -> None:
    do(store, *[Add(name=name, gradient=ones(LARGE)) for name in names])


def test_the_disk_of_a_run_stays_bounded_without_the_vacuum(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch, 4 << 20)
    stores = [schema.open(), schema.open()]
    create(stores[0], *NAMES, shape=(LARGE,), quorum=4, keep=1)
    for table in ("buffers", "deltas", "unowned"):
        schema.ask(f"alter table {table} set (autovacuum_enabled = off)")
    for step in range(20):
        for number in range(4):
            add_all(stores[number % 2], *NAMES)
        assert [(value(stores[0], name, step) == 4).all() for name in NAMES] == [True] * 4
        until(lambda: sum(schema.tables().values()) < 24 << 20, "the tables of old steps stay")
    assert schema.ask("select pg_relation_size('deltas')") < [(1 << 20,)]
    assert schema.faults() == []
    do(stores[0], *[Delete(name=name) for name in NAMES])
    until(lambda: schema.tables() == {}, "the tables of nothing stay")
    assert schema.ask("select * from unowned") == []


def test_no_vacuum_reads_the_tables_of_blobs(schema: Schema) -> None:
    store = schema.open()
    create(store, "a", shape=(LARGE,))
    add_all(store, "a")
    ours = "from pg_class where relnamespace = current_schema()::regnamespace and relname ~ '^chunks_[0-9]+$'"
    toast = f"oid in (select reltoastrelid {ours})"
    found = schema.ask(f"select reloptions {ours} union all select reloptions from pg_class where {toast}")
    assert found == [(["autovacuum_enabled=off"],)] * 2


def test_a_table_stays_while_somebody_may_read_it(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that has begun before the blobs were freed has not even looked at their table yet."""
    part_tables(monkeypatch)
    store = schema.open()
    create(store, "a", "b", shape=(LARGE,))
    add_all(store, "a", "b")
    with opened_readonly(schema.url, schema.name) as reader:
        with reader.reading() as moment:
            found = [record for _, record in moment.sound_records() if record is not None]
            do(store, Delete(name="a"), Delete(name="b"))
            create(store, "other", shape=(LARGE,))
            for _ in range(3):
                add_all(store, "other")
            do(store, Zero(name="other"))
            until(lambda: len(schema.tables()) >= 5, "other tables are not there")
            until_called(janitor, "drop_free")
            for record in found:
                (numbers,) = moment.streamed(record.spec, record.value)
                assert (numbers == 1).all()
            locks = "select count(*) from pg_locks join pg_class on oid = relation where relname ~ '^chunks_'"
            ours = "relnamespace = current_schema()::regnamespace and not pid = pg_backend_pid()"
            assert schema.ask(f"{locks} and {ours}") == [(0,)]  # an export of many values keeps none
        until(lambda: schema.tables() == {}, "the tables stay")


def test_a_fold_may_read_what_is_freed_meanwhile(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch)
    monkeypatch.setattr(compactor, "FOLD_EVERY", 2)
    usual, reading, go_on = deltas.total, threading.Event(), threading.Event()
    sums: list[Any] = []

    def total(connection: Any, spec: Any, all_deltas: Any, *rest: Any) -> Any:
        found = [*all_deltas]
        reading.set()
        assert go_on.wait(PATIENCE)
        sums.append(usual(connection, spec, found, *rest))
        return sums[-1]

    monkeypatch.setattr(compactor, "total", total)
    store = schema.open()
    create(store, "a", "b", shape=(LARGE,))
    for _ in range(2):
        add_all(store, "a")
    assert reading.wait(PATIENCE)
    before = schema.tables().keys()
    do(store, Delete(name="a"))
    add_all(store, "b")
    until_called(janitor, "drop_free")
    assert before <= schema.tables().keys()
    go_on.set()
    until(lambda: len(schema.tables()) == 1, "the tables stay")
    assert [(one == 2).all() for one in sums] == [True]
    assert (value(store, "b") == 1).all()


def test_a_table_that_is_locked_is_dropped_later_and_nobody_waits(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_tables(monkeypatch)
    store = schema.open()
    create(store, "a", "b", shape=(LARGE,))
    add_all(store, "a")
    (table,) = schema.tables()
    with schema.connected() as other, other.transaction():
        other.execute(f"lock table {table} in access share mode".encode())
        do(store, Delete(name="a"))
        for count in range(1, 20):
            assert add(store, "b", ones(LARGE))["count"] == count
            assert (value(store, "b") == count).all()
            assert schema.ask("select relation::regclass from pg_locks where not granted") == []
        assert table in schema.tables()
    until(lambda: table not in schema.tables(), "the table stays")
    assert schema.faults() == []


def everything_moves(patch: pytest.MonkeyPatch) -> None:
    """Let the janitor move all blobs in every round."""
    patch.setattr(blobs, "SPARSE_SECONDS", -60.0)
    patch.setattr(blobs, "SPARE_BYTES", -(1 << 40))


def test_what_is_dead_beside_the_living_goes(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch, 100 << 20)
    store = schema.open()
    names = [f"w{number}" for number in range(20)]
    create(store, *names, shape=(LARGE,))
    for each in range(20):
        add(store, names[each], np.full(LARGE, each, np.float32))
    part(store, 1, {"w1": ones(LARGE)})
    do(store, *[Delete(name=name) for name in names[2:]])
    (table,) = schema.tables()
    assert schema.tables()[table] > 21 * 4 * LARGE
    until_called(janitor, "movable")
    assert [*schema.tables()] == [table]
    monkeypatch.setattr(blobs, "SPARSE_SECONDS", -60.0)
    until(lambda: schema.tables() and table not in schema.tables(), "the table with the dead stays")
    assert 12 * LARGE < sum(schema.tables().values()) < 16 * LARGE
    assert schema.ask("select count(distinct blob) from chunks") == [(3,)]
    moved = schema.tables().keys()
    until_called(janitor, "movable")
    assert schema.tables().keys() == moved  # they move once
    part(store, 2, {"w0": ones(LARGE)})
    assert ((value(store, "w0") == 1).all(), (value(store, "w1") == 2).all()) == (True, True)
    assert schema.faults() == []


def test_tables_are_dropped_between_moves(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is freed while many blobs move fills the disk. Each move takes all the time that a round has."""
    part_tables(monkeypatch)
    monkeypatch.setattr(janitor, "MOVE_SECONDS", 0.1)
    store, usual, moves = schema.open(), blobs.Blobs.move, list[Any]()

    def move(*arguments: Any) -> None:
        moves.append(arguments)
        time.sleep(janitor.MOVE_SECONDS)
        usual(*arguments)

    monkeypatch.setattr(blobs.Blobs, "move", move)
    names = [f"w{number}" for number in range(50)]
    create(store, *names, "other", shape=(LARGE,))
    add(store, "other", ones(LARGE))
    (table,) = schema.tables()
    for name in names:
        add(store, name, ones(LARGE))
    everything_moves(monkeypatch)
    until(lambda: moves, "nothing moves")
    do(store, Delete(name="other"))
    until(lambda: table not in schema.tables(), "the table stays")
    assert len(moves) < len(names)


def test_moves_race_with_everything(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch, 1 << 20)
    everything_moves(monkeypatch)
    for name in ("FOLD_EVERY", "FOLD_EVERY_SMALL"):
        monkeypatch.setattr(compactor, name, 2)
    stores = [schema.open(), schema.open()]
    create(stores[0], *NAMES, shape=(LARGE,), keep=2)
    first = schema.ask("select coalesce(max(blob), 0) from deltas")
    end = time.monotonic() + 4

    def run(place: int) -> int:
        name, count, pushes = NAMES[place], 0, 0
        store, other = stores[place % 2], stores[1 - place % 2]
        while time.monotonic() < end or pushes < 6:  # a slow machine takes longer
            if pushes % 3:
                add_all(store, name)
            else:
                part(store, 1, {name: ones(LARGE)}, push=f"{name} {pushes}")
                part(store, 2, {}, push=f"{name} {pushes}")
            count, pushes = count + 1, pushes + 1
            assert (value(other, name) == count).all()
            if count == 5:
                assert (do(store, Take(name=name)).values[name] == 5).all()
                count = 0
        assert (value(other, name) == count).all()
        return pushes

    with ThreadPoolExecutor(4) as threads:
        assert min(threads.map(run, range(4))) >= 6
    schema.close()
    assert schema.ask("select max(blob) from deltas") > first
    assert schema.faults() == []
    assert not [line for line in examine(schema.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]


def test_no_table_goes_while_others_of_a_request_are_written(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch)
    monkeypatch.setattr(blobs, "FREED_SECONDS", 2.0)  # for what is made before the first is written
    store, made = schema.open(), list[int]()
    fresh = "select 1 from unowned where bytes = 0 and due > extract(epoch from clock_timestamp())"

    def wait(_: deltas.Turns) -> None:
        until(lambda: schema.ask(fresh) == [], "the tables stay new")
        until_called(janitor, "drop_free", 2)

    monkeypatch.setattr(deltas.Turns, "wait", wait)
    names = [f"w{number}" for number in range(6)]
    create(store, *names, shape=(LARGE,))
    Once(monkeypatch, "staged", lambda: made.append(len(schema.tables())))
    add_all(store, *names)
    assert made == [6]
    assert schema.faults() == []


def test_a_move_that_is_cut_changes_nothing(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    create(store, "a", shape=(LARGE,))
    add_all(store, "a")
    ((before,),) = schema.ask("select blob from deltas")

    class Cut:
        def wait(self) -> None:
            schema.end_backends("state like 'idle in transaction%'")

    with pytest.raises(Exception, match="terminat|connection"):
        store._janitor._blobs.move(before, 4 * LARGE, Cut())  # type: ignore[arg-type]
    assert schema.ask("select blob from deltas") == [(before,)]
    assert schema.faults() == []
    store._janitor._blobs.move(before, 4 * LARGE, store._janitor._turns)
    assert schema.ask("select blob from deltas") > [(before,)]
    store._janitor._blobs.move(before, 4 * LARGE, store._janitor._turns)  # it has moved already
    assert schema.ask("select count(distinct blob) from chunks") == [(2,)]
    assert (value(store, "a") == 1).all()
    assert schema.faults() == []


@pytest.mark.parametrize("rested", [0.0, 1e9])
def test_a_server_makes_another_table_for_one_that_is_gone(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, rested: float
) -> None:
    monkeypatch.setattr(blobs, "RESTED_SECONDS", rested)
    store = schema.open()
    create(store, "a", shape=(LARGE,))
    for _ in range(3):
        add_all(store, "a")
        (table,) = schema.tables()
        do(store, Zero(name="a"))
        schema.ask(f"delete from unowned; drop table {table}")
    add_all(store, "a")
    assert (value(store, "a") == 1).all()
    assert schema.faults() == []


def test_a_lost_table_is_damage_of_its_buffers(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "TABLE_BYTES", 1)
    store = schema.open()
    create(store, "hurt", "well", shape=(LARGE,), nonfinite="reject")
    add_all(store, "hurt")
    (table,) = schema.tables()
    add_all(store, "well")
    schema.ask(f"drop table {table}")
    with pytest.raises(BufferCorrupt):
        value(store, "hurt")
    with pytest.raises(BufferCorrupt):
        add_all(store, "well", "hurt")
    add_all(store, "well")
    assert (value(store, "well") == 2).all()
    wrong = [line for line in examine(schema.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
    assert wrong == ["WRONG: the running value of the buffer 'hurt' is damaged"]


def test_a_gradient_that_is_claimed_late_keeps_its_table(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over when a transaction takes it, and the janitor looks before the transaction ends."""
    part_tables(monkeypatch)
    monkeypatch.setattr(writer, "STAGED_SECONDS", 0.0)
    store = schema.open()
    create(store, "a", shape=(LARGE,))
    for count in range(1, 4):
        with monkeypatch.context() as patch:
            Once(patch, "made", lambda: until_called(janitor, "drop_free"))
            assert add(store, "a", ones(LARGE))["count"] == count
        assert (value(store, "a") == count).all()
    assert schema.faults() == []


@pytest.mark.parametrize("start", [1000, 5500, 7001])
def test_tables_fit_to_any_start_of_the_sequence(schema: Schema, monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    part_tables(monkeypatch)
    store = schema.open()
    schema.ask(f"alter sequence ids restart {start}")
    create(store, "a", "b", shape=(LARGE,))
    for count in range(1, 4):
        add_all(store, "a", "b")
        assert (value(store, "a") == count).all()
    assert schema.faults() == []
    do(store, Delete(name="a"), Delete(name="b"))
    until(lambda: schema.tables() == {}, "the tables stay")


def test_a_key_is_repeated_after_its_blobs_have_moved(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch)
    everything_moves(monkeypatch)
    store = schema.open()
    create(store, "a", shape=(LARGE,))
    sent = Request([Add(name="a", gradient=ones(LARGE))], key("k"))
    first = store.submit(sent).result(PATIENCE)
    ((blob,),) = schema.ask("select blob from deltas")
    until(lambda: schema.ask("select blob from deltas") > [(blob,)], "the blob does not move")
    again = store.submit(sent).result(PATIENCE)
    assert (again.receipts, again.replayed) == (first.receipts, True)
    assert (value(store, "a") == 1).all()
