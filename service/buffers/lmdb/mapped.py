"""The map of data.mdb in this process, which another process may outgrow."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lmdb


class MappedFile:
    """The transactions of an environment in this process.

    A server with a larger GRADSERVE_STORE_BYTES may write behind the end of this process's map. LMDB then begins no
    transaction here (`MDB_MAP_RESIZED`) until this process adopts the larger map, while it has no transaction.
    """

    def __init__(self, env: lmdb.Environment) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait until no transaction runs
        self._running = 0
        self._adopted = 0  # how many times a larger map was adopted

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[Any]:
        """Begin a transaction. If it writes, it is committed on leaving, unless an exception is raised."""
        txn = self._begin(write)
        try:
            with txn:
                yield txn
        finally:
            self._end()

    def _begin(self, write: bool) -> Any:
        while True:
            with self._lock:
                self._running += 1
                adopted = self._adopted
            try:
                return self._env.begin(write=write, buffers=True)
            except lmdb.MapResizedError:
                self._end()
                self._adopt(adopted)
            except BaseException:
                self._end()
                raise

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._waiting and not self._running:
                self._idle.notify_all()

    def _adopt(self, adopted: int) -> None:
        """Adopt the map of the process that made it larger, unless another thread has done so since."""
        with self._lock:
            self._waiting += 1
            self._idle.wait_for(lambda: not self._running or self._adopted > adopted)
            self._waiting -= 1
            if self._adopted == adopted:
                self._env.set_mapsize(0)
                self._adopted += 1
                self._idle.notify_all()
