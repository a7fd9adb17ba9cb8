"""`memory:` is LMDB in files without names, which no other process finds and nothing leaves behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from service.buffers import memory
from service.buffers.changes import Add
from service.buffers.memory import MemoryStore
from tests.buffers.calls import create, do, key, ones, value
from tests.faults.servers import Client, Server
from tests.serving import open_files


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that stands for the files in memory."""
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    monkeypatch.setattr(memory, "ROOM_BYTES", 0)
    return tmp_path


@pytest.fixture
def store(place: Path) -> Iterator[MemoryStore]:
    made = MemoryStore()
    yield made
    made.close()


def names_in(place: Path) -> set[str]:
    """Return the names that this process's open files in a directory had."""
    return {Path(file).name for file in open_files() if file.startswith(str(place))}


def test_its_files_have_no_names(store: MemoryStore, place: Path) -> None:
    create(store, "w", shape=(1 << 16,))
    for number in range(3):
        for _ in range(2):
            do(store, Add(name="w", gradient=ones(1 << 16)), key=key(str(number)))
    assert value(store, "w").tolist() == [3] * (1 << 16)
    assert not [*place.iterdir()]
    assert {"data.mdb (deleted)", "values (deleted)"} <= names_in(place)
    store.close()
    assert not names_in(place)


class Usage(NamedTuple):
    free: int


def test_little_memory_is_left_alone(
    place: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are then beside other temporary files."""
    monkeypatch.setattr(memory, "ROOM_BYTES", 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(999))
    other = tmp_path_factory.mktemp("other")
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    store = MemoryStore()
    assert (names_in(place), bool(names_in(other))) == (set(), True)
    store.close()


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    with Server(tmp_path / "none", store="memory:") as server:
        with Client(server.url) as client:
            client.create("w", [1 << 16])
        found = {Path(file).parent for file in open_files(server.process.pid) if file.endswith("data.mdb (deleted)")}
        server.kill()
    (directory,) = found
    assert not directory.exists()
