"""What is refused or repeated is not written first: no log, no row, no blob of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from service.buffers.changes import Add, Delete
from service.buffers.gradients import Rows
from service.buffers.graph_changes import PutGraph
from service.buffers.perform import Request, Wide
from service.buffers.postgres import PostgresStore, deadlines
from service.buffers.postgres.exchange import Connection, Execution
from service.buffers.postgres.writer import Writer
from service.buffers.restore import Restore
from service.buffers.sets import Set
from service.errors import GradserveError, UnknownBuffer
from tests.buffers.calls import add, create, do, key, ones, part, spec, value
from tests.buffers.postgres import Schema
from tests.buffers.stores import PATIENCE

SIZE = 1 << 20
"""Elements of a float32 gradient: 4 MB."""

LITTLE_LOG = 2 * SIZE
"""Bytes of the log: half a gradient. After a checkpoint the janitor writes whole pages."""

MODEL = bytes(range(256)) * (SIZE // 64)


def large() -> Any:
    return np.arange(SIZE, dtype=np.float32)


def graph(store: PostgresStore, content: bytes) -> object:
    return store.submit(Request([], hidden=PutGraph.of("g", content, {}))).result(PATIENCE)


def wide(store: PostgresStore, prefix: str, **rest: Any) -> object:
    many = Wide(prefix, lambda name: Add(name=name, gradient=gradient, **rest))
    gradient = large()
    return store.submit(Request([Add(name="", gradient=gradient)], wide=many)).result(PATIENCE)


def gathered() -> Rows:
    rows = Rows(np.arange(1024), np.ones((1024, 1024), np.float32))
    rows.onto((1024, 1024))
    return rows


def rival(store: PostgresStore) -> object:
    record = store.record("w")
    return do(store, Restore(name="w", record=record, value=large()))


REFUSED: dict[str, Callable[[PostgresStore], object]] = {
    "404": lambda store: add(store, "missing", large()),
    "404 of one of many": lambda store: do(store, Add(name="w", gradient=large()), Add(name="no", gradient=ones(1))),
    "404 of rows": lambda store: add(store, "missing", gathered()),
    "404 of a prefix": lambda store: wide(store, "missing"),
    "404 of a part": lambda store: part(store, 1, {"missing": large()}, push="q"),
    "409 stale_step": lambda store: add(store, "w", large(), step=7),
    "409 stale_step of a prefix": lambda store: wide(store, "w", step=7),
    "409 duplicate_contributor": lambda store: add(store, "w", large(), contributor="ann"),
    "409 of another state": lambda store: do(store, Add(name="w", gradient=large(), state="other")),
    "409 buffer_exists": rival,
    "409 graph_exists": lambda store: graph(store, MODEL[1:]),
    "200 of the same graph": lambda store: graph(store, MODEL),
    "412": lambda store: do(store, Add(name="w", gradient=large(), match=frozenset({"other"}))),
    "412 of a new buffer": lambda store: do(
        store, Set(name="new", gradient=large(), spec=spec((SIZE,)), match=frozenset({"other"}))
    ),
    "422 of a norm": lambda store: add(store, "short", large()),
    "422 of a shape": lambda store: add(store, "w", ones(SIZE + 1)),
    "200 of a replay": lambda store: do(store, Add(name="w", gradient=large()), key=key("k")),
    "200 of a replay that wants the value": lambda store: do(
        store, Add(name="last", gradient=large(), want_value=True), key=key("l")
    ),
    "422 key_reused": lambda store: do(store, Add(name="w", gradient=large()), key=key("k", request="another")),
    "200 of a part again": lambda store: part(store, 1, {"w": large()}),
    "404 of a dropped push": lambda store: part(store, 2, {"w": large()}, push="dropped"),
    "200 of a complete push": lambda store: part(store, 1, {"last": large()}, push="complete"),
    "507": lambda store: full(store, lambda: add(store, "w", large())),
    "507 of a part": lambda store: full(store, lambda: part(store, 1, {"w": large()}, push="new")),
    "507 of a graph": lambda store: full(store, lambda: store.submit(new_graph()).result(PATIENCE)),
}


def new_graph() -> Request:
    return Request([], hidden=PutGraph.of("new", MODEL, {}))


def full(store: PostgresStore, work: Callable[[], object]) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._janitor, "_used", 1 << 62)
        return work()


@pytest.fixture
def store(schema: Schema) -> PostgresStore:
    """Return a store with what the requests meet."""
    store = schema.open()
    create(store, "w", "last", shape=(SIZE,))
    create(store, "short", shape=(SIZE,), max_norm=1.0)
    add(store, "w", large(), contributor="ann")
    do(store, Add(name="w", gradient=large()), key=key("k"))
    part(store, 1, {"w": large()})
    with pytest.raises(UnknownBuffer):
        part(store, 1, {"missing": ones(1)}, push="dropped")
    part(store, 1, {"last": large()}, push="complete")
    part(store, 2, {"w": ones(1)}, push="complete")
    do(store, Add(name="last", gradient=large(), want_value=True), key=key("l"))
    graph(store, MODEL)
    return store


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_or_repeated_is_not_written(schema: Schema, store: PostgresStore, name: str) -> None:
    def written() -> tuple[int, int]:
        ((rows, blobs),) = schema.ask("select (select count(*) from chunks), (select count(*) from unowned)")
        return rows, blobs

    def log() -> int:
        ((place,),) = schema.ask("select pg_current_wal_insert_lsn() - '0/0'")
        return int(place)

    def ask() -> int:
        """Ask, and return how much longer the log is: the store's own threads may write as well."""
        before = log()
        try:
            done, status = REFUSED[name](store), 200
            assert getattr(done, "replayed", False) or not getattr(done, "is_new", True)
        except GradserveError as error:
            status = error.status
        assert str(status) == name[:3]
        return log() - before

    rows = written()
    assert any(ask() < LITTLE_LOG for _ in range(5))
    assert written() == rows


