"""Slots: the file `values`, which holds the chunks of large values, and the list of its free slots.

No transaction writes into a slot that a reader may still read, or that a crash may lead back to. `format.py` draws when
a slot is free again.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
import numpy.typing as npt

from service.buffers.lmdb.format import NUMBER, keep
from service.buffers.room import store_full
from service.errors import StoreFull
from service.host.files import open_regular
from service.host.system import begin_to_store, free_range, read_into, sync

CHUNK_BYTES = 1 << 18
"""Length of a slot: a value above 64 KB takes at most four times its size, and a chunk fits into a cache."""

_FREE_KEY = struct.Struct(">QI")
"""The transaction that freed slots, and a running number."""

_MOST_IN_FREE = 1000
"""Slots in one entry of the free list: a transaction writes back the rest of the entry that it takes from."""

_UNSTORED_PARTS = 4
"""The disk begins to store once a quarter of what was written since the last sync waits, and at least a chunk: a small
value is under way early, and a large value makes few of these calls. A call takes as long as an add to a chunk."""

_MOST_UNSTORED_BYTES = 1 << 21
"""The disk begins to store at the latest when this much waits, so that it is not idle while a value is written."""

RESERVE_BYTES = 1 << 17
"""What LMDB keeps of the disk or of its own free pages: without any it could not even delete a buffer."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""A full disk, the user's quota, and a limit of the file's size."""


class Databases(Protocol):
    """What slots and values need of an environment."""

    meta: Any
    values: Any
    free: Any
    file: SlotFile
    max_bytes: int

    def unseal(self, sealed: memoryview, key: memoryview | bytes) -> memoryview | None: ...

    def oldest_reader(self) -> int | None:
        """Return the transaction whose state the slowest reader sees; None if there are no readers."""


