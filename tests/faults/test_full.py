"""A full disk, a full store and a read-only store: a clear error, no change, and service again once there is room."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.faults.servers import Client, Server, new_key, tensors
from tests.serving import assert_problem

SIZE = 30_000
"""Elements of a buffer: a store in these tests holds a dozen."""

ONES = np.ones(SIZE)
ROOM = 4 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yield a small file system."""
    with tempfile.TemporaryDirectory() as path:  # not tmp_path: a mount left there makes pytest fail later
        mounted = _mount("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", path)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(path)
        finally:
            subprocess.run(["umount", path], check=True, timeout=30)


def _mount(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        return subprocess.CompletedProcess(arguments, 1, "", str(error))


def fill(client: Client, size: int = SIZE) -> tuple[int, httpx.Response]:
    """Create buffers and add to each until the server refuses; return the last number and the refusal."""
    for number in range(1, 100):
        client.create(f"b{number}", (size,))
        body = tensors(gradient=np.ones(size))
        refused = client.once("POST", f"/v1/buffers/b{number}/accumulate", key=f"{number}", **body)
        if refused.status_code != 200:
            return number, refused
    raise AssertionError("it does not get full")


def add_in_vain(client: Client, name: str, key: str | None = None, *, size: int = SIZE) -> None:
    answer = client.once("POST", f"/v1/buffers/{name}/accumulate", key=key, **tensors(gradient=np.ones(size)))
    assert_problem(answer, 507, "store_full", "nothing was changed")


def test_a_full_disk_changes_nothing_until_there_is_room(disk: Path, tmp_path: Path) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(ROOM // 4))
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        last, refused = fill(client)
        before = client.state()
        assert_problem(refused, 507, "store_full", "disk", "full", "nothing was changed")
        for _ in range(2):
            add_in_vain(client, f"b{last}", new_key())
        assert client.state() == before
        ballast.unlink()
        assert client.add(f"b{last}", ONES, key=str(last))["count"] == 1  # the key of a failed request is free
        assert client.add("b1", ONES)["count"] == 2
        server.restart()
        assert (client.value("b1") == 2).all()
        assert (client.value(f"b{last}") == 1).all()


@pytest.mark.parametrize("size", [SIZE, 200_000])
def test_deleting_a_buffer_makes_room_on_a_full_disk(disk: Path, tmp_path: Path, size: int) -> None:
    ones = np.ones(size)
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        last, _ = fill(client, size)
        ballast = disk / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        add_in_vain(client, f"b{last}", size=size)
        client.done("DELETE", "/v1/buffers/b1")
        for number in range(50):  # these buffers need room from the disk
            client.create(f"new.{number}", (10,))
            assert client.add(f"new.{number}", np.ones(10))["count"] == 1
        server.restart()
        client.done("DELETE", "/v1/buffers/b2")
        assert client.add(f"b{last}", ones)["count"] == 1
        for name in ("b3", f"b{last}"):
            assert (client.value(name) == 1).all()


def test_deleting_a_large_buffer_makes_room_on_a_disk_full_of_small_ones(disk: Path, tmp_path: Path) -> None:
    """LMDB needs room to change its pages, even on a full disk."""
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        last, _ = fill(client)
        for number in range(10_000):
            answer = client.once("PUT", f"/v1/buffers/small.{number}", json={"shape": [10]})
            if answer.status_code != 201:
                break
        assert_problem(answer, 507, "store_full", "disk", "full")
        for name in ("b1", "small.0", "b2"):
            client.done("DELETE", f"/v1/buffers/{name}")
        assert client.add(f"b{last}", ONES)["count"] == 1


def test_deleting_small_buffers_makes_room_inside_lmdb(disk: Path, tmp_path: Path) -> None:
    """Deleting small buffers frees pages inside LMDB, and no room on the disk."""
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        for number in range(40):
            client.create(f"small.{number}", (4000,))
            client.add(f"small.{number}", np.ones(4000))
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(20):
            client.done("DELETE", f"/v1/buffers/small.{number}")
        for number in range(5):
            client.create(f"new.{number}", (4000,))
            assert client.add(f"new.{number}", np.ones(4000))["count"] == 1


def test_a_refused_add_gives_back_the_room_that_it_took(disk: Path, tmp_path: Path) -> None:
    """The refused add had written some bytes; the store frees them without a commit."""
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        client.create("huge", (ROOM // 4,))
        names = [f"small.{number}" for number in range(30)]
        for name in names:
            client.create(name, (16_000,), "float32")  # small enough to be kept in LMDB, not in slots
        for _ in range(2):
            add_in_vain(client, "huge", new_key(), size=ROOM // 4)
        client.add_many(dict.fromkeys(names, np.ones(16_000, np.float32)), key=new_key())


def test_a_full_store_changes_nothing_until_a_buffer_is_deleted(tmp_path: Path) -> None:
    with Server(tmp_path / "store", store_bytes=ROOM) as server, Client(server.url) as client:
        last, refused = fill(client)
        before = client.state()
        assert_problem(refused, 507, "store_full", "GRADSERVE_STORE_BYTES", "nothing was changed")
        for _ in range(2):
            add_in_vain(client, f"b{last}", new_key())
        assert client.state() == before
        client.done("DELETE", "/v1/buffers/b1")
        assert client.add("b2", ONES)["count"] == 2
        assert (client.value("b2") == 2).all()


def test_an_add_to_many_buffers_without_room_changes_none(tmp_path: Path) -> None:
    with Server(tmp_path / "store", store_bytes=ROOM) as server, Client(server.url) as client:
        names = [f"b{number}" for number in range(20)]
        for name in names:
            client.create(name, (SIZE,))
        before = client.state()
        key = new_key()
        for _ in range(2):
            refused = client.once("POST", "/v1/buffers/accumulate", key=key, **tensors(**dict.fromkeys(names, ONES)))
            assert_problem(refused, 507, "store_full")
            assert client.state() == before
        client.add_many(dict.fromkeys(names[:5], ONES), key=new_key())
        assert [client.metadata(name)["count"] for name in names] == [1] * 5 + [0] * 15


def test_a_store_full_to_the_last_page_still_deletes(tmp_path: Path) -> None:
    with Server(tmp_path / "store", store_bytes=ROOM) as server, Client(server.url) as client:
        fill(client)
        for number in range(10_000):
            body = {"shape": [SIZE], "dtype": "float64"}
            if client.once("PUT", f"/v1/buffers/small.{number}", json=body).status_code != 201:
                break
        for name in ("b1", "b2"):
            client.done("DELETE", f"/v1/buffers/{name}")
        assert client.add("b3", ONES)["count"] == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_read_only_store_is_refused_at_the_start(workers: int, disk: Path, tmp_path: Path) -> None:
    with Server(disk / "store", log=tmp_path / "log") as server, Client(server.url) as client:
        client.create("b", (SIZE,))
    remounted = _mount("-o", "remount,ro", str(disk))
    if remounted.returncode:
        pytest.skip(f"no file system can be made read-only here: {remounted.stderr.strip()}")
    try:
        server = Server(disk / "store", workers=workers, log=tmp_path / "refusal")
        server.launch()
        status, said = server.ended()
        assert status not in (0, None)
        assert f"{disk / 'store'}" in said
        assert "Read-only file system" in said
        assert "Traceback" not in said
    finally:
        assert _mount("-o", "remount,rw", str(disk)).returncode == 0
