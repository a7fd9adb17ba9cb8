"""Each kind of store, and a store on the disk that tests reopen. The test's clock drives both."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from service.buffers.changes import Delete
from service.buffers.lmdb import writer
from service.buffers.memory import MemoryStore
from service.buffers.store import Store
from tests.buffers.calls import do
from tests.buffers.postgres import Schema
from tests.buffers.stores import KEY_SECONDS, Clock, Reopen, flip, open_lmdb, open_postgres, reopening
from tests.network import Network

KINDS = ["lmdb", "postgres"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reopen(tmp_path: Path, clock: Clock) -> Iterator[Reopen]:
    """Yield a function that closes the store in `tmp_path / "store"` and opens it again."""
    yield from reopening(partial(open_lmdb, tmp_path / "store", clock))


@pytest.fixture
def schema(postgres_url: str) -> Iterator[Schema]:
    """Yield a new schema of PostgreSQL; its stores are closed after the test."""
    made = Schema(postgres_url)
    yield made
    made.close()


@pytest.fixture
def network(schema: Schema) -> Iterator[Network]:
    with Network(int(schema.url.rpartition(":")[2].partition("/")[0])) as network:
        yield network
        schema.close()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = opened(request, tmp_path / "store", clock)
    yield store
    store.close()


@pytest.fixture(params=["lmdb", "postgres"])
def reopen_damaged(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Store]]:
    """Yield a function that closes a store and opens it again; before, it damages all that holds a given pattern."""
    path = tmp_path / "store"
    if request.param == "lmdb":
        yield from reopening(partial(open_lmdb, path, clock), partial(flip, path))
    else:
        schema: Schema = request.getfixturevalue("schema")
        yield from reopening(partial(open_postgres, schema.url, clock, schema=schema.name), schema.damage)


@pytest.fixture(scope="module")
def module_clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module", params=KINDS)
def module_store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, module_clock: Clock
) -> Iterator[Store]:
    store = opened(request, tmp_path_factory.mktemp("store") / "store", module_clock)
    yield store
    store.close()


@pytest.fixture
def namespace(module_store: Store) -> Iterator[Store]:
    """Yield a new namespace of a store that tests with many cases share: to open a store takes longer than a case.

    All cases have the same keys.
    """
    store = module_store.within(uuid.uuid4().hex)
    yield store
    do(store, *[Delete(name=record.name) for record in store.records()])


def opened(request: pytest.FixtureRequest, path: Path, clock: Clock) -> Store:
    """Return a new store of the kind that the fixture's parameter names."""
    if request.param == "postgres":
        return open_postgres(request.getfixturevalue("postgres_url"), clock, schema=f"test_{uuid.uuid4().hex}")
    return open_lmdb(path, clock)


@pytest.fixture
def open_memory(clock: Clock) -> Iterator[Callable[[], MemoryStore]]:
    """Yield a function that opens a new store in memory. The test's end closes it."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(closing(MemoryStore(key_seconds=KEY_SECONDS, clock=clock)))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the idle writer look for expired entries at once."""
    monkeypatch.setattr(writer, "IDLE_SECONDS", 0.01)


@pytest.fixture
def untidied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the idle writer leave expired entries alone."""
    monkeypatch.setattr(writer.Writer, "_tidy_up", lambda self: None)
