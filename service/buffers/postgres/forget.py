"""`gradserve keys-forget` over PostgreSQL."""

from __future__ import annotations

from service.buffers.postgres.connections import Database, retried
from service.buffers.postgres.snapshot import opened_readonly

MOST_AT_ONCE = 10_000
"""Keys that a transaction deletes: no server waits long for the locks of more."""

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
        count: int = connection.execute(_FORGET, (seconds, namespace, MOST_AT_ONCE)).fetchall()[0][0]
    return count


def _vacuum(database: Database) -> None:
    """Give the room of the deleted rows back."""
    with database.idle() as connection:
        connection.execute(f'vacuum "{database.schema}".keys'.encode())
