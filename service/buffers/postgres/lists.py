"""Lists of the buffers with a prefix: their records, page by page, or no more than their names or their bytes.

`clock` parameters are as in `statements.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from service.buffers.names import BufferName
from service.buffers.packed import unpack_record
from service.buffers.postgres.exchange import Connection, Statement
from service.buffers.postgres.statements import RECORD_SIZE
from service.buffers.record import Record
from service.errors import BufferCorrupt

_RECORDS = Statement(f"""
    select name, record from (
        select name, record, sum({RECORD_SIZE}) over (order by name) - {RECORD_SIZE} as before
        from buffers
        where namespace = $1::text and starts_with(name, $2::text) and name > $3::text and name >= $2::text
            and (expires is null or expires > coalesce($4::double precision, extract(epoch from now())))
        order by name limit $5::bigint
    ) as page
    where before <= $6::bigint order by name
""")
"""The last record may be the first that makes all take more than the last parameter."""

NAMES = Statement("""
    select name from buffers
    where namespace = $1::text and starts_with(name, $2::text) and name >= $2::text
        and (expires is null or expires > coalesce($3::double precision, extract(epoch from now())))
    order by name limit $4::bigint
""")

RECORD_BYTES = Statement(f"""
    select coalesce(sum({RECORD_SIZE}), 0)::bigint
    from unnest($1::text[], $2::text[]) as wanted(namespace, name)
    join buffers on buffers.namespace = wanted.namespace collate "C" and buffers.name = wanted.name collate "C"
""")


def records(
    connection: Connection,
    namespace: str,
    prefix: str,
    after: str,
    clock: float | None,
    limit: int | None,
    most_bytes: int,
) -> Iterator[Record]:
    """Yield at least the records of a page as `Store.records` wants it."""
    is_damaged = True
    while is_damaged:  # then the page lacks buffers
        is_damaged = False
        rows = connection.ask(_RECORDS(namespace, prefix, after, clock, limit, most_bytes))
        for name, packed in rows:
            try:
                yield unpack_record(BufferName(namespace, name), packed)
            except BufferCorrupt:
                after, is_damaged = rows[-1][0], True
