"""What the metrics say about the database."""

from __future__ import annotations

from service.buffers.postgres.connections import application_of
from service.buffers.postgres.exchange import Connection

_MEASURES = """
    select
        (select count(*) from pg_stat_activity where datname = current_database()) as connections,
        current_setting('max_connections')::bigint as connections_limit,
        count(*) as standbys,
        min(pg_wal_lsn_diff(pg_current_wal_lsn(), flush_lsn))::bigint as lag_bytes,
        (select coalesce(sum(octet_length(data)), 0)::bigint from loose join chunks using (blob)) as loose_bytes,
        (select coalesce(sum(bytes), 0)::bigint from deltas where not overwrite) as unfolded_bytes
    from pg_stat_replication where sync_state is null or sync_state in ('sync', 'quorum')
"""
"""The state and the lag of standbys are null for a user who may not see them."""


_REPLICAS = """
    select count(distinct application_name) from pg_stat_activity
    where datname = current_database() and starts_with(application_name, %s)
"""


def replicas(connection: Connection, schema: str) -> int | None:
    """Return how many servers have connections for this schema; None if the database calls ours by another name."""
    ((count,),) = connection.execute(_REPLICAS, (application_of(schema),)).fetchall()
    return count or None


def measures(connection: Connection) -> dict[str, float]:
    """Return the numbers that are known, by the ends of their metrics' names."""
    cursor = connection.execute(_MEASURES)
    (row,) = cursor.fetchall()
    names = [column.name for column in cursor.description or ()]
    return {name: value for name, value in zip(names, row, strict=True) if value is not None}
