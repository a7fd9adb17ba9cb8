"""Opening a store: before anything reads data.mdb, its end must be there."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb

from service.buffers.lmdb.environment import Environment, open_lmdb
from service.buffers.lmdb.format import DATABASES
from service.buffers.lmdb.reader import Reader
from service.errors import BufferCorrupt, StoreFailed


def open_environment(path: Path, *, max_bytes: int, readonly: bool = False) -> Environment:
    """Open the store in the directory `path`.

    Raises `StoreFailed` if the store cannot be opened, is damaged, or comes from a newer version.
    """
    raw = open_lmdb(path, max_bytes=max_bytes, readonly=readonly)
    try:
        _check_length(raw, path, max_bytes)
    finally:
        raw.close()
    return Environment(path, max_bytes=max_bytes, readonly=readonly)


def _check_length(raw: lmdb.Environment, path: Path, max_bytes: int) -> None:
    """Raise `StoreFailed` if the end of data.mdb is missing: to read there would kill the process.

    A file may be short without harm, because LMDB never writes pages at its end that were never used. So a copy is
    given its full length and read as a whole. The file itself is left alone: another process may write to it.
    """
    info, size = raw.info(), (path / "data.mdb").stat().st_size
    expected = (info["last_pgno"] + 1) * raw.stat()["psize"]
    if not info["last_txnid"] or size >= expected:
        return
    try:
        with TemporaryDirectory(dir=path if os.access(path, os.W_OK) else None) as directory:
            raw.copy(directory)
            os.truncate(Path(directory) / "data.mdb", expected)
            copy = Environment(Path(directory), max_bytes=max_bytes)
            try:
                _read_everything(copy)
            finally:
                copy.close()
    except (lmdb.Error, BufferCorrupt, StoreFailed, struct.error) as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise StoreFailed(f"The disk is too full to check the store in {path}: {error}") from None
        raise StoreFailed(f"The store in {path} is truncated: data.mdb has {size} bytes ({error})") from None


def _read_everything(env: Environment) -> None:
    """Read every page. Raises lmdb.Error, `BufferCorrupt` or struct.error where pages are missing."""
    with env.writing() as txn:
        txn.put(b"trial", bytes(8 << 20), db=env.meta)  # a large value makes LMDB read its list of free pages
        txn.abort()
    with env.reading() as txn:
        for name in DATABASES:
            for _, entry in txn.cursor(db=getattr(env, name)):
                bytes(entry)
        reader = Reader(env, txn)
        for full_name, record in reader.sound_records():
            if record is None:
                raise BufferCorrupt(f"the buffer {full_name.joined!r} is damaged")
            for value in record.values:
                reader.values.slots_of(value)
