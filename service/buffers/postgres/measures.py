"""What the metrics say about the database."""

from __future__ import annotations

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


def measures(connection: Connection) -> dict[str, float]:
    """Return the numbers that are known, by the ends of their metrics' names."""
    cursor = connection.execute(_MEASURES)
    (row,) = cursor.fetchall()
    names = [column.name for column in cursor.description or ()]
    return {name: value for name, value in zip(names, row, strict=True) if value is not None}
