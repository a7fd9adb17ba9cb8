"""Calls of the operating system that not every system has, each with a fallback.

Linux has all of them. macOS lacks `sched_getaffinity`, `fdatasync`, `posix_fallocate`, `sync_file_range`, `fallocate`
and `mallopt`; before version 11 it lacks `preadv`, too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
from pathlib import Path
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2
"""Linux's sync_file_range: begin to store."""

_PUNCH_HOLE = 3
"""Linux's fallocate: free a part of a file on the disk, and keep the file's size."""

_M_TRIM_THRESHOLD = -1
"""`mallopt`'s number, from malloc.h, for the bytes of freed memory at the end of the heap to keep."""

_M_MMAP_THRESHOLD = -3
"""`mallopt`'s number, from malloc.h, for the bytes from which memory is mapped, and unmapped once freed."""

_M_ARENA_MAX = -8
"""`mallopt`'s number, from malloc.h, for the number of heaps."""

_MAX_MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest threshold that glibc accepts on 64-bit machines."""

_NO_FULL_SYNC = errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL
"""Errors of file systems without F_FULLFSYNC."""


def _from_c(name: str, *types: type) -> Any:
    """Return a function of the C library; in a C library without this function, one that does nothing."""
    function: Any = getattr(ctypes.CDLL(None), name, lambda *_: None)
    function.argtypes = types
    return function


_sync_file_range = _from_c("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = _from_c("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_mallopt = _from_c("mallopt", ctypes.c_int, ctypes.c_int)


def cores() -> int:
    """Return the number of cores that this process may use; where no system call says it, the machine's cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disk_bytes(path: Path) -> tuple[int, int]:
    """Return how many bytes are free on the disk of a file or directory, and how many it has. Raises OSError."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def sync(descriptor: int) -> None:
    """Return when the data of a file, or the entries of a directory, are on the disk. Raises OSError.

    macOS's `fsync` leaves them in the cache of the drive, which a power cut empties. F_FULLFSYNC does not.
    """
    if (full_sync := _full_sync()) is not None:
        try:
            fcntl.fcntl(descriptor, full_sync)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Call `sync` for the file or directory at `path`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync_drive(path: Path) -> None:
    """Bring a file that was written and synced by others to the disk, where `fsync` alone does not."""
    if _full_sync() is not None:
        sync_path(path)


def _full_sync() -> int | None:
    return getattr(fcntl, "F_FULLFSYNC", None)


def begin_to_store(descriptor: int) -> None:
    """Let the disk begin to store what was written. This is a hint, which may fail; only `sync` promises anything."""
    _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)  # 0 bytes mean the whole file


def free_range(descriptor: int, start: int, size: int) -> None:
    """Give a part of a file back to the disk, if it can take that. The part then reads as zeros, or as before."""
    _fallocate(descriptor, _PUNCH_HOLE, start, size)


def reserve(descriptor: int, start: int, size: int) -> None:
    """Add `size` zeros at `start`, the end of a file, which have room on the disk. Raises OSError if it is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
    elif os.pwrite(descriptor, bytes(size), start) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_into(descriptor: int, memory: memoryview, start: int) -> int:
    """Read into the memory from this place of a file. Return the count of bytes. Raises OSError."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], start)
    data = os.pread(descriptor, len(memory), start)
    memory[: len(data)] = data
    return len(data)


NEW_OBJECTS = 10_000
"""New objects after which Python looks for cycles among them, by default 700."""

SEARCHES = 100
"""Such searches after which Python looks among all that were new in them, too, by default 10: while a request for many
buffers is made, they are all in use, and a search among them takes as long as the add of 2,000 of the buffers.
"""


def collect_rarely() -> None:
    """Let Python seldom look for unreachable cycles, and never among the objects that are there now.

    A request for many buffers makes a hundred thousand objects and no cycle: the search took half of its time.
    """
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, SEARCHES)


def keep_freed_memory(limit: int) -> None:
    """Let the C library keep up to `limit` bytes of freed memory, for everything but tensors.

    By default glibc returns large memory to the system at once. Each new page then costs a page fault, which takes
    longer than filling the page. Other C libraries have no such setting.
    """
    _mallopt(_M_ARENA_MAX, 1)  # one heap, so that each thread can reuse what another one freed
    _mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
    _mallopt(_M_TRIM_THRESHOLD, min(limit, (1 << 31) - 1))  # mallopt takes a C int
