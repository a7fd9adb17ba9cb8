"""The janitor thread: it deletes what nobody needs any more, and knows how full the store is."""

from __future__ import annotations

import logging
import threading
import time

from service.buffers.names import BufferName
from service.buffers.packed import unpack_record
from service.buffers.perform import Outcome, Request
from service.buffers.postgres.batch import FREE, KEY_LOCK
from service.buffers.postgres.connections import HANGING_SECONDS, Database, retried
from service.buffers.postgres.readonly import opened_readonly
from service.buffers.postgres.schema import FREED_SECONDS, drop_partitions, make_partitions
from service.buffers.room import check_keys, room_for, store_full

logger = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
"""The shortest pause between rounds."""

ROUNDS_AT_REST = 20
"""The janitor rests twenty times as long as its last round took: it counts all keys and deltas."""

TURN_SECONDS = 1
"""How long the janitor waits for a lock before which all adds wait: it tries again in the next round."""

BLOBS_AT_ONCE = 200
"""Blobs that a transaction deletes."""

EXPIRED_AT_ONCE = 200
"""Expired buffers that a transaction deletes."""

KEYS_AT_ONCE = 10_000
"""Keys that a transaction forgets: no server waits long for the locks of more."""

_SWEEP = """
    with gone as (delete from loose where blob in (
        select blob from loose where due < extract(epoch from clock_timestamp())
        order by due limit %s for update skip locked
    ) returning blob)
    delete from chunks using gone where chunks.blob = gone.blob
"""

_HANGING = f"""
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and usename = current_user and state like 'idle in transaction%%'
        and state_change < clock_timestamp() - make_interval(secs => %s)
        and pid in (select pid from pg_locks where locktype = 'advisory' and classid = {KEY_LOCK} and objsubid = 2)
"""
"""Ends the transactions of writers that hang.

The database's own time-out does not: after its `Sync`, a pipeline of psycopg sends a `Flush`, which stops that clock.
"""

_EXPIRED = """
    select namespace, name, record from buffers where expires <= %s
    order by namespace, name limit %s for update skip locked
"""

_USED = """
    select (select coalesce(sum(bytes), 0) from deltas)
         + (select coalesce(sum(pg_total_relation_size(relid)), 0) from pg_partition_tree('keys'))
         + pg_total_relation_size('buffers')
"""


KEY_BYTES = 120
"""What the database takes for a key beside its outcome."""

_KEY_BYTES = f"select namespace, sum(length(outcome) + {KEY_BYTES})::bigint from keys where outcome <> '' group by 1"

_FORGET = """
    with old as (
        select digest, at from keys
        where outcome <> '' and at <= extract(epoch from clock_timestamp()) - %s
            and namespace = coalesce(%s, namespace)
        limit %s for update skip locked
    ), gone as (delete from keys using old where keys.digest = old.digest and keys.at = old.at returning 1)
    select count(*) from gone
"""
"""The rows without an outcome are marks of transactions: a server may still ask for them."""


class Janitor:
    """The janitor thread. It begins at once, and ends with `close`."""

    def __init__(self, database: Database, *, max_bytes: int, key_seconds: float) -> None:
        self._database, self._max_bytes, self._key_seconds = database, max_bytes, key_seconds
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

    def used(self) -> int:
        """Return the bytes in use."""
        with self._database.transaction() as connection:
            return int(connection.execute(_USED).fetchall()[0][0])

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._round()
            except Exception as error:  # the thread outlives what it cannot do
                logger.warning("The store's janitor goes on later: %s", " ".join(str(error).split()))
            self._closed.wait(max(ROUND_SECONDS, ROUNDS_AT_REST * (time.monotonic() - began)))

    def _round(self) -> None:
        with self._database.transaction() as connection:
            connection.execute(_HANGING, (HANGING_SECONDS,))
            now = self._database.now(connection)
        make_partitions(self._database, now, TURN_SECONDS)
        drop_partitions(self._database, now - self._key_seconds, TURN_SECONDS)
        while self._sweep() and not self._closed.is_set():
            pass
        while self._expire(now) and not self._closed.is_set():
            pass
        self._used = self.used()
        with self._database.transaction() as connection:
            self._key_bytes = dict(connection.execute(_KEY_BYTES).fetchall())

    def _sweep(self) -> bool:
        """Delete some loose blobs. Return whether there may be more."""
        with self._database.transaction(durable=False) as connection:
            return connection.execute(_SWEEP, (BLOBS_AT_ONCE,)).rowcount > 0

    def _expire(self, now: float) -> bool:
        """Delete some expired buffers. Return whether there may be more."""
        with self._database.transaction() as connection:
            rows = connection.execute(_EXPIRED, (now, EXPIRED_AT_ONCE), binary=True).fetchall()
            records = [unpack_record(BufferName(namespace, name), packed) for namespace, name, packed in rows]
            for record in records:
                connection.execute("delete from buffers where namespace = %s and name = %s", record.full_name)
            connection.exchange([FREE([value for record in records for value in record.values], FREED_SECONDS)])
        return bool(records)


def forget(url: str, schema: str, seconds: float, namespace: str | None) -> int:
    """Forget the keys of a namespace, None for all, that are at least this old. Return their number.

    Servers may use the store meanwhile. Raises `StoreFailed`.
    """
    with opened_readonly(url, schema):
        pass  # there is a store, of this version
    database, forgotten = Database(url, schema, replicated=False), 0
    try:
        while count := retried(lambda: _forget_some(database, seconds, namespace)):
            forgotten += count
        retried(lambda: _vacuum(database))
        return forgotten
    finally:
        database.close()


def _forget_some(database: Database, seconds: float, namespace: str | None) -> int:
    with database.transaction() as connection:
        count: int = connection.execute(_FORGET, (seconds, namespace, KEYS_AT_ONCE)).fetchall()[0][0]
    return count


def _vacuum(database: Database) -> None:
    """Give the room of the deleted rows back."""
    with database.worker() as connection:
        connection.execute(f'vacuum "{database.schema}".keys'.encode())
