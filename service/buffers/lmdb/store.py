"""The store on one machine's disk: LMDB, which several worker processes may share.

Readers see the last commit. One process writes at a time, each in a thread of its own (`writer.py`). A commit is
complete on the disk or not there at all, so that a crash needs no repair.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np

from service.buffers.graphs import MAX_GRAPHS
from service.buffers.lmdb.caches import WriterState
from service.buffers.lmdb.clock import clock_of
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import key_range
from service.buffers.lmdb.reader import Reader, reading
from service.buffers.lmdb.writer import Writer
from service.buffers.names import HIDDEN, BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.record import Key, Known, Record, Snapshot
from service.buffers.room import Most
from service.buffers.steps import Closed
from service.buffers.store import (
    KEY_SECONDS,
    MAX_BUFFERS,
    Allocate,
    Committed,
    Store,
    alive,
    page,
    snapshots,
    uncounted,
)
from service.dtypes import Array
from service.errors import BufferCorrupt


class LmdbStore(Store):
    """The store in the directory `path`, which is made if it is not there, for at most `max_bytes` of data.

    Raises `StoreFailed` if the store cannot be opened, is damaged, or comes from a newer version.
    """

    blocks = False  # a look-up reads mapped memory

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        allocate: Allocate = np.empty,
        key_seconds: float = KEY_SECONDS,
        clock: Callable[[], float] | None = None,
        committed: Committed = uncounted,
        max_buffers: int = MAX_BUFFERS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._env = Environment(path, max_bytes=max_bytes)
        self._allocate, self._clock = allocate, clock or clock_of(self._env)
        state = WriterState(allocate, Most(max_buffers, max_graphs))
        self._writer = Writer(self._env, state, key_seconds=key_seconds, clock=self._clock, committed=committed)

    def submit(self, request: Request) -> Future[Outcome]:
        return self._writer.submit(request, self.namespace)

    def record(self, name: str) -> Record:
        with reading(self._env) as reader:
            return self._alive(reader, name)

    def now(self) -> float:
        return self._clock()

    def look(self, names: Collection[BufferName]) -> dict[BufferName, Record]:
        found, now = {}, self._clock()
        with reading(self._env) as reader:
            for name in names:
                with suppress(BufferCorrupt):
                    record = reader.get(name)
                    if record is not None and record.lives(now):
                        found[name] = record
        return found

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, most_bytes: int = sys.maxsize
    ) -> list[Record]:
        now = self._clock()
        with reading(self._env) as reader:
            found = reader.records(*key_range(self.namespace, prefix, after))
            return page((record for record in found if record.lives(now)), limit, most_bytes)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        now = self._clock()
        with reading(self._env) as reader:
            stored = reader.names_in(*key_range(self.namespace, prefix, ""))
            return [name.name for name in islice((each for each in stored if reader.may_live(each, now)), limit)]

    def record_bytes(self, names: Sequence[str]) -> int:
        with reading(self._env) as reader:
            return sum(reader.record_bytes(BufferName(self.namespace, name)) for name in names)

    def read(self, names: Sequence[str], step: int | Sequence[int] | None = None) -> list[Snapshot]:
        with reading(self._env) as reader, np.errstate(all="ignore"):
            records = {name: self._alive(reader, name) for name in dict.fromkeys(names)}

            def load(record: Record, of: Closed | None) -> Array:
                return reader.values.load(record.spec, (of or record).value, self._allocate)

            return snapshots([records[name] for name in names], step, load)

    def recall(self, key: Key, names: Sequence[str] = ()) -> Known | None:
        with reading(self._env) as reader:
            return reader.keys.find(key, names, self._writer.oldest_key())

    def generation(self) -> int:
        return self._env.generation()

    def size(self) -> tuple[int, int]:
        with reading(self._env) as reader:
            hidden = reader.counts(HIDDEN).values()
            return reader.entries()["buffers"] - sum(hidden), reader.bytes_in_use()

    def close(self) -> None:
        if self._writer.close():
            self._env.close()

    def _alive(self, reader: Reader, name: str) -> Record:
        return alive(reader.get(BufferName(self.namespace, name)), name, self._clock())
