"""The LMDB environment of a store: its files, its databases, and its transactions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from service.buffers.lmdb.format import DATABASES, FORMAT
from service.buffers.lmdb.slots import NO_ROOM, SlotFile, disk_full, store_full
from service.errors import StoreFailed

MAP_MARGIN = 64 << 20
"""Bytes of LMDB's map beyond twice the limit: to forget something, LMDB first needs room."""

FILES = "data.mdb", "lock.mdb", "values"
"""What processes that share a store find by its name."""


class Environment:
    """An LMDB environment of format 1 or 2, its databases, and its transactions."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool = False) -> None:
        self.path, self.max_bytes = path, max_bytes
        self._env = open_lmdb(path, max_bytes=max_bytes, readonly=readonly)
        mark = path / "format"
        try:
            self._open(readonly)
            self.file = SlotFile(path / "values", readonly=readonly)
            if not (readonly or mark.exists()):
                mark.write_text(f"{FORMAT}\n")
                _sync_directory(path)
            self._files = {} if readonly else {path / name: _identity(path / name) for name in FILES}
        except (lmdb.Error, OSError) as error:
            self._env.close()
            raise StoreFailed(f"The store in {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def _open(self, readonly: bool) -> None:
        create = not readonly
        if create:
            self.check_readers()
        self.meta = self._env.open_db(b"meta", create=create)
        with self._env.begin() as txn:
            found = txn.get(b"format", db=self.meta)
        if found is not None and not (found.isdigit() and int(found) <= FORMAT):
            raise StoreFailed(
                f"The store in {self.path} has format {found.decode(errors='replace')}, but this version of gradserve"
                f" knows formats up to {FORMAT}: use the version that wrote it, or a newer one"
            )
        self.format = FORMAT if found is None else int(found)
        for name in DATABASES:
            setattr(self, name, self._env.open_db(name.encode(), create=create))
        if create and found is None:
            with self._env.begin(write=True) as txn:
                txn.put(b"format", str(FORMAT).encode(), db=self.meta)

    def oldest_reader(self) -> int | None:
        """The number of the transaction whose state the slowest reader sees; None: there are no readers."""
        lines = [line.split() for line in self._env.readers().splitlines()]
        seen = [int(line[2]) for line in lines if len(line) == 3 and line[2].isdigit()]
        return min(seen, default=None)

    def check_readers(self) -> bool:
        """Free the places of processes that were killed in the table of readers. Whether there were any."""
        return self._env.reader_check() > 0

    buffers: Any
    values: Any
    free: Any
    keys: Any
    times: Any
    deadlines: Any

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A transaction that reads. Raises `StoreFailed` where LMDB fails."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield txn
            self.check_files()  # or else who writes now may not have seen that this was read
        except lmdb.Error as error:
            raise translated(error, self.path, self.max_bytes) from None

    def writing(self) -> Any:
        """A transaction that writes, committed on leaving unless an exception is raised."""
        return self._env.begin(write=True, buffers=True)

    def check_files(self) -> None:
        """Raise `StoreFailed` if a file was removed or replaced since it was opened: who opens the store now would
        neither see what is read and written here nor wait for it."""
        for file, opened in self._files.items():
            if _identity(file) != opened:
                raise StoreFailed(
                    f"{file.name} in {self.path} was removed or replaced while the server was running; restart the"
                    " server to use the store again"
                )

    def generation(self) -> int:
        """The number of the last transaction that was committed. Raises `StoreFailed` where the store has failed."""
        self.check_files()
        try:
            with self._env.begin() as txn:  # what info() tells may not be visible yet
                return int(txn.id())
        except lmdb.Error as error:
            raise translated(error, self.path, self.max_bytes) from None

    def allocated(self) -> int:
        """Bytes of the disk that LMDB has for its pages, used or free."""
        return os.stat(self.path / "data.mdb").st_blocks * 512

    def sizes(self) -> dict[str, int]:
        """Bytes: the limit of each file, and what of the disk they take."""
        return {
            "limit": self.max_bytes,
            "data.mdb": (self.path / "data.mdb").stat().st_size,
            "values": self.file.size(),
        }

    def close(self) -> None:
        """Let go of everything."""
        self._env.close()
        self.file.close()


def open_lmdb(path: Path, *, max_bytes: int, readonly: bool) -> lmdb.Environment:
    """Open LMDB in the directory `path`, which is made unless `readonly`. Raises `StoreFailed`."""
    data = path / "data.mdb"
    try:
        if readonly and not data.exists():
            raise StoreFailed(f"There is no store in {path}")
        if (path / "format").exists() and (not data.exists() or not data.stat().st_size):
            raise StoreFailed(f"The store in {path} is damaged: data.mdb is missing or empty")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return lmdb.open(
            str(path),
            map_size=2 * max_bytes + MAP_MARGIN,
            max_dbs=8,
            max_readers=1024,
            meminit=False,
            readonly=readonly,
            mode=0o600,
        )
    except (lmdb.Error, OSError) as error:
        raise StoreFailed(f"The store in {path} cannot be opened: {error}") from None


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is, whatever its name; None: there is none, or none that can be seen."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def disk_is_full(path: Path) -> bool:
    """Whether the disk has so little room that this may be what fails."""
    try:
        disk = os.statvfs(path)
    except OSError:  # what fails need not be full
        return False
    return disk.f_bavail * disk.f_frsize < 4 << 20


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def translated(error: Exception, path: Path, max_bytes: int) -> Exception:
    """What a failure of LMDB's is to a client."""
    if isinstance(error, lmdb.MapFullError):
        return store_full(max_bytes)
    if isinstance(error, (lmdb.Error, OSError)):
        for reason in map(os.strerror, NO_ROOM):
            if reason in str(error):
                return disk_full(reason)
        if os.strerror(errno.EIO) in str(error) and disk_is_full(path):
            return disk_full()  # LMDB calls a write that came short an input/output error
        return StoreFailed(f"The store in {path} failed: {error}")
    return error
