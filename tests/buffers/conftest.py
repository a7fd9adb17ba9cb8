"""Each store, and one on the disk that is closed and opened again, by a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.buffers.lmdb import LmdbStore, writer
from service.buffers.store import MAX_BUFFERS, Store
from tests.buffers.calls import Clock, open_lmdb, open_memory


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., LmdbStore]]:
    """Opens the store in `tmp_path / "store"`, whose earlier one is closed."""
    opened: list[LmdbStore] = []

    def reopen(*, max_buffers: int = MAX_BUFFERS) -> LmdbStore:
        for store in opened:
            store.close()
        opened.append(open_lmdb(tmp_path / "store", clock, max_buffers=max_buffers))
        return opened[-1]

    yield reopen
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store: Store = open_memory(clock) if request.param == "memory" else open_lmdb(tmp_path / "store", clock)
    yield store
    store.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer looks for what has expired as soon as it has nothing to do."""
    monkeypatch.setattr(writer, "IDLE_SECONDS", 0.01)


@pytest.fixture
def untidied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer does nothing about what has expired while it is idle."""
    monkeypatch.setattr(writer.Writer, "_tidy_up", lambda self: None)
