"""The pushes in parts in the database.

A staged gradient is the only delta of a value of its own, which no buffer has and which it overwrites: there is nothing
to add up. To add it, `MOVE` makes it a delta of the sum. A blob stays where it is, and so do the numbers of a row above
2 KB, which PostgreSQL keeps beside its table.

The lock of its key protects a push against other servers, and the lock of its row protects it against the janitor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from service.buffers.names import BufferName
from service.buffers.packed import digest_of, pack_push, unpack_known, unpack_push
from service.buffers.postgres.exchange import Execution, ResultRows, Statement, columns
from service.buffers.postgres.statements import COUNTED_BYTES
from service.buffers.pushes import Part, Push, PushName
from service.errors import BufferCorrupt

_PUSHES = """
    select namespace, id, record from pushes
    where (namespace, id) in (select * from unnest($1::text[], $2::text[])) order by namespace, id
"""

PUSHES = Statement(_PUSHES), Statement(f"{_PUSHES} for update")
"""The second locks them."""

STAGED_BYTES = Statement(f"""
    select namespace, {COUNTED_BYTES} from pushes
    where namespace = any($1::text[])
        and until > coalesce($2::double precision, extract(epoch from clock_timestamp()))
    group by namespace
""")

STAGED_VALUES = Statement("select value from deltas where value = any($1::bigint[])")

MOVE = Statement("""
    update deltas set value = moved.value, seq = moved.seq, weight = moved.weight, overwrite = false
    from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::double precision[]) as moved(staged, value, seq, weight)
    where deltas.value = moved.staged
""")

PUT_PUSHES = Statement("""
    insert into pushes (namespace, id, until, bytes, record)
    select * from unnest($1::text[], $2::text[], $3::double precision[], $4::bigint[], $5::bytea[])
    on conflict (namespace, id) do update
    set until = excluded.until, bytes = excluded.bytes, record = excluded.record
""")

REMOVE_PUSHES = Statement("""
    delete from pushes where (namespace, id) in (select * from unnest($1::text[], $2::text[]))
""")

OVERDUE = Statement("""
    with overdue as (
        select namespace, id from pushes where until <= coalesce($1::double precision, extract(epoch from now()))
        order by until limit $2::bigint for update skip locked
    )
    delete from pushes using overdue where pushes.namespace = overdue.namespace and pushes.id = overdue.id
    returning record
""")
"""Forgets some pushes whose time is over, and returns them."""

INCOMPLETE = Statement("""
    declare found no scroll cursor for select id, record from pushes
    where namespace = $1::text and until > coalesce($2::double precision, extract(epoch from now()))
""")

ALL_PUSHES = Statement("select namespace, id, record, bytes from pushes order by namespace, id")


@dataclass
class FoundPushes:
    """What the database has of the pushes of a batch, and of their namespaces."""

    pushes: dict[PushName, Push | BufferCorrupt] = field(default_factory=dict)
    nbytes: Counter[str] = field(default_factory=Counter)
    """The bytes that each namespace has staged."""
    buffers: set[BufferName] = field(default_factory=set)
    """The buffers of all parts of the pushes that are complete, or that the batch may complete."""
    values: set[int] = field(default_factory=set)
    """The values of the gradients that the batch may add."""


def ask_pushes(parts: Sequence[Part], clock: float | None, *, locks: bool) -> list[Execution]:
    """Return what reads the pushes of the parts, perhaps locks them, and then reads the bytes of their namespaces."""
    names, callers = sorted({part.name for part in parts}), sorted({part.caller for part in parts})
    return [PUSHES[locks](*columns(names, 2)), STAGED_BYTES(callers, clock)]


def found_pushes(
    parts: Sequence[Part], rows: ResultRows, sizes: ResultRows, known: Mapping[bytes, bytes]
) -> FoundPushes:
    """Return what the batch needs to know about the pushes of its parts. `known` has the keys that the database has."""
    found = FoundPushes(nbytes=Counter(dict(sizes)))
    for namespace, name, packed in rows:
        try:
            found.pushes[namespace, name] = unpack_push(packed)
        except BufferCorrupt as error:
            found.pushes[namespace, name] = error  # the request that needs it gets the error
    counts = Counter(part.name for part in parts)
    for part in {part.name: part for part in parts}.values():
        push, packed = found.pushes.get(part.name), known.get(digest_of(part.key))
        if packed is not None:
            with suppress(BufferCorrupt):
                found.buffers.update(BufferName(part.caller, name) for name in unpack_known(packed, ()).receipts)
        if isinstance(push, Push) and len(push.staged) + counts[part.name] >= push.parts:
            found.buffers.update(BufferName(part.caller, name) for _, name, _ in push.gradients)
            found.values.update(values_of(push))
    return found


def values_of(push: Push) -> Iterator[int]:
    """Yield the values of the gradients that the push has staged."""
    return (staged.place[0] for _, _, staged in push.gradients if staged.place is not None)


def put_pushes(pushes: Mapping[PushName, Push | None]) -> list[Execution]:
    """Return what stores these pushes, and removes those that are None."""
    put = [(*name, push.until, push.nbytes, pack_push(push)) for name, push in pushes.items() if push is not None]
    gone = [name for name, push in pushes.items() if push is None]
    return [PUT_PUSHES(*columns(put, 5)), REMOVE_PUSHES(*columns(gone, 2))] if pushes else []
