"""The values of buffers that a graph reads. Parameters that have not changed are neither read nor decoded again."""

from __future__ import annotations

from collections.abc import Sequence

from service.api.http.call import Call
from service.buffers.record import Record, Snapshot
from service.dtypes import Array

ENTRY_BYTES = 1 << 10
"""Bytes of memory for a value in the cache, besides its numbers: a scalar takes some, too."""


def read_cached(call: Call, names: Sequence[str]) -> list[Snapshot]:
    """Return the buffers with their values, as of one moment. Nobody may write to the values: the cache has them, too.

    The memory of values that are read is reserved first. Raises what `Call.reserve` and `Store.read` raise.
    """
    records = {record.name: record for record in call.store.durable(names)}
    held: dict[str, Array | None] = {name: call.cache.get(*_place(record)) for name, record in records.items()}
    found = _read(call, [record for name, record in records.items() if held[name] is None])
    if any(snapshot.state != records[name].state for name, snapshot in found.items()):
        found = _read(call, [*records.values()])  # some have changed since, but all must be of one moment
    found = {name: Snapshot(records[name], value) for name, value in held.items() if value is not None} | found
    return [found[name] for name in names]


def _read(call: Call, records: Sequence[Record]) -> dict[str, Snapshot]:
    """Read the buffers, and keep their values."""
    if not records:
        return {}
    call.reserve(sum(record.spec.nbytes for record in records))
    found = {snapshot.record.name: snapshot for snapshot in call.store.read([record.name for record in records])}
    for snapshot in found.values():
        snapshot.value.flags.writeable = False
        call.cache.put(*_place(snapshot.record), snapshot.value, ENTRY_BYTES + snapshot.value.nbytes)
    return found


def _place(record: Record) -> tuple[object, object]:
    """Return the buffer's key in the cache, and its state. A failover may lose a state and use its number again."""
    return record.full_name, (record.state, record.updated)
