"""Regions of shared memory that clients have registered: ranges of objects in /dev/shm, by namespace and name.

The server maps no object, and keeps none open. Each use opens the object by its key, checks that it is still the one
that was registered, and reads or writes its bytes with system calls. So an object that its client has truncated gives
an error, where mapped memory would end the process by SIGBUS. The memory of a removed object is free at once.

Every worker process sees every region, for the regions are noted in a directory that the workers share. A note is the
text of a symbolic link, which nothing follows: one system call makes the link with its text, or fails if there is one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from service.errors import (
    InvalidParameter,
    NotReady,
    RegionExists,
    RegionUnusable,
    TooManyRegions,
    UnknownRegion,
    shown,
)
from service.host.files import open_regular
from service.host.system import read_into

OBJECTS = Path("/dev/shm")
"""The directory where Linux keeps the objects of shm_open."""

MAX_REGIONS = 1024
"""Regions in a namespace, at most. Each takes an inode on the disk until it is unregistered."""

MAX_NAME_CHARACTERS = 255
"""Characters of a region's name, at most. The text of a link has room for 4,095 bytes."""

_KEY = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9._-]{0,254})")

_KEY_RULE = "a slash, then a letter, a digit or _, then up to 254 characters of A-Z a-z 0-9 _ . -"

_LINKED = errno.ELOOP
"""The error of a link where O_NOFOLLOW forbids one."""


class Region(NamedTuple):
    """A registered region: `byte_size` bytes from `offset` on in the object that has the key, the device and inode."""

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int


class Regions:
    """The regions of all namespaces, noted in the directory `shared`; without it, in one of this process's own.

    All methods make a few quick system calls, and `read` and `write` copy memory.
    """

    def __init__(self, shared: Path | None) -> None:
        self._own: TemporaryDirectory[str] | None = None
        if shared is None:
            self._own = TemporaryDirectory(prefix="gradserve-regions-")
            shared = Path(self._own.name)
        self._directory = shared / "regions"

    def close(self) -> None:
        """Forget the regions, unless other processes share them."""
        if self._own is not None:
            self._own.cleanup()

    def register(self, namespace: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Note a region under this name.

        Raises `InvalidParameter` for a wrong key or name, `RegionUnusable` if the object does not have these bytes,
        `RegionExists`, `TooManyRegions`, and `NotReady` if the directory cannot be written.
        """
        if len(name) > MAX_NAME_CHARACTERS:
            raise InvalidParameter(f"The region's name has {len(name)} characters; the limit is {MAX_NAME_CHARACTERS}")
        if _KEY.fullmatch(key) is None:
            raise InvalidParameter(f"key is {shown(key)}, but must be {_KEY_RULE}", parameter="key")
        with _opened(key, os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
        region = Region(name, key, offset, byte_size, status.st_dev, status.st_ino)
        _check_size(region, status.st_size, offset + byte_size)
        place = self._place(namespace)
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if len(os.listdir(place)) >= MAX_REGIONS:
                raise TooManyRegions(
                    f"The namespace has {MAX_REGIONS} regions, the most that it may have; unregister those that are"
                    " not used",
                    limit=MAX_REGIONS,
                )
            os.symlink(json.dumps(region), place / _digest(name))
        except FileExistsError:
            raise RegionExists(f"There is a region {shown(name)} already; unregister it first") from None
        except OSError as error:
            raise NotReady(f"The server cannot note the region just now: {error.strerror}") from None

    def unregister(self, namespace: str, name: str | None = None) -> None:
        """Forget the region, if there is one, or all regions of the namespace.

        A request that is reading or writing the region goes on.
        """
        place = self._place(namespace)
        for note in _notes(place) if name is None else [place / _digest(name)]:
            with suppress(FileNotFoundError):
                note.unlink()

    def all(self, namespace: str) -> list[Region]:
        """Return the regions of the namespace, sorted by name."""
        regions = list[Region]()
        for note in _notes(self._place(namespace)):
            with suppress(FileNotFoundError):  # another request has unregistered it
                regions.append(_read_note(note))
        return sorted(regions)

    def find(self, namespace: str, name: str) -> Region:
        """Return the region. Raises `UnknownRegion`."""
        try:
            return _read_note(self._place(namespace) / _digest(name))
        except FileNotFoundError:
            raise UnknownRegion(f"There is no region {shown(name)}; register it first") from None

    def read(self, namespace: str, name: str, offset: int, memory: memoryview) -> None:
        """Fill the memory with the region's bytes from `offset` on. Raises `UnknownRegion` and `RegionUnusable`."""
        with self._part(namespace, name, offset, len(memory), os.O_RDONLY) as (descriptor, start):
            done = 0
            while done < len(memory):
                step = read_into(descriptor, memory[done:], start + done)
                if step == 0:
                    raise RegionUnusable(f"The object of the region {shown(name)} was truncated while it was read")
                done += step

    def write(self, namespace: str, name: str, offset: int, data: memoryview) -> None:
        """Write the data to the region, from `offset` on. Raises `UnknownRegion` and `RegionUnusable`."""
        with self._part(namespace, name, offset, len(data), os.O_WRONLY) as (descriptor, start):
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], start + done)

    @contextmanager
    def _part(self, namespace: str, name: str, offset: int, size: int, flags: int) -> Iterator[tuple[int, int]]:
        """Yield the descriptor of the region's object, and the place there of the region's byte at `offset`."""
        region = self.find(namespace, name)
        if offset + size > region.byte_size:
            raise RegionUnusable(
                f"The region {shown(name)} has {region.byte_size} bytes, which do not reach from byte {offset} to"
                f" {offset + size}"
            )
        with _opened(region.key, flags) as descriptor:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (region.device, region.inode):
                raise RegionUnusable(
                    f"Another object has the key {region.key} since the region {shown(name)} was registered; unregister"
                    " the region, then register it again"
                )
            start = region.offset + offset
            _check_size(region, status.st_size, start + size)
            try:
                yield descriptor, start
            except OSError as error:
                raise RegionUnusable(f"The object {region.key} cannot be read or written: {error.strerror}") from None

    def _place(self, namespace: str) -> Path:
        return self._directory / _digest(namespace)


def _digest(name: str) -> str:
    """Return a file name for any name."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def _notes(place: Path) -> list[Path]:
    try:
        return [place / name for name in os.listdir(place)]
    except FileNotFoundError:  # the namespace never had a region
        return []


def _read_note(note: Path) -> Region:
    return Region(*json.loads(os.readlink(note)))


def _check_size(region: Region, size: int, end: int) -> None:
    if end > size:
        raise RegionUnusable(
            f"The object {region.key} has {size} bytes, but the region {shown(region.name)} needs {end}"
        )


@contextmanager
def _opened(key: str, flags: int) -> Iterator[int]:
    """Yield a descriptor of the object, which must be a regular file. Raises `RegionUnusable`."""
    try:
        descriptor = open_regular(OBJECTS / key.removeprefix("/"), flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "It is a link" if error.errno == _LINKED else error.strerror
        raise RegionUnusable(f"The server cannot open the object {key}: {reason}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)
