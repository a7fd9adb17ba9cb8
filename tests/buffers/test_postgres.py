"""Stores over PostgreSQL, two of them on one schema: what only this kind of store can do."""

from __future__ import annotations

import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from service.buffers import failpoints, perform
from service.buffers.changes import Add, Create, Delete, Zero
from service.buffers.doctor import examine
from service.buffers.names import BufferName
from service.buffers.packed import FORMAT, unpack_record
from service.buffers.perform import Request, Wide
from service.buffers.postgres import batch, compactor, connections, failures, janitor, outage, watcher
from service.buffers.postgres import store as store_module
from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Connection
from service.buffers.record import Record
from service.errors import StoreFailed, TooManyTensors, UnknownBuffer
from tests.buffers.calls import add, create, do, key, ones, spec, value
from tests.buffers.postgres import Schema, until, until_changed
from tests.buffers.stores import MAX_BYTES, PATIENCE
from tests.kernels.equality import assert_same_bits
from tests.network import Network
from tests.postgres import cluster

LARGE = 40_000
"""Elements of a float32 gradient that is staged: a gradient of 64 KB or less goes into a row."""


@pytest.mark.parametrize("version", [1, FORMAT + 1])
def test_tables_of_another_format_are_refused(schema: Schema, version: int) -> None:
    schema.open().close()
    schema.ask(f"update meta set version = {version}")
    refused = rf"SCHEMA\) has format {version}, but .* knows format {FORMAT}\..*gradserve export.*gradserve import"
    with pytest.raises(StoreFailed, match=refused):
        schema.open()
    schema.ask(f"update meta set version = {FORMAT}")
    assert schema.open().records() == []


def test_many_servers_make_the_tables_at_once(schema: Schema) -> None:
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(lambda _: schema.open(), range(4)))
    create(stores[0], "w")
    assert [add(store, "w", 1.0)["count"] for store in stores] == [1, 2, 3, 4]


def test_schemas_share_nothing(postgres_url: str, schema: Schema) -> None:
    other = Schema(postgres_url)
    create(schema.open(), "w")
    assert other.open().records() == []
    other.close()


@pytest.mark.parametrize("setting", ["fsync", "full_page_writes"])
def test_a_database_that_loses_commits_is_refused(schema: Schema, setting: str) -> None:
    schema.ask(f"alter system set {setting} = off")
    schema.ask("select pg_reload_conf()")
    try:
        until(lambda: schema.ask(f"show {setting}") == [("off",)], "the setting is not loaded")
        with pytest.raises(StoreFailed, match=f"^The database has {setting} off, and so may lose"):
            schema.open()
    finally:
        schema.ask(f"alter system reset {setting}")
        schema.ask("select pg_reload_conf()")
    until(lambda: schema.ask(f"show {setting}") == [("on",)], "the setting is not loaded")


def test_replicated_needs_a_synchronous_standby(schema: Schema) -> None:
    with pytest.raises(StoreFailed, match="no synchronous standby: set synchronous_standby_names there"):
        schema.open(replicated=True)


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_defaults_of_the_database_break_nothing(schema: Schema, isolation: str) -> None:
    """A key that another server has just stored must be seen, whatever isolation the database has by default."""
    schema.ask(f"alter role postgres set default_transaction_isolation = '{isolation}'")
    schema.ask("alter role postgres set statement_timeout = '20s'")
    try:
        stores = [schema.open(), schema.open()]
        create(stores[0], "w")
        for number in range(20):
            sent = Request([Add(name="w", gradient=ones(2), do_update=number % 2 > 0)], key(f"{number}"))
            made = [store.submit(sent) for store in stores]
            assert sorted(one.result(PATIENCE).replayed for one in made) == [False, True]
    finally:
        schema.ask("alter role postgres reset all")
    assert stores[1].record("w").count == 10


