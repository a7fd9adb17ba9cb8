"""The registry of shared memory: what it opens, what it refuses, and what several processes see of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.errors import (
    GradserveError,
    InvalidParameter,
    NotReady,
    RegionExists,
    RegionUnusable,
    TooManyRegions,
    UnknownRegion,
)
from service.host import shared_memory
from service.host.shared_memory import MAX_NAME_CHARACTERS, OBJECTS, Region, Regions
from service.host.system import read_into

pytestmark = pytest.mark.skipif(not OBJECTS.is_dir(), reason="needs /dev/shm")

KEY = f"/gradserve-test-{os.getpid()}"
OBJECT = OBJECTS / KEY[1:]
DATA = bytes(range(100))


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[Regions]:
    """Yield a registry, and an object of 100 bytes with the key."""
    OBJECT.write_bytes(DATA)
    yield Regions(tmp_path)
    for path in OBJECTS.glob(f"{OBJECT.name}*"):
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()


def read(regions: Regions, size: int, offset: int = 0, name: str = "r", namespace: str = "") -> bytes:
    memory = memoryview(bytearray(size))
    regions.read(namespace, name, offset, memory)
    return bytes(memory)


def test_bytes_are_read_and_written_where_the_region_says(regions: Regions) -> None:
    regions.register("", "r", KEY, 10, 80)
    assert read(regions, 5, offset=20) == DATA[30:35]
    assert read(regions, 80) == DATA[10:90]
    assert read(regions, 0, offset=80) == b""
    regions.write("", "r", 77, memoryview(b"abc"))
    assert OBJECT.read_bytes() == DATA[:87] + b"abc" + DATA[90:]


@pytest.mark.parametrize("key", [KEY, KEY[1:]], ids=["with", "without"])
def test_a_key_may_lack_its_slash_as_for_shm_open(regions: Regions, key: str) -> None:
    regions.register("", "r", key, 0, 100)
    assert regions.all("") == [Region("r", key, 0, 100, OBJECT.stat().st_dev, OBJECT.stat().st_ino)]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/",
        "//a",
        "/a/b",
        "/..",
        "/.",
        "..",
        "/../tmp/a",
        "/.a",
        "/-a",
        "/a\0",
        "/a b",
        "/a\n",
        "/é",
        "/" + "a" * 256,
    ],
)
def test_a_key_that_is_no_safe_file_name_is_refused(regions: Regions, key: str) -> None:
    with pytest.raises(InvalidParameter, match="key is"):
        regions.register("", "r", key, 0, 1)


def as_link() -> None:
    OBJECT.symlink_to(Path(__file__))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "No such file"),
        (as_link, "It is a link"),
        (OBJECT.mkdir, "Not a regular file"),
        (lambda: os.mkfifo(OBJECT), "Not a regular file"),
    ],
    ids=["nothing", "link", "directory", "FIFO"],
)
def test_what_is_not_a_regular_file_is_refused(regions: Regions, make: Any, reason: str) -> None:
    regions.register("", "before", KEY, 0, 100)
    OBJECT.unlink()
    make()
    with pytest.raises(RegionUnusable, match=f"cannot open the object {KEY}: {reason}"):
        regions.register("", "r", KEY, 0, 1)
    for use in (lambda: read(regions, 1, name="before"), lambda: regions.write("", "before", 0, memoryview(b"a"))):
        with pytest.raises(RegionUnusable, match="cannot open"):
            use()


def test_a_region_that_its_object_does_not_hold_is_refused(regions: Regions) -> None:
    for offset, size in ((0, 101), (1, 100), (100, 1), (1 << 62, 1 << 62)):
        with pytest.raises(RegionUnusable, match=f"has 100 bytes, but the region 'r' needs {offset + size}"):
            regions.register("", "r", KEY, offset, size)
    assert regions.all("") == []


def test_bytes_outside_the_region_are_refused_even_if_the_object_has_them(regions: Regions) -> None:
    regions.register("", "r", KEY, 10, 20)
    for offset, size in ((0, 21), (20, 1), (1 << 62, 0)):
        with pytest.raises(RegionUnusable, match="has 20 bytes, which do not reach from byte"):
            read(regions, size, offset)
    with pytest.raises(RegionUnusable, match="which do not reach"):
        regions.write("", "r", 20, memoryview(b"a"))
    assert OBJECT.read_bytes() == DATA


def test_a_truncated_object_gives_an_error_until_it_has_its_size_again(regions: Regions) -> None:
    regions.register("", "r", KEY, 0, 100)
    os.truncate(OBJECT, 50)
    assert read(regions, 50) == DATA[:50]
    for use in (lambda: read(regions, 51), lambda: regions.write("", "r", 50, memoryview(b"a"))):
        with pytest.raises(RegionUnusable, match="has 50 bytes, but the region 'r' needs 51"):
            use()
    assert OBJECT.stat().st_size == 50
    os.truncate(OBJECT, 100)
    assert read(regions, 100) == DATA[:50] + bytes(50)


def test_an_object_that_is_truncated_while_it_is_read_gives_an_error(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("", "r", KEY, 0, 100)

    def short(descriptor: int, memory: memoryview, start: int) -> int:
        step = read_into(descriptor, memory[:30], start)
        os.truncate(OBJECT, 40)
        return step

    monkeypatch.setattr("service.host.shared_memory.read_into", short)
    with pytest.raises(RegionUnusable, match="'r' was truncated while it was read"):
        read(regions, 100)


def test_a_region_that_is_unregistered_while_it_is_read_is_read_to_its_end(
    regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("", "r", KEY, 0, 100)

    def slow(descriptor: int, memory: memoryview, start: int) -> int:
        regions.unregister("", "r")
        OBJECT.unlink(missing_ok=True)
        return read_into(descriptor, memory[:30], start)

    monkeypatch.setattr("service.host.shared_memory.read_into", slow)
    assert read(regions, 100) == DATA
    with pytest.raises(UnknownRegion, match="no region 'r'"):
        read(regions, 100)


@pytest.mark.parametrize("size", [100, 200])
def test_another_object_under_the_same_key_is_never_touched(regions: Regions, size: int) -> None:
    regions.register("", "r", KEY, 0, 100)
    OBJECT.rename(OBJECT.with_name(f"{OBJECT.name}.renamed"))
    OBJECT.write_bytes(bytes(size))
    for use in (lambda: read(regions, 1), lambda: regions.write("", "r", 0, memoryview(b"a"))):
        with pytest.raises(RegionUnusable, match=f"Another object has the key {KEY}"):
            use()
    assert OBJECT.read_bytes() == bytes(size)
    regions.unregister("", "r")
    regions.register("", "r", KEY, 0, 100)
    assert read(regions, 100) == bytes(100)


def test_a_full_device_gives_an_error(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with holes may be larger than the device."""
    regions.register("", "r", KEY, 0, 100)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RegionUnusable, match=f"{KEY} cannot be read or written: No space left"):
        regions.write("", "r", 0, memoryview(b"a"))


