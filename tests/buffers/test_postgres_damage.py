"""Damage in the tables of a PostgreSQL store: one row harms one buffer, and stops no thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from psycopg import errors

from service.buffers.changes import Add, Delete, Take, Zero
from service.buffers.doctor import examine
from service.buffers.perform import Request
from service.buffers.postgres import compactor, failures, janitor
from service.buffers.rules import SetRules
from service.errors import BufferCorrupt
from tests.buffers.calls import add, create, do, ones, part, value
from tests.buffers.postgres import Schema, more_rows, until
from tests.buffers.stores import PATIENCE, Gate
from tests.postgres import Cluster, cluster

LARGE = 40_000
"""Elements of a float32 gradient that is a blob of three rows."""


def test_a_damaged_record_does_not_stop_the_janitor(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.01)
    store = schema.open()
    create(store, "hurt", "well", ttl_seconds=1000.0)
    add(store, "well", 1.0)
    schema.ask("update buffers set record = '[]' where name = 'hurt'")
    schema.ask("update buffers set expires = 0")
    until(lambda: schema.ask("select name from buffers") == [], "the expired buffers stay")
    assert schema.ask("select value from deltas") == []


def test_work_that_fails_does_not_stop_the_rest_of_the_janitor(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never delete a blob whose page is damaged."""
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.01)

    def failing(*_: object) -> None:
        raise errors.DataCorrupted("invalid page")

    monkeypatch.setattr(janitor, "drop_free", failing)
    store = schema.open()
    create(store, "w", ttl_seconds=1000.0)
    schema.ask("update buffers set expires = 0")
    until(lambda: schema.ask("select name from buffers") == [], "the expired buffer stays")
    schema.ask("delete from counts")
    until(lambda: schema.ask("select 1 from counts"), "the janitor does not count")


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_gradient_that_the_database_has_lost_is_noticed(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    """No read, no fold and no add gives a sum without it, and the others keep theirs."""
    monkeypatch.setattr(compactor, "FOLD_EVERY_SMALL", 4)
    store = schema.open()
    for name in ("a", "b"):
        create(store, name, nonfinite="reject" if name == "b" else "allow")
        for _ in range(3):
            add(store, name, 1.0)
    assert (value(store, "a") == 3).all()
    schema.ask("delete from deltas where seq = %s", lost)
    for name in ("a", "b"):
        with pytest.raises(BufferCorrupt, match="lacks gradients"):
            store.read([name])
    with pytest.raises(BufferCorrupt, match="lacks gradients"):
        add(store, "b", 1.0)
    add(store, "a", 1.0)  # is worth a fold
    create(store, "other")
    add(store, "other", 1.0)
    assert (value(store, "other") == 1).all()
    store.close()
    assert schema.ask("select count(*) from deltas where value = (select min(value) from deltas)") == [(3,)]


ROW = {
    "another dtype": "update deltas set dtype = 'x' where {}",
    "a shape that is no JSON": "update deltas set shape = '[' where {}",
    "a shape of no numbers": "update deltas set shape = '[null]' where {}",
    "a shape that does not fit": "update deltas set shape = '[7]' where {}",
    "an immense shape": "update deltas set shape = '[1000000000000]' where {}",
    "no numbers": "update deltas set data = null, blob = null where {}",
    "another place": "update deltas set seq = 9 where {}",
}
"""What is done to the row of a gradient."""

SMALL_ROW = {"numbers that are cut": "update deltas set data = substr(data, 2) where {}"}

OF_BLOB = "where number = 2 and blob in (select blob from deltas where {})"

BLOB = {
    "a row too many": more_rows("select blob, 9, '1234' from deltas where {}"),
    "a row too few": f"delete from chunks {OF_BLOB}",
    "a row that is cut": f"update chunks set data = substr(data, 2) {OF_BLOB}",
    "a row that is longer": f"update chunks set data = data || '12345678' {OF_BLOB}",
}
"""What is done to the rows of its blob."""


@pytest.mark.parametrize(
    ("size", "statement"),
    [
        *(pytest.param(2, damage, id=f"small: {name}") for name, damage in (ROW | SMALL_ROW).items()),
        *(pytest.param(LARGE, damage, id=f"large: {name}") for name, damage in (ROW | BLOB).items()),
    ],
)
def test_a_damaged_gradient_harms_one_buffer(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, statement: str, size: int
) -> None:
    monkeypatch.setattr(compactor, "FOLD_EVERY_SMALL", 4)
    monkeypatch.setattr(compactor, "FOLD_EVERY", 4)
    store = schema.open()
    create(store, "hurt", "well", shape=(size,), nonfinite="reject")
    create(store, "summed", shape=(size,))
    names = ("hurt", "well", "summed")
    for _ in range(3):
        do(store, *[Add(name=name, gradient=ones(size)) for name in names])
    value_of = store.record("hurt").value, store.record("summed").value
    schema.ask(statement.format(f"deltas.value in {value_of} and deltas.seq = 2"))
    for name in ("hurt", "summed"):
        with pytest.raises(BufferCorrupt) as caught:
            store.read(["well", name])
        assert caught.value.context == {"buffer": name}
        with pytest.raises(BufferCorrupt):
            do(store, Take(name=name))
    with pytest.raises(BufferCorrupt):
        add(store, "hurt", ones(size))
    assert add(store, "summed", ones(size))["count"] == 4  # is worth a fold
    assert (value(store, "well") == 3).all()
    for _ in range(4):
        add(store, "well", ones(size))
    until(lambda: len(schema.ask(f"select from deltas where value = {store.record('well').value}")) < 7, "no folds")
    assert (value(store, "well") == 7).all()
    do(store, Zero(name="hurt"))
    do(store, Delete(name="summed"))
    add(store, "hurt", ones(size))
    assert (value(store, "hurt") == 1).all()


def test_buffers_whose_blob_is_free_already_can_be_deleted(schema: Schema) -> None:
    store = schema.open()
    for name in ("a", "b", "well"):
        create(store, name, shape=(LARGE,))
        add(store, name, np.ones(LARGE, np.float32))
    assert (value(store, "well") == 1).all()
    schema.ask("update deltas set blob = (select min(blob) from deltas) where blob < (select max(blob) from deltas)")
    schema.ask("insert into unowned select min(blob), 1e18 from deltas")
    do(store, Delete(name="a"), Delete(name="b"))
    assert (value(store, "well") == 1).all()


def test_a_damaged_staged_gradient_harms_one_push(schema: Schema) -> None:
    store = schema.open()
    create(store, "a", "b", nonfinite="reject")
    for push in ("p", "q"):
        part(store, 1, {"a": 1.0}, push=push, request=push)
    schema.ask("update deltas set dtype = 'x' where value = (select min(value) from deltas)")
    with pytest.raises(BufferCorrupt):
        part(store, 2, {"b": 1.0}, push="p", request="p")
    assert part(store, 2, {"b": 1.0}, push="q", request="q").receipts["a"]["count"] == 1
    assert value(store, "a").tolist() == [1, 1]


def test_a_record_that_is_behind_its_gradients_is_damaged_at_once(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next gradient has the place of another. No retry helps, and the writer of all others must not wait for it."""
    monkeypatch.setattr(failures, "FIRST_PAUSE_SECONDS", PATIENCE)
    store = schema.open()
    create(store, "hurt", "well")
    for _ in range(3):
        do(store, Add(name="hurt", gradient=ones(2)), Add(name="well", gradient=ones(2)))
    schema.ask("update buffers set seq = 1 where name = 'hurt'")
    requests = [Request([Add(name=name, gradient=ones(2))]) for name in ("well", "hurt", "well")]
    made = Gate(monkeypatch, "made").together(store, requests)
    with pytest.raises(BufferCorrupt):
        made[1].result(PATIENCE)
    assert [made[place].result(PATIENCE).receipts["well"]["count"] for place in (0, 2)] == [4, 5]
    with pytest.raises(BufferCorrupt):
        store.read(["hurt"])
    do(store, Zero(name="hurt"))
    add(store, "hurt", 1.0)
    assert value(store, "hurt").tolist() == [1, 1]


@pytest.mark.parametrize("seq", [(1 << 63) - 1, 1 << 62, 0, -1, -(1 << 63)])
def test_an_impossible_place_of_the_last_gradient_is_damage(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, seq: int
) -> None:
    store = schema.open()
    create(store, "hurt", "well")
    for name in ("hurt", "well"):
        add(store, name, 1.0)
    part(store, 1, {"hurt": 1.0})
    schema.ask("update buffers set seq = %s where name = 'hurt'", seq)
    requests = [Request([Add(name=name, gradient=ones(2))]) for name in ("well", "hurt", "well")]
    made = Gate(monkeypatch, "made").together(store, requests)
    with pytest.raises(BufferCorrupt, match=f"has {seq} as the place of the last gradient of 'hurt'") as caught:
        made[1].result(PATIENCE)
    assert caught.value.context == {"buffer": "hurt"}
    assert [made[place].result(PATIENCE).receipts["well"]["count"] for place in (0, 2)] == [2, 3]
    with pytest.raises(BufferCorrupt):
        store.read(["hurt"])
    with pytest.raises(BufferCorrupt):
        part(store, 2, {})
    do(store, SetRules(name="hurt", rules={"keep": 2}))
    do(store, Zero(name="hurt"))
    assert part(store, 2, {}).receipts["hurt"]["count"] == 1
    assert value(store, "hurt").tolist() == [1, 1]


@pytest.mark.parametrize(
    "statement",
    [
        "update buffers set record = set_byte(record, length(record) / 2, get_byte(record, length(record) / 2) # 1)",
        "update buffers set record = convert_to(replace(convert_from(substr(record, 1, length(record) - 8), 'UTF8'),"
        " '12345.678', '12345.679'), 'UTF8') || substr(record, length(record) - 7)",
        "update buffers set record = (select record from buffers where name = 'well')",
    ],
    ids=["a bit", "a number", "another buffer's"],
)
def test_a_record_that_is_damaged_but_readable_is_noticed(schema: Schema, statement: str) -> None:
    store = schema.open()
    create(store, "hurt", "well", ttl_seconds=12345.678)
    for name in ("hurt", "well"):
        add(store, name, 1.0)
    schema.ask(f"{statement} where name = 'hurt'")
    uses: list[Callable[[], object]] = [
        lambda: store.record("hurt"),
        lambda: store.read(["hurt"]),
        lambda: add(store, "hurt", 1.0),
    ]
    for use in uses:
        with pytest.raises(BufferCorrupt, match="of the buffer 'hurt' is damaged"):
            use()
    assert [record.name for record in store.records()] == ["well"]
    assert add(store, "well", 1.0)["count"] == 2
    wrong = [line for line in examine(schema.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
    assert wrong[0] == "WRONG: the buffer 'hurt' is damaged"
    do(store, Delete(name="hurt"))
    create(store, "hurt")


@pytest.mark.parametrize("nbytes", [(1 << 63) - 1, 1 << 51, -(1 << 63)])
def test_a_damaged_count_of_bytes_does_not_fill_the_store(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.01)
    monkeypatch.setattr(janitor, "ROUNDS_AT_REST", 0)
    store = schema.open(max_bytes=1 << 40)
    create(store, "a", "b")
    add(store, "a", 1.0)
    part(store, 1, {"a": 1.0}, push="p")
    schema.ask("update deltas set bytes = %s", nbytes)
    schema.ask("update buffers set seq = %s where name = 'p'", nbytes)
    schema.ask("delete from counts")
    until(lambda: schema.ask("select 1 from counts where used > 0"), "the janitor does not count")
    assert store.measures()["unfolded_bytes"] == 0
    assert 0 < store.size()[1] < 1 << 40
    part(store, 1, {"b": 1.0}, push="q")
    add(store, "b", 1.0)
    assert part(store, 2, {}, push="p").receipts["a"]["count"] == 2
    part(store, 1, {"b": 1.0}, push="r")
    schema.ask("update buffers set seq = %s where name = 'r'", nbytes)
    wrong = [line for line in examine(schema.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
    counted = store.record("a").value
    assert wrong == [
        "WRONG: the bytes of the push 'r' are counted wrong until its next part comes",
        f"WRONG: the value {counted} has a gradient whose bytes are counted wrong",
    ]


def lose_page(server: Cluster, schema: Schema, relation: str) -> None:
    """Damage the first page of a relation on the disk."""
    ((file,),) = schema.ask(f"select pg_relation_filepath({relation})")
    server.stop()
    with (server.directory / file).open("r+b") as pages:
        pages.write(b"\xff" * 8192)
    server.start()


@pytest.mark.parametrize("size", [10_000, LARGE])
def test_a_gradient_that_the_database_cannot_read_harms_one_buffer(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is damaged on the disk. Then the database raises an error of its own, which no retry heals."""
    numbers, usual, retries = np.arange(size, dtype=np.float32), failures.is_transient, list[bool]()

    def is_transient(error: BaseException) -> bool:
        retries.append(usual(error))
        return retries[-1]

    monkeypatch.setattr(failures, "is_transient", is_transient)
    with cluster() as server:
        schema = Schema(server.url)
        store = schema.open()
        create(store, "hurt", "well", shape=(size,), nonfinite="reject")
        for name in ("hurt", "well"):
            add(store, name, numbers)
        schema.close()
        assert not [line for line in examine(server.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
        table = "(select min(tableoid) from chunks)" if size == LARGE else "'deltas'::regclass"
        lose_page(server, schema, f"(select reltoastrelid from pg_class where oid = {table})")
        wrong = [line for line in examine(server.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
        assert wrong[:1] == ["WRONG: the running value of the buffer 'hurt' is damaged"]
        assert not any("'well'" in line for line in wrong)
        store = schema.open()
        for use in (
            lambda: store.read(["hurt", "well"]),
            lambda: do(store, Take(name="hurt")),
            lambda: do(store, Add(name="well", gradient=numbers), Take(name="hurt")),
        ):
            with pytest.raises(BufferCorrupt, match="the log of the server says how"):
                use()
        made = [store.submit(Request([Add(name=name, gradient=numbers)])) for name in ("well", "hurt", "well")]
        with pytest.raises(BufferCorrupt):
            made[1].result(PATIENCE)
        assert {made[place].result(PATIENCE).receipts["well"]["count"] for place in (0, 2)} == {2, 3}
        assert retries
        assert not any(retries)
        assert (value(store, "well") == 3 * numbers).all()
        if size == LARGE:  # a row of numbers cannot even be deleted
            do(store, Zero(name="hurt"))
            assert (value(store, "hurt") == 0).all()
        schema.close()


def test_records_that_the_database_cannot_read_are_damage_and_not_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "ROUND_SECONDS", 0.01)
    with cluster() as server:
        schema = Schema(server.url)
        create(schema.open(), "w", ttl_seconds=1000.0)
        schema.close()
        lose_page(server, schema, "'buffers'::regclass")
        (wrong,) = [line for line in examine(server.url, 1 << 30, schema.name) if line.startswith("WRONG: ")]
        assert "invalid page in block 0" in wrong
        store = schema.open()
        uses: list[Callable[[], object]] = [
            store.records,
            lambda: store.record("w"),
            lambda: store.read(["w"]),
            lambda: do(store, Delete(name="w")),
            lambda: create(store, "w"),
        ]
        for use in uses:
            with pytest.raises(BufferCorrupt, match="the log of the server says how"):
                use()
        until(lambda: schema.ask("select 1 from counts"), "the janitor does not count")
        store.check()
        schema.close()
