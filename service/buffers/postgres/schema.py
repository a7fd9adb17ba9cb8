"""The tables of a PostgreSQL store, and the life of a gradient from its staging to its fold.

A buffer's value is a list of deltas in the order of `seq`: a delta is a gradient as it came, with its weight. A delta
of up to 64 KB is in its row. A larger delta is a blob: rows of 64 KB in a table under `chunks`, which never change.

    staged                       admitted                       folded                         freed
    +------------------------+   +--------------------------+   +--------------------------+   +-----------------------+
    | COPY into `chunks`;    |   | one short transaction:   |   | the sum of the deltas    |   | the deltas go; the    |
    | `unowned` has the blob;|-->| keys, records, deltas;   |-->| takes the place of the   |-->| blobs are `unowned`,  |
    | no lock is held        |   | a delta owns the blob    |   | last; the others go      |   | and their table goes  |
    +------------------------+   +--------------------------+   +--------------------------+   +-----------------------+

The server may lose a staged blob in a crash, because `synchronous_commit` is off for it. Then `unowned` lacks the blob,
too, and the transaction that would admit it finds that and fails; the writer stages the blob again.

A table has the blobs of a block of ids, and is dropped once all of them are free: see `blobs.py`.

A record is sealed as in LMDB: it ends with a checksum, seeded by the name of its buffer (`service/buffers/packed.py`).

The gradients of a push in parts are deltas, too, of the values of the push: see `pushes.py`.

A transaction takes its locks in one order: keys, pushes, namespaces with new buffers, buffers by name. A
fold locks one buffer. The janitor locks pushes whose time is over, and waits for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from psycopg import sql

from service.buffers import graphs, pushes
from service.buffers.names import BufferName, graphs_of, pushes_of
from service.buffers.packed import FORMAT, check_format, pack_record
from service.buffers.postgres.connections import LOCK_SECONDS, Database
from service.buffers.postgres.exchange import Connection, Statement, columns
from service.buffers.postgres.statements import BLOB_TABLES, HAS_TABLE, PUT, SEAL_OF_KEY, VERSION
from service.errors import BufferCorrupt, StoreFailed

ID_BLOCK = 1000
"""Ids that a server takes at once: one round trip for a thousand values."""

ROW_BYTES = 1 << 16
"""Bytes of a gradient in a row, at most. To stage a row takes one more transaction; rows of 64 KB COPY fastest."""

FREED_SECONDS = 60.0
"""How long a freed blob is kept, at least. What reads it by then keeps its table for longer: see `blobs.py`."""

_LOCK = Statement("select pg_advisory_xact_lock(1735549284)")
"""Lets one process make or migrate tables at a time. The number is "grad" in ASCII."""

_TABLES = f"""
create table meta (version integer primary key, ids bigint not null default {1 - ID_BLOCK});
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
create index deltas_blob on deltas (blob) where blob is not null;
create table chunks (blob bigint not null, number integer not null, data bytea not null);
alter table chunks alter data set storage external;
create table unowned (blob bigint primary key, due double precision not null, bytes bigint not null default 0);
create table keys (
    digest bytea not null,
    namespace text not null,
    at double precision not null,
    outcome bytea not null,
    seal bytea not null,
    primary key (digest, at)
) partition by range (at);
insert into meta values ({FORMAT});
"""

_UPGRADE = f"""
lock table meta in access exclusive mode;
alter table meta add column ids bigint not null default {1 - ID_BLOCK}, add primary key (version);
alter table keys add column seal bytea;
update keys set seal = {SEAL_OF_KEY};
alter table keys alter seal set not null;
update meta set version = {FORMAT};
"""
"""Makes this format of those before, once all transactions have ended that have read their number."""

_COUNTS = b"""
create unlogged table if not exists counts (
    used bigint not null,
    key_bytes text not null,
    due double precision not null
)
"""
"""What the janitors have counted last, for all servers: it holds nothing that a crash may not take."""


def prepare(database: Database) -> None:
    """Make the tables that are not there, or bring an older store over. Raises `StoreFailed` for other formats."""
    with database.transaction(checks=False) as connection:
        check_settings(database, connection)
        connection.ask(_LOCK())
        found = format_of(connection, database.schema)
        if found is None:
            connection.execute(sql.SQL("create schema if not exists {}").format(sql.Identifier(database.schema)))
            connection.execute(_TABLES.encode())
        elif found != str(FORMAT):
            connection.execute(_UPGRADE.encode())
            if older := [*older_records(connection)]:
                connection.ask(PUT(*columns(older, 6)))
            connection.execute(b"drop table graphs, pushes")
        connection.execute(_COUNTS)


def format_of(connection: Connection, schema: str) -> str | None:
    """Return the format of the store in the transaction's schema, if there is one. Raises `StoreFailed` for others."""
    if connection.ask(HAS_TABLE("meta")) == [(False,)]:
        return None
    found = ", ".join(str(version) for (version,) in connection.ask(VERSION()))
    check_format(found or "none", f"The PostgreSQL schema {schema!r} (GRADSERVE_POSTGRES_SCHEMA)")
    return found