def test_every_registry_of_a_directory_sees_every_change(regions: Regions, tmp_path: Path) -> None:
    """Worker processes have a registry each."""
    other = Regions(tmp_path)
    regions.register("", "r", KEY, 0, 100)
    assert read(other, 100) == DATA
    assert other.all("") == regions.all("")
    with pytest.raises(RegionExists, match="region 'r' already"):
        other.register("", "r", KEY, 0, 1)
    other.unregister("", "r")
    with pytest.raises(UnknownRegion):
        read(regions, 1)
    regions.close()  # it is not the registry's own directory
    other.register("", "r", KEY, 0, 100)
    assert [one.name for one in Regions(tmp_path).all("")] == ["r"]


def test_a_namespace_sees_only_its_own_regions(regions: Regions) -> None:
    for namespace, offset in (("", 0), ("a", 1), ("..", 2)):
        regions.register(namespace, "r", KEY, offset, 10)
    regions.register("a", "s", KEY, 0, 10)
    assert read(regions, 1) == b"\0"
    assert read(regions, 1, namespace="a") == b"\1"
    assert read(regions, 1, namespace="..") == b"\2"
    with pytest.raises(UnknownRegion):
        read(regions, 1, name="s")
    regions.unregister("a")
    assert [len(regions.all(namespace)) for namespace in ("", "a", "..", "b")] == [1, 0, 1, 0]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "é\0\n", "\udc80", "x" * MAX_NAME_CHARACTERS])
def test_any_name_may_be_a_regions(regions: Regions, name: str) -> None:
    regions.register("", name, KEY, 0, 100)
    assert [one.name for one in regions.all("")] == [name]
    assert read(regions, 100, name=name) == DATA
    regions.unregister("", name)
    assert regions.all("") == []


def test_a_name_without_bounds_is_refused(regions: Regions) -> None:
    with pytest.raises(InvalidParameter, match=f"name has {MAX_NAME_CHARACTERS + 1} characters"):
        regions.register("", "\0" * (MAX_NAME_CHARACTERS + 1), KEY, 0, 1)
    regions.register("", "\0" * MAX_NAME_CHARACTERS, KEY, 0, 1)  # the longest text of a note


def test_the_number_of_regions_is_bounded(regions: Regions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_REGIONS", 2)
    for name in "ab":
        regions.register("", name, KEY, 0, 1)
    with pytest.raises(TooManyRegions, match="has 2 regions"):
        regions.register("", "c", KEY, 0, 1)
    regions.register("other", "c", KEY, 0, 1)
    regions.unregister("", "a")
    regions.register("", "c", KEY, 0, 1)


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path, regions: Regions) -> None:
    regions.register("", "r", KEY, 0, 1)
    for path in sorted((tmp_path / "regions").rglob("*"), reverse=True):
        path.unlink() if path.is_symlink() else path.rmdir()
    (tmp_path / "regions").rmdir()
    assert regions.all("") == []
    regions.unregister("")
    regions.register("", "r", KEY, 0, 1)
    assert read(regions, 1) == b"\0"


def test_a_directory_that_cannot_be_written_is_an_error_of_the_server(tmp_path: Path, regions: Regions) -> None:
    (tmp_path / "regions").write_bytes(b"")
    with pytest.raises(NotReady, match="cannot note the region"):
        regions.register("", "r", KEY, 0, 1)


def test_a_process_alone_keeps_its_regions_to_itself_and_cleans_up(regions: Regions) -> None:
    one, other = Regions(None), Regions(None)
    one.register("", "r", KEY, 0, 1)
    assert (len(one.all("")), len(other.all(""))) == (1, 0)
    directory = one._directory
    for registry in (one, other):
        registry.close()
    assert not directory.parent.exists()


def test_no_descriptor_stays_open(regions: Regions) -> None:
    before = os.listdir("/proc/self/fd")
    for round in range(200):
        regions.register("", "r", KEY, 0, 100)
        read(regions, 100)
        regions.write("", "r", 0, memoryview(DATA))
        for size in (101, 1000):
            with pytest.raises(GradserveError):
                read(regions, size)
            with pytest.raises(GradserveError):
                regions.register("", f"{round}", KEY, 0, size)
        regions.unregister("", "r")
    assert os.listdir("/proc/self/fd") == before
