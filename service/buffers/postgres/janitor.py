"""The janitor thread: it deletes what nobody needs any more, and knows how full the store is."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import orjson

from service.buffers.names import BufferName
from service.buffers.packed import unpack_record
from service.buffers.perform import Outcome, Request
from service.buffers.postgres.blobs import Blobs, drop_free, movable
from service.buffers.postgres.connections import HANGING_SECONDS, Database
from service.buffers.postgres.deltas import Turns
from service.buffers.postgres.exchange import ResultRows, Statement
from service.buffers.postgres.failures import as_operator_error, retried, survived
from service.buffers.postgres.readonly import opened_readonly
from service.buffers.postgres.schema import FREED_SECONDS, drop_partitions, make_partitions
from service.buffers.postgres.statements import (
    COUNTED,
    COUNTS_ALONE,
    DELETE,
    FREE,
    HANGING,
    KEY_BYTES,
    NO_LIMIT,
    NOW,
    PUT_COUNTS,
    USED,
)
from service.buffers.room import check_keys, check_staged, room_for, store_full
from service.errors import BufferCorrupt

LATER = "The store's janitor goes on later"
"""What the log says before an error."""

_EXPIRED = Statement("""
    select namespace, name, record from (
        select *, sum(length(record)) over (order by namespace, name) - length(record) as before from (
            select namespace, name, record from buffers
            where expires <= coalesce($1::double precision, extract(epoch from now()))
            order by namespace, name limit $2::bigint for update skip locked
        ) as expired
    ) as page where before <= $3::bigint
""")
"""The last may be the first with which the records take more bytes than the last parameter."""

_FORGET = Statement("""
    with old as (
        select digest, at from keys
        where outcome <> '' and at <= extract(epoch from clock_timestamp()) - $1::double precision
            and namespace = coalesce($2::text, namespace)
        limit $3::bigint for update skip locked
    ), gone as (delete from keys using old where keys.digest = old.digest and keys.at = old.at returning 1)
    select count(*) from gone
