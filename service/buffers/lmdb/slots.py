"""Chunks of large values on the disk, in the slots of the file `values`; LMDB holds which slots are free.

A slot is never written while a state that a reader sees, or that a crash leads back to, refers to it: a chunk that
changes goes into a free slot. The one that it leaves may be taken by the second transaction after this one, and by none
as long as a reader sees a state before it. The file is synced before the transaction is committed.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import struct
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from service.errors import StoreFull

CHUNK = 1 << 18
"""Bytes of a slot."""

NUMBER = struct.Struct(">Q")
_FREE_KEY = struct.Struct(">QI")
_MOST_IN_FREE = 1000
"""Slots in an entry of the free list: a transaction writes back those that it does not take."""

_SYNC_FILE_RANGE_WRITE = 2
"""Linux's sync_file_range: let the disk begin. A hint that may fail; `sync` is what counts."""

_HELD_FRACTION = 4
"""The disk begins to store once a quarter of what was written since the last sync waits, and at least a chunk: a small
value is under way early, and a large one makes few of these calls, each of which takes as long as to add a chunk."""

_MOST_HELD_BYTES = 1 << 21
"""The disk begins to store at the latest when this much waits, however much was written before."""

_PUNCH_HOLE = 3
"""Linux's fallocate: take a part of a file from the disk, but keep the file's size."""

RESERVE = 1 << 17
"""Bytes that LMDB is left, of the disk or of its own free pages: without a few it could not even delete a buffer."""

NO_ROOM = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
"""A full disk; the user's quota, or a limit of a file's size, is one too."""

_begin_to_store: Any = getattr(ctypes.CDLL(None), "sync_file_range", lambda *_: None)
_begin_to_store.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

_give_back: Any = getattr(ctypes.CDLL(None), "fallocate", lambda *_: None)
_give_back.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class Databases(Protocol):
    """What slots and values need of an environment."""

    meta: Any
    values: Any
    free: Any
    file: SlotFile
    max_bytes: int

    def oldest_reader(self) -> int | None:
        """The number of the transaction whose state the slowest reader sees; None: there are no readers."""


class SlotFile:
    """The file of the slots, CHUNK bytes each."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        self._fd = os.open(path, os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT, 0o600)
        self._written = self._held = 0  # bytes since the last sync, and those of which the disk was not told

    def read(self, slot: int, memory: memoryview) -> bool:
        """Fill the memory from a slot. Return False if the file is too short."""
        try:
            return os.preadv(self._fd, [memory], slot * CHUNK) == len(memory)
        except OSError:
            return False

    def write(self, slot: int, data: memoryview) -> None:
        """Write a chunk. Raises OSError for a full disk."""
        done = os.pwrite(self._fd, data, slot * CHUNK)
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], slot * CHUNK + done)
        self._written += done
        self._held += done
        if self._held >= max(CHUNK, min(self._written // _HELD_FRACTION, _MOST_HELD_BYTES)):
            _begin_to_store(self._fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # 0 bytes: all that there is
            self._held = 0

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._fd)
        self._written = self._held = 0

    def has_room(self, size: int = 0) -> bool:
        """Whether the disk has room for `size` bytes more, and the reserve."""
        disk = os.fstatvfs(self._fd)
        return disk.f_bavail * disk.f_frsize >= size + RESERVE or not disk.f_blocks

    def give_back(self, slots: npt.NDArray[np.int64], count: int) -> None:
        """Give the disk what these slots take, and what lies behind the first `count`. Where it cannot, it does not."""
        slots = np.sort(slots)
        for run in np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1):
            if run.size:
                _give_back(self._fd, _PUNCH_HOLE, int(run[0]) * CHUNK, run.size * CHUNK)
        if os.fstat(self._fd).st_size > count * CHUNK:
            os.ftruncate(self._fd, count * CHUNK)

    def size(self) -> int:
        """Bytes of the disk that the file takes."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def slot_count(env: Databases, txn: Any) -> int:
    """How many slots there are, free ones included."""
    found = txn.get(b"slots", db=env.meta)
    return 0 if found is None else int(NUMBER.unpack(found)[0])


