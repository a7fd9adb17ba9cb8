"""The pushes in parts in the database.

A staged gradient is the only delta of a value of its own, which the push has and which it overwrites: there is nothing
to add up. To add it, `MOVE` makes it a delta of the sum. A blob stays where it is, and so do the numbers of a row above
2 KB, which PostgreSQL keeps beside its table.

The push is a buffer; its `seq` has the bytes that it has staged. The lock of its key protects it against other
servers, and the lock of its row protects it against the janitor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from service.buffers.names import BufferName
from service.buffers.packed import digest_of, unpack_known
from service.buffers.postgres.exchange import Statement
from service.buffers.postgres.statements import COUNTED_BYTES
from service.buffers.pushes import Part, Push
from service.buffers.record import Record
from service.errors import BufferCorrupt

STAGED_BYTES = Statement(f"""
    select namespace, {COUNTED_BYTES} from (select namespace, seq as bytes, expires from buffers) as pushes
    where namespace = any($1::text[])
        and expires > coalesce($2::double precision, extract(epoch from clock_timestamp()))
    group by namespace
""")

STAGED_VALUES = Statement("select value from deltas where value = any($1::bigint[])")

MOVE = Statement("""
    update deltas set value = moved.value, seq = moved.seq, weight = moved.weight, overwrite = false
    from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::double precision[]) as moved(staged, value, seq, weight)
    where deltas.value = moved.staged
""")


class Stored(NamedTuple):
    """A buffer, and the `seq` of the last delta of its value, or the bytes that a push has staged."""

    record: Record
    seq: int


def needed_by(
    parts: Sequence[Part], heads: Mapping[BufferName, Stored | BufferCorrupt | None], known: Mapping[bytes, bytes]
) -> tuple[set[BufferName], set[int]]:
    """Return the buffers that the pushes of a batch need, and the values of the gradients that it may add.

    The buffers are those of all parts of the pushes that are complete, or that the batch may complete. `heads` has the
    pushes, and `known` the keys that the database has.
    """
    buffers, values, counts = set[BufferName](), set[int](), Counter(part.name for part in parts)
    for part in {part.name: part for part in parts}.values():
        head, packed = heads[part.name], known.get(digest_of(part.key))
        if packed is not None:
            with suppress(BufferCorrupt):
                buffers.update(BufferName(part.caller, name) for name in unpack_known(packed, ()).receipts)
        if isinstance(head, Stored):
            push = Push.of(head.record)
            if len(push.staged) + counts[part.name] >= push.parts:
                buffers.update(BufferName(part.caller, name) for _, name, _ in push.gradients)
                values.update(head.record.values)
    return buffers, values
