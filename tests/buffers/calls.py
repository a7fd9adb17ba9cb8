"""Short forms of the requests and checks that the tests of the stores make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Change, Create
from service.buffers.doctor import examine
from service.buffers.lmdb import LmdbStore, opened_readonly, value_writer, values
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.memory import MemoryStore
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import PostgresStore
from service.buffers.record import Key, Receipt, Record, Spec
from service.buffers.store import MAX_BUFFERS, Store
from service.dtypes import DTYPES, Array
from service.errors import GradserveError

KEY_SECONDS = 1000.0
MAX_BYTES = 64 << 20
LARGE = 5 * (CHUNK_BYTES // 8) + 3
"""Elements of a buffer that has several chunks in any dtype, the last chunk partly full."""
SMALL_CHUNK = 16
"""Bytes of a chunk where a value of a few elements must have several chunks."""
PATIENCE = 60
"""Seconds after which a pending future makes a test fail instead of hang."""


class Clock:
    """A clock of seconds since 1970 that only a test advances."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def open_lmdb(
    path: Path, clock: Callable[[], float], *, max_bytes: int = MAX_BYTES, max_buffers: int = MAX_BUFFERS
) -> LmdbStore:
    return LmdbStore(path, max_bytes=max_bytes, key_seconds=KEY_SECONDS, clock=clock, max_buffers=max_buffers)


def open_memory(
    clock: Callable[[], float], *, max_bytes: int = MAX_BYTES, max_buffers: int = MAX_BUFFERS
) -> MemoryStore:
    return MemoryStore(key_seconds=KEY_SECONDS, clock=clock, max_bytes=max_bytes, max_buffers=max_buffers)


def shrink_lmdb(patch: pytest.MonkeyPatch) -> None:
    """Store values of a few elements outside LMDB, in several chunks."""
    for module in (values, value_writer):
        patch.setattr(module, "CHUNK_BYTES", SMALL_CHUNK)
    patch.setattr(value_writer, "INLINE_BYTES", SMALL_CHUNK // 2)


def open_postgres(
    url: str, clock: Callable[[], float], *, schema: str, max_buffers: int = MAX_BUFFERS
) -> PostgresStore:
    return PostgresStore(url, schema=schema, key_seconds=KEY_SECONDS, clock=clock, max_buffers=max_buffers)


def key(text: str = "k", *, caller: str = "ann", request: str = "a request") -> Key:
    return Key(caller, text, request.encode().ljust(16)[:16])


def spec(shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> Spec:
    return Spec(shape, DTYPES[dtype], **rules)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def do(store: Store, *changes: Change, key: Key | None = None) -> Outcome:
    """Return the outcome of a request for these changes."""
    return store.submit(Request(changes, key)).result(PATIENCE)


def request(*changes: Change) -> Request:
    return Request(changes)


def create(store: Store, *names: str, shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> None:
    do(store, *[Create(name=name, spec=spec(shape, dtype, **rules)) for name in names])


def add(store: Store, name: str, gradient: Any, **rest: Any) -> Receipt:
    """Add a gradient and return the receipt. Plain numbers make a float32 gradient."""
    array = np.asarray(gradient, np.float32) if isinstance(gradient, float | int | list) else gradient
    return do(store, Add(name=name, gradient=array, **rest)).receipts[name]


def value(store: Store, name: str, epoch: int | None = None) -> Array:
    (snapshot,) = store.read([name], epoch)
    return snapshot.value


def state(store: Store) -> dict[str, tuple[Record, list[bytes]]]:
    """Return the record and the bytes of every readable value of each buffer."""
    found = {}
    for record in store.records():
        epochs = [None, *(one.epoch for one in record.closed)]
        found[record.name] = (record, [value(store, record.name, epoch).tobytes() for epoch in epochs])
    return found


def fails_alone(store: Store, error: type[GradserveError], *changes: Change) -> GradserveError:
    """Return the error of a request, after a check that nothing changed."""
    before = state(store)
    with pytest.raises(error) as caught:
        do(store, *changes)
    assert state(store) == before
    return caught.value


def entries_of(path: Path) -> dict[str, int]:
    """Return the number of entries in each database of the environment."""
    with lmdb.open(str(path), max_dbs=8, readonly=True) as env, env.begin() as txn:
        names = [bytes(name) for name, _ in txn.cursor()]
        return {name.decode(): txn.stat(env.open_db(name, txn=txn, create=False))["entries"] for name in names}


def wrong(path: Path) -> list[str]:
    """Return the faults that the doctor finds in a closed store, lost slots included."""
    lines = [*examine(f"lmdb:{path}", MAX_BYTES)]
    with opened_readonly(path, MAX_BYTES) as opened, opened.reading() as reader:
        slots = reader.slot_count()
    used, free = (int(line.split()[place]) for line in lines if " slots in use, " in line for place in (0, 4))
    if used + free != slots:
        lines.append(f"WRONG: of {slots} slots {used} are used and {free} free")
    return [line for line in lines if line.startswith("WRONG")]


class Gate:
    """A gate that holds the writer before a commit: requests submitted meanwhile share one batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str = "before commit") -> None:
        self._point = point
        self._wanted, self._held, self._opened = False, threading.Event(), threading.Event()
        monkeypatch.setattr(failpoints, "action", self._hold)

    def _hold(self, point: str) -> None:
        if point == self._point and self._wanted:
            self._wanted = False
            self._held.set()
            self._opened.wait(PATIENCE)

    def together(self, store: Store, requests: Sequence[Request]) -> list[Future[Outcome]]:
        with self.holding(store):
            return [store.submit(request) for request in requests]

    @contextmanager
    def holding(self, store: Store) -> Iterator[None]:
        """Hold the writer until the context is left: what is submitted inside waits together."""
        self._held.clear()
        self._opened.clear()
        self._wanted = True
        first = store.submit(Request([]))
        assert self._held.wait(PATIENCE)
        yield
        self._opened.set()
        first.result(PATIENCE)
