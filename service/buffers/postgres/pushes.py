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
from dataclasses import dataclass, field
from typing import NamedTuple

from service.buffers.names import BufferName
from service.buffers.packed import digest_of, unpack_known
from service.buffers.postgres.exchange import Execution, ResultRows, Statement, columns
from service.buffers.postgres.statements import COUNTED_BYTES, NAMED_RECORDS
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


@dataclass
class FoundPushes:
    """What the database has of the pushes of a batch, and of their namespaces."""

    heads: dict[BufferName, Stored | BufferCorrupt | None] = field(default_factory=dict)
    nbytes: Counter[str] = field(default_factory=Counter)
    """The bytes that each namespace of pushes has staged."""
    buffers: set[BufferName] = field(default_factory=set)
    """The buffers of all parts of the pushes that are complete, or that the batch may complete."""
    values: set[int] = field(default_factory=set)
    """The values of the gradients that the batch may add."""


def ask_pushes(parts: Sequence[Part], most: int, clock: float | None, *, locks: bool) -> list[Execution]:
    """Return what reads the pushes of the parts, perhaps locks them, and then reads the bytes of their namespaces."""
    names = sorted({part.name for part in parts})
    return [NAMED_RECORDS[locks](most, *columns(names, 2)), STAGED_BYTES(sorted({one for one, _ in names}), clock)]


def found_pushes(
    parts: Sequence[Part],
    heads: dict[BufferName, Stored | BufferCorrupt | None],
    sizes: ResultRows,
    known: Mapping[bytes, bytes],
) -> FoundPushes:
    """Return what the batch needs to know about the pushes of its parts, which are the buffers `heads`.

    `known` has the keys that the database has.
    """
    found, counts = FoundPushes(heads, Counter(dict(sizes))), Counter(part.name for part in parts)
    for part in {part.name: part for part in parts}.values():
        head, packed = heads[part.name], known.get(digest_of(part.key))
        if packed is not None:
            with suppress(BufferCorrupt):
                found.buffers.update(BufferName(part.caller, name) for name in unpack_known(packed, ()).receipts)
        if isinstance(head, Stored):
            push = Push.of(head.record)
            if len(push.staged) + counts[part.name] >= push.parts:
                found.buffers.update(BufferName(part.caller, name) for _, name, _ in push.gradients)
                found.values.update(head.record.values)
    return found
