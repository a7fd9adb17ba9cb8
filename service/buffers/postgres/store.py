"""The store over PostgreSQL: any number of servers on any machines share it.

The database keeps the promises: a commit is on the disk before its requests are answered, and, with `replicated`, on
the synchronous standby, too. What this process keeps in memory can be lost at any time.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from typing import TypeVar

import numpy as np

from service.buffers.graphs import MAX_GRAPHS
from service.buffers.names import BufferName
from service.buffers.packed import digest_of, unpack_known, unpack_record
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import lists
from service.buffers.postgres import schema as tables
from service.buffers.postgres.blobs import Blobs
from service.buffers.postgres.compactor import Compactor
from service.buffers.postgres.connections import Database, application_of
from service.buffers.postgres.deltas import Delta, Turns, complete, stream, total
from service.buffers.postgres.exchange import Connection, Execution, ResultRows
from service.buffers.postgres.failures import as_operator_error, retried
from service.buffers.postgres.fence import Fence
from service.buffers.postgres.janitor import Janitor
from service.buffers.postgres.outage import Outage
from service.buffers.postgres.pushes import Stored
from service.buffers.postgres.statements import COUNT, MEASURES, NOW, OUTCOME, RECORDS, REPLICAS, VERSION
from service.buffers.postgres.watcher import Watcher
from service.buffers.postgres.writer import Writer
from service.buffers.record import Key, Known, Record, Snapshot
from service.buffers.room import Most
from service.buffers.steps import Closed
from service.buffers.store import (
    KEY_SECONDS,
    MAX_BUFFERS,
    Allocate,
    Committed,
    Store,
    alive,
    closed_steps,
    page,
    snapshots,
    uncounted,
)
from service.dtypes import Array
from service.errors import BufferCorrupt

R = TypeVar("R")

READ_SECONDS = 10.0
"""How long a read waits for a database that answers slowly."""

CHECK_SECONDS = 2.0
"""How long a probe waits for the database."""


class _Ids:
    """Numbers that no buffer, value or blob has or had, taken from the database in blocks."""

    def __init__(self, take_block: Callable[[], int]) -> None:
        self._take_block, self._lock = take_block, threading.Lock()
        self._next = self._stop = 0

    def __call__(self) -> int:
        with self._lock:
            if self._next == self._stop:
                self._next = self._take_block()
                self._stop = self._next + tables.ID_BLOCK
            self._next += 1
            return self._next - 1


class PostgresStore(Store):
    """The store in a schema of the database at `url`. A `clock` replaces the database's, in tests.

    Raises `StoreFailed` if the database cannot be reached, or has the tables of a newer version.
    """

    blocks = True

    def __init__(
        self,
        url: str,
        *,
        schema: str = "gradserve",
        max_bytes: int = 1 << 60,
        replicated: bool = False,
        allocate: Allocate = np.empty,
        key_seconds: float = KEY_SECONDS,
        clock: Callable[[], float] | None = None,
        committed: Committed = uncounted,
        max_buffers: int = MAX_BUFFERS,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._allocate, self._key_seconds = allocate, key_seconds
        self._database = Database(url, schema, replicated=replicated, clock=clock or (lambda: None))
        try:
            retried(lambda: tables.prepare(self._database), raised=as_operator_error, tells=True)
        except BaseException:
            self._database.close()
            raise
        self._ids = _Ids(lambda: retried(lambda: tables.take_ids(self._database)))
        self._outage = Outage(READ_SECONDS, lambda: self._asked(VERSION()))
        self._fence = Fence(self._database, self._outage, READ_SECONDS)
        turns, blobs = Turns(), Blobs(self._database)
        self._compactor = Compactor(self._database, blobs, allocate, turns)
        self._watcher = Watcher(self._database)
        self._janitor = Janitor(self._database, turns, max_bytes=max_bytes, key_seconds=key_seconds)
        self._writer = Writer(
            self._database,
            self._ids,
            blobs,
            allocate=allocate,
            key_seconds=key_seconds,
            committed=committed,
            changed=self._watcher.tell,
            janitor=self._janitor,
            most=Most(max_buffers, max_graphs),
            fold=self._compactor.submit,
            turns=turns,
        )

    def submit(self, request: Request) -> Future[Outcome]:
        return self._writer.submit(request, self.namespace)

    def record(self, name: str) -> Record:
        return _alive([name], self._ask(self._records([name])))[name].record

    def durable(self, names: Sequence[str], step: int | None = None) -> list[Record]:
        stored = _alive(names, self._ask(self._records(names), fenced=True))
        records = [stored[name].record for name in names]
        closed_steps(records, step)  # raises
        return records

    def now(self) -> float:
        return float(self._ask(NOW(self._database.clock()))[0][0])

    def look(self, names: Collection[BufferName]) -> dict[BufferName, Record]:
        found = {}
        wanted = [name.namespace for name in names], [name.name for name in names]
        for namespace, name, packed, _, now in self._ask(RECORDS(*wanted, self._database.clock())):
            with suppress(BufferCorrupt):
                record = unpack_record(BufferName(namespace, name), packed)
                if record.lives(now):
                    found[record.full_name] = record
        return found

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, most_bytes: int = sys.maxsize
    ) -> list[Record]:
        wanted = (self.namespace, prefix, after, self._database.clock(), limit, most_bytes)
        return self._read(lambda connection: page(lists.records(connection, *wanted), limit, most_bytes))

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        rows = self._ask(lists.NAMES(self.namespace, prefix, self._database.clock(), limit), fenced=True)
        return [name for (name,) in rows]

    def record_bytes(self, names: Sequence[str]) -> int:
        return int(self._ask(lists.RECORD_BYTES([self.namespace] * len(names), names))[0][0])

    def read(self, names: Sequence[str], step: int | Sequence[int] | None = None) -> list[Snapshot]:
        def find(connection: Connection) -> list[Snapshot]:
            (rows,) = connection.exchange([self._records([*dict.fromkeys(names)])])
            stored = _alive(names, rows)
            records = [stored[name].record for name in names]
            states = zip(records, closed_steps(records, step), strict=True)
            values = [(of or record).value for record, of in states]
            found = groupby(stream(connection, [value for value in values if value is not None]), lambda one: one.value)

            def load(record: Record, of: Closed | None) -> Array:
                value = (of or record).value
                deltas: Iterable[Delta] = ()
                if value is not None:
                    deltas = complete(value, next(found)[1], stored[record.name].seq if of is None else None)
                return total(connection, record.spec, deltas, self._allocate)

            return snapshots(records, step, load)

        with np.errstate(all="ignore"):
            return self._read(find)

    def recall(self, key: Key, names: Sequence[str] = ()) -> Known | None:
        query = OUTCOME(digest_of(key), self._key_seconds, self._database.clock())
        rows = self._ask(query) and self._ask(query, fenced=True)  # a new key does not wait for the standby
        return unpack_known(rows[0][0], names) if rows else None

    def generation(self) -> int:
        return self._watcher.generation

    def check(self) -> None:
        def attempt() -> None:
            with self._database.workers.lend(CHECK_SECONDS) as connection:
                self._database.cross(connection)

        self._outage.check()
        retried(attempt, seconds=CHECK_SECONDS)

    def size(self) -> tuple[int, int]:
        return self._ask(COUNT())[0][0], retried(self._janitor.used, seconds=READ_SECONDS)

    def measures(self) -> dict[str, float]:
        return dict(self._ask(MEASURES()))

    def replicas(self) -> int | None:
        ((count,),) = self._ask(REPLICAS(application_of(self._database.schema)))
        return count or None  # a pooler gives the connections a name of its own

    def close(self) -> None:
        if self._writer.close():
            for helper in (self._compactor, self._watcher, self._janitor):
                helper.close()
            self._database.close()

    def _records(self, names: Sequence[str]) -> Execution:
        return RECORDS([self.namespace] * len(names), names, self._database.clock())

    def _read(self, work: Callable[[Connection], R]) -> R:
        """Return what `work` reads, all of it of one moment, once the standby has it."""

        def attempt() -> R:
            with self._database.reading(READ_SECONDS) as connection:
                found, server = work(connection), connection.server
            self._fence.wait(server)
            return found

        return self._outage.read(attempt)

    def _ask(self, execution: Execution, *, fenced: bool = False) -> ResultRows:
        return self._outage.read(lambda: self._asked(execution, fenced=fenced))

    def _asked(self, execution: Execution, *, fenced: bool = False) -> ResultRows:
        with self._database.readers.lend(READ_SECONDS) as connection:
            rows, server = self._database.read(connection, execution), connection.server
        if fenced:
            self._fence.wait(server)
        return rows


def _alive(names: Sequence[str], rows: ResultRows) -> dict[str, Stored]:
    """Return the buffers. Raises `UnknownBuffer` for the first that does not exist."""
    found = {
        name: Stored(unpack_record(BufferName(namespace, name), packed), seq)
        for namespace, name, packed, seq, _ in rows
    }
    now = rows[0][-1] if rows else 0.0
    for name in names:
        alive(found[name].record if name in found else None, name, now)
    return found