class SlotFile:
    """The file of the slots, `CHUNK_BYTES` bytes each."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        self._fd = open_regular(path, os.O_NOFOLLOW | (os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT))
        self._written_bytes = 0  # since the last sync
        self._unstored_bytes = 0  # since the disk last began to store

    def read(self, slot: int, memory: memoryview) -> bool:
        """Fill the memory from a slot. Return False if the file is too short or cannot be read."""
        try:
            return read_into(self._fd, memory, slot * CHUNK_BYTES) == len(memory)
        except OSError:
            return False

    def write(self, slot: int, data: memoryview) -> None:
        """Write a chunk into a slot. Raises OSError for a full disk."""
        start = slot * CHUNK_BYTES
        done = os.pwrite(self._fd, data, start)
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], start + done)
        self._written_bytes += done
        self._unstored_bytes += done
        part = min(self._written_bytes // _UNSTORED_PARTS, _MOST_UNSTORED_BYTES)
        if self._unstored_bytes >= max(CHUNK_BYTES, part):
            begin_to_store(self._fd)
            self._unstored_bytes = 0

    def sync(self) -> None:
        """Return when everything that was written is on the disk."""
        sync(self._fd)
        self._written_bytes = self._unstored_bytes = 0

    def has_room(self, size: int = 0) -> bool:
        """Return whether the disk has room for `size` bytes and the reserve."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize >= size + RESERVE_BYTES or not disk.f_blocks

    def give_back(self, slots: npt.NDArray[np.int64], count: int) -> None:
        """Give these slots, and everything behind the first `count` slots, back to the disk, if it can take them."""
        slots = np.sort(slots)
        for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
            if run.size:
                free_range(self._fd, int(run[0]) * CHUNK_BYTES, run.size * CHUNK_BYTES)
        if os.fstat(self._fd).st_size > count * CHUNK_BYTES:
            os.ftruncate(self._fd, count * CHUNK_BYTES)

    def disk_bytes(self) -> int:
        """Return the bytes of the disk that the file takes."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        os.close(self._fd)


def slots_in(env: Databases, entry: tuple[memoryview, memoryview]) -> npt.NDArray[np.int64]:
    """Return the slots of an entry of the free list, none if it is damaged: they are lost."""
    slots = env.unseal(entry[1], entry[0]) or b""
    return np.frombuffer(slots, "<i8", len(slots) // NUMBER.size)


def stored_number(env: Databases, txn: Any, name: bytes) -> int:
    """Return b"last_id", or b"slots", which counts free slots, too. Raises lmdb.CorruptedError if it is damaged."""
    data = env.unseal(txn.get(name, default=b"", db=env.meta), name)
    if data is None:
        raise lmdb.CorruptedError(f"its number {name.decode()!r} is lost")
    return int.from_bytes(data, "big")


class Slots:
    """The slots that a transaction takes and frees."""

    def __init__(self, env: Databases, txn: Any) -> None:
        self._env, self._txn = env, txn
        self._spare: list[int] = []  # free, and no longer in `free`
        self._fresh: set[int] = set()  # taken by this transaction
        self._freed: list[int] = []

    def write(self, slot: int, data: memoryview) -> int:
        """Write a chunk that was in `slot`, -1 for a new chunk. Return its slot from now on. Raises `StoreFull`."""
        if slot not in self._fresh:
            self.free(slot)
            slot = self._take()
        try:
            self._env.file.write(slot, data)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise disk_full(str(error.strerror)) from None
            raise
        return slot

    def free(self, slot: int) -> None:
        """Free a slot; -1 is no slot."""
        if slot < 0:
            return
        if slot in self._fresh:
            self._fresh.remove(slot)
            self._spare.append(slot)
        else:
            self._freed.append(slot)

    def finish(self) -> None:
        """Store the free list, and sync the file if it was written: the commit may follow."""
        for freed_by, slots in ((self._txn.id(), self._freed), (0, self._spare)):
            for start in range(0, len(slots), _MOST_IN_FREE):
                part = np.array(slots[start : start + _MOST_IN_FREE], "<i8").tobytes()
                keep(self._txn, self._env.free, self._unused_key(freed_by), part)
        if self._fresh:
            self._env.file.sync()

    def give_back(self) -> None:
        """Give all slots that a transaction could take back to the disk."""
        last, count = self._last_reusable(), stored_number(self._env, self._txn, b"slots")
        with self._txn.cursor(db=self._env.free) as cursor:
            entries = itertools.takewhile(lambda entry: _FREE_KEY.unpack(entry[0])[0] <= last, cursor)
            free = np.concatenate([np.empty(0, "<i8"), *(slots_in(self._env, entry) for entry in entries)])
        self._env.file.give_back(free[(free >= 0) & (free < count)], count)

    def _unused_key(self, freed_by: int) -> bytes:
        keys = (_FREE_KEY.pack(freed_by, number) for number in itertools.count())
        return next(key for key in keys if self._txn.get(key, db=self._env.free) is None)

    def _take(self) -> int:
        """Return a free slot. Raises `StoreFull`."""
        if not self._spare:
            self._spare = self._reusable() or self._beyond()
        slot = self._spare.pop()
        self._fresh.add(slot)
        return slot

    def _reusable(self) -> list[int]:
        """Return reusable slots, the lowest last, and remove them from the free list."""
        with self._txn.cursor(db=self._env.free) as cursor:
            if not cursor.first() or _FREE_KEY.unpack(cursor.key())[0] > self._last_reusable():
                return []
            slots = np.sort(slots_in(self._env, cursor.item()))[::-1]
            cursor.delete()
        return list(slots[(slots >= 0) & (slots < stored_number(self._env, self._txn, b"slots"))].tolist())

    def _last_reusable(self) -> int:
        """Return the last transaction whose freed slots are reusable."""
        seen, newest = self._env.oldest_reader(), int(self._txn.id()) - 2
        return newest if seen is None else min(newest, seen)

    def _beyond(self) -> list[int]:
        """Return a new slot behind all others. Raises `StoreFull`."""
        count = stored_number(self._env, self._txn, b"slots")
        if (count + 1) * CHUNK_BYTES > self._env.max_bytes:
            raise store_full(self._env.max_bytes)
        if not self._env.file.has_room(CHUNK_BYTES):
            raise disk_full()
        keep(self._txn, self._env.meta, b"slots", NUMBER.pack(count + 1))
        return [count]


def disk_full(reason: str = os.strerror(errno.ENOSPC)) -> StoreFull:
    """Return the error of a store whose disk is full."""
    return StoreFull(f"The disk of the store is full ({reason}); nothing was changed")
