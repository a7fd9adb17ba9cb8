"""The tables under `chunks`: each has the blobs of a block of ids, and is dropped once all of them are free.

To drop a table gives its disk back at once. To delete its rows would leave that to the vacuum, which reads them all
again, and is slower than large gradients come. So no row is deleted: what lives on in an old table moves to another
once a quarter of the table is free.

A process writes to a table of its own. A transaction that began before the blobs were freed may still read them, so the
table stays until all such transactions have ended. Then nobody looks for its blobs, and nobody waits while it goes.

The first id of a block is no blob. It counts as freed from the start, and keeps the new table for a while.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby

import psycopg
from psycopg.errors import DataCorrupted, IndexCorrupted, LockNotAvailable, UndefinedTable

from service.buffers.gradients import Gradient
from service.buffers.postgres.connections import Database
from service.buffers.postgres.deltas import COPY_HEAD, TURN_BYTES, Turns, pieces
from service.buffers.postgres.exchange import Connection, OwnError, ResultRows, Statement
from service.buffers.postgres.failures import retried
from service.buffers.postgres.schema import FREED_SECONDS, ID_BLOCK, ROW_BYTES, table_of, take_ids
from service.buffers.postgres.statements import BLOB_TABLES, BY_INDEX, COUNTED_BYTES, HAS_TABLE, LEASE, STAGE

TABLE_BYTES = 256 << 20
"""Bytes after which a process begins its next table. A free blob may keep as many, a table takes 10 ms to make."""

RESTED_SECONDS = 30.0
"""A table that had no new blob for so long may have been dropped."""

SPARSE_SECONDS = 300.0
"""How old a table is before its blobs move: by then most of what does not live long is gone."""

SPARE_BYTES = 1 << 20
"""What a table may take beside its blobs: an empty one takes some, too."""

_ROW = struct.Struct("!hiqiii")
"""A row of a blob up to its data: three fields; blob, number and data, each with its length before it."""

_IS_FREE = """
    due < extract(epoch from clock_timestamp()) and age(unowned.xmin) > (
        select coalesce(max(age(backend_xmin)), 0) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
    )
"""
"""Whether no transaction may find the blob: all that run have begun after it was freed. `xmin` is what freed it."""

_FREE_TABLES = Statement(f"""
    with {BLOB_TABLES} select first from tables
    where not exists (select from deltas where blob between first and first + {ID_BLOCK - 1})
        and not exists (select from unowned where blob between first and first + {ID_BLOCK - 1} and not ({_IS_FREE}))
""")

_FORGET = Statement(f"""
    delete from unowned where blob in (
        select blob from unowned where blob between $1::bigint and $1::bigint + {ID_BLOCK - 1} and {_IS_FREE}
        for update skip locked
    )
""")
"""Lets nobody claim a blob that waited for too long. It skips those that somebody claims just now."""

_USED = Statement(f"""
    select exists (select from deltas where blob between $1::bigint and $1::bigint + {ID_BLOCK - 1})
        or exists (select from unowned where blob between $1::bigint and $1::bigint + {ID_BLOCK - 1})
""")

_MOVABLE = Statement(f"""
    with {BLOB_TABLES}, living as (
        select (blob - 1) / {ID_BLOCK} * {ID_BLOCK} + 1 as first, {COUNTED_BYTES} as bytes
        from deltas where blob is not null group by first
    )
    select distinct deltas.blob, deltas.bytes
    from tables join living using (first) join unowned on unowned.blob = first
        join deltas on deltas.blob between first and first + {ID_BLOCK - 1}
    where due < extract(epoch from clock_timestamp()) - $1::double precision
        and 4 * living.bytes < 3 * (pg_total_relation_size(oid) - $2::bigint)
""")

_MOVED = Statement("""
    with moved as (update deltas set blob = $2::bigint where blob = $1::bigint returning bytes), freed as (
        insert into unowned
        select $1::bigint, extract(epoch from clock_timestamp()) + $3::double precision, max(bytes)
        from moved having count(*) > 0 on conflict do nothing
    )
    select count(*) from moved
