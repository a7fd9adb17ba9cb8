"""Memory whose pages are already in place, for large outputs: fresh pages cost more than the arithmetic."""

from __future__ import annotations

import ctypes
import math
import threading

import numpy as np

from service.dtypes import Array, DType

SMALLEST = 1 << 20
"""Bytes below which the C library's allocator already reuses memory."""


class Arena:
    """Allocates arrays and takes their memory back when the last view of each is gone.

    At most `limit` bytes are kept for later; the rest goes back to the system. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Array] = []
        self._lock = threading.RLock()  # a lease may be collected while its own thread holds the lock

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """An uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALLEST:
            return np.empty(shape, dtype)
        lease = _Lease(self, self._take(size))
        return np.asarray(lease)[:size].view(dtype).reshape(shape)

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait for their next use."""
        with self._lock:
            return sum(memory.nbytes for memory in self._kept)

    def _take(self, size: int) -> Array:
        """The smallest kept memory of `size` bytes or up to twice as many, else new memory."""
        with self._lock:
            fitting = [memory for memory in self._kept if size <= memory.nbytes <= 2 * size]
            if not fitting:
                return np.empty(size, np.uint8)
            best = min(fitting, key=lambda memory: memory.nbytes)
            self._kept = [memory for memory in self._kept if memory is not best]
            return best

    def give_back(self, memory: Array) -> None:
        """Keep `memory` for later, and let go of what was kept longest where that is too much."""
        if memory.nbytes > self._limit:
            return
        with self._lock:
            self._kept.append(memory)
            while self.kept_bytes > self._limit:
                self._kept.pop(0)


class _Lease:
    """Owns `memory` for as long as an array views it: NumPy keeps the object behind `__array_interface__` alive."""

    def __init__(self, arena: Arena, memory: Array) -> None:
        self._arena = arena
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._arena.give_back(self._memory)


def keep_freed_memory(limit: int) -> None:
    """Let the C library keep up to `limit` bytes of freed memory for later, for all that is not a tensor.

    By default it returns what is large to the system at once, and each page comes back by a fault that costs more than
    to fill it. Has an effect with glibc only; elsewhere it does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)  # one heap that all threads share, so that one can reuse what another freed
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(_M_TRIM_THRESHOLD, min(limit, (1 << 31) - 1))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from malloc.h
