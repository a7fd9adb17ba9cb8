"""The read-only face of an LMDB store, for `gradserve doctor` and `gradserve export`. A server may use the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.examination import LmdbMoment
from service.buffers.lmdb.opening import open_environment
from service.buffers.packed import FORMAT


class LmdbReadOnly:
    """A store that is only read."""

    def __init__(self, env: Environment) -> None:
        self._env = env

    def described(self) -> Iterator[str]:
        sizes = self._env.sizes()
        yield f"store {self._env.path}, format {FORMAT}"
        yield f"data.mdb {sizes['data.mdb']} bytes, values {sizes['values']}; limit {sizes['limit']}"

    def now(self) -> float:
        return clock_of(self._env, readonly=True)()

    @contextmanager
    def reading(self) -> Iterator[LmdbMoment]:
        with self._env.reading() as txn:
            yield LmdbMoment(self._env, txn)


@contextmanager
def opened_readonly(path: Path, max_bytes: int) -> Iterator[LmdbReadOnly]:
    """Open the store in the directory `path`. Raises `StoreFailed` if it cannot be opened."""
    env = open_environment(path, max_bytes=max_bytes, readonly=True)
    try:
        yield LmdbReadOnly(env)
    finally:
        env.close()