""")


class Blobs:
    """New blobs of this process, for any of its threads."""

    def __init__(self, database: Database) -> None:
        self._database, self._lock = database, threading.Lock()
        self._next = self._stop = self._room = 0
        self._last = 0.0

    def new(self, nbytes: int) -> int:
        """Return the id of a blob of this size, for which there is a table."""
        with self._lock:
            if self._next == self._stop or self._room <= 0 or not self._is_there():
                self._next, self._stop = retried(lambda: _make_table(self._database))
                self._room = TABLE_BYTES
            self._next += 1
            self._room -= nbytes
            self._last = time.monotonic()
            return self._next - 1

    def _is_there(self) -> bool:
        """Return whether the table of the next blob is there, as far as this can be known."""
        if time.monotonic() < self._last + RESTED_SECONDS:
            return True
        with self._database.transaction(durable=False) as connection:
            return connection.ask(HAS_TABLE(table_of(self._next))) == [(True,)]

    def write(
        self, connection: Connection, sources: Iterable[tuple[int, Gradient]], turns: Turns | None = None
    ) -> None:
        """Write the numbers of each gradient under its blob's id. Give way at the `turns`."""
        groups = [(table, [*group]) for table, group in groupby(sources, lambda one: table_of(one[0]))]
        with self._noticed(groups[-1][0]):
            if len(groups) > 1:  # no table goes while others are written
                tables = ", ".join(table for table, _ in groups)
                connection.execute(f"lock table {tables} in row exclusive mode".encode())
            for table, written in groups:
                with connection.cursor().copy(f"copy {table} from stdin (format binary)".encode()) as copy:
                    _write_rows(copy, written, turns)

    def move(self, blob: int, nbytes: int, turns: Turns) -> None:
        """Give a gradient another blob, unless it is freed or moved meanwhile. Leave what is damaged where it is."""
        new, at_once = self.new(nbytes), TURN_BYTES // ROW_BYTES
        source, target = table_of(blob), table_of(new)
        last = Statement(f"select coalesce(max(number), 0) from {source} where blob = $1::bigint")
        rows = Statement(f"""
            insert into {target} select $1::bigint, number, data from {source}
            where blob = $2::bigint and number >= $3::integer and number < $3::integer + {at_once}
        """)
        with (
            suppress(DataCorrupted, IndexCorrupted, _UsedError),
            self._database.transaction(durable=False) as connection,
        ):
            with self._noticed(target):
                (leased,), ((end,),) = connection.exchange([LEASE(blob), last(blob)])
                for start in range(0, end + 1 if leased == (True,) else 0, at_once):
                    connection.ask(rows(new, blob, start))
                    turns.wait()
            if leased == (False,) or connection.ask(_MOVED(blob, new, FREED_SECONDS)) == [(0,)]:
                raise _UsedError

    @contextmanager
    def _noticed(self, table: str) -> Iterator[None]:
        """Let the next try make a table if this one has been dropped."""
        try:
            yield
        except UndefinedTable:
            with self._lock:
                if table_of(self._next) == table:
                    self._next = self._stop
            raise OwnError("a table of gradients is gone") from None


def _write_rows(copy: psycopg.Copy, sources: Iterable[tuple[int, Gradient]], turns: Turns | None) -> None:
    copy.write(COPY_HEAD)
    for blob, source in sources:
        for number, data in enumerate(pieces(source)):
            copy.write(_ROW.pack(3, 8, blob, 4, number, len(data)) + data)
            if turns is not None and (number + 1) % (TURN_BYTES // ROW_BYTES) == 0:
                turns.wait()
    copy.write(b"\xff\xff")


class _UsedError(Exception):
    """Another transaction uses the blob, or the table."""


def _make_table(database: Database) -> tuple[int, int]:
    """Make a table. Return the first id of its blobs, and the id after the last."""
    taken = take_ids(database)
    first = taken + (1 - taken) % ID_BLOCK  # `table_of` has blocks from 1 on, wherever an operator has set the sequence
    with database.transaction(durable=False) as connection:
        connection.execute(
            f"create table {table_of(first)} (primary key (blob, number)) inherits (chunks)"
            " with (autovacuum_enabled = off, toast.autovacuum_enabled = off)".encode()
        )
        connection.ask(STAGE(FREED_SECONDS, [first], [0]))
    return first + 1, taken + ID_BLOCK


def drop_free(database: Database) -> None:
    """Drop the tables whose blobs are all free. Another round drops those that are in use just now."""
    with database.transaction(durable=False) as connection:
        *_, tables = connection.exchange([BY_INDEX(), _FREE_TABLES()])
    for (first,) in tables:
        with suppress(LockNotAvailable, UndefinedTable, _UsedError), database.transaction(durable=False) as connection:
            if connection.exchange([LEASE(first), HAS_TABLE(table_of(first))]) != [[(True,)]] * 2:
                continue  # another process drops it, or has
            connection.execute(f"lock table {table_of(first)} in access exclusive mode nowait".encode())
            *_, used = connection.exchange([BY_INDEX(), _FORGET(first), _USED(first)])
            if used == [(True,)]:
                raise _UsedError
            connection.execute(f"drop table {table_of(first)}".encode())


def movable(connection: Connection) -> ResultRows:
    """Return the blobs that live in old tables that are free by a quarter, and their bytes."""
    return connection.ask(_MOVABLE(SPARSE_SECONDS, SPARE_BYTES))