""")
"""The rows without an outcome are marks of transactions: a server may still ask for them."""

ROUND_SECONDS = 5.0
"""The shortest pause between rounds."""

ROUNDS_AT_REST = 20
"""All janitors rest from counting twenty times as long as one of them has counted all keys and deltas."""

TURN_SECONDS = 1
"""How long the janitor waits for a lock before which all adds wait: it tries again in the next round."""

MOVE_SECONDS = 60.0
"""How long a round moves blobs, at most: meanwhile this janitor drops no table."""

EXPIRED_AT_ONCE = 200
"""Expired buffers that a transaction deletes, at most."""

EXPIRED_BYTES = 1 << 20
"""Bytes of their records: a push has a hundred for each gradient, which the transaction frees, too."""

KEYS_AT_ONCE = 10_000
"""Keys that a transaction forgets: no server waits long for the locks of more."""

BYTES_PER_KEY = 120
"""What the database takes for a key beside its outcome."""


class Janitor:
    """The janitor thread. It begins at once, and ends with `close`.

    None of its commits waits for the standby: a silent one would keep the backend of each, and a janitor does again
    what a failover loses.
    """

    def __init__(self, database: Database, turns: Turns, *, max_bytes: int, key_seconds: float) -> None:
        self._database, self._max_bytes, self._key_seconds = database, max_bytes, key_seconds
        self._turns, self._blobs = turns, Blobs(database)
        self._used = 0
        self._key_bytes: dict[str, int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradserve-janitor", daemon=True)
        self._thread.start()

    def check_room(self, request: Request, outcome: Outcome) -> None:
        """Raise `StoreFull` if the store had no room for such a request at the last round."""
        if self._used > room_for(request, outcome, self._max_bytes):
            raise store_full(self._max_bytes)

    def check_keys(self, namespace: str) -> None:
        """Raise `KeysFull` if the keys of the namespace had taken their share at the last round."""
        check_keys(self._key_bytes.get(namespace, 0), self._max_bytes)

    def check_staged(self, namespace_bytes: int) -> None:
        """Raise `StoreFull` if a namespace may not have staged so much."""
        check_staged(namespace_bytes, self._max_bytes)

    def used(self) -> int:
        """Return the bytes in use."""
        with self._database.transaction(durable=False) as connection:
            return int(connection.ask(USED())[0][0])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            with survived(LATER):
                self._round()
            self._closed.wait(ROUND_SECONDS)

    def _round(self) -> None:
        with self._database.transaction(durable=False) as connection:
            connection.ask(HANGING(HANGING_SECONDS))
            ((now,),) = connection.ask(NOW(self._database.clock()))
        with survived(LATER):
            make_partitions(self._database, now, TURN_SECONDS)
            drop_partitions(self._database, now - self._key_seconds, TURN_SECONDS)
        with survived(LATER):
            drop_free(self._database)
        with survived(LATER):
            while self._expire(now) and not self._closed.is_set():
                pass
        self._move(self._count())

    def _count(self) -> ResultRows:
        """Learn the bytes in use from the janitor that has counted them last, or count them for all.

        The janitor that has counted returns the blobs to move.
        """
        blobs: ResultRows = []
        with self._database.transaction(durable=False) as connection:
            alone, rows = connection.exchange([COUNTS_ALONE(), COUNTED()])
            if alone == [(True,)] and not any(is_fresh for *_, is_fresh in rows):
                began = time.monotonic()
                ((used,),) = connection.ask(USED())
                of_keys: dict[str, int] = dict(connection.ask(KEY_BYTES(BYTES_PER_KEY)))
                blobs = movable(connection)
                rest = ROUNDS_AT_REST * (time.monotonic() - began)
                rows = connection.ask(PUT_COUNTS(used, orjson.dumps(of_keys).decode(), rest))
        for used, key_bytes, _ in rows:
            self._used, self._key_bytes = used, orjson.loads(key_bytes)
        return blobs

    def _move(self, blobs: ResultRows) -> None:
        """Move these blobs to other tables: then theirs can be dropped."""
        end = time.monotonic() + MOVE_SECONDS
        for blob, nbytes in blobs:
            if self._closed.is_set() or time.monotonic() > end:
                return
            self._blobs.move(blob, nbytes, self._turns)

    def _expire(self, now: float) -> bool:
        """Delete some expired buffers. Return whether there may be more."""
        with self._database.transaction(durable=False) as connection:
            rows = connection.ask(_EXPIRED(now, EXPIRED_AT_ONCE, EXPIRED_BYTES))
            values: list[int] = []
            for namespace, name, packed in rows:
                with suppress(BufferCorrupt):
                    values += unpack_record(BufferName(namespace, name), packed).values
            names = [row[0] for row in rows], [row[1] for row in rows]
            connection.exchange([DELETE(*names), FREE(values, None, FREED_SECONDS)])
        return bool(rows)


def forget(url: str, schema: str, seconds: float, namespace: str | None) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    Servers may use the store meanwhile. Raises `StoreFailed`.
    """
    with opened_readonly(url, schema):
        pass  # there is a store, of this version
    database, forgotten = Database(url, schema, replicated=False), 0
    try:
        while count := retried(lambda: _forget_some(database, seconds, namespace), raised=as_operator_error):
            forgotten += count
        retried(lambda: _recount(database), raised=as_operator_error)
        return forgotten
    finally:
        database.close()


def _forget_some(database: Database, seconds: float, namespace: str | None) -> int:
    with database.transaction() as connection:
        count: int = connection.ask(_FORGET(seconds, namespace, KEYS_AT_ONCE))[0][0]
    return count


def _recount(database: Database) -> None:
    """Give the room of the deleted rows back, and let the servers count what is left."""
    with database.workers.lend() as connection:
        connection.execute(f"select {NO_LIMIT.format('false')}".encode())
        connection.execute(f'vacuum "{database.schema}".keys'.encode())
        connection.execute(f'delete from "{database.schema}".counts'.encode())
