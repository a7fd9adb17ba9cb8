"""The LMDB environment of a store: its files, its databases, and its transactions."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lmdb
import orjson

from service.buffers.lmdb.format import DATABASES, NUMBER, OLDER, bring_over, index, keep
from service.buffers.lmdb.pages import faults_of
from service.buffers.lmdb.slots import NO_ROOM, SlotFile, disk_full
from service.buffers.packed import FORMAT, READABLE, check_format, seed_of, unseal
from service.buffers.room import store_full
from service.errors import StoreFailed
from service.host.files import check_regular, open_new
from service.host.system import disk_bytes, reserve, sync_drive, sync_path

MAP_BYTES = 1 << 40
"""LMDB's map: a part of the address space, and no memory. All processes have the same map, whatever their limits."""

MARGIN_BYTES = 64 << 20
"""data.mdb may have twice the limit of the store, and this: LMDB keeps the pages that readers see, or that are free."""

MOST_READERS = 1024
"""Places in LMDB's table of readers: threads that read at the same time, in all processes."""

FULL_DISK_BYTES = 4 << 20
"""A disk with less room than this counts as full."""

UNREADABLE = (struct.error, UnicodeError, orjson.JSONDecodeError)
"""What decoding raises for damaged data that no checksum covers, such as LMDB's own pages."""

DAMAGED = (
    lmdb.BadDbiError,
    lmdb.BadValsizeError,
    lmdb.CorruptedError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
)
"""What LMDB raises for damaged pages."""

FILES = "data.mdb", "lock.mdb", "values"
"""The files that processes share; they find each file by its name."""


class UnsyncedError(lmdb.Error):
    """A transaction is committed, but may not be on the disk."""