@pytest.mark.parametrize(
    ("lock", "use"),
    {
        "buffers in exclusive": lambda store, _: add(store, "w", 1.0),
        "unowned in exclusive": lambda store, _: add(store, "large", ones(LARGE)),
        "chunks in access exclusive": lambda store, _: value(store, "large"),
        "deltas in access exclusive": lambda _, schema: [*examine(schema.url, MAX_BYTES, schema.name)],
        "keys in share update exclusive": lambda _, schema: janitor.forget(schema.url, schema.name, 0, None),  # vacuums
    }.items(),
)
def test_a_default_of_the_database_ends_no_long_transaction(schema: Schema, lock: str, use: Callable[..., Any]) -> None:
    limits = ["statement_timeout", "transaction_timeout"]
    known = [name for name in limits if schema.ask("select 1 from pg_settings where name = %s", name)]
    waits = "wait_event_type = 'Lock' and now() - xact_start > interval '900 ms'"
    with schema.connected() as other, schema.connected() as looking, ThreadPoolExecutor(1) as thread:
        for name in known:  # for connections that come now
            looking.execute(f"alter role postgres set {name} = '300ms'".encode())
        try:
            store = schema.open()
            create(store, "w")
            create(store, "large", shape=(LARGE,))
            add(store, "large", ones(LARGE))
            with other.transaction():
                other.execute(f"lock table {lock} mode".encode())
                used = thread.submit(use, store, schema)
                until(
                    lambda: (
                        used.done()
                        or looking.execute(f"select 1 from pg_stat_activity where {waits}".encode()).rowcount
                    ),
                    "nothing waits for the lock",
                )
                assert not used.done()
            used.result(PATIENCE)
        finally:
            looking.execute("alter role postgres reset all")


def test_overlapping_adds_through_two_stores_are_exact(schema: Schema) -> None:
    """Each request adds to twelve of twenty buffers, in an order of its own, and comes through both stores."""
    stores, sizes = [schema.open(), schema.open()], {f"b{number}": LARGE if number == 7 else 3 for number in range(20)}
    for name, size in sizes.items():
        create(stores[0], name, shape=(size,))
    chance, expected, requests = np.random.default_rng(1), dict.fromkeys(sizes, 0), list[Request]()
    for number in range(60):
        names = [str(name) for name in chance.permutation(list(sizes))[:12]]
        adds = [Add(name=name, gradient=np.full(sizes[name], number, np.float32)) for name in names]
        requests.append(Request(adds, key(f"{number}")))
        for name in names:
            expected[name] += number

    def send(place: int) -> list[Any]:
        """Send all requests to one store, with repeats."""
        order = np.random.default_rng(place).permutation(len(requests))
        sent = [(number, stores[place].submit(requests[number])) for number in (*order, *order[:20])]
        return [(number, one.result(PATIENCE)) for number, one in sent]

    with ThreadPoolExecutor(2) as threads:
        answers = [each for answers in threads.map(send, range(2)) for each in answers]
    assert sum(not outcome.replayed for _, outcome in answers) == len(requests)
    for name, total in expected.items():
        assert (value(stores[0], name) == total).all()
    assert schema.faults() == []


def test_folds_by_two_stores_change_no_bit(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "FOLD_EVERY_SMALL", 1)
    monkeypatch.setattr(compactor, "FOLD_EVERY", 1)
    stores = [schema.open(), schema.open()]
    create(stores[0], "small", "reject", nonfinite="allow")
    create(stores[0], "large", shape=(LARGE,))
    chance = np.random.default_rng(2)
    sums = {"small": np.zeros(2, np.float32), "reject": np.zeros(2, np.float32), "large": np.zeros(LARGE, np.float32)}
    for number in range(30):
        gradients = {name: chance.normal(size=total.shape).astype(np.float32) for name, total in sums.items()}
        do(stores[number % 2], *[Add(name=name, gradient=one, weight=0.3) for name, one in gradients.items()])
        for name, one in gradients.items():
            sums[name] = sums[name] + np.float32(0.3) * one
    for name, total in sums.items():
        assert_same_bits(value(stores[0], name), total)
    until(lambda: schema.ask("select count(*) from deltas") < [(15,)], "nothing is folded")
    for name, total in sums.items():
        assert_same_bits(value(stores[1], name), total)
    assert schema.faults() == []


