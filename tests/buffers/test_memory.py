"""`memory:` is LMDB in files without names, which no other process finds and nothing leaves behind."""

from __future__ import annotations

import os
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


def opened(place: Path) -> set[str]:
    """Return the names that the open files in a directory had."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if name.startswith(str(place)):
            found.add(Path(name).name)
    return found


def test_its_files_have_no_names(store: MemoryStore, place: Path) -> None:
    create(store, "w", shape=(1 << 16,))
    for number in range(3):
        for _ in range(2):
            do(store, Add(name="w", gradient=ones(1 << 16)), key=key(str(number)))
    assert value(store, "w").tolist() == [3] * (1 << 16)
    assert not [*place.iterdir()]
    assert {"data.mdb (deleted)", "values (deleted)"} <= opened(place)
    store.close()
    assert not opened(place)


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
    assert (opened(place), bool(opened(other))) == (set(), True)
    store.close()


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    before = {path for path in Path("/dev/shm").iterdir() if path.name.startswith("gradserve-")}
    with Server(tmp_path / "none", store="memory:") as server:
        with Client(server.url) as client:
            client.create("w", [1 << 16])
        server.kill()
    after = {path for path in Path("/dev/shm").iterdir() if path.name.startswith("gradserve-")}
    assert not {path for path in after - before if not path.name.startswith("gradserve-tests-")}
