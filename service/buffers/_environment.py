"""The LMDB environment of a store: its files, its databases, and its transactions."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lmdb

from service.buffers._format import DATABASES, FORMAT
from service.buffers._reader import Reader
from service.buffers._slots import NO_ROOM, SlotFile, disk_full, store_full
from service.errors import BufferCorrupt, StoreFailed

MAP_MARGIN = 64 << 20
"""Bytes of LMDB's map beyond twice the limit: to forget something, LMDB first needs room."""

FILES = "data.mdb", "lock.mdb", "values"
"""What processes that share a store find by its name."""


class Environment:
    """An LMDB environment of format 1 or 2, its databases, and its transactions."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool = False) -> None:
        self.path, self.max_bytes = path, max_bytes
        data, mark = path / "data.mdb", path / "format"
        try:
            if readonly and not data.exists():
                raise StoreFailed(f"There is no store in {path}")
            if mark.exists() and (not data.exists() or not data.stat().st_size):
                raise StoreFailed(f"The store in {path} is damaged: data.mdb is missing or empty")
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._env = lmdb.open(
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
        self._check_length()
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

    def _check_length(self) -> None:
        """Raise `StoreFailed` if the end of data.mdb is missing: to read there would kill the process.

        A file may be short without harm, as pages at its end that were never used are never written. So what is short
        is judged by a copy, which is given its full length and read as a whole. The file itself is left alone: another
        process may be writing to it.
        """
        info, size = self._env.info(), (self.path / "data.mdb").stat().st_size
        expected = (info["last_pgno"] + 1) * self._env.stat()["psize"]
        if not info["last_txnid"] or size >= expected:
            return
        try:
            with TemporaryDirectory(dir=self.path if os.access(self.path, os.W_OK) else None) as place:
                self._env.copy(place)
                os.truncate(Path(place) / "data.mdb", expected)
                copy = Environment(Path(place), max_bytes=self.max_bytes)
                try:
                    copy.walk()
                finally:
                    copy.close()
        except (lmdb.Error, BufferCorrupt, StoreFailed, struct.error) as error:
            if os.strerror(errno.ENOSPC) in str(error):
                raise StoreFailed(
                    f"There is no room to see whether the store in {self.path} is whole: {error}"
                ) from None
            raise StoreFailed(f"The store in {self.path} is cut short: data.mdb has {size} bytes ({error})") from None

    def walk(self) -> None:
        """Read everything. Raises lmdb.Error, `BufferCorrupt` or struct.error where pages are missing."""
        with self._env.begin(write=True) as txn:
            txn.put(b"trial", bytes(8 << 20), db=self.meta)  # makes LMDB read its list of free pages
            txn.abort()
        with self._env.begin(buffers=True) as txn:
            for name in DATABASES:
                for _, sealed in txn.cursor(db=getattr(self, name)):
                    bytes(sealed)
            reader = Reader(self, txn)
            for name, record in reader.sound_records():
                if record is None:
                    raise BufferCorrupt(f"the buffer {name!r} is damaged")
                for value in record.values:
                    reader.values.parts_of(value)

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
                    f"{file.name} in {self.path} was removed or replaced while the server runs; nothing is read or"
                    " changed until it is started again"
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
