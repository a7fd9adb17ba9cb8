"""The statements of the store but those of its tables, of pushes and of the doctor, which stand where they are used.

`clock` parameters are the time that a test sets; null for the database's own.
"""

from __future__ import annotations

from service.buffers.names import HIDDEN
from service.buffers.packed import SEAL_BYTES
from service.buffers.postgres.exchange import Statement
from service.buffers.pushes import MAX_STORED_BYTES

KEY_LOCK = 1
"""The class of the advisory locks of keys."""

NAMESPACE_LOCK = 2
"""The class of the advisory locks of namespaces."""

FOLD_LOCK = 3
"""The class of the advisory locks of values that a process folds, and of blobs that it moves."""

COUNT_LOCK = 4
"""The class of the advisory locks of schemas whose keys a process counts."""

COUNTED_BYTES = f"coalesce(sum(bytes) filter (where bytes between 0 and {MAX_STORED_BYTES}), 0)::bigint"
"""The bytes of many rows, without those that are damaged there: one could fill the store, or have no sum."""

# ----- every transaction -----

BEGIN = Statement("begin isolation level read committed, read write")

BEGIN_READING = Statement("begin isolation level repeatable read, read write")

NO_LIMIT = """
    set_config('statement_timeout', '0', {0}), case
        when current_setting('transaction_timeout', true) is not null then set_config('transaction_timeout', '0', {0})
    end
"""
"""Lets nothing end a transaction for its length. PostgreSQL 17 is the first with a `transaction_timeout`."""

SETTINGS = f"""
    select set_config('search_path', quote_ident($1::text), true), set_config('synchronous_commit', $2::text, true),
        set_config('lock_timeout', $3::text, true), set_config('idle_in_transaction_session_timeout', $4::text, true),
        {NO_LIMIT.format("true")}, set_config('client_min_messages', 'warning', true), pg_postmaster_start_time()::text,
"""
"""Behind these columns comes the format of the store."""

COMMIT = Statement("commit")

NOW = Statement("select coalesce($1::double precision, extract(epoch from now()))")

BACKEND = Statement("select pg_backend_pid()")

_HAS_STANDBY = """
    current_setting('synchronous_standby_names') <> '' and exists (
        select 1 from pg_stat_get_wal_senders() where sync_state is null or sync_state in ('sync', 'quorum')
    )
"""
"""The view over this function, `pg_stat_replication`, takes 2 ms more to plan."""

HAS_STANDBY = Statement(f"select {_HAS_STANDBY}")
"""Whether there is a synchronous standby. The state of a standby is null for a user who may not see it."""

FENCE = Statement(f"""
    select case when {_HAS_STANDBY} then pg_logical_emit_message(true, 'gradserve', '') is not null else false end
""")
"""Writes to the log, if there is a standby: once the commit returns, the standby has everything that came before."""

CANCEL = Statement("select pg_cancel_backend($1::integer)")

IS_REPLICATED = Statement("select current_setting('synchronous_standby_names') <> ''")
"""Whether a commit that has just returned has waited: to empty the setting ends the wait without a warning."""

# ----- a batch of requests: the first round trip -----

BY_INDEX = Statement("select set_config('enable_seqscan', 'off', true)")
"""Lets the database plan for full tables: it keeps the plans that it made while they were empty."""

LOCK = Statement("select pg_advisory_xact_lock($1::integer, lock) from unnest($2::integer[]) as lock")

SEAL_OF_KEY = "substr(sha256(digest || outcome), 1, 8)"

_SOUND_OUTCOME = f"case when seal = {SEAL_OF_KEY} then outcome else '' end"
"""An outcome that cannot be read, if the digest or the outcome is damaged."""

KEYS = Statement(f"select digest, at, {_SOUND_OUTCOME} from keys where digest = any($1::bytea[]) order by at")

COUNTS = Statement("""
    select namespace, count(*) from buffers
    where namespace = any($1::text[])
        and (expires is null or expires > coalesce($2::double precision, extract(epoch from clock_timestamp())))
    group by namespace
""")

RECORD_SIZE = f"(octet_length(record) - {SEAL_BYTES})"
"""Bytes of a record without its checksum, as in every store."""

_WITHIN = f"""
    select namespace, name, case when sum({RECORD_SIZE}) over () <= $1::bigint then record end, seq
    from ({{}}) as found
"""
"""No record if all have more bytes: they would take too much memory."""


