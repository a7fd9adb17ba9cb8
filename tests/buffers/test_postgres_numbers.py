"""The numbers on which a PostgreSQL store depends, the seals of its keys, and another format under a running server."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from service.buffers.changes import Add, Take
from service.buffers.doctor import examine
from service.buffers.packed import FORMAT
from service.buffers.postgres import PostgresStore
from service.buffers.postgres import schema as tables
from service.errors import BufferCorrupt, StoreFailed
from tests.buffers.calls import add, create, do, key, ones, part, value
from tests.buffers.postgres import Schema, until
from tests.buffers.stores import MAX_BYTES, PATIENCE
from tests.buffers.test_formats import READ, problems, restored
from tests.postgres import cluster
from tests.serving import assert_problem, serving

LARGE = 40_000
"""Elements of a float32 gradient that is a blob."""


def wrong(schema: Schema) -> list[str]:
    return [line for line in examine(schema.url, MAX_BYTES, schema.name) if line.startswith("WRONG")]


# ----- numbers -----


SEQUENCE = "select setval('ids', 1, false)"
TAKEN = "update meta set ids = 0"


@pytest.mark.parametrize("adds", [2, 70])
@pytest.mark.parametrize("behind", [[SEQUENCE], [SEQUENCE, TAKEN], [TAKEN]])
def test_a_number_in_use_is_never_the_next(schema: Schema, behind: list[str], adds: int) -> None:
    """Logical replication copies rows, and leaves the sequence where it was."""
    store, sizes = schema.open(), {"small": 3, "large": LARGE}
    for name, size in sizes.items():
        create(store, name, shape=(size,))
        for _ in range(adds if name == "small" else 10):
            add(store, name, ones(size))
    part(store, 1, {"small": ones(3), "large": ones(LARGE)})
    schema.close()
    before = {name: schema.open().read([name])[0].value for name in sizes}
    schema.close()
    for statement in behind:
        schema.ask(statement)
    found = [line.partition(" the id ")[0] for line in wrong(schema)]
    assert found == ["WRONG: the sequence ids goes on with 1, but"] * behind.count(SEQUENCE)
    store, other = schema.open(), schema.open()
    for number, each in enumerate((store, other)):
        for name, size in sizes.items():
            create(each, f"{name}{number}", shape=(size,))
            for _ in range(3):
                add(each, f"{name}{number}", ones(size))
    for name, numbers in before.items():
        assert (value(store, name) == numbers).all()
        assert all((value(store, f"{name}{number}") == 3).all() for number in range(2))
    assert part(store, 2, {}).receipts["large"]["count"] == 11
    assert wrong(schema) == []


def test_numbers_that_many_servers_take_at_once_are_different(schema: Schema) -> None:
    stores = [schema.open() for _ in range(4)]
    taken: list[int] = []
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            taken += threads.map(lambda place: tables.take_ids(stores[place % 4]._database), range(40))
            schema.ask("select setval('ids', 1, false)")
    assert len({*taken}) == 120
    assert all(first % tables.ID_BLOCK == 1 for first in taken)
    assert min(np.diff(sorted(taken))) >= tables.ID_BLOCK


def test_the_sequence_stays_ahead_of_a_standby(schema: Schema) -> None:
    """PostgreSQL logs a sequence 32 steps ahead. A promoted standby that lacks the last rows goes on behind those."""
    database = schema.open()._database
    tables.take_ids(database)
    first = tables.take_ids(database)
    assert schema.ask("select last_value, log_cnt > 0 from ids") == [(first, True)]


# ----- keys -----


def keyed(store: PostgresStore, name: str, size: int = 2) -> bool:
    return do(store, Add(name=name, gradient=ones(size)), key=key(f"k {name}")).replayed


def test_a_digest_that_has_changed_on_the_disk_counts_nothing_twice() -> None:
    with cluster() as server:
        schema = Schema(server.url)
        store = schema.open()
        create(store, "hurt", "well")
        assert not keyed(store, "hurt")
        ((digest, table),) = schema.ask("select digest, tableoid::regclass::text from keys where outcome <> ''")
        assert not keyed(store, "well")
        ((file,),) = schema.ask(f"select pg_relation_filepath('{table}')")
        schema.close()
        server.stop()
        server.run("pg_checksums", "--disable", "-D", str(server.directory))  # they would notice it
        pages = server.directory / file
        content = pages.read_bytes()
        assert content.count(digest) == 1
        pages.write_bytes(content.replace(digest, bytes([digest[0] ^ 1]) + digest[1:]))
        server.start()
        assert wrong(schema) == ["WRONG: 1 idempotency keys are damaged: a retry with one fails, or counts again"]
        store = schema.open()
        for _ in range(2):
            with pytest.raises(BufferCorrupt):
                keyed(store, "hurt")
        with pytest.raises(BufferCorrupt):
            store.recall(key("k hurt"))
        assert keyed(store, "well")
        assert [store.record(name).count for name in ("hurt", "well")] == [1, 1]
        schema.close()


def test_an_outcome_that_is_damaged_but_readable_is_noticed(schema: Schema) -> None:
    store = schema.open()
    create(store, "hurt", "well")
    keyed(store, "hurt")
    schema.ask("update keys set outcome = set_byte(outcome, 0, get_byte(outcome, 0) # 1) where outcome <> ''")
    keyed(store, "well")
    with pytest.raises(BufferCorrupt):
        keyed(store, "hurt")
    with pytest.raises(BufferCorrupt):
        store.recall(key("k hurt"), ["hurt"])
    assert keyed(store, "well")
    assert wrong(schema) == ["WRONG: 1 idempotency keys are damaged: a retry with one fails, or counts again"]


# ----- the format -----


USES: list[Callable[[PostgresStore], object]] = [
    lambda store: add(store, "small", ones(3)),
    lambda store: add(store, "large", ones(LARGE)),
    lambda store: do(store, Take(name="small")),
    lambda store: create(store, "new"),
    lambda store: part(store, 1, {"small": ones(3)}),
    lambda store: store.record("small"),
    lambda store: store.read(["large"]),
    lambda store: store.durable(["small"]),
    lambda store: store.recall(key("k")),
    lambda store: store.records(),
    lambda store: store.check(),
    lambda store: store.size(),
]


@pytest.mark.parametrize("number", [FORMAT + 1, 99, FORMAT - 1])
def test_a_running_server_notices_another_format(schema: Schema, number: int) -> None:
    store, sizes = schema.open(), {"small": 3, "large": LARGE}
    for name, size in sizes.items():
        create(store, name, shape=(size,))
        add(store, name, ones(size))
    schema.ask("update meta set version = %s", number)
    message = rf"^The store has format {number}, but this version of gradserve knows format {FORMAT}\."
    for use in USES:
        with pytest.raises(StoreFailed, match=message):
            use(store)
    schema.ask("update meta set version = %s", FORMAT)
    assert {name: value(store, name)[0] for name in sizes} == dict.fromkeys(sizes, 1)
    assert add(store, "small", ones(3))["count"] == 2


def test_a_running_server_notices_tables_that_have_changed(schema: Schema) -> None:
    """The number counts, and not the error that the new tables raise."""
    store = schema.open()
    create(store, "small", shape=(3,))
    schema.ask(f"alter table buffers rename column record to content; update meta set version = {FORMAT + 1}")
    for use in (lambda: add(store, "small", ones(3)), lambda: store.record("small"), lambda: store.read(["small"])):
        with pytest.raises(StoreFailed, match=f"has format {FORMAT + 1}, "):
            use()


def test_a_store_is_brought_over_between_transactions(schema: Schema) -> None:
    """What a transaction has read of the format is true until it ends."""
    store = schema.open()
    create(store, "small", shape=(3,))
    with schema.connected() as newer, ThreadPoolExecutor(1) as thread:
        with newer.transaction():
            newer.execute("lock table meta in access exclusive mode")
            added = thread.submit(add, store, "small", ones(3))
            until(lambda: schema.ask("select 1 from pg_stat_activity where wait_event = 'relation'"), "nothing waits")
            newer.execute(f"update meta set version = {FORMAT + 1}".encode())
        with pytest.raises(StoreFailed, match=f"format {FORMAT + 1}, "):
            added.result(PATIENCE)
    assert schema.ask("select count(*) from deltas") == [(0,)]


def test_a_server_of_an_older_version_is_not_ready(schema: Schema) -> None:
    with serving(store=schema.url, postgres_schema=schema.name) as url, httpx.Client(base_url=url) as client:
        client.put("/v1/buffers/a", json={"shape": [1]}).raise_for_status()
        assert client.get("/v2/health/ready").status_code == 200
        schema.ask(f"update meta set version = {FORMAT + 1}")
        for method, path in (
            ("GET", "/v1/buffers/a/value"),
            ("GET", "/v1/buffers"),
            ("POST", "/v1/buffers/a/accumulate"),
        ):
            answer = client.request(method, path, json={"gradient": [1]} if method == "POST" else None)
            assert_problem(answer, 503, "store_failed", f"format {FORMAT + 1}, ", f"format {FORMAT}.")
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/health/live").status_code == 200
        schema.ask(f"update meta set version = {FORMAT}")
        assert client.get("/v1/buffers/a").json()["count"] == 0


@pytest.mark.parametrize("name", READ[:-1])
def test_many_servers_bring_a_store_over_once(tmp_path: Path, postgres_url: str, name: str) -> None:
    schema = restored(name, tmp_path, postgres_url)
    with ThreadPoolExecutor(4) as threads:
        stores = [*threads.map(lambda _: schema.open(), range(4))]
    assert all((value(store, "weight") == [1, 2, 3]).all() for store in stores)
    assert schema.ask("select version from meta") == [(FORMAT,)]
    assert problems(schema, FORMAT) == []
    schema.close()
    schema.drop()


@pytest.mark.parametrize("name", READ[:-1])
def test_a_store_is_brought_over_whole_or_not_at_all(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    schema, number = restored(name, tmp_path, postgres_url), int(name.split(".")[0])
    monkeypatch.setattr(tables, "_COUNTS", b"select 1 / 0")
    with pytest.raises(StoreFailed, match="division by zero"):
        schema.open()
    assert schema.ask("select version from meta") == [(number,)]
    assert problems(schema, number) == []
    schema.drop()
