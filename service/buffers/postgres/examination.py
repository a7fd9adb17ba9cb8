"""What `gradserve doctor` checks in a PostgreSQL store besides the buffers: gradients, blobs, ids and keys."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator

from psycopg import sql

from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.schema import ID_BLOCK
from service.buffers.postgres.transaction import unpack_known
from service.buffers.readonly import WRONG

KEYS_AT_ONCE = 10_000
"""Keys that a statement reads: a longer one would make the server that drops old keys, and so all adds, wait."""

_ORPHANS = "select distinct value from deltas where value <> all(%s) order by value"

_LOOSE_IN_USE = "select blob, value from deltas join loose using (blob) order by blob"

_LOOSE = "select count(distinct blob), coalesce(sum(octet_length(data)), 0) from loose join chunks using (blob)"

_BLOBS_OF_NOTHING = """
    select blob, sum(octet_length(data)) from chunks
    where not exists (select 1 from loose where loose.blob = chunks.blob)
        and not exists (select 1 from deltas where deltas.blob = chunks.blob)
    group by blob order by blob
"""

_GRADIENTS = "select count(*), count(blob), coalesce(sum(bytes), 0) from deltas"

_NEXT_ID = f"select last_value + {ID_BLOCK} from ids"

_LAST_ID = """
    select greatest((select max(value) from deltas), (select max(blob) from deltas), (select max(blob) from chunks))
"""

_KEYS = """
    select digest, at, outcome from {} where (digest, at) > (%s, %s) order by digest, at limit %s
"""


def leftovers(connection: Connection, values: Collection[int]) -> Iterator[str]:
    """Yield lines about gradients and blobs, as the transaction of the connection sees them."""
    count, blobs, size = connection.execute(_GRADIENTS).fetchall()[0]
    yield f"{count} gradients, {blobs} of them in blobs; {size} bytes"
    count, size = connection.execute(_LOOSE).fetchall()[0]
    yield f"{count} blobs of {size} bytes are staged, or wait for their deletion"
    for (value,) in connection.execute(_ORPHANS, ([*values],)):
        yield f"{WRONG}value {value} belongs to no buffer that can be read"
    for blob, value in connection.execute(_LOOSE_IN_USE):
        yield f"{WRONG}the blob {blob} of the value {value} will be deleted, although it is used"
    for blob, size in connection.execute(_BLOBS_OF_NOTHING):
        yield f"{WRONG}the blob {blob} of {size} bytes belongs to no gradient"
    (following,), (last,) = (connection.execute(query).fetchall()[0] for query in (_NEXT_ID, _LAST_ID))
    if last is not None and last >= following:
        yield f"{WRONG}the sequence ids goes on with {following}, but the id {last} has been used: set it higher"


def damaged_keys(connection: Connection, schema: str) -> Iterator[str]:
    """Yield lines about the idempotency keys. They are of many moments: no statement holds their table for long."""
    query = sql.SQL(_KEYS).format(sql.Identifier(schema, "keys"))
    count = damaged = 0
    place: tuple[bytes, float] = (b"", 0.0)
    while rows := connection.execute(query, (*place, KEYS_AT_ONCE), binary=True).fetchall():
        outcomes = [bytes(outcome) for _, _, outcome in rows if outcome]  # a transaction's own mark has none
        count += len(outcomes)
        damaged += sum(not _is_known(outcome) for outcome in outcomes)
        place = rows[-1][:2]
    yield f"{count} idempotency keys"
    if damaged:
        yield f"{WRONG}{damaged} idempotency keys are damaged: a retry with one of them fails"


def _is_known(outcome: bytes) -> bool:
    try:
        unpack_known(outcome)
    except (zlib.error, ValueError, TypeError):
        return False
    return True