def _locking(query: str) -> tuple[Statement, Statement]:
    """Return a statement that only looks at buffers, and one that locks them."""
    return Statement(_WITHIN.format(query)), Statement(_WITHIN.format(f"{query} for update of buffers"))


NAMED_RECORDS = _locking("""
    select buffers.namespace, buffers.name, buffers.record, buffers.seq
    from unnest($2::text[], $3::text[]) as wanted(namespace, name)
    join buffers on buffers.namespace = wanted.namespace collate "C" and buffers.name = wanted.name collate "C"
    order by buffers.namespace, buffers.name
""")

WIDE_RECORDS = _locking("""
    select namespace, name, record, seq from buffers
    where (namespace, name) in (
        select namespace collate "C", name collate "C" from unnest($2::text[], $3::text[]) as wanted(namespace, name)
        union
        select buffers.namespace, buffers.name from unnest($4::text[], $5::text[]) as wanted(namespace, prefix)
        join buffers on buffers.namespace = wanted.namespace collate "C"
            and buffers.name >= wanted.prefix collate "C" and starts_with(buffers.name, wanted.prefix)
    )
    order by namespace, name
""")
"""The same with all buffers of some prefixes: in one statement, which locks them in the order of their names."""

CLAIM = Statement("delete from unowned where blob = any($1::bigint[]) returning blob, bytes")

TIME = Statement("""
    select coalesce($1::double precision, extract(epoch from clock_timestamp())),
           current_setting('synchronous_standby_names')
""")

# ----- the second round trip -----

DELETE = Statement("""
    delete from buffers using unnest($1::text[], $2::text[]) as gone(namespace, name)
    where buffers.namespace = gone.namespace collate "C" and buffers.name = gone.name collate "C"
""")

PUT = Statement("""
    insert into buffers (namespace, name, record, seq, expires, due)
    select * from unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[], $5::double precision[],
                         $6::double precision[])
    on conflict (namespace, name) do update
    set record = excluded.record, seq = excluded.seq, expires = excluded.expires, due = excluded.due
""")

INSERT = Statement("""
    insert into deltas (value, seq, weight, overwrite, dtype, shape, bytes, blob, data)
    select * from unnest($1::bigint[], $2::bigint[], $3::double precision[], $4::boolean[], $5::text[], $6::text[],
                         $7::bigint[], $8::bigint[], $9::bytea[])
""")

FREE = Statement("""
    with gone as (
        delete from deltas where value = any($1::bigint[]) and seq <= coalesce($2::bigint, seq) returning blob, bytes
    ), freed as (
        insert into unowned select blob, extract(epoch from clock_timestamp()) + $3::double precision, bytes
        from gone where blob is not null on conflict do nothing
    )
    select count(*) from gone
""")
"""Frees the first deltas of a value, or all deltas of some values. Only in a damaged store is a blob free before."""

STAGE = Statement("""
    insert into unowned
    select blob, extract(epoch from clock_timestamp()) + $1::double precision, bytes
    from unnest($2::bigint[], $3::bigint[]) as staged(blob, bytes)
""")

REMEMBER = Statement(f"""
    insert into keys (digest, namespace, at, outcome, seal)
    select digest, namespace, $1::double precision, outcome, {SEAL_OF_KEY}
    from unnest($2::bytea[], $3::text[], $4::bytea[]) as made(digest, namespace, outcome)
""")

FORGET_MARKS = Statement("""
    delete from keys using unnest($1::bytea[], $2::double precision[]) as mark(digest, at)
    where keys.digest = mark.digest and keys.at = mark.at
""")

# ----- reads -----

RECORDS = Statement("""
    select buffers.namespace, buffers.name, buffers.record, buffers.seq,
           coalesce($3::double precision, extract(epoch from now()))
    from unnest($1::text[], $2::text[]) as wanted(namespace, name)
    join buffers on buffers.namespace = wanted.namespace collate "C" and buffers.name = wanted.name collate "C"
""")

ROWS_AT_ONCE = 64
"""Gradients that are fetched at once: 4 MB of them, and as much in libpq."""

