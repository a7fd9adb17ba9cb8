"""Each kind of store, and a store on the disk that tests reopen. The test's clock drives both."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.buffers.lmdb import LmdbStore, writer
from service.buffers.store import MAX_BUFFERS, Store
from tests.buffers.calls import Clock, open_lmdb, open_memory, open_postgres


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., LmdbStore]]:
    """Return a function that closes the store in `tmp_path / "store"` and opens it again."""
    opened: list[LmdbStore] = []

    def reopen(*, max_buffers: int = MAX_BUFFERS) -> LmdbStore:
        for store in opened:
            store.close()
        opened.append(open_lmdb(tmp_path / "store", clock, max_buffers=max_buffers))
        return opened[-1]

    yield reopen
    for store in opened:
        store.close()


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store: Store
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        store = open_postgres(url, clock, schema=f"test_{uuid.uuid4().hex}")
    else:
        store = open_memory(clock) if request.param == "memory" else open_lmdb(tmp_path / "store", clock)
    yield store
    store.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the idle writer look for expired entries at once."""
    monkeypatch.setattr(writer, "IDLE_SECONDS", 0.01)


@pytest.fixture
def untidied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the idle writer leave expired entries alone."""
    monkeypatch.setattr(writer.Writer, "_tidy_up", lambda self: None)
