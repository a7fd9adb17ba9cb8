"""Short forms of what the tests of the stores do, and of what they look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service.buffers.changes import Add, Change, Create, Outcome, Request
from service.buffers.lmdb import LmdbStore
from service.buffers.memory import MemoryStore
from service.buffers.store import MOST_BUFFERS, Key, Receipt, Record, Spec, Store
from service.dtypes import DTYPES

Array = np.ndarray[Any, np.dtype[Any]]

KEY_SECONDS = 1000.0
MAX_BYTES = 64 << 20
PATIENCE = 20
"""Seconds after which a future that is not done makes a test fail instead of hang."""


class Clock:
    """Seconds since 1970 that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def open_lmdb(
    path: Path, clock: Callable[[], float], *, max_bytes: int = MAX_BYTES, max_buffers: int = MOST_BUFFERS
) -> LmdbStore:
    return LmdbStore(path, max_bytes=max_bytes, key_seconds=KEY_SECONDS, clock=clock, max_buffers=max_buffers)


def open_memory(clock: Callable[[], float], *, max_buffers: int = MOST_BUFFERS) -> MemoryStore:
    return MemoryStore(key_seconds=KEY_SECONDS, clock=clock, max_buffers=max_buffers)


def key(text: str = "k", *, caller: str = "ann", request: str = "a request") -> Key:
    return Key(caller, text, request.encode().ljust(16)[:16])


def spec(shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> Spec:
    return Spec(shape, DTYPES[dtype], **rules)


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def do(store: Store, *changes: Change, key: Key | None = None) -> Outcome:
    """The outcome of a request for these changes."""
    return store.submit(Request(changes, key)).result(PATIENCE)


def create(store: Store, *names: str, shape: tuple[int, ...] = (2,), dtype: str = "float32", **rules: Any) -> None:
    do(store, *[Create(name=name, spec=spec(shape, dtype, **rules)) for name in names])


def add(store: Store, name: str, gradient: Any, **rest: Any) -> Receipt:
    """The receipt of an add; numbers are a gradient in float32."""
    array = np.asarray(gradient, np.float32) if isinstance(gradient, float | int | list) else gradient
    return do(store, Add(name=name, gradient=array, **rest)).receipts[name]


def value(store: Store, name: str, epoch: int | None = None) -> Array:
    (snapshot,) = store.read([name], epoch)
    return snapshot.value


def state(store: Store) -> dict[str, tuple[Record, list[bytes]]]:
    """All that the store says of its buffers."""
    found = {}
    for record in store.records():
        epochs = [None, *(one.epoch for one in record.closed)]
        found[record.name] = (record, [value(store, record.name, epoch).tobytes() for epoch in epochs])
    return found
