"""A transaction that writes: LMDB's, as `requests.perform` wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from service.buffers.gradients import Gradient
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import COUNT, DIGEST_SIZE, KEY_HEAD, TIME, digest_of, microseconds, packed, seed_of
from service.buffers.lmdb.reader import Reader, is_due
from service.buffers.lmdb.slots import RESERVE, disk_full, store_full
from service.buffers.lmdb.value_writer import ValueCache, ValueWriter
from service.buffers.lmdb.values import seal
from service.buffers.names import namespace_of
from service.buffers.record import Key, Known, Record, Spec, too_many
from service.buffers.store import Allocate
from service.dtypes import Array
from service.errors import BufferCorrupt

MOST_EXPIRED = 100
"""Expired buffers that one transaction removes: a client's request waits for it."""

MOST_CACHED_RECORDS = 1 << 14
"""Records that the writer remembers: about 16 MB."""

MOST_CACHED_EPOCHS = 1 << 17
"""Closed epochs in all records that the writer remembers: each takes 0.2 KB, all of them 26 MB."""

NOBODY = b"nobody"
"""In place of the mark, before this process has written."""


class RecordCache(dict[str, Record | None]):
    """Records as the last transactions saw and left them, None for no buffer. Too many are all forgotten at once."""

    def __init__(self) -> None:
        super().__init__()
        self._epochs = 0

    def remember(self, records: Mapping[str, Record | None]) -> None:
        """Replace the records of these names. The closed epochs of both count: to subtract the old ones is slow."""
        self.update(records)
        self._epochs += sum(len(record.closed) for record in records.values() if record is not None)
        if len(self) > MOST_CACHED_RECORDS or self._epochs > MOST_CACHED_EPOCHS:
            self.clear()

    def clear(self) -> None:
        """Forget all records."""
        super().clear()
        self._epochs = 0


@dataclass
class WriterState:
    """What the writer thread keeps from one transaction to the next: two limits of the store, and its caches.

    The caches are true while the last transaction of the store is the one that left `mark`.
    """

    allocate: Allocate
    max_buffers: int
    records: RecordCache = field(default_factory=RecordCache)
    values: ValueCache = field(default_factory=ValueCache)
    mark: bytes = NOBODY

    def forget(self) -> None:
        """Empty the caches."""
        self.records.clear()
        self.values.clear()


