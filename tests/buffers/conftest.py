"""A store on the disk that is closed and opened again, by a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.buffers.lmdb import LmdbStore
from service.buffers.store import MOST_BUFFERS
from tests.buffers.calls import Clock, open_lmdb


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., LmdbStore]]:
    """Opens the store in `tmp_path / "store"`, whose earlier one is closed."""
    opened: list[LmdbStore] = []

    def reopen(*, max_buffers: int = MOST_BUFFERS) -> LmdbStore:
        for store in opened:
            store.close()
        opened.append(open_lmdb(tmp_path / "store", clock, max_buffers=max_buffers))
        return opened[-1]

    yield reopen
    for store in opened:
        store.close()
