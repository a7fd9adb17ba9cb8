"""The tables of a PostgreSQL store, and the life of a gradient from its staging to its fold.

A buffer's value is a list of deltas in the order of `seq`: a delta is a gradient as it came, with its weight. A delta
of up to 64 KB is in its row. A larger delta is a blob: rows of 64 KB in `chunks`, which never change.

    staged                      admitted                        folded                         freed
    +-----------------------+   +---------------------------+   +--------------------------+   +---------------------+
    | COPY into `chunks`;   |   | one short transaction:    |   | the sum of the deltas    |   | the deltas go; the  |
    | `loose` has the blob; |-->| keys, records, deltas;    |-->| takes the place of the   |-->| blobs are `loose`,  |
    | no lock is held       |   | the blob is not loose now |   | last; the others go      |   | and deleted later   |
    +-----------------------+   +---------------------------+   +--------------------------+   +---------------------+

The server may lose a staged blob in a crash, because `synchronous_commit` is off for it. Then `loose` lacks the blob,
too, and the transaction that would admit it finds that and fails; the writer stages the blob again.

A transaction takes its locks in one order: keys, namespaces with new buffers, buffers by name. A fold locks one buffer.
"""

from __future__ import annotations

from psycopg import sql

from service.buffers.packed import FORMAT, check_format
from service.buffers.postgres.connections import LOCK_SECONDS, Database
from service.errors import StoreFailed

ID_BLOCK = 1000
"""Ids that a server takes from the sequence at once: one round trip for a thousand values."""

CHUNK_BYTES = 1 << 16
"""Bytes of a row of `chunks`: rows of 64 KB are the fastest to COPY."""

INLINE_BYTES = 1 << 16
"""A delta of up to 64 KB is in its own row: to stage it would take a transaction more."""

FREED_SECONDS = 60.0
"""How long a freed blob is kept: a reader may be on its way to it."""

_LOCK = "select pg_advisory_xact_lock(1735549284)"
"""Lets one process make or migrate tables at a time. The number is "grad" in ASCII."""

_TABLES = f"""
create table meta (version integer not null);
create sequence ids increment {ID_BLOCK};
create table buffers (
    namespace text collate "C" not null,
    name text collate "C" not null,
    record bytea not null,
    seq bigint not null,
    expires double precision,
    due double precision,
    primary key (namespace, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
create index buffers_expires on buffers (expires) where expires is not null;
create index buffers_due on buffers (due) where due is not null;
create table deltas (
    value bigint not null,
    seq bigint not null,
    weight double precision not null,
    overwrite boolean not null,
    dtype text not null,
    shape text not null,
    bytes bigint not null,
    blob bigint,
    data bytea,
    primary key (value, seq)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
alter table deltas alter data set storage external;
create table chunks (
    blob bigint not null,
    number integer not null,
    data bytea not null,
    primary key (blob, number)
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_threshold = 1000);
alter table chunks alter data set storage external;
create table loose (blob bigint primary key, due double precision not null);
create index loose_due on loose (due);
create table keys (
    digest bytea not null,
    namespace text not null,
    at double precision not null,
    outcome bytea not null,
    primary key (digest, at)
) partition by range (at);
insert into meta values ({FORMAT});
"""


def prepare(database: Database) -> None:
    """Make the tables if they are not there. Raises `StoreFailed` for those of another format."""
    schema = database.schema
    check_settings(database)
    with database.transaction() as connection:
        connection.execute(_LOCK)
        found = connection.execute("select to_regclass(%s)", (f'"{schema}".meta',)).fetchone()
        if found is None or found[0] is None:
            connection.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(schema)))
            connection.execute(_TABLES.encode())
            return
        rows = connection.execute("select version from meta").fetchall()
        check_version(schema, rows)


def check_version(schema: str, rows: list[tuple[int]]) -> None:
    """Raise `StoreFailed` if the rows of `meta` are those of another format."""
    found = ", ".join(str(row[0]) for row in rows) or "none"
    check_format(found, f"The PostgreSQL schema {schema!r} (GRADSERVE_POSTGRES_SCHEMA)")


PARTITION_SECONDS = 6 * 3600
"""The keys of six hours share a partition, and expire with it."""


_SETTINGS = """
    select current_setting('fsync'), current_setting('full_page_writes'), current_setting('synchronous_standby_names')
"""


def check_settings(database: Database) -> None:
    """Raise `StoreFailed` if the database cannot keep what it has committed."""
    with database.transaction() as connection:
        ((fsync, full_page_writes, standbys),) = connection.execute(_SETTINGS).fetchall()
        for name, value in (("fsync", fsync), ("full_page_writes", full_page_writes)):
            if value != "on":
                raise StoreFailed(
                    f"The database has {name} {value}, and so may lose what it has committed: set it to on"
                )
        if database.replicated and not standbys:
            raise StoreFailed(
                "GRADSERVE_DURABILITY is replicated, but the database has no synchronous standby: set"
                " synchronous_standby_names there, or GRADSERVE_DURABILITY to local"
            )
        database.check_standby(connection)


_WAIT = "select set_config('lock_timeout', %s, true)"


def take_ids(database: Database) -> int:
    """Return the first of the next `ID_BLOCK` ids. They are durable: no other server gets them after a crash."""
    with database.transaction() as connection:
        first: int = connection.execute("select nextval('ids')").fetchall()[0][0]
    return first


def make_partitions(database: Database, time: float, patience: float = LOCK_SECONDS) -> None:
    """Make the partitions of `keys` for this time and the next hours, if they are not there.

    All adds wait while it waits for a lock, at most `patience` seconds.
    """
    first = int(time // PARTITION_SECONDS) * PARTITION_SECONDS
    for start in (first, first + PARTITION_SECONDS):
        with database.transaction() as connection:
            if connection.execute("select to_regclass(%s)", (f"keys_{start}",)).fetchall() == [(None,)]:
                connection.execute(_LOCK)
                connection.execute(_WAIT, (f"{patience}s",))
                connection.execute(
                    sql.SQL("create table if not exists {} partition of keys for values from ({}) to ({})").format(
                        sql.Identifier(f"keys_{start}"), sql.Literal(start), sql.Literal(start + PARTITION_SECONDS)
                    )
                )


def drop_partitions(database: Database, time: float, patience: float) -> None:
    """Drop the partitions of `keys` whose keys are all older than `time`. Wait for locks as `make_partitions` does."""
    query = "select relid::regclass::text from pg_partition_tree('keys') where isleaf and level > 0"
    with database.transaction() as connection:
        connection.execute(_WAIT, (f"{patience}s",))
        for (name,) in connection.execute(query).fetchall():
            if int(name.removeprefix("keys_")) + PARTITION_SECONDS <= time:
                connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(name)))
