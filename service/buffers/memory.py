"""A store in this process's memory, for tests and short runs. It ends with the process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from service.buffers.clock import Clock
from service.buffers.closing import close_if_due
from service.buffers.graphs import MAX_GRAPHS, StoredGraph, known
from service.buffers.memory_state import State
from service.buffers.memory_transaction import MemoryTransaction
from service.buffers.names import BufferName
from service.buffers.parts import make
from service.buffers.perform import Outcome, Request, resolved
from service.buffers.pushes import Push
from service.buffers.record import Key, Known, Record, Snapshot
from service.buffers.room import UNLIMITED, room_for, store_full
from service.buffers.staging import free_push
from service.buffers.store import (
    KEY_SECONDS,
    MAX_BUFFERS,
    Allocate,
    Committed,
    Store,
    after_commit,
    alive,
    listed,
    page,
    settle,
    snapshots,
    uncounted,
    without_traceback,
)
from service.errors import StoreFailed

K = TypeVar("K")
V = TypeVar("V")


class MemoryStore(Store):
    """A dict and a lock. Each request is made in the thread that submits it, one request at a time."""

    blocks = False

    def __init__(
        self,
        *,
        allocate: Allocate = np.empty,
        key_seconds: float = KEY_SECONDS,
        clock: Callable[[], float] | None = None,
        committed: Committed = uncounted,
        max_buffers: int = MAX_BUFFERS,
        max_bytes: int = UNLIMITED,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._committed, self._max_bytes = committed, max_bytes
        self._allocate, self._key_seconds = allocate, key_seconds
        self._limits = {"max_buffers": max_buffers, "max_bytes": max_bytes, "max_graphs": max_graphs}
        self._clock = clock or Clock.starting()
        self._lock, self._state = threading.Lock(), State()

    def submit(self, request: Request) -> Future[Outcome]:
        done: Future[Outcome] = Future()
        with self._lock, np.errstate(all="ignore"):
            start = time.perf_counter()
            try:
                if self._state.closed:
                    raise StoreFailed("The store is closed")
                now = self._clock()
                self._expire(now)
                txn = self._transaction()
                request = resolved(txn, request, self.namespace)
                outcome = make(txn, request, self.namespace, now)
                if txn.used() > room_for(request, outcome, self._max_bytes):
                    raise store_full(self._max_bytes)
                txn.commit()
                self._state.generation += 1
            except Exception as error:
                done.set_exception(without_traceback(error))
            else:
                with after_commit():
                    self._committed(1, time.perf_counter() - start)
                settle(done, outcome)
        return done

    def size(self) -> tuple[int, int]:
        with self._lock:
            return len(self._state.records), self._state.used

    def record(self, name: str) -> Record:
        with self._lock:
            self._expire(self._clock())
            return self._alive(name)

    def now(self) -> float:
        return self._clock()

    def look(self, names: Collection[BufferName]) -> dict[BufferName, Record]:
        with self._lock:
            self._expire(now := self._clock())
            records = self._state.records
            return {name: records[name] for name in names if name in records and records[name].lives(now)}

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, most_bytes: int = sys.maxsize
    ) -> list[Record]:
        with self._lock:
            self._expire(now := self._clock())
            own = (each for each in self._state.records.values() if each.full_name.namespace == self.namespace)
            listed = [each for each in own if each.name.startswith(prefix) and each.name > after and each.lives(now)]
            return page(sorted(listed, key=lambda record: record.name), limit, most_bytes)

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        return [record.name for record in self.records(prefix, limit=limit)]

    def record_bytes(self, names: Sequence[str]) -> int:
        found = self.look([BufferName(self.namespace, name) for name in names])
        return sum(record.packed_bytes for record in found.values())

    def read(self, names: Sequence[str], epoch: int | None = None) -> list[Snapshot]:
        with self._lock:
            self._expire(self._clock())
            load = self._transaction().load
            return snapshots(map(self._alive, names), epoch, lambda record, of: load(record.spec, (of or record).value))

    def recall(self, key: Key, names: Sequence[str] = ()) -> Known | None:
        with self._lock:
            self._expire(self._clock())
            return self._transaction().recall(key, names)

    def pushes(self, prefix: str = "", limit: int | None = None) -> list[tuple[str, Push]]:
        with self._lock:
            self._expire(self._clock())
            own = (
                (name, push) for (namespace, name), push in self._state.pushes.items() if namespace == self.namespace
            )
            return listed(own, prefix, limit)

    def graph(self, name: str) -> StoredGraph:
        with self._lock:
            return known(self._state.graphs.get(BufferName(self.namespace, name)), name)

    def graphs(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[StoredGraph]:
        with self._lock:
            own = (graph for name, graph in self._state.graphs.items() if name.namespace == self.namespace)
            found = [graph for graph in own if graph.name.startswith(prefix) and graph.name > after]
            return sorted(found, key=lambda graph: graph.name)[:limit]

    def graph_content(self, graph: StoredGraph) -> memoryview:
        with self._lock:
            known(self._state.graphs.get(BufferName(self.namespace, graph.name)), graph.name, graph.id)
            return self._state.values[graph.id].view(np.uint8).data.toreadonly()

    def generation(self) -> int:
        with self._lock:
            self._expire(self._clock())
            return self._state.generation

    def close(self) -> None:
        with self._lock:
            self._state.close()

    def _transaction(self) -> MemoryTransaction:
        return MemoryTransaction(self._state, self._allocate, **self._limits)

    def _expire(self, now: float) -> None:
        keys = self._state.keys
        while keys and keys[oldest := next(iter(keys))][0] + self._key_seconds <= now:
            self._state.forget(oldest)
        for name, push in [*self._state.pushes.items()]:
            if push.until <= now:
                self._change(free_push, name, push)
        for record in [*self._state.timed.values()]:
            if not record.lives(now):
                self._change(MemoryTransaction.remove, record)
            elif record.due is not None and record.due <= now:
                self._change(close_if_due, record, now)

    def _change(self, change: Callable[..., object], *arguments: object) -> None:
        txn = self._transaction()
        change(txn, *arguments)
        txn.commit()
        self._state.generation += 1

    def _alive(self, name: str) -> Record:
        return alive(self._state.records.get(BufferName(self.namespace, name)), name, self._clock())