class Environment:
    """The LMDB environment of a store, its databases, and its transactions."""

    meta: Any
    buffers: Any
    values: Any
    free: Any
    keys: Any
    outcomes: Any
    deadlines: Any
    older: Sequence[Any] = ()
    """The graphs and the pushes of an older store that is only read, which has them apart."""

    def __init__(self, path: Path, *, max_bytes: int, readonly: bool = False) -> None:
        self.path, self.data, self.max_bytes = path, path / "data.mdb", max_bytes
        self._env = open_lmdb(path, readonly=readonly)
        mark = path / "format"
        try:
            if not readonly:
                self.check_readers()
            with nullcontext() if readonly else self._env.begin(write=True) as txn:
                self._lengthen()
                self._open_databases(txn)
            self.file = SlotFile(path / "values", readonly=readonly)
            if not (readonly or mark.exists()):
                with suppress(FileExistsError), open(open_new(mark), "w") as file:  # another process may be first
                    file.write(f"{FORMAT}\n")
                sync_path(path)
            self._files = {} if readonly else {str(path / name): _identity(path / name) for name in FILES}
        except (lmdb.Error, OSError) as error:
            self._env.close()
            raise StoreFailed(f"The store in {path} cannot be read: {error}") from None
        except BaseException:
            self._env.close()
            raise

    def _open_databases(self, txn: Any | None) -> None:
        """Open the databases. `txn` makes those of a new store, and brings an older store to this format."""
        is_new = txn is not None and not self._env.stat()["entries"]
        self.meta = self._env.open_db(b"meta", txn, create=is_new)
        with nullcontext(txn) if txn is not None else self._env.begin() as reader:
            self.format = READABLE[0] if is_new else self._check_format(reader, f"The store in {self.path}", READABLE)
        for name in DATABASES:
            setattr(self, name, self._env.open_db(name.encode(), txn, create=is_new))
        if self.format != str(FORMAT):
            if txn is None:
                self.older = [self._env.open_db(name, create=False) for name in OLDER]
            else:
                self._bring_over(txn)

    def _bring_over(self, txn: Any) -> None:
        """Seal what older formats have without checksums, which a new store lacks. Make graphs and pushes buffers.

        The clock starts again.
        """
        numbers = {name: bytes(NUMBER.size) for name in (b"last_id", b"slots")} | dict(txn.cursor(db=self.meta))
        if len(numbers[b"last_id"]) != NUMBER.size:
            raise lmdb.CorruptedError(f"format {self.format} is not its format")
        for database, entries in ((self.meta, numbers), (self.free, dict(txn.cursor(db=self.free)))):
            for key, data in entries.items():
                keep(txn, database, key, data)
        index(txn, self.keys, self.outcomes)
        older = [self._env.open_db(name, txn) for name in OLDER]
        bring_over(txn, older, self.buffers, self.meta, self.deadlines)
        self.format = str(FORMAT)
        txn.put(b"format", self.format.encode(), db=self.meta)

    def _check_format(self, txn: Any, store: str, readable: Sequence[str]) -> str:
        """Return the format. Raises `StoreFailed` for another: a newer version may have brought the store over."""
        found = bytes(txn.get(b"format", default=b"", db=self.meta)).decode(errors="replace")
        check_format(found, store, readable)
        return found

    def unseal(self, sealed: bytes | memoryview, key: bytes | memoryview) -> memoryview | None:
        """Return what is stored under a key, None if it is damaged. Older formats have no checksums there."""
        return unseal(sealed, seed_of(key)) if self.format == READABLE[-1] else memoryview(sealed)

    def _lengthen(self) -> None:
        """Give data.mdb the length that LMDB expects: to read behind its end would kill the process.

        It may be short without harm, because LMDB never writes pages at its end that were never used. Raises
        `StoreFailed` if it lacks a page in use, or cannot be lengthened.
        """
        data, expected = self.data, self.file_bytes()
        size = data.stat().st_size
        if size >= expected:
            return
        with self._env.begin() as txn:
            faults = faults_of(data, txn, self._env.stat()["psize"])
        if faults:
            raise StoreFailed(f"The store in {self.path} is truncated: data.mdb has {size} bytes ({faults[0]})")
        try:
            with open(data, "r+b") as file:
                reserve(file.fileno(), size, expected - size)
        except OSError as error:
            problem = f"data.mdb has {size} bytes, and must get {expected} before it is read ({error.strerror})"
            raise StoreFailed(f"The store in {self.path} cannot be opened: {problem}") from None

    def file_bytes(self) -> int:
        """Return the bytes of data.mdb that the last transaction left in use or free."""
        return int((self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"])

    def oldest_reader(self) -> int | None:
        """Return the transaction whose state the slowest reader sees; None if there are no readers.

        LMDB has only `mdb_reader_list`, which writes its table of readers as text: a line for each reader with its
        process, its thread and its transaction, "-" for none.
        """
        lines = [line.split() for line in self._env.readers().splitlines()]
        seen = [int(line[2]) for line in lines if len(line) == 3 and line[2].isdigit()]
        return min(seen, default=None)

    def check_readers(self) -> bool:
        """Free the places of killed processes in the table of readers. Return whether there were any."""
        return self._env.reader_check() > 0

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Begin a transaction that reads. Raises `StoreFailed`."""
        try:
            with self._env.begin(buffers=True) as txn:
                self._check_format(txn, "The store", [self.format])
                yield txn
            self.check_files()  # a process with another lock.mdb does not see this reader, and may reuse what it read
        except (lmdb.Error, *UNREADABLE) as error:
            raise as_client_error(error, self.path, self.max_bytes) from None

    @contextmanager
    def writing(self) -> Iterator[Any]:
        """Begin a transaction that writes. It is committed on leaving, unless an exception is raised.

        Raises `StoreFailed` for what cannot be decoded, and lmdb.Error, which may be `UnsyncedError`.
        """
        try:
            with self._env.begin(write=True, buffers=True) as txn:
                self._check_format(txn, "The store", [self.format])
                yield txn
        except UNREADABLE as error:
            raise as_client_error(error, self.path, self.max_bytes) from None
        try:
            if self._files:
                sync_drive(self.data)  # LMDB writes the page that completes a commit with O_DSYNC
        except OSError as error:
            raise UnsyncedError(f"the disk may lack what is committed (error {error.errno})") from None

    def check_files(self) -> None:
        """Raise `StoreFailed` if a file was removed or replaced since it was opened.

        A process that opens the store now would neither see what this process writes, nor wait for it.
        """
        for file, opened in self._files.items():
            if _identity(file) != opened:
                raise StoreFailed(
                    f"{os.path.basename(file)} of the store was removed or replaced while the server was running;"
                    " restart the server to use the store again"
                )

    def generation(self) -> int:
        """Return the number of the last committed transaction. Raises `StoreFailed`."""
        with self.reading() as txn:  # what info() says may not be visible to readers yet
            return int(txn.id())

    def disk_bytes(self) -> int:
        """Return the bytes of the disk that LMDB has for its pages, used or free."""
        return os.stat(self.data).st_blocks * 512 if self._files else self.file_bytes()

    def forget_files(self) -> None:
        """Let the files have no names: this process has them open, and no other is to find them."""
        self._files, self.path = {}, self.path.parent

    def close(self) -> None:
        self._env.close()
        self.file.close()


def open_lmdb(path: Path, *, readonly: bool) -> lmdb.Environment:
    """Open LMDB in the directory `path`, which is made unless `readonly`. Raises `StoreFailed`."""
    data = path / "data.mdb"
    try:
        if readonly and not data.exists():
            raise StoreFailed(f"There is no store in {path}")
        if (path / "format").exists() and (not data.exists() or not data.stat().st_size):
            raise StoreFailed(f"The store in {path} is damaged: data.mdb is missing or empty")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in FILES:
            check_regular(path / name)
        return lmdb.open(
            str(path),
            map_size=MAP_BYTES,
            max_dbs=1 + len(DATABASES) + len(OLDER),  # one is `meta`
            max_readers=MOST_READERS,
            meminit=False,
            readonly=readonly,
            mode=0o600,
        )
    except lmdb.MemoryError:
        raise StoreFailed(
            f"The store in {path} cannot be opened: LMDB needs 1 TiB of address space, which is no memory, but this"
            " process may not have it; lift its limit with `ulimit -v unlimited`, or with LimitAS=infinity in systemd"
        ) from None
    except (lmdb.Error, OSError) as error:
        raise StoreFailed(f"The store in {path} cannot be opened: {error}") from None


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Return the device and the number of a file; None if the file cannot be seen."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def disk_is_full(path: Path) -> bool:
    """Return whether a failure here may come from a full disk."""
    try:
        free, _ = disk_bytes(path)
    except OSError:  # a disk that fails need not be full
        return False
    return free < FULL_DISK_BYTES


def as_client_error(error: Exception, path: Path, max_bytes: int) -> Exception:
    """Return what a client gets for a failure of LMDB or the disk, without paths; any other error as it is."""
    if isinstance(error, lmdb.MapFullError):
        return store_full(max_bytes)
    if isinstance(error, (lmdb.Error, OSError)):
        for reason in map(os.strerror, NO_ROOM):
            if reason in str(error):
                return disk_full(reason)
        if os.strerror(errno.EIO) in str(error) and disk_is_full(path):
            return disk_full()  # LMDB calls a write that came short an input/output error
        if not isinstance(error, DAMAGED):
            return StoreFailed(f"The store failed: {(isinstance(error, OSError) and error.strerror) or error}")
    if isinstance(error, (*DAMAGED, *UNREADABLE)):
        return StoreFailed(
            f"The store is damaged: {error}. Restore its buffers from an export; gradserve doctor shows the damage"
        )
    return error
