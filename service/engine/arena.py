"""Memory of past tensors, used again for large outputs: fresh pages cost more than the arithmetic."""

from __future__ import annotations

import math
import threading

import numpy as np

from service.dtypes import Array, DType

MIN_REUSED_BYTES = 1 << 20
"""Below this size the C library's allocator already reuses memory."""


class Arena:
    """Allocates arrays, and takes the memory of each back when its last view is gone.

    At most `limit` bytes of free memory are kept; the rest goes back to the system. Thread-safe.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: list[Array] = []
        self._lock = threading.RLock()  # a lease may be collected while its own thread holds the lock

    def allocate(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialised array."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_REUSED_BYTES:
            return np.empty(shape, dtype)
        lease = _Lease(self, self._take(size), size)
        return np.asarray(lease).view(dtype).reshape(shape)

    @property
    def free_bytes(self) -> int:
        """The bytes of free memory that are kept."""
        with self._lock:
            return sum(memory.nbytes for memory in self._free)

    def _take(self, size: int) -> Array:
        """Return the smallest free memory of `size` to twice `size` bytes, or else new memory."""
        with self._lock:
            fitting = [memory for memory in self._free if size <= memory.nbytes <= 2 * size]
            if not fitting:
                return np.empty(size, np.uint8)
            best = min(fitting, key=lambda memory: memory.nbytes)
            self._free = [memory for memory in self._free if memory is not best]
            return best

    def give_back(self, memory: Array) -> None:
        """Keep `memory` for later, and release the oldest free memory beyond the limit."""
        if memory.nbytes > self._limit:
            return
        with self._lock:
            self._free.append(memory)
            while self.free_bytes > self._limit:
                self._free.pop(0)


class _Lease:
    """Owns `memory` while an array views `size` bytes: NumPy keeps the object behind `__array_interface__` alive."""

    def __init__(self, arena: Arena, memory: Array, size: int) -> None:
        self._arena = arena
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "shape": (size,)}

    def __del__(self) -> None:
        self._arena.give_back(self._memory)
