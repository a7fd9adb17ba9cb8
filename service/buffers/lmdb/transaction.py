"""A transaction that writes: LMDB's, as `perform` wants it."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from service.buffers.closing import close_if_due
from service.buffers.gradients import Gradient
from service.buffers.lmdb.caches import WriterState
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import COUNT, DUE, NUMBER, TIME, due_entry, keep, key_range, microseconds, name_of
from service.buffers.lmdb.keys import KeyWriter
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.value_writer import ValueWriter
from service.buffers.names import BufferName, pushes_of
from service.buffers.packed import SEAL_BYTES, pack_record
from service.buffers.pushes import Place
from service.buffers.record import Key, Known, Record, Spec
from service.buffers.room import KEYS_PART, check_keys, check_staged
from service.dtypes import Array
from service.errors import BufferCorrupt

MOST_EXPIRED = 100
"""Expired buffers, or gradients of expired pushes, that one transaction removes: a client's request waits for it."""

MOST_CLOSED = 1000
"""Steps that are due and that one transaction closes: a client's request waits for it, about 20 ms."""

MOST_FORGOTTEN = 10_000
"""Expired keys that one request deletes if its namespace has no room for its key; they take a tenth of a second."""


class LmdbTransaction(Reader):
    """A transaction that writes, as `perform` wants it."""

    values: ValueWriter
    keys: KeyWriter

    def __init__(self, env: Environment, txn: Any, state: WriterState, oldest_key: int) -> None:
        self._env, self._txn, self._state, self._oldest = env, txn, state, oldest_key
        self.values, self.keys = ValueWriter(env, txn, state.values), KeyWriter(env, txn)
        self.changed: dict[BufferName, Record | None] = {}
        """Records that `finish` stores, None to delete: a record that changes often is stored once."""
        self._counts: dict[str, int] = {}
        self.loaded_bytes = 0
        """Bytes of the records that it has loaded."""
        self.writes = 0
        """Changes so far. If there are any, at least one has written to LMDB, which then counts the transaction."""
        self.expired = 0
        """Changes that removed what has expired, or closed what was due: they stay although a request fails."""
        self.next_due = math.inf
        """When the first step is due whose deadline this transaction has set."""
        self.to_fold: dict[int, BufferName] = {}
        """Values that should be folded soon after the commit, and their buffers."""
        self.staged_bytes = Counter[str]()
        """How many bytes more each namespace of pushes has staged."""
        self.most_bytes = sys.maxsize
        """What this transaction may write of a request that several may make."""

    def get(self, name: BufferName) -> Record | None:
        if name in self.changed:
            return self.changed[name]
        known = self._state.records
        if name in known:
            record = known[name]
        else:
            record = super().get(name)
            known.remember({name: record})
        self.loaded_bytes += 0 if record is None else record.packed_bytes
        return record

    def names(self, namespace: str, prefix: str) -> list[str]:
        names = {name.name for name in self.names_in(*key_range(namespace, prefix, ""))}
        for full_name, record in self.changed.items():  # by requests before this one
            if full_name.namespace == namespace and full_name.name.startswith(prefix):
                (names.discard if record is None else names.add)(full_name.name)
        return sorted(names)

    def put(self, record: Record) -> None:
        self.writes += 1
        spec, expires = record.spec, record.expires
        self._count_staged(record.full_name, spec.nbytes)
        if expires is not None or spec.deadline_seconds is not None:
            old = self.get(record.full_name)
            if expires is not None and spec.ttl_seconds != (None if old is None else old.spec.ttl_seconds):
                deadline = TIME.pack(microseconds(expires)) + record.full_name.joined.encode()
                self._txn.put(deadline, b"", db=self._env.deadlines)  # `remove_expired` sets the next deadline
            self._schedule(old, record)
        self.changed[record.full_name] = record

    def _schedule(self, old: Record | None, new: Record | None) -> None:
        """Keep the entry that says when the running step is due. An entry that is wrong does nothing."""
        before, after = (None if record is None else due_entry(record) for record in (old, new))
        if before == after:
            return
        if before is not None:
            self._txn.delete(before, db=self._env.deadlines)
        if after is not None:
            self._txn.put(after, b"", db=self._env.deadlines)
            assert new is not None
            self.next_due = min(self.next_due, new.due or math.inf)

    def check_counts(self) -> None:
        """Count all buffers and keys if a sum of the counts is wrong."""
        if not self.adds_up():
            self.writes += 1
            self._counts = {**dict.fromkeys(self.counts(), 0), **self.count_all()}
            self.keys.recount()

    def count_new(self, name: BufferName, now: float) -> None:
        namespace = name.namespace
        while (refusal := self._state.most.refusal(name, self._count(namespace))) is not None:
            if not self.remove_expired(now, MOST_EXPIRED, namespace):
                raise refusal
        self._counts[namespace] = self._count(namespace) + 1

    def _count(self, namespace: str) -> int:
        if namespace in self._counts:
            return self._counts[namespace]
        stored = self._txn.get(key := COUNT + namespace.encode(), default=b"", db=self._env.meta)
        return int.from_bytes(self._env.unseal(stored, key) or b"", "big")  # the next start counts what is damaged

    def remove(self, record: Record) -> None:
        self.forget(record.full_name)
        self._schedule(record, None)
        if record.spec.ttl_seconds is not None:  # its first deadline; a later deadline finds no buffer
            due = microseconds(record.created + record.spec.ttl_seconds)
            self._txn.delete(TIME.pack(due) + record.full_name.joined.encode(), db=self._env.deadlines)
        for value in record.values:
            self.free(value)

    def forget(self, name: BufferName) -> None:
        self.writes += 1
        self._count_staged(name, 0)
        self._counts[name.namespace] = max(0, self._count(name.namespace) - 1)
        self.changed[name] = None

    def new_id(self) -> int:
        self.writes += 1
        return self.values.new_id()

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        self.writes += 1
        return self.values.accumulate(record.spec, record.value, gradient, weight, overwrite)

    def free(self, value: int | None) -> None:
        self.writes += 1
        self.values.free(value)

    def load(self, spec: Spec, value: int | None) -> Array:
        return self.values.load(spec, value, self._state.allocate)

    def recall(self, key: Key, names: Sequence[str]) -> Known | None:
        return self.keys.find(key, names, self._oldest)

    def admit_key(self, key: Key) -> None:
        limit = self._env.max_bytes
        if self.keys.use(key.caller).bytes >= limit // KEYS_PART:
            self.expired += self.forget_keys(MOST_FORGOTTEN)
            check_keys(self.keys.use(key.caller).bytes, limit)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.writes += 1
        self.keys.remember(key, known, now)

    def admit_part(self, namespace: str, nbytes: int) -> None:
        own = pushes_of(namespace)
        check_staged(self.bytes_of(own) + self.staged_bytes[own] + nbytes, self._env.max_bytes)

    def _count_staged(self, name: BufferName, nbytes: int) -> None:
        """Count that a push has staged this many bytes from now on. Other buffers are not counted."""
        if name.is_push:
            with suppress(BufferCorrupt):
                old = self.get(name)
                nbytes -= 0 if old is None else old.spec.nbytes
            self.staged_bytes[name.namespace] += nbytes

    def stage(self, record: Record, gradient: Gradient) -> Place:
        self.writes += 1
        return self.values.stage(record.spec, gradient)

    def staged(self, spec: Spec, place: Place) -> Gradient:
        return self.values.staged(spec, place)

    def add_staged(self, record: Record, place: Place, weight: float) -> int:
        self.writes += 1
        value, is_waiting = self.values.add_staged(record.spec, record.value, place, weight)
        if is_waiting:
            self.to_fold[value] = record.full_name
        return value

    def store_bytes(self, content: Array) -> int:
        self.writes += 1
        return self.values.store_bytes(content)

    def fold(self, record: Record, value: int) -> None:
        """Add to a value of the buffer some of what waits for it."""
        if self.values.has_waiting(value):
            self.writes += 1
            if self.values.fold(record.spec, value, self.most_bytes):
                self.to_fold[value] = record.full_name

    def advance(self) -> None:
        """Write, so that LMDB counts this transaction: freed slots are reusable two transactions later."""
        self.writes += 1
        keep(self._txn, self._env.meta, b"slots", NUMBER.pack(self.slot_count()))

    def finish(self, now: float) -> None:
        """Bring large values to the disk, and store what all requests changed: the commit may follow."""
        self.values.slots.finish()
        for name, record in self.changed.items():
            key = name.joined.encode()
            if record is None:
                self._txn.delete(key, db=self._env.buffers)
            else:
                sealed = pack_record(record)
                self._txn.put(key, sealed, db=self._env.buffers)
                record.__dict__["packed_bytes"] = len(sealed) - SEAL_BYTES
        for namespace, count in self._counts.items():
            if count:
                keep(self._txn, self._env.meta, COUNT + namespace.encode(), NUMBER.pack(count))
            else:
                self._txn.delete(COUNT + namespace.encode(), db=self._env.meta)
        self.keys.finish()

    def tidy_up(self, now: float, keys: int, most: int) -> None:
        """Remove up to `keys` expired keys, and some expired buffers, as `remove_expired` does."""
        self.forget_keys(keys)
        self.remove_expired(now, most)

    def forget_keys(self, most: int) -> int:
        """Delete up to `most` keys that have expired. Return their number."""
        forgotten, _ = self.keys.forget(self._oldest, most)
        self.writes += forgotten
        return forgotten

    def remove_expired(self, now: float, most: int, namespace: str | None = None) -> bool:
        """Remove some expired buffers, of one namespace or of all. Return whether any deadline was over.

        They have little more than `most` values together.

        A buffer that changed since its deadline was set gets a later deadline.
        """
        limit, before = microseconds(now), self.writes
        deadlines = self.deadlines_up_to(limit, most, namespace)
        for deadline in deadlines:
            if most <= 0:
                break
            self.writes += 1
            self._txn.delete(deadline, db=self._env.deadlines)
            name = name_of(deadline[TIME.size :])
            try:
                record = self.get(name)
            except BufferCorrupt:
                if name.is_push:  # what it has staged is lost
                    self.forget(name)
                continue  # a client that asks for another buffer gets the error
            if record is None or record.expires is None:
                continue
            if record.lives(now):
                later = max(microseconds(record.expires), limit + 1)
                self._txn.put(TIME.pack(later) + deadline[TIME.size :], b"", db=self._env.deadlines)
            else:
                most -= max(1, len(record.values))
                self.remove(record)
        self.expired += self.writes - before
        return bool(deadlines)

    def close_due(self, now: float, most: int) -> None:
        """Close up to `most` steps whose deadlines are over."""
        before, limit = self.writes, microseconds(now)
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            more = cursor.set_range(DUE)
            entries = [bytes(key) for key in itertools.islice(cursor.iternext(values=False), most)] if more else []
        for entry in entries:
            if TIME.unpack_from(entry, len(DUE))[0] > limit:
                break
            try:
                record = self.get(name_of(entry[len(DUE) + TIME.size :]))
            except BufferCorrupt:
                record = None  # a client that asks for this buffer gets the error
            if record is None or due_entry(record) != entry:
                self.writes += 1
                self._txn.delete(entry, db=self._env.deadlines)
            elif record.lives(now):
                close_if_due(self, record, now)
            else:
                self.remove(record)
        self.expired += self.writes - before
