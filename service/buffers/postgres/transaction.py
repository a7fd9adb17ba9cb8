"""A transaction of the writer: what the database says of the requests' buffers, and what the requests change.

The changes stay in memory until all requests are made, so that a request that fails leaves nothing to undo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from service.buffers.gradients import Dense, Gradient, add_whole
from service.buffers.names import BufferName
from service.buffers.packed import digest_of, unpack_known
from service.buffers.postgres.compactor import Fold
from service.buffers.postgres.deltas import Delta, Payload, check_complete, delta_of, payload_of, read_deltas, total
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.schema import ROW_BYTES
from service.buffers.record import Key, Known, Record, Spec, too_many
from service.buffers.store import Allocate
from service.dtypes import Array
from service.errors import BufferCorrupt

FOLD_EVERY_SMALL = 64
"""Deltas between two folds of a small value: each fold takes as much of the database as twenty adds."""

SMALL_BYTES = 1 << 14
"""Up to this size a read of 64 deltas takes hardly longer than a read of one."""

FOLD_EVERY = 16
"""The same for values that are neither small nor large."""

FOLD_EVERY_LARGE = 8
"""The same for large values: a read has at most eight times their bytes to add."""

LARGE_BYTES = 1 << 20
"""From this size on the bytes of a value cost more than its rows."""


class Stored(NamedTuple):
    """A buffer, and the `seq` of the last delta of its value."""

    record: Record
    seq: int


@dataclass
class Found:
    """What the database has of the buffers, keys and namespaces of a batch, all of them locked."""

    records: dict[BufferName, Stored | BufferCorrupt | None]
    keys: dict[bytes, bytes]
    """What is stored with each key, packed."""
    counts: Counter[str]
    seqs: dict[int, int]
    """The `seq` of the last delta of each value that grows."""


@dataclass
class Changes:
    """What requests have changed."""

    records: dict[BufferName, Stored | None] = field(default_factory=dict)
    deltas: dict[int, list[Delta]] = field(default_factory=dict)
    """The new deltas by value."""
    blobs: dict[int, Payload] = field(default_factory=dict)
    """Blobs that were not staged."""
    freed: list[int] = field(default_factory=list)
    keys: dict[bytes, tuple[Key, Known]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    folds: list[Fold] = field(default_factory=list)

    def merge(self, others: Changes) -> None:
        """Take over the changes of a request that succeeded."""
        self.records |= others.records
        for value, deltas in others.deltas.items():
            self.deltas.setdefault(value, []).extend(deltas)
        self.blobs |= others.blobs
        self.freed += others.freed
        self.keys |= others.keys
        self.counts.update(others.counts)
        self.folds += others.folds


class PostgresTransaction:
    """The changes of a request, which `perform` makes. `earlier` has those of the requests before it in the batch.

    `staged` has the blobs of the request's gradients, by the identity of their arrays.
    """

    def __init__(
        self,
        connection: Connection,
        found: Found,
        earlier: Changes,
        staged: Mapping[int, int],
        next_id: Callable[[], int],
        allocate: Allocate,
        max_buffers: int,
        now: float,
        admit_key: Callable[[str], None],
    ) -> None:
        self._connection, self._found, self._earlier, self._staged = connection, found, earlier, staged
        self.new_id, self._allocate, self._max_buffers = next_id, allocate, max_buffers
        self.changes, self._now, self._admit_key = Changes(), now, admit_key

    def _stored(self, name: BufferName) -> Stored | None:
        for records in (self.changes.records, self._earlier.records):
            if name in records:
                return records[name]
        found = self._found.records.get(name)
        if isinstance(found, BufferCorrupt):
            raise found
        return found

    def get(self, name: BufferName) -> Record | None:
        stored = self._stored(name)
        return None if stored is None else stored.record

    def names(self, namespace: str, prefix: str) -> list[str]:
        known = {name: stored for name, stored in self._found.records.items() if name.namespace == namespace}
        known |= {name: stored for name, stored in self._earlier.records.items() if name.namespace == namespace}
        return sorted(name.name for name, stored in known.items() if stored and name.name.startswith(prefix))

    def count_new(self, name: BufferName, now: float) -> None:
        own = name.namespace
        count = self._found.counts[own] + self._earlier.counts[own] + self.changes.counts[own]
        if count >= self._max_buffers:
            raise too_many(count, self._max_buffers)
        self.changes.counts[own] += 1

    def put(self, record: Record) -> None:
        name, old = record.full_name, self._stored(record.full_name)
        before = 0 if old is None else old.seq
        self.changes.records[name] = Stored(record, self._seq(record.value, before))
        values = [(record.value, False)]
        if old is not None and record.epoch > old.record.epoch and record.closed:
            values.append((record.closed[-1].value, True))
        for value, has_ended in values:
            if value is not None and _is_worth_a_fold(record.spec, self._seq(value, before), has_ended):
                self.changes.folds.append(Fold(name, record.spec, value))

    def _seq(self, value: int | None, before: int) -> int:
        """Return the `seq` of the last delta of a value, which was `before` if the request has added none."""
        if value is None:
            return 0
        deltas = self.changes.deltas.get(value)
        return deltas[-1].seq if deltas else before

    def remove(self, record: Record) -> None:
        if record.lives(self._now):  # else it is not in the counts
            self.changes.counts[record.full_name.namespace] -= 1
        self.changes.records[record.full_name] = None
        for value in record.values:
            self.free(value)

    def remove_damaged(self, name: BufferName) -> None:
        self.changes.records[name] = None

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        spec = record.spec
        if spec.nonfinite == "reject":
            before = np.empty(spec.size, spec.dtype) if overwrite else self.load(spec, record.value).reshape(-1)
            add_whole(spec, before, before, gradient, weight, overwrite)  # raises the error of a sum that is not finite
        if not overwrite and not spec.size:
            return record.value
        stored = self._stored(record.full_name)
        value, seq = record.value, 0 if stored is None else stored.seq
        if overwrite and value is not None:
            self.free(value)
            value = None
        if value is None:
            value, seq = self.new_id(), 0
        payload = payload_of(gradient)
        source = gradient.array if isinstance(gradient, Dense) else gradient
        blob = self._staged.get(id(source))
        if blob is None and payload.nbytes > ROW_BYTES:
            blob = self.new_id()
            self.changes.blobs[blob] = payload
        self.changes.deltas.setdefault(value, []).append(delta_of(value, seq + 1, payload, weight, overwrite, blob))
        return value

    def free(self, value: int | None) -> None:
        if value is not None:
            self.changes.freed.append(value)

    def load(self, spec: Spec, value: int | None) -> Array:
        deltas: list[Delta] = []
        if value is not None:
            deltas = read_deltas(self._connection, [value])[value]
            new = [*self._earlier.deltas.get(value, ()), *self.changes.deltas.get(value, ())]
            deltas += new
            check_complete(value, deltas, new[-1].seq if new else self._found.seqs.get(value))
        return total(self._connection, spec, deltas, self._allocate, {**self._earlier.blobs, **self.changes.blobs})

    def recall(self, key: Key, names: Sequence[str]) -> Known | None:
        digest = digest_of(key)
        if digest in self._earlier.keys:
            return self._earlier.keys[digest][1]
        packed = self._found.keys.get(digest)
        return None if packed is None else unpack_known(packed, names)

    def admit_key(self, key: Key) -> None:
        self._admit_key(key.caller)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.changes.keys[digest_of(key)] = (key, known)


def _is_worth_a_fold(spec: Spec, seq: int, has_ended: bool) -> bool:
    """Return whether to fold a value now: often while it grows, and at the end of an epoch that all workers read."""
    if spec.nbytes < LARGE_BYTES:
        return not has_ended and seq % (FOLD_EVERY_SMALL if spec.nbytes <= SMALL_BYTES else FOLD_EVERY) == 0
    return seq > 1 and spec.closes_itself if has_ended else seq % FOLD_EVERY_LARGE == 0
