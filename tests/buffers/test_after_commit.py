"""Errors behind a commit: the requests are made, so they must not be made again."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg.errors import DiskFull

from service.buffers import failpoints
from service.buffers.changes import Add
from service.buffers.lmdb import environment
from service.buffers.lmdb import writer as lmdb_writer
from service.buffers.lmdb.caches import RecordCache
from service.buffers.perform import Outcome
from service.buffers.postgres import PostgresStore, batch
from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Connection, Execution, ResultRows
from service.buffers.postgres.statements import INSERT
from service.buffers.store import Store
from service.errors import StoreFailed
from tests.buffers.calls import add, create, ones, request, value
from tests.buffers.postgres import Once, Schema, shrink
from tests.buffers.stores import PATIENCE, Gate, Reopen
from tests.network import Network

REQUESTS = 3
"""Adds without keys in one batch: if they are made again, nothing tells."""

POSTGRES = ("the failpoint", "_changed", "_fold", "_committed", "_deadlines.expect")
LMDB = ("the failpoint", "_committed", "folds", "remember")


class BrokenError(Exception):
    """An error that no store expects."""


def failing(*_: object) -> Any:
    raise BrokenError


def at_commit(point: str) -> None:
    if point == "committed":
        raise BrokenError


@contextmanager
def together(store: Store, patch: pytest.MonkeyPatch, point: str) -> Iterator[list[Future[Outcome]]]:
    """Yield adds without keys that share a batch, which begins when the context is left."""
    with Gate(patch, point).holding(store):
        yield [store.submit(request(Add(name="w", gradient=ones(2)))) for _ in range(REQUESTS)]


def check_counted_once(store: Store, futures: Sequence[Future[Outcome]]) -> None:
    counts = [future.result(PATIENCE).receipts["w"]["count"] for future in futures]
    assert counts == [*range(1, REQUESTS + 1)]
    check_count(store, REQUESTS)


def check_count(store: Store, count: int) -> None:
    assert value(store, "w").tolist() == [count, count]
    assert add(store, "w", 1.0)["count"] == count + 1
    assert value(store, "w").tolist() == [count + 1, count + 1]


@pytest.mark.parametrize("where", POSTGRES)
def test_what_fails_behind_a_commit_of_postgresql_counts_once(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    shrink(monkeypatch)
    store = schema.open()
    create(store, "w", deadline_seconds=3600.0)
    with monkeypatch.context() as patch:
        with together(store, patch, "made") as futures:
            if where == "the failpoint":
                patch.setattr(failpoints, "action", at_commit)
            else:
                *holder, name = where.split(".")
                patch.setattr(getattr(store._writer, *holder) if holder else store._writer, name, failing)
        for future in futures:
            future.exception(PATIENCE)
    check_counted_once(store, futures)


@pytest.mark.parametrize("where", LMDB)
def test_what_fails_behind_a_commit_of_lmdb_counts_once(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = reopen()
    create(store, "w")
    with monkeypatch.context() as patch:
        with together(store, patch, "before commit") as futures:
            if where == "the failpoint":
                patch.setattr(failpoints, "action", at_commit)
            else:
                holder = {"_committed": store._writer, "folds": lmdb_writer, "remember": RecordCache}[where]
                patch.setattr(holder, where, failing)
        for future in futures:
            future.exception(PATIENCE)
    check_counted_once(store, futures)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_drive_that_does_not_sync_a_commit_of_lmdb_counts_once(
    reopen: Reopen, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """macOS syncs the drive after LMDB's commit. Nobody knows whether the commit is on it."""
    store = reopen()
    create(store, "w")

    def fail(path: object) -> None:
        raise OSError(number, "no sync")

    with monkeypatch.context() as patch:
        with together(store, patch, "before commit") as futures:
            Once(patch, "made", lambda: patch.setattr(environment, "sync_drive", fail))
        errors = [future.exception(PATIENCE) for future in futures]
    assert [type(error) for error in errors] == [StoreFailed] * REQUESTS
    check_count(store, REQUESTS)
    assert "may lack" in str(errors[0])


def after_insert(patch: pytest.MonkeyPatch, fail: Callable[[], None], *, before: bool = False) -> None:
    """Fail at the round trip that inserts and commits: `before` it or, the first time, after it."""
    usual, failed = Connection.exchange, list[None]()

    def exchange(self: Connection, executions: Sequence[Execution | None], **options: Any) -> list[ResultRows]:
        is_meant = any(one is not None and one.statement is INSERT for one in executions) and not failed
        failed.extend([None] * is_meant)
        if is_meant and before:
            fail()
        found = usual(self, executions, **options)
        if is_meant:
            fail()
        return found

    patch.setattr(Connection, "exchange", exchange)


def test_an_error_in_the_answer_to_a_commit_counts_once(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    create(store, "w")
    with monkeypatch.context() as patch:
        with together(store, patch, "made") as futures:
            after_insert(patch, failing)
        errors = [future.exception(PATIENCE) for future in futures]
    assert [type(error) for error in errors] == [BrokenError] * REQUESTS
    check_count(store, REQUESTS)


def test_an_error_after_a_lost_answer_to_a_commit_counts_once(
    schema: Schema, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second attempt fails before it has looked whether the first is committed."""
    store = schema.open(network.url)
    create(store, "w")
    usual, attempts = batch.Batch.find, list[object]()

    def find(self: batch.Batch, database: Database, connection: Connection, key_seconds: float) -> Any:
        attempts.append(self)
        if attempts.count(self) == 2:
            failing()
        return usual(self, database, connection, key_seconds)

    with monkeypatch.context() as patch:
        with together(store, patch, "made") as futures:
            patch.setattr(batch.Batch, "find", find)
            Once(patch, "made", lambda: network.lose_commit("answer"))
        errors = [future.exception(PATIENCE) for future in futures]
    assert [type(error) for error in errors] == [BrokenError] * REQUESTS
    check_count(store, REQUESTS)


def test_a_disk_without_room_for_a_batch_may_have_room_for_each_request(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill() -> None:
        raise DiskFull("could not extend file")

    store: PostgresStore = schema.open()
    create(store, "w")
    with monkeypatch.context() as patch:
        with together(store, patch, "made") as futures:
            after_insert(patch, fill, before=True)
        check_counted_once(store, futures)