@pytest.mark.parametrize("admitted", [False, True])
def test_the_transaction_decides(schema: Schema, monkeypatch: pytest.MonkeyPatch, admitted: bool) -> None:
    """What the look has seen may be past by then, either way."""
    usual, store, other = Writer._is_admitted, schema.open(), schema.open()
    if admitted:
        create(store, "w", "v", shape=(SIZE,))

    def rivalled(self: Writer, submission: Any) -> bool:
        found = usual(self, submission)
        if self is store._writer:
            if admitted:
                do(other, Delete(name="v"))
            else:
                create(other, "w", "v", shape=(SIZE,))
        return found

    monkeypatch.setattr(Writer, "_is_admitted", rivalled)
    both = Add(name="w", gradient=large()), Add(name="v", gradient=large())
    if admitted:
        with pytest.raises(GradserveError) as caught:
            do(store, *both, key=key())
        assert caught.value.status == 404
        assert store.record("w").count == 0
    else:
        assert not do(store, *both, key=key()).replayed
        monkeypatch.undo()
        assert do(store, *both, key=key()).replayed
        assert all((value(store, name) == large()).all() for name in ("w", "v"))
    assert schema.faults() == []


def test_a_small_add_makes_two_round_trips_and_a_large_one_looks_once(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "LOOK_SECONDS", 3600.0)  # the writer's looks for deadlines are exchanges, too
    store, usual = schema.open(), Connection.exchange
    create(store, "w", shape=(SIZE,))
    made: Counter[str] = Counter()
    sent: Counter[str] = Counter()

    def exchange(self: Connection, executions: Sequence[Execution | None], **named: Any) -> Any:
        name = threading.current_thread().name
        thread = name if name.startswith("gradserve-") else "staging"
        made[thread] += 1
        sent[thread] += len([*filter(None, executions)])
        return usual(self, executions, **named)

    def counted(gradient: Any, text: str) -> tuple[int, int, int]:
        made.clear()
        sent.clear()
        do(store, Add(name="w", gradient=gradient), key=key(text))
        return made["gradserve-writer"], sent["gradserve-writer"], made["staging"]

    for text, gradient in (("a", ones(1)), ("b", large())):
        do(store, Add(name="w", gradient=gradient), key=key(text))  # makes the table of blobs
    monkeypatch.setattr(Connection, "exchange", exchange)
    assert counted(ones(1), "c") == (2, 12, 0)
    assert counted(large(), "d") == (2, 13, 4)
