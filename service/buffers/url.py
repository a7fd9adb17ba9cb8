"""URLs of stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from service.buffers.lmdb import LmdbStore
from service.buffers.memory import MemoryStore
from service.buffers.store import MAX_BUFFERS, Allocate, Committed, Store, uncounted
from service.errors import StoreFailed, shown


def path_of(url: str) -> Path | None:
    """Return the directory of an LMDB store; None for a store in memory. Raises `StoreFailed` for another URL."""
    kind, _, place = url.partition(":")
    if kind == "lmdb" and place:
        return Path(place)
    if url == "memory:":
        return None
    raise StoreFailed(f"GRADSERVE_STORE is {shown(url)}, but must be lmdb:PATH or memory:")


def open_store(
    url: str,
    *,
    max_bytes: int,
    key_seconds: float,
    allocate: Allocate = np.empty,
    committed: Committed = uncounted,
    max_buffers: int = MAX_BUFFERS,
) -> Store:
    """Open or create the store at `url`. Raises `StoreFailed`."""
    path = path_of(url)
    if path is None:
        return MemoryStore(
            allocate=allocate,
            key_seconds=key_seconds,
            committed=committed,
            max_buffers=max_buffers,
            max_bytes=max_bytes,
        )
    return LmdbStore(
        path,
        max_bytes=max_bytes,
        allocate=allocate,
        key_seconds=key_seconds,
        committed=committed,
        max_buffers=max_buffers,
    )
