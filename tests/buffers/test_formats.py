"""Stores of the format before: refused, left alone, and carried over by the two commands that the refusal names."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.buffers.lmdb import LmdbStore
from service.buffers.packed import FORMAT
from service.errors import EpochGone, StoreFailed
from tests.buffers.calls import add, value
from tests.buffers.postgres import Schema
from tests.buffers.stores import MAX_BYTES
from tests.commands import called

MADE = Path(__file__).parent / "format1"
"""A store of format 1, the export of it, and tables of it. That version wrote them: see `make` there."""

COMMANDS = (["doctor"], ["export", "-"], ["keys-forget", "--older-than", "1h"])

BOTH = r"has format 1, but .* knows format \d+\. .*`gradserve export FILE`.*`gradserve import FILE`"


@pytest.fixture
def before(tmp_path: Path) -> Iterator[Path]:
    with tarfile.open(MADE / "store.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "store"
    made = {file.name: file.read_bytes() for file in path.iterdir()}
    yield path
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock.mdb"} == made


def test_a_store_of_the_format_before_is_refused_and_left_alone(before: Path) -> None:
    expected = rf"{before} has format 1, but .* knows format {FORMAT}\. .*`gradserve export FILE`.*`gradserve import"
    with pytest.raises(StoreFailed, match=expected):
        LmdbStore(before, max_bytes=MAX_BYTES)


@pytest.fixture
def tables(postgres_url: str) -> Iterator[Schema]:
    schema = Schema(postgres_url)
    schema.ask(f"create schema {schema.name}")
    schema.ask((MADE / "tables.sql").read_text())

    def rows() -> list[object]:
        return [schema.ask(f"select * from {table}") for table in ("meta", "buffers", "deltas", "keys")]

    made = rows()
    yield schema
    assert rows() == made
    schema.drop()


def test_tables_of_the_format_before_are_refused_and_left_alone(tables: Schema) -> None:
    with pytest.raises(StoreFailed, match=BOTH):
        tables.open()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_such_tables(tables: Schema, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.setenv("GRADSERVE_POSTGRES_SCHEMA", tables.name)
    status, out, err = called(*command, "--store", tables.url)
    assert (status, out) == (1, "")
    assert re.search(BOTH, err)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_it_and_name_what_carries_it_over(before: Path, command: list[str]) -> None:
    status, out, err = called(*command, "--store", f"lmdb:{before}")
    assert (status, out) == (1, "")
    assert "has format 1" in err
    assert "gradserve import FILE" in err


def test_its_export_brings_its_buffers(tmp_path: Path) -> None:
    carried = tmp_path / "carried"
    assert called("import", str(MADE / "export.safetensors"), "--store", f"lmdb:{carried}")[0] == 0
    store = LmdbStore(carried, max_bytes=MAX_BYTES)
    weight, bias = store.record("weight"), store.record("bias")
    assert (weight.epoch, weight.version, weight.count, weight.spec.quorum) == (1, 3, 1, 2)
    assert (bias.epoch, bias.version, bias.count) == (0, 4, 4)
    assert bias.contributors_in == {"first": 1, "second": 1, "third": 1}
    assert (value(store, "weight").tolist(), value(store, "bias").tolist()) == ([1, 2, 3], [2.5, -0.5])
    with pytest.raises(EpochGone):
        store.closed("weight", 0)
    assert add(store, "weight", [1, 1, 1])["closed"]
    store.close()