class Slots:
    """The slots that a transaction takes and frees."""

    def __init__(self, env: Databases, txn: Any) -> None:
        self._env, self._txn = env, txn
        self._spare: list[int] = []
        self._fresh: set[int] = set()
        self._freed: list[int] = []

    def write(self, slot: int, data: memoryview) -> int:
        """Write a chunk that was in `slot`, -1 for nowhere. Returns the slot where it is now. Raises `StoreFull`."""
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
        """Free a slot, -1 for none."""
        if slot < 0:
            return
        if slot in self._fresh:
            self._fresh.remove(slot)
            self._spare.append(slot)
        else:
            self._freed.append(slot)

    def finish(self) -> None:
        """Store which slots are free, and let the disk have what was written: what is left to do before the commit."""
        for freed_by, slots in ((self._txn.id(), self._freed), (0, self._spare)):
            for start in range(0, len(slots), _MOST_IN_FREE):
                part = np.array(slots[start : start + _MOST_IN_FREE], "<i8").tobytes()
                self._txn.put(self._unused_key(freed_by), part, db=self._env.free)
        if self._fresh:
            self._env.file.sync()

    def give_back(self) -> None:
        """Give the disk the room of all slots that could be taken."""
        last, count = self._last_reusable(), slot_count(self._env, self._txn)
        with self._txn.cursor(db=self._env.free) as cursor:
            entries = itertools.takewhile(lambda entry: _FREE_KEY.unpack(entry[0])[0] <= last, cursor)
            free = np.concatenate([np.empty(0, "<i8"), *(np.frombuffer(slots, "<i8") for _, slots in entries)])
        self._env.file.give_back(free[(free >= 0) & (free < count)], count)

    def _unused_key(self, freed_by: int) -> bytes:
        keys = (_FREE_KEY.pack(freed_by, number) for number in itertools.count())
        return next(key for key in keys if self._txn.get(key, db=self._env.free) is None)

    def _take(self) -> int:
        """Return a slot to which nothing refers. Raises `StoreFull`."""
        if not self._spare:
            self._spare = self._reusable() or self._beyond()
        slot = self._spare.pop()
        self._fresh.add(slot)
        return slot

    def _reusable(self) -> list[int]:
        """Slots that were freed long enough ago, the lowest last."""
        with self._txn.cursor(db=self._env.free) as cursor:
            if not cursor.first() or _FREE_KEY.unpack(cursor.key())[0] > self._last_reusable():
                return []
            slots = np.frombuffer(cursor.value(), "<i8").tolist()
            cursor.delete()
        count = slot_count(self._env, self._txn)
        return sorted((slot for slot in slots if 0 <= slot < count), reverse=True)  # others are damage

    def _last_reusable(self) -> int:
        """The last transaction that freed slots long enough ago."""
        seen, newest = self._env.oldest_reader(), int(self._txn.id()) - 2
        return newest if seen is None else min(newest, seen)

    def _beyond(self) -> list[int]:
        """A slot behind all others. Raises `StoreFull`."""
        count = slot_count(self._env, self._txn)
        if (count + 1) * CHUNK > self._env.max_bytes:
            raise store_full(self._env.max_bytes)
        if not self._env.file.has_room(CHUNK):
            raise disk_full()
        self._txn.put(b"slots", NUMBER.pack(count + 1), db=self._env.meta)
        return [count]


def disk_full(reason: str = os.strerror(errno.ENOSPC)) -> StoreFull:
    """The error of a store whose disk has no room left."""
    return StoreFull(f"The disk of the store is full ({reason}); nothing was changed")


def store_full(max_bytes: int) -> StoreFull:
    """The error of a store that has no room left of its own."""
    return StoreFull(
        f"The store has reached its limit of {max_bytes} bytes (GRADSERVE_STORE_BYTES); nothing was changed",
        limit=max_bytes,
    )
