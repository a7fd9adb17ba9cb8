"""The read-only face of a store, for `gradserve doctor` and `gradserve export`. A server may use the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.opening import open_environment
from service.buffers.lmdb.reader import Reader, reading


class ReadOnlyStore:
    """A store that is only read."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def sizes(self) -> dict[str, int]:
        """Return bytes: the limit of the store, the size of data.mdb, and what `values` takes of the disk."""
        return self._env.sizes()

    def now(self) -> float:
        """Return the time of the store's clock, in seconds since 1970. Raises `StoreFailed`."""
        return clock_of(self._env, readonly=True)()

    def reading(self) -> AbstractContextManager[Reader]:
        """Read the store as it is at one moment. Raises `StoreFailed`."""
        return reading(self._env)


@contextmanager
def opened_readonly(path: Path, max_bytes: int) -> Iterator[ReadOnlyStore]:
    """Open the store in the directory `path`. Raises `StoreFailed` if it cannot be opened."""
    env = open_environment(path, max_bytes=max_bytes, readonly=True)
    try:
        yield ReadOnlyStore(env)
    finally:
        env.close()