def test_folds_that_wait_take_no_more_than_their_values(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database may fold more slowly than adds come: then each value waits once, and further values not at all."""
    monkeypatch.setattr(compactor, "FOLD_EVERY_SMALL", 2)
    monkeypatch.setattr(compactor, "MOST_WAITING", 3)
    made: list[str] = []
    slow, begun, usual = threading.Event(), threading.Event(), compactor.Compactor._make

    def make(self: compactor.Compactor, connection: Any, fold: compactor.Fold) -> None:
        made.append(fold.name.name)
        begun.set()
        assert slow.wait(PATIENCE)
        usual(self, connection, fold)

    monkeypatch.setattr(compactor.Compactor, "_make", make)
    store, names = schema.open(), ["a", "b", "c", "d", "e"]
    create(store, *names)
    for number in range(20):
        for name in names:
            add(store, name, 1.0)
            assert number < 1 or begun.wait(PATIENCE)
    assert made == ["a"]
    slow.set()
    until(lambda: schema.ask("select count(*) from deltas") == [(4 * 1 + 20,)], "the folds that wait are not made")
    assert made == ["a", "b", "c", "d"]
    for _ in range(2):
        add(store, "e", 1.0)
    until(lambda: made[-1] == "e", "a value that did not fit is not folded later")
    assert [(value(store, name) == 20 + 2 * (name == "e")).all() for name in names] == [True] * 5
    assert schema.faults() == []


@pytest.mark.parametrize("size", [3, LARGE])
def test_folds_race_with_zeros_and_deletes(schema: Schema, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(compactor, "FOLD_EVERY_SMALL", 1)
    monkeypatch.setattr(compactor, "FOLD_EVERY", 1)
    stores = [schema.open(), schema.open()]
    new = Create(name="w", spec=spec((size,), keep=2))
    end = time.monotonic() + 1

    def add_always(store: Any) -> None:
        while time.monotonic() < end:
            try:
                add(store, "w", ones(size))
            except UnknownBuffer:
                do(store, new)

    def interrupt() -> None:
        for number in range(1000):
            if time.monotonic() > end:
                return
            try:
                do(stores[number % 2], [Zero, Delete][number % 3 == 0](name="w"))
            except UnknownBuffer:
                pass
            record = stores[0].records()
            (found,) = stores[1].read(["w"]) if record and number % 2 else (None,)
            assert found is None or (found.value == found.record.count).all()

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(add_always, store) for store in stores]
        try:
            interrupt()
        except UnknownBuffer:
            pass
        for one in running:
            one.result(PATIENCE)
    do(stores[0], new)
    do(stores[0], Zero(name="w"))
    assert add(stores[1], "w", ones(size))["count"] == 1
    assert (value(stores[0], "w") == 1).all()
    schema.close()  # which waits for the folds
    assert schema.faults() == []


def test_reads_of_many_buffers_are_of_one_moment(schema: Schema) -> None:
    stores, names = [schema.open(), schema.open()], ["a", "b", "c"]
    create(stores[0], *names)
    stop, read_versions = threading.Event(), set[int]()

    def read() -> None:
        while not stop.is_set():
            found = stores[1].read(names)
            assert len({(each.record.version, each.value.tobytes()) for each in found}) == 1
            assert len({record.version for record in stores[1].records()}) == 1
            read_versions.add(found[0].record.version)

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        while len(read_versions) < 10 and not reading.done():
            do(stores[0], *[Add(name=name, gradient=ones(2)) for name in names])
        stop.set()
        reading.result(PATIENCE)


@pytest.mark.parametrize(("count", "size", "adds"), [(40, 4096, 60), (1, 2_000_000, 3), (3, 2, 64), (2, 2, 65)])
def test_a_read_takes_little_more_memory_than_its_values(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, count: int, size: int, adds: int
) -> None:
    """Each value is the sum of many gradients, which no fold has added up yet."""
    monkeypatch.setattr(compactor.Compactor, "submit", lambda *_: None)
    store, names = schema.open(), [f"b{number}" for number in range(count)]
    create(store, *names, "empty", shape=(size,))
    for _ in range(adds):
        do(store, *[Add(name=name, gradient=ones(size)) for name in names])
    wanted = [*names[::-1], "empty"]
    tracemalloc.start()
    try:
        found = store.read(wanted)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [snapshot.record.name for snapshot in found] == wanted
    assert all((snapshot.value == snapshot.record.count).all() for snapshot in found)
    assert [snapshot.record.count for snapshot in found] == [adds] * count + [0]
    assert peak < 4 * size * len(wanted) + (4 << 20)


def test_reads_that_wait_do_not_stop_adds(schema: Schema) -> None:
    """The reads hold all connections for reads, and their threads; adds, new ids and probes have their own."""
    store = schema.open()
    create(store, "large", shape=(LARGE,))
    create(store, "small", shape=(2,))
    add(store, "large", ones(LARGE))
    with schema.connected() as other, ThreadPoolExecutor(2 * connections.READERS) as threads:
        with other.transaction():
            other.execute("lock table chunks in access exclusive mode")
            reading = [threads.submit(value, store, "large") for _ in range(2 * connections.READERS)]
            until(
                lambda: schema.ask("select count(*) from pg_locks where not granted") >= [(connections.READERS,)],
                "the reads do not wait",
            )
            for count in range(1, 100):
                assert add(store, "small", 1.0)["count"] == count
            for number in range(400):
                create(store, f"new{number}")
            store.check()
        assert all((one.result(PATIENCE) == 1).all() for one in reading)


def test_a_transaction_takes_no_more_locks_than_its_connection_has(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else many servers behind a pooler could fill the lock table, which all clients of the database share."""
    store, names = schema.open(), [f"b{number}" for number in range(300)]
    create(store, *names)
    ((each,),) = schema.ask("select current_setting('max_locks_per_transaction')::integer")
    held: list[int] = []

    def look(point: str) -> None:
        if point == "made":
            held.extend(count for (count,) in schema.ask("select count(*) from pg_locks where locktype = 'advisory'"))

    monkeypatch.setattr(failpoints, "action", look)
    sent = [store.submit(Request([Add(name=name, gradient=ones(2))], key(name))) for name in names]
    assert all(one.result(PATIENCE).receipts for one in sent)
    assert 10 < max(held) < each


def test_connections_that_the_database_has_ended_are_replaced(schema: Schema) -> None:
    store = schema.open()
    create(store, "w")
    for count in range(1, 4):
        assert schema.end_backends("state = 'idle'") > 1
        assert store.record("w").count == count - 1
        assert add(store, "w", 1.0)["count"] == count
        assert store.generation() >= count


def test_the_locks_of_a_server_that_hangs_are_freed(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "HANGING_SECONDS", 1)
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.1)
    stores = [schema.open(), schema.open()]
    create(stores[0], "w")
    hanging, awake = threading.Event(), threading.Event()

    def hang(point: str) -> None:
        if point == "made" and not hanging.is_set():
            hanging.set()
            awake.wait(PATIENCE)

    monkeypatch.setattr(failpoints, "action", hang)
    first = stores[0].submit(Request([Add(name="w", gradient=ones(2))], key("hung")))
    assert hanging.wait(PATIENCE)
    assert add(stores[1], "w", 1.0)["count"] == 1
    awake.set()
    assert first.result(PATIENCE).receipts["w"]["count"] == 2
    assert (value(stores[0], "w") == 2).all()