OPEN_DELTAS = Statement("""
    declare found no scroll cursor for
    select wanted.value, seq, weight, overwrite, dtype, shape, bytes, blob, data
    from unnest($1::bigint[]) as wanted(value)
    left join lateral (select * from deltas where deltas.value = wanted.value order by seq) as deltas on true
""")
"""Finds the gradients of one value after the other: the database neither sorts nor keeps them."""

OUTCOME = Statement(f"""
    select {_SOUND_OUTCOME} from keys where digest = $1::bytea
        and at + $2::double precision > coalesce($3::double precision, extract(epoch from now()))
""")

COUNT = Statement(f"select count(*) from buffers where not starts_with(namespace, '{HIDDEN}')")

SNAPSHOT = Statement("select pg_current_snapshot()::text")
"""A text that differs once a transaction has been committed."""

NOTIFY = Statement("select pg_notify($1::text, '')")

# ----- folds -----

DELTAS_OF = Statement("select count(*) from deltas where value = $1::bigint")

LEASE = Statement(f"select pg_try_advisory_xact_lock({FOLD_LOCK}, ($1::bigint & x'7fffffff'::bigint)::integer)")

LOCKED = Statement("select from buffers where namespace = $1::text and name = $2::text for update")

# ----- deadlines, and what the janitor does -----

MOST_DUE = 256
"""Steps that a transaction closes: this takes a fraction of a second, and one lock."""

DUE = Statement(f"""
    select namespace, name, due - coalesce($1::double precision, extract(epoch from clock_timestamp()))
    from buffers where due is not null order by due limit {MOST_DUE}
""")

HANGING = Statement(f"""
    select pg_terminate_backend(pid) from pg_stat_activity
    where datname = current_database() and usename = current_user and state like 'idle in transaction%'
        and state_change < clock_timestamp() - make_interval(secs => $1::double precision)
        and pid in (select pid from pg_locks where locktype = 'advisory' and classid = {KEY_LOCK} and objsubid = 2)
""")
"""Ends the transactions of writers that hang.

The database's own time-out does not: after its `Sync`, a pipeline of psycopg sends a `Flush`, which stops that clock.
"""

USED = Statement(f"""
    select (select {COUNTED_BYTES} from deltas)
         + (select coalesce(sum(pg_total_relation_size(relid)), 0)::bigint from pg_partition_tree('keys'))
         + pg_total_relation_size('buffers')
""")

KEY_BYTES = Statement("""
    select namespace, sum(length(outcome) + $1::integer)::bigint from keys where outcome <> '' group by namespace
""")

COUNTED = Statement("select used, key_bytes, due > extract(epoch from clock_timestamp()) from counts")
"""Its last column says whether that is still fresh."""

COUNTS_ALONE = Statement(f"select pg_try_advisory_xact_lock({COUNT_LOCK}, hashtext(current_schema()))")

PUT_COUNTS = Statement("""
    with gone as (delete from counts)
    insert into counts values ($1::bigint, $2::text, extract(epoch from clock_timestamp()) + $3::double precision)
    returning used, key_bytes, true
""")

# ----- metrics -----

MEASURES = Statement(f"""
    with synchronous as (select * from pg_stat_replication where sync_state is null or sync_state in ('sync', 'quorum'))
    select * from (values
        ('connections', (select count(*) from pg_stat_activity where datname = current_database())),
        ('connections_limit', current_setting('max_connections')::bigint),
        ('standbys', (select count(*) from synchronous)),
        ('lag_bytes', (select min(pg_wal_lsn_diff(pg_current_wal_lsn(), flush_lsn))::bigint from synchronous)),
        ('loose_bytes', (select {COUNTED_BYTES} from unowned)),
        ('unfolded_bytes', (select {COUNTED_BYTES} from deltas where not overwrite))
    ) as measured(name, value) where value is not null
""")
"""The state and the lag of standbys are null for a user who may not see them."""

REPLICAS = Statement("""
    select count(distinct application_name) from pg_stat_activity
    where datname = current_database() and starts_with(application_name, $1::text)
""")

# ----- the tables -----

BLOB_TABLES = """
    tables as materialized (
        select substr(relname, 8)::bigint as first, oid from pg_class join pg_inherits on inhrelid = oid
        where inhparent = 'chunks'::regclass
    )
"""
"""The tables of blobs. Materialized, so that no plan takes the number from the name of another table."""

HAS_TABLE = Statement("select to_regclass($1::text) is not null")

VERSION = Statement("select version from meta")
