"""What the tests of the PostgreSQL stores share: stores of one schema, and a look behind them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from service.buffers import failpoints
from service.buffers.names import BufferName, pushes_of
from service.buffers.packed import unpack_record
from service.buffers.postgres import PostgresStore, batch, blobs, compactor, deltas, janitor, transaction
from tests.buffers.stores import PATIENCE, SMALL_CHUNK


class Schema:
    """A schema of a database, and the stores that a test has opened on it."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"test_{uuid.uuid4().hex}"
        self.stores: list[PostgresStore] = []

    def open(self, url: str | None = None, **options: Any) -> PostgresStore:
        """Open one more store, of a server of its own."""
        self.stores.append(PostgresStore(url or self.url, schema=self.name, **options))
        return self.stores[-1]

    def close(self) -> None:
        while self.stores:
            self.stores.pop().close()

    @contextmanager
    def connected(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection of another program, which finds the tables."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("select set_config('search_path', %s, false)", (self.name,))
            yield connection

    def ask(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        with self.connected() as connection:
            cursor = connection.execute(query.encode(), arguments or None)
            return cursor.fetchall() if cursor.description else []

    def end_backends(self, where: str) -> int:
        """End the backends of all stores for which the condition holds. Return how many there were."""
        query = f"""
            select pg_terminate_backend(pid, 5000) from pg_stat_activity
            where pid <> pg_backend_pid() and backend_type = 'client backend' and ({where})
        """
        return len(self.ask(query))

    def drop(self) -> None:
        """Drop the tables of closed stores."""
        self.ask(f"drop schema {self.name} cascade")

    def damage(self, pattern: bytes) -> None:
        """Cut the first byte off everything that holds `pattern`: records, gradients, and the rows of blobs."""
        columns = {"buffers": "record", "deltas": "data", "chunks": "data"}
        cuts = [
            f"update {table} set {data} = substr({data}, 2) where position(%s::bytea in {data}) > 0 returning 1"
            for table, data in columns.items()
        ]
        assert any([self.ask(cut, pattern) for cut in cuts])

    def tables(self) -> dict[str, int]:
        """Return the names of the tables of blobs, and their bytes on the disk."""
        query = "select inhrelid::regclass::text, pg_total_relation_size(inhrelid) from pg_inherits"
        found = self.ask(f"{query} where inhparent = 'chunks'::regclass")
        return {name: size for name, size in found if size is not None}  # else it has just been dropped

    def faults(self) -> list[str]:
        """Return what nothing refers to, or what is missing, while no store works."""
        rows = self.ask("select namespace, name, record, expires, due from buffers")
        records = [(unpack_record(BufferName(*row[:2]), row[2]), [*row[3:]]) for row in rows]
        used = {value for record, _ in records for value in record.values}
        found = {value for (value,) in self.ask("select distinct value from deltas")}
        faults = [f"deltas of the value {value}, which no buffer has" for value in found - used]
        faults += [f"no deltas of the value {value}" for value in used - found]
        faults += [f"times of {one.name}" for one, times in records if [one.expires, one.due] != times]
        queries = {
            "blobs that nothing refers to": """
                select distinct blob from chunks
                where blob not in (select blob from deltas where blob is not null union select blob from unowned)
            """,
            "blobs that are used and unowned": "select blob from deltas join unowned using (blob)",
            "blobs that are missing": """
                select blob from deltas where blob is not null and blob not in (select blob from chunks)
            """,
        }
        for what, query in queries.items():
            faults += [f"{what}: {blob}" for (blob,) in self.ask(query)]
        return faults


def pushes_in(schema: Schema) -> list[str]:
    """Return the ids of the pushes that the database has."""
    found = schema.ask("select name from buffers where starts_with(namespace, %s) order by name", pushes_of(""))
    return [name for (name,) in found]


def more_rows(query: str) -> str:
    """Return the statement that puts the rows of a query into the first table of blobs."""
    table = "(select min(tableoid)::regclass::text from chunks)"
    return f"do $$ begin execute 'insert into ' || {table} || $rows$ {query} $rows$; end $$"


class Once:
    """An action at the first hit of a failpoint."""

    def __init__(self, patch: pytest.MonkeyPatch, point: str, action: Any) -> None:
        self._point, self._action = point, action
        self.times = 0
        patch.setattr(failpoints, "action", self)

    def __call__(self, point: str) -> None:
        if point == self._point:
            self.times += 1
            if self.times == 1:
                self._action()


def part_tables(patch: pytest.MonkeyPatch, nbytes: int = 1) -> None:
    """Begin a table after `nbytes` bytes, by default with each blob. The janitor may drop it at once."""
    patch.setattr(blobs, "TABLE_BYTES", nbytes)
    for module in (blobs, batch, compactor, janitor):
        patch.setattr(module, "FREED_SECONDS", 0.0)
    patch.setattr(janitor, "ROUND_SECONDS", 0.02)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """Stage gradients of a few elements, in several chunks, and fold a value after every second delta."""
    for module in (batch, transaction, compactor, deltas):
        patch.setattr(module, "ROW_BYTES", SMALL_CHUNK // 2)
    for name in ("FOLD_EVERY", "FOLD_EVERY_SMALL"):
        patch.setattr(compactor, name, 2)


def until_changed(store: PostgresStore, before: int) -> None:
    """Wait until the store says that something may have changed."""
    until(lambda: store.generation() > before, "the change is not noticed")


def until_called(owner: Any, name: str, times: int = 3) -> None:
    """Wait until threads have called a function this number of times from now on, each time to its end."""
    usual, ended = getattr(owner, name), list[str]()

    def call(*arguments: Any) -> Any:
        found = usual(*arguments)
        ended.append(name)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        until(lambda: len(ended) >= times, f"nothing calls {name}")


def until(is_so: Callable[[], object], what: str) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)
