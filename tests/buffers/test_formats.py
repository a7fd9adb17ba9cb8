"""Stores of all formats: most are refused and left alone, those of today's and the one before are read as they were."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import lmdb
import pytest

from service.buffers.doctor import examine
from service.buffers.graph_changes import DeleteGraph
from service.buffers.lmdb import LmdbStore
from service.buffers.packed import FORMAT, READABLE
from service.buffers.perform import Request
from service.buffers.store import Store
from service.errors import GraphCorrupt, StepGone, StoreFailed, UnknownGraph
from tests.buffers.calls import add, value
from tests.buffers.formats.make import HERE, LAST, MODEL, calls_of, send
from tests.buffers.postgres import Schema
from tests.buffers.stores import MAX_BYTES, entries_of, wrong
from tests.commands import called
from tests.serving import serving

MADE = {path.name: int(re.split(r"\D", path.name)[0]) for path in sorted(HERE.glob("*.tar.xz"))}
"""The archives of what versions have written, and the formats. Two formats were called 1."""

CURRENT = f"{FORMAT}.tar.xz"

READ = [f"{number}.tar.xz" for number in READABLE]

OTHERS = [name for name in MADE if name not in READ]
IN_POSTGRES = [name for name in OTHERS if MADE[name] != 2 and "first" not in name]

COMMANDS = (
    ["doctor"],
    ["export", "-"],
    ["keys-forget", "--older-than", "1h"],
    ["import", "export.safetensors"],
    ["serve"],
)


def refusal(number: int) -> str:
    return (
        rf"has format {number}, but this version of gradserve knows format {FORMAT}\. Use the version that wrote it\."
        r" .*`gradserve export FILE` with that version, .*`gradserve import FILE` with this version and an empty store"
    )


def unpacked(name: str, place: Path) -> Path:
    """Unpack an archive: `store`, `export.safetensors` and perhaps `tables.sql`."""
    with tarfile.open(HERE / name) as archive:
        archive.extractall(place, filter="data")
    return place


def restored(name: str, place: Path, url: str) -> Schema:
    schema = Schema(url)
    schema.ask(f"create schema {schema.name}")
    schema.ask((unpacked(name, place) / "tables.sql").read_text())
    return schema


def refused(number: int, place: Path, **settings: str) -> None:
    """Check that every command that opens a store refuses that of these settings."""
    with pytest.MonkeyPatch.context() as patch:
        for name, setting in {"PORT": "0", **settings}.items():
            patch.setenv(f"GRADSERVE_{name}", setting)
        for command in COMMANDS:
            status, out, err = called(*[str(place / each) if "export." in each else each for each in command])
            assert (status, out) == (1, ""), command
            assert re.search(refusal(number), err)


def test_there_is_a_store_of_every_format() -> None:
    assert {*MADE.values()} == {*range(1, FORMAT + 1)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_store_of_another_format_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    path = unpacked(name, tmp_path) / "store"

    def content() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"}

    made = content()
    with pytest.raises(StoreFailed, match=f"The store in {path} {refusal(MADE[name])}"):
        LmdbStore(path, max_bytes=MAX_BYTES)
    refused(MADE[name], tmp_path, STORE=f"lmdb:{path}")
    assert content() == made


@pytest.mark.parametrize("name", IN_POSTGRES)
def test_tables_of_another_format_are_refused_and_left_alone(tmp_path: Path, postgres_url: str, name: str) -> None:
    schema = restored(name, tmp_path, postgres_url)

    def rows() -> list[object]:
        return [schema.ask(f"select * from {table}") for table in ("meta", "buffers", "deltas", "keys")]

    made = rows()
    with pytest.raises(StoreFailed, match=rf"'{schema.name}' \(GRADSERVE_POSTGRES_SCHEMA\) {refusal(MADE[name])}"):
        schema.open()
    refused(MADE[name], tmp_path, STORE=schema.url, POSTGRES_SCHEMA=schema.name)
    assert rows() == made
    schema.drop()


def test_a_newer_store_is_refused_with_the_same_words(tmp_path: Path, postgres_url: str) -> None:
    schema, newer = restored(CURRENT, tmp_path, postgres_url), FORMAT + 1
    with lmdb.open(str(tmp_path / "store"), max_dbs=1) as env, env.begin(write=True) as txn:
        txn.put(b"format", str(newer).encode(), db=env.open_db(b"meta", txn))
    schema.ask(f"update meta set version = {newer}")
    with pytest.raises(StoreFailed, match=refusal(newer)):
        LmdbStore(tmp_path / "store", max_bytes=MAX_BYTES)
    with pytest.raises(StoreFailed, match=refusal(newer)):
        schema.open()
    schema.drop()


@pytest.mark.parametrize("name", MADE)
def test_the_export_of_every_format_brings_its_buffers(tmp_path: Path, name: str) -> None:
    file, carried = unpacked(name, tmp_path) / "export.safetensors", tmp_path / "carried"
    assert called("import", str(file), "--store", f"lmdb:{carried}")[0] == 0
    with closing(LmdbStore(carried, max_bytes=MAX_BYTES)) as store:
        weight, bias = store.record("weight"), store.record("bias")
        assert (weight.step, weight.version, weight.count, weight.spec.quorum, weight.spec.keep) == (1, 3, 1, 2, 2)
        assert (bias.step, bias.version, bias.count) == (0, 4, 4)
        assert (value(store, "weight").tolist(), value(store, "bias").tolist()) == ([1, 2, 3], [2.5, -0.5])
        assert value(store, "table")[1:-1].tolist() == [[1, 1]] * 39_998
        if name not in ("1-first.tar.xz", "2.tar.xz"):
            assert value(store, "table")[[0, -1]].tolist() == [[7, 9], [4, 5]]
            assert store.record("late").contributors_in == {"x": 1}
        with pytest.raises(StepGone):
            store.durable(["weight"], 0)
        assert add(store, "weight", [1, 1, 1])["closed"]


def exported(path: Path) -> tuple[Any, bytes]:
    """Return the header and the tensors of an export, in the words of today."""
    length, content = path.read_bytes()[:8], path.read_bytes()[8:]
    header = int.from_bytes(length, "little")
    return json.loads(content[:header].replace(b"epoch", b"step")), content[header:]


@pytest.mark.parametrize("name", READ)
def test_a_store_that_is_read_holds_what_was_put_in(tmp_path: Path, name: str) -> None:
    path = unpacked(name, tmp_path) / "store"
    assert wrong(path) == []
    described = called("doctor", "--store", f"lmdb:{path}")[1]
    assert f", format {MADE[name]}\n" in described
    assert "\n1 graphs\n" in described
    assert called("export", str(tmp_path / "again"), "--store", f"lmdb:{path}")[0] == 0
    assert exported(tmp_path / "again") == exported(tmp_path / "export.safetensors")
    with serving(store=f"lmdb:{path}", idempotency_seconds=1e9) as url:
        check_content(url, MADE[name])
    assert wrong(path) == []
    assert f", format {FORMAT}\n" in called("doctor", "--store", f"lmdb:{path}")[1]


@pytest.mark.parametrize("name", READ)
def test_tables_that_are_read_hold_what_was_put_in(tmp_path: Path, postgres_url: str, name: str) -> None:
    schema = restored(name, tmp_path, postgres_url)
    assert problems(schema, MADE[name]) == []
    with serving(store=postgres_url, postgres_schema=schema.name, idempotency_seconds=1e9) as url:
        check_content(url, MADE[name])
    assert schema.faults() == []
    assert problems(schema, FORMAT) == []
    schema.drop()


def test_a_damaged_graph_of_an_older_store_stays_damaged(tmp_path: Path) -> None:
    path = unpacked("8.tar.xz", tmp_path) / "store"
    with lmdb.open(str(path), max_dbs=1) as env, env.begin(write=True) as txn:
        graphs = env.open_db(b"graphs", txn, create=False)
        txn.put(b"g", txn.get(b"g", b"", db=graphs)[1:], db=graphs)
    damaged_graph(lambda: LmdbStore(path, max_bytes=MAX_BYTES), lambda: wrong(path))


def test_a_damaged_graph_of_older_tables_stays_damaged(tmp_path: Path, postgres_url: str) -> None:
    schema = restored("8.tar.xz", tmp_path, postgres_url)
    schema.ask("update graphs set record = substr(record, 2)")

    def found() -> list[str]:
        return [line for line in examine(schema.url, MAX_BYTES, schema.name) if line.startswith("WRONG")]

    damaged_graph(schema.open, found)
    schema.drop()


def damaged_graph(opened: Callable[[], Store], found: Callable[[], list[str]]) -> None:
    """Check a store whose graph was damaged when its format had graphs apart."""
    before = found()
    assert "WRONG: the graph 'g' is damaged" in before
    with closing(opened()) as store:
        assert store.graphs() == []
        with pytest.raises(GraphCorrupt, match="head of the graph 'g' is damaged"):
            store.graph("g")
    assert found() == before
    with closing(opened()) as store:
        store.submit(Request([], hidden=DeleteGraph(name="g"))).result()
        with pytest.raises(UnknownGraph):
            store.graph("g")
    assert "WRONG: the graph 'g' is damaged" not in found()


def problems(schema: Schema, number: int) -> list[str]:
    """Return the faults that the doctor finds in tables of this format."""
    first, *lines = examine(schema.url, MAX_BYTES, schema.name)
    assert f", format {number}; " in first
    return [line for line in lines if line.startswith("WRONG")]


def check_content(url: str, number: int) -> None:
    """Check all that a server answers from a store that `CALLS` have made, with another version perhaps."""
    with httpx.Client(base_url=url) as client:

        def data(path: str) -> object:
            return client.get(f"/v1/buffers/{path}").raise_for_status().json()["value"]["data"]

        for call in calls_of(number):
            if call.key is not None:
                answer = send(client, call)
                assert answer.status_code == (201 if call.method == "PUT" else 200), (call, answer.text)
                assert answer.headers["Idempotency-Replayed"] == "true"
        assert data("weight/value?step=0") == [2, 4, 6]
        assert data("weight/value") == [1, 2, 3]
        assert data("bias/value") == [2.5, -0.5]
        assert data("passing/value?step=0") == [5]
        table = data("table/value")
        assert table == [[7, 9], *[[1, 1]] * 39_998, [4, 5]]
        late = client.get("/v1/buffers/late").json()
        assert (late["contributors_in"], late["missing"]) == ({"x": 1}, ["y"])
        assert late["missing_since"] == {"y": late["created_at"]}
        assert round(late["deadline_at"] - late["updated_at"]) == 10**9
        pushes = client.get("/v1/pushes").json()["pushes"]
        assert [(each["push"], each["staged"]) for each in pushes] == [("p", [1])]
        assert send(client, LAST).status_code == 200
        assert data("bias/value") == [3.5, 0.5]
        assert data("table/value") == [[8, 10], *[[2, 2]] * 39_998, [5, 6]]
        assert data("weight/value?step=1") == [2, 3, 4]
        weight = client.get("/v1/buffers/weight").json()
        assert weight["missing_since"] == {"x": weight["updated_at"]}
        if number > 7:
            absent = client.get("/v1/buffers/absent").json()
            assert absent["missing_since"]["y"] == absent["updated_at"] > absent["missing_since"]["x"]
        graphs = [each["name"] for each in client.get("/v1/graphs").json()["graphs"]]
        assert graphs == ["g"]
        assert client.get("/v1/graphs/g/model").content == MODEL
        assert data("g.p.w/value") == [1.5, 2.5]
        assert client.post("/v1/graphs/g", json={"x": [1, 2]}).json()["y"]["data"] == [2, 6]


def test_a_new_store_is_made_like_that_of_this_format(tmp_path: Path, postgres_url: str) -> None:
    """What a store holds changes only with the number of its format: then `formats/make.py` makes a new archive."""
    path, schema = tmp_path / "store", restored(CURRENT, tmp_path, postgres_url)
    new, other = tmp_path / "new", Schema(postgres_url)
    for options in ({"store": f"lmdb:{new}"}, {"store": postgres_url, "postgres_schema": other.name}):
        with serving(**options) as url, httpx.Client(base_url=url) as client:
            for call in calls_of(FORMAT):
                assert send(client, call).is_success
    assert entries_of(new).keys() == entries_of(path).keys()
    assert packed_in(new) == packed_in(path)
    assert tables_of(other) == tables_of(schema)
    upgraded = restored(READ[0], tmp_path / "before", postgres_url)
    upgraded.open().close()
    assert tables_of(upgraded)["columns"] == tables_of(schema)["columns"]
    for each in (schema, other, upgraded):
        each.drop()


def packed_in(path: Path) -> list[str]:
    """Return the JSON in the databases of an LMDB store, with 0 for every number."""
    found = []
    with lmdb.open(str(path), max_dbs=9, readonly=True) as env, env.begin() as txn:
        for name in (b"buffers", b"values"):
            for key, sealed in txn.cursor(env.open_db(name, txn, create=False)):
                data = bytes(sealed)[:-8]  # without its checksum
                if name == b"values":
                    length = int.from_bytes(data[-5:-1], "little") if data.endswith(b"c") else 0
                    data = data[-5 - length : -5]
                found.append(f"{bytes(key)!r}: {without_numbers(data)}")
    return found


def tables_of(schema: Schema) -> dict[str, object]:
    """Return the columns and indexes of tables, and some of their rows, with 0 for every number.

    An unlogged table holds nothing that counts: a crash empties it. Nor do options, which are about room and speed.
    """
    no_partition = "!~ '^(keys|chunks)_[0-9]'"
    own = f"nspname = current_schema() and relname {no_partition} and relpersistence = 'p'"
    return {
        "columns": schema.ask(
            "select table_name, column_name, data_type, is_nullable, collation_name from information_schema.columns"
            f" where table_schema = current_schema() and table_name {no_partition} and table_name <> 'counts'"
            " order by 1, ordinal_position"
        ),
        "relations": schema.ask(
            f"select relname, relkind from pg_class join pg_namespace n on n.oid = relnamespace where {own} order by 1"
        ),
        "indexes": schema.ask(
            "select replace(indexdef, current_schema(), '') from pg_indexes"
            f" where schemaname = current_schema() and tablename {no_partition} order by 1"
        ),
        "records": [
            without_numbers(bytes(record)[:-8])  # without its checksum
            for (record,) in schema.ask("select record from buffers order by name")
        ],
    }


def without_numbers(text: bytes) -> str:
    return re.sub(r"-?\d[\d.e+-]*", "0", re.sub(r"[0-9a-f]{32}", "HEX", text.decode()))