class LmdbTransaction(Reader):
    """A transaction that writes, as `perform` wants it."""

    def __init__(self, env: Environment, txn: Any, state: WriterState, oldest_key: int) -> None:
        super().__init__(env, txn)
        self._state, self._oldest = state, oldest_key
        self._writer = ValueWriter(env, txn, state.values)
        self.changed: dict[str, Record | None] = {}
        """What is to be put: if a record changes again, only the last is."""
        self._counts: dict[str, int] = {}
        self._digests: list[bytes] = []
        self.writes = 0
        """How much was changed so far."""
        self.expired = 0
        """How much of that was to see to what has expired, which stands though a request fails."""

    def get(self, name: str) -> Record | None:
        if name in self.changed:
            return self.changed[name]
        if name in self._state.records:
            return self._state.records[name]
        record = super().get(name)
        self._state.records.remember({name: record})
        return record

    def put(self, record: Record) -> None:
        self.writes += 1
        if record.expires is not None and self.get(record.name) is None:  # later ones are set when this one is due
            self._txn.put(TIME.pack(microseconds(record.expires)) + record.name.encode(), b"", db=self._env.deadlines)
        self.changed[record.name] = record

    def check_counts(self, *, closely: bool) -> None:
        """Count the buffers anew if the last that wrote did not, or, `closely`, if the sum of the counts is wrong."""
        wrong = closely and sum(self.counts().values()) != self.entries()["buffers"]
        if wrong or not self.is_counted():
            self.writes += 1
            self._counts = {**dict.fromkeys(self.counts(), 0), **self.counted_anew()}

    def count_new(self, name: str, now: float) -> None:
        namespace, most, expired = namespace_of(name), self._state.max_buffers, True
        while (count := self._count(namespace)) >= most and expired:
            expired = self.remove_expired(now, MOST_EXPIRED, namespace)
        if count >= most:
            raise too_many(count, most)
        self._counts[namespace] = count + 1

    def _count(self, namespace: str) -> int:
        if namespace in self._counts:
            return self._counts[namespace]
        stored = self._txn.get(COUNT + namespace.encode(), db=self._env.meta)
        return 0 if stored is None else int(TIME.unpack(stored)[0])

    def remove(self, record: Record) -> None:
        self._remove(record.name)
        if record.spec.ttl_seconds is not None:  # where it was not due yet; else it is looked at, and found gone
            due = microseconds(record.created + record.spec.ttl_seconds)
            self._txn.delete(TIME.pack(due) + record.name.encode(), db=self._env.deadlines)
        for value in record.values:
            self.free(value)

    def remove_damaged(self, name: str) -> None:
        self._remove(name)

    def _remove(self, name: str) -> None:
        self.writes += 1
        namespace = namespace_of(name)
        self._counts[namespace] = max(0, self._count(namespace) - 1)
        self.changed[name] = None

    def new_id(self) -> int:
        self.writes += 1
        return self._writer.new_id()

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        self.writes += 1
        return self._writer.accumulate(record.spec, record.value, gradient, weight, overwrite)

    def free(self, value: int | None) -> None:
        self.writes += 1
        self._writer.free(value)

    def load(self, spec: Spec, value: int | None) -> Array:
        return self._writer.load(spec, value, self._state.allocate)

    def recall(self, key: Key) -> Known | None:
        return self.known(digest_of(key), self._oldest)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.writes += 1
        digest, stored = digest_of(key), microseconds(now)
        data = KEY_HEAD.pack(stored, known.fingerprint) + orjson.dumps([known.receipts, known.ids, known.sources])
        self._txn.put(digest, seal(data, seed_of(digest)), db=self._env.keys)
        self._digests.append(digest)

    def check_room(self) -> None:
        """Raise `StoreFull` unless this transaction leaves the store within its size, and LMDB its reserve."""
        limit = self._env.max_bytes
        if self.taken() > limit and self.used() > limit:
            raise store_full(limit)
        if not self._env.file.has_room() and self._env.allocated() - self.pages() < RESERVE:
            raise disk_full()

    def give_back(self) -> None:
        """Give the disk what of the store is free."""
        self._writer.slots.give_back()

    def finish(self, now: float) -> None:
        """Store what is stored once for all requests, and bring large values to the disk."""
        self._writer.slots.finish()
        for name, record in self.changed.items():
            if record is None:
                self._txn.delete(name.encode(), db=self._env.buffers)
            else:
                self._txn.put(name.encode(), packed(record), db=self._env.buffers)
        for namespace, count in self._counts.items():
            if count:
                self._txn.put(COUNT + namespace.encode(), TIME.pack(count), db=self._env.meta)
            else:
                self._txn.delete(COUNT + namespace.encode(), db=self._env.meta)
        if self._digests:
            when = TIME.pack(microseconds(now)) + TIME.pack(self._txn.id())
            self._txn.put(when, b"".join(self._digests), db=self._env.times)

    def forget_keys(self, most: int) -> None:
        """Forget keys that are older than they need be, up to `most`."""
        with self._txn.cursor(db=self._env.times) as cursor:
            while most > 0 and is_due(cursor, self._oldest):
                digests = bytes(cursor.value())
                for start in range(0, len(digests), DIGEST_SIZE):
                    self._forget(digests[start : start + DIGEST_SIZE])
                cursor.delete()
                most, self.writes = most - len(digests) // DIGEST_SIZE, self.writes + 1

    def _forget(self, digest: bytes) -> None:
        try:
            used_again = self.known(digest, self._oldest) is not None
        except BufferCorrupt:
            used_again = False
        if not used_again:
            self._txn.delete(digest, db=self._env.keys)

    def remove_expired(self, now: float, most: int, namespace: str | None = None) -> bool:
        """Remove buffers that have expired, up to `most`, of all namespaces or of one. Whether any was to be looked at.

        Whoever looks at it says when to look again, and that is later.
        """
        limit, due, before = microseconds(now), list[bytes](), self.writes
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            for found in cursor.iternext(values=False):
                if len(due) == most or TIME.unpack_from(found)[0] > limit:
                    break
                if namespace is None or namespace_of(bytes(found[TIME.size :]).decode()) == namespace:
                    due.append(bytes(found))
        for deadline in due:
            self.writes += 1
            self._txn.delete(deadline, db=self._env.deadlines)
            name = deadline[TIME.size :]
            try:
                record = self.get(name.decode())
            except BufferCorrupt:
                continue  # whoever asks for it is told
            if record is None or record.expires is None:
                continue
            if record.lives(now):
                again = max(microseconds(record.expires), limit + 1)
                self._txn.put(TIME.pack(again) + name, b"", db=self._env.deadlines)
            else:
                self.remove(record)
        self.expired += self.writes - before
        return bool(due)
