"""Large graphs, which several transactions of an LMDB store write."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import pytest

from service.buffers import failpoints
from service.buffers.changes import Add, Delete
from service.buffers.graph_changes import PutGraph
from service.buffers.lmdb import drafts
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.lmdb.store import LmdbStore
from service.buffers.perform import Outcome, Request
from service.buffers.store import Store
from service.errors import GraphExists, StoreFull, UnknownBuffer
from tests.buffers.calls import create, do, key, ones
from tests.buffers.stores import PATIENCE, Clock, Reopen, entries_of, open_lmdb, wrong
from tests.buffers.test_contract_graphs import LARGE as MODEL
from tests.buffers.test_contract_graphs import content, delete, names, put
from tests.buffers.test_lmdb_drafts import Between, assert_nothing_left

CHUNKS = -(-len(MODEL) // CHUNK_BYTES)
"""Chunks of the model: here as many transactions write it."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the directory of the store of `reopen`."""
    return tmp_path / "store"


@pytest.fixture
def store(reopen: Reopen, monkeypatch: pytest.MonkeyPatch) -> LmdbStore:
    """Return a store whose transactions write one chunk of a graph."""
    monkeypatch.setattr(drafts, "MOST_OF_GRAPH", CHUNK_BYTES)
    return reopen()


def send(store: Store, name: str = "mlp", model: bytes = MODEL) -> Future[Outcome]:
    return store.submit(Request([], hidden=PutGraph.of(name, model, {})))


def test_others_have_their_turns_while_a_graph_is_written(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()
    create(store, "w")

    def add_now() -> None:
        assert store.graphs() == []
        store.submit(Request([Add(name="w", gradient=ones(2))])).add_done_callback(lambda _: order.append("add"))

    between = Between(monkeypatch, add_now)
    future = send(store)
    future.add_done_callback(lambda _: order.append("graph"))
    assert future.result(PATIENCE).is_new
    assert (order, between.commits, store.pushes()) == (["add", "graph"], CHUNKS, [])
    assert content(store) == MODEL
    assert_nothing_left(store, path, values=2)


@pytest.mark.parametrize("what", ["the same", "another model", "a repeated request"])
def test_a_graph_that_will_not_be_kept_is_not_written(
    store: LmdbStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put(store, "mlp", MODEL, key=key())
    hits = Counter[str]()
    monkeypatch.setattr(failpoints, "action", lambda point: hits.update([point]))
    if what == "another model":
        with pytest.raises(GraphExists):
            put(store, "mlp", MODEL[::-1])
    else:
        put(store, "mlp", MODEL, key=key() if what == "a repeated request" else None)
    assert not hits["chunk"]


@pytest.mark.parametrize("model", [b"another model", MODEL])
def test_a_graph_of_the_name_that_came_first_stays(
    store: LmdbStore, path: Path, monkeypatch: pytest.MonkeyPatch, model: bytes
) -> None:
    Between(monkeypatch, lambda: first.append(send(store, model=model)))
    first = list[Future[Outcome]]()
    second = send(store)
    if model == MODEL:
        assert second.result(PATIENCE).is_new != first[0].result(PATIENCE).is_new
    else:
        with pytest.raises(GraphExists):
            second.result(PATIENCE)
    assert content(store) == model
    assert_nothing_left(store, path, values=1)


def test_a_request_that_is_refused_frees_what_was_written(store: LmdbStore, path: Path) -> None:
    create(store, "w")
    with pytest.raises(UnknownBuffer):
        put(store, "mlp", MODEL, Delete(name="w"), Delete(name="nowhere"))
    assert (names(store), store.names("")) == ([], ["w"])
    assert_nothing_left(store, path)


@pytest.mark.parametrize("at", range(1, CHUNKS))
def test_a_store_that_closes_finishes_the_graph(
    store: LmdbStore, reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    closing = threading.Thread(target=store.close)

    def close() -> None:
        closing.start()
        while not store._writer._batches._closed:
            time.sleep(0.001)

    Between(monkeypatch, close, at=at)
    assert send(store).result(PATIENCE).is_new
    closing.join()
    assert wrong(path) == []
    assert content(reopen()) == MODEL


@pytest.mark.parametrize("at", range(1, CHUNKS))
def test_what_a_crash_has_left_of_a_graph_is_forgotten(
    store: LmdbStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    crashed = tmp_path / "crashed"
    Between(monkeypatch, lambda: shutil.copytree(tmp_path / "store", crashed), at=at)
    send(store).result(PATIENCE)
    monkeypatch.setattr(failpoints, "action", None)
    assert (entries_of(crashed)["pushes"], entries_of(crashed)["buffers"], wrong(crashed)) == (1, 0, [])
    clock.advance(drafts.GRAPH_SECONDS + 1)
    again = open_lmdb(crashed, clock)
    do(again)
    assert again.graphs() == []
    put(again, "mlp", MODEL)
    assert content(again) == MODEL
    assert_nothing_left(again, crashed, values=1)


def test_a_graph_that_takes_too_long_is_written_at_once(
    store: LmdbStore, path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Between(monkeypatch, lambda: clock.advance(drafts.GRAPH_SECONDS + 1), at=2)
    assert send(store).result(PATIENCE).is_new
    assert content(store) == MODEL
    assert_nothing_left(store, path, values=1)


def test_a_full_store_frees_what_was_written(reopen: Reopen, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MOST_OF_GRAPH", CHUNK_BYTES)
    store = reopen(max_bytes=3 << 20)
    put(store, "small", MODEL)
    for _ in range(2):
        with pytest.raises(StoreFull, match="limit of 3145728 bytes"):
            put(store, "large", MODEL * 2)
    do(store)
    delete(store, "small")
    put(store, "large", MODEL * 2)
    assert content(store, "large") == MODEL * 2
    assert_nothing_left(store, path, values=1)