def older_records(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of `buffers` that the graphs and pushes of an older format are, which has them apart.

    What is damaged stays damaged, under its new name.
    """
    if connection.ask(HAS_TABLE("graphs")) == [(False,)]:
        return
    for namespace, name, packed in connection.ask(_OLDER_GRAPHS()):
        with suppress(BufferCorrupt):
            packed = pack_record(graphs.unpack_older(BufferName(namespace, name), packed))
        yield graphs_of(namespace), name, packed, 1, None, None
    for namespace, name, packed, nbytes, until in connection.ask(_OLDER_PUSHES()):
        with suppress(BufferCorrupt):
            record = pushes.unpack_older(BufferName(pushes_of(namespace), name), packed)
            packed, until = pack_record(record), record.expires
        yield pushes_of(namespace), name, packed, nbytes, until, None


_OLDER_GRAPHS = Statement("select namespace, name, record from graphs order by namespace, name")

_OLDER_PUSHES = Statement("select namespace, id, record, bytes, until from pushes order by namespace, id")

PARTITION_SECONDS = 6 * 3600
"""The keys of six hours share a partition, and expire with it."""


_SETTING = Statement("select current_setting($1::text)")


def check_settings(database: Database, connection: Connection) -> None:
    """Raise `StoreFailed` if the database cannot keep what it has committed."""
    for name in ("fsync", "full_page_writes"):
        ((value,),) = connection.ask(_SETTING(name))
        if value != "on":
            raise StoreFailed(f"The database has {name} {value}, and so may lose what it has committed: set it to on")
    if database.replicated and connection.ask(_SETTING("synchronous_standby_names")) == [("",)]:
        raise StoreFailed(
            "GRADSERVE_DURABILITY is replicated, but the database has no synchronous standby: set"
            " synchronous_standby_names there, or GRADSERVE_DURABILITY to local"
        )
    database.check_standby(connection)


_TAKE_IDS = Statement(f"""
    with {BLOB_TABLES}, used as (
        select greatest(
            (select max(value) from deltas), (select max(blob) from deltas),
            (select max(first) + {ID_BLOCK - 1} from tables), 0
        ) as id
    ), taken as (
        update meta set ids = greatest(
            nextval('ids'), ids + {ID_BLOCK}, (select (id + {ID_BLOCK - 1}) / {ID_BLOCK} * {ID_BLOCK} + 1 from used)
        ) returning ids
    )
    select case when ids > (select last_value from ids) then setval('ids', ids) else ids end from taken
""")
"""Goes on behind the last block and all rows, wherever the sequence is: logical replication carries rows only."""

_PARTITIONS = Statement("select inhrelid::regclass::text from pg_inherits where inhparent = 'keys'::regclass")
"""Locks nothing. pg_partition_tree locks all, so a reader and a server that drops one would end in a deadlock."""


def table_of(blob: int) -> str:
    """Return the quoted name of the table that has a blob: the blobs of a block of ids share one."""
    return f'"chunks_{(blob - 1) // ID_BLOCK * ID_BLOCK + 1}"'


_WAIT = Statement("select set_config('lock_timeout', $1::text, true)")


def take_ids(database: Database) -> int:
    """Return the first of the next `ID_BLOCK` ids. They are durable: no other server gets them after a crash."""
    with database.transaction() as connection:
        first: int = connection.ask(_TAKE_IDS())[0][0]
    return first


def make_partitions(database: Database, time: float, patience: float = LOCK_SECONDS) -> None:
    """Make the partitions of `keys` for this time and the next hours, if they are not there.

    All adds wait while it waits for a lock, at most `patience` seconds. It does not wait for the standby: the commits
    of the keys do.
    """
    first = int(time // PARTITION_SECONDS) * PARTITION_SECONDS
    for start in (first, first + PARTITION_SECONDS):
        with database.transaction(durable=False) as connection:
            if connection.ask(HAS_TABLE(f"keys_{start}")) == [(False,)]:
                connection.ask(_LOCK())
                connection.ask(_WAIT(f"{patience}s"))
                connection.execute(
                    sql.SQL("create table if not exists {} partition of keys for values from ({}) to ({})").format(
                        sql.Identifier(f"keys_{start}"), sql.Literal(start), sql.Literal(start + PARTITION_SECONDS)
                    )
                )


def drop_partitions(database: Database, time: float, patience: float) -> None:
    """Drop the partitions of `keys` whose keys are all older than `time`. Wait for locks as `make_partitions` does."""
    with database.transaction(durable=False) as connection:
        connection.ask(_WAIT(f"{patience}s"))
        for (name,) in connection.ask(_PARTITIONS()):
            if int(name.removeprefix("keys_")) + PARTITION_SECONDS <= time:
                connection.execute(sql.SQL("drop table if exists {}").format(sql.Identifier(name)))