def test_another_server_learns_of_every_change(schema: Schema) -> None:
    stores = [schema.open(), schema.open()]
    create(stores[0], "w")
    for _ in range(5):
        time.sleep(0.05)
        before = stores[1].generation()
        add(stores[0], "w", 1.0)
        until_changed(stores[1], before)


def test_a_change_of_a_server_that_tells_nobody_is_noticed(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server may be killed between its commit and its note, just when this server hears a note of its own."""
    usual, changing, before = watcher._snapshot, threading.Event(), [0]

    def change_and_look(connection: Any) -> str:
        if changing.is_set():
            other.execute("update meta set version = version")
            before[0] = store.generation()
            changing.clear()
        return usual(connection)

    with schema.connected() as other:
        monkeypatch.setattr(watcher, "_snapshot", change_and_look)
        store = schema.open()
        create(store, "w")
        for _ in range(5):
            changing.set()
            add(store, "w", 1.0)
            until(lambda: not changing.is_set(), "the store does not look")
            until_changed(store, before[0])


def test_clients_read_nothing_of_the_database_and_the_log_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its words may name its address and its users. The operator who starts a server reads them at once."""
    monkeypatch.setattr(failures.retried, "__defaults__", (lambda: False, 0.1))
    monkeypatch.setattr(store_module, "READ_SECONDS", 0.1)
    with cluster() as server:
        schema = Schema(server.url)
        store = schema.open()
        create(store, "w")
        server.stop()
        uses: list[Callable[[], object]] = [
            lambda: store.record("w"),
            store.check,
            store.size,
            lambda: add(store, "w", 1.0),
            lambda: store.read(["w"], 0),
        ]
        for use in uses * 3:
            with pytest.raises(StoreFailed) as caught:
                use()
            assert not re.search(rf"127|{server.port}|postgres|connection", str(caught.value))
            assert "the log of the server says why" in str(caught.value)
        said = [record.message for record in caplog.records if "does not serve" in record.message]
        assert 1 <= len(said) < len(uses)
        assert f"port {server.port} failed" in said[0]
        with pytest.raises(StoreFailed, match=f"port {server.port} failed"):
            schema.open()
        schema.close()


def test_a_database_that_answers_others_may_take_long_to_connect(schema: Schema, network: Network) -> None:
    """A machine without time for a new process of the database is no outage: reads wait for it."""
    store = schema.open(network.url)
    create(store, "w")
    store._database.readers._close_idle()
    network.to_hold = 1
    assert store.record("w").name == "w"
    assert network.to_hold == 0


def test_reads_of_a_database_that_is_away_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each takes a thread from all others, for as long as a lost connection takes to be noticed."""
    monkeypatch.setattr(outage, "AWAY_SECONDS", 0.0)
    usual, hangs, goes_on, tries = Database.connect, threading.Event(), threading.Event(), list[str]()

    def connect(self: Database, *seconds: float) -> Connection:
        name = threading.current_thread().name
        if hangs.is_set() and name.startswith(("gradserve-scout", "reader")):
            tries.append(name)
            assert goes_on.wait(PATIENCE)
        return usual(self, *seconds)

    monkeypatch.setattr(Database, "connect", connect)
    with cluster() as server, ThreadPoolExecutor(8, thread_name_prefix="reader") as readers:
        schema = Schema(server.url)
        store = schema.open()
        create(store, "w")
        server.stop()
        with pytest.raises(StoreFailed):
            store.record("w")
        hangs.set()
        uses: list[Callable[[], object]] = [lambda: store.record("w"), lambda: store.read(["w"]), store.records]
        uses.append(store.check)
        for failed in [readers.submit(use) for use in uses * 2]:
            with pytest.raises(StoreFailed, match="the log of the server says why"):
                failed.result(PATIENCE)
        assert tries == ["gradserve-scout"]
        server.start()
        goes_on.set()
        until(lambda: not readers.submit(store.record, "w").exception(), "the store does not read again")
        for found in [readers.submit(use) for use in uses * 2]:
            found.result(PATIENCE)
        schema.close()


def test_only_the_clock_of_the_database_counts(schema: Schema) -> None:
    """A server whose machine is decades ahead forgets no key early."""
    right, ahead = schema.open(), schema.open()
    create(right, "w")
    sent = Request([Add(name="w", gradient=ones(2))], key())
    assert not right.submit(sent).result(PATIENCE).replayed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        assert ahead.submit(sent).result(PATIENCE).replayed
        assert ahead.record("w").updated < 4e9


def test_records_that_are_too_large_are_not_loaded(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database sends none of them. Requests that are too large only together are made one after another."""
    store = schema.open()
    create(store, "a", "b", "c")
    add(store, "a", 1.0)
    monkeypatch.setattr(perform, "MAX_CHANGED_BYTES", 2 * store.record_bytes(["a"]))
    loaded: list[BufferName] = []

    def unpack(name: BufferName, packed: bytes) -> Record:
        loaded.append(name)
        return unpack_record(name, packed)

    monkeypatch.setattr(batch, "unpack_record", unpack)
    for request in (
        Request([Add(name=name, gradient=ones(2)) for name in "abc"]),
        Request([], wide=Wide("", lambda name: Zero(name=name))),
    ):
        with pytest.raises(TooManyTensors, match="send it in parts"):
            store.submit(request).result(PATIENCE)
    assert not loaded
    made = [store.submit(Request([Add(name=name, gradient=ones(2))])) for name in "abc" * 20]
    counts = [each.result(PATIENCE).receipts[name]["count"] for each, name in zip(made, "abc" * 20, strict=True)]
    assert counts[-3:] == [21, 20, 20]
    assert len(loaded) >= 60
