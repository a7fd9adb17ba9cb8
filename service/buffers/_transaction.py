"""A transaction that writes: LMDB's, as `changes.perform` wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from service.buffers._environment import (
    DIGEST_SIZE,
    KEY_HEAD,
    TIME,
    Environment,
    Reader,
    digest_of,
    is_due,
    microseconds,
    packed,
    seed_of,
)
from service.buffers._values import ValueWriter, seal
from service.buffers.store import Allocate, Array, Gradient, Key, Known, Record, Spec
from service.errors import BufferCorrupt


class LmdbTransaction(Reader):
    """A transaction that writes, as `perform` wants it."""

    def __init__(
        self,
        env: Environment,
        txn: Any,
        allocate: Allocate,
        oldest_key: int,
        known: dict[str, Record | None],
        written: Callable[[], None],
    ) -> None:
        super().__init__(env, txn)
        self._allocate, self._oldest, self._known = allocate, oldest_key, known
        self._writer = ValueWriter(env, txn, written)
        self.changed: dict[str, Record | None] = {}
        """What is to be put: if a record changes again, only the last is."""
        self._digests: list[bytes] = []
        self.writes = 0
        """How much was changed so far."""

    def get(self, name: str) -> Record | None:
        if name in self.changed:
            return self.changed[name]
        if name not in self._known:
            self._known[name] = super().get(name)
        return self._known[name]

    def put(self, record: Record) -> None:
        self.writes += 1
        if record.expires is not None and self.get(record.name) is None:  # later ones are set when this one is due
            self._txn.put(TIME.pack(microseconds(record.expires)) + record.name.encode(), b"", db=self._env.deadlines)
        self.changed[record.name] = record

    def remove(self, record: Record) -> None:
        self.writes += 1
        self.changed[record.name] = None
        for value in record.values:
            self.free(value)

    def remove_damaged(self, name: str) -> None:
        self.writes += 1
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
        return self._writer.load(spec, value, self._allocate)

    def recall(self, key: Any, oldest: int | None = None) -> Known | None:
        return super().recall(digest_of(key), self._oldest)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self.writes += 1
        digest, stored = digest_of(key), microseconds(now)
        data = KEY_HEAD.pack(stored, known.fingerprint) + orjson.dumps([known.receipts, known.ids])
        self._txn.put(digest, seal(data, seed_of(digest)), db=self._env.keys)
        self._digests.append(digest)

    def fits(self) -> bool:
        """Whether the store is within its size, this transaction included."""
        return self.taken() <= self._env.max_bytes or self.used() <= self._env.max_bytes

    def finish(self, now: float) -> None:
        """Store what is stored once for all requests, and bring large values to the disk."""
        self._writer.finish()
        for name, record in self.changed.items():
            if record is None:
                self._txn.delete(name.encode(), db=self._env.buffers)
            else:
                self._txn.put(name.encode(), packed(record), db=self._env.buffers)
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
            used_again = super().recall(digest, self._oldest) is not None
        except BufferCorrupt:
            used_again = False
        if not used_again:
            self._txn.delete(digest, db=self._env.keys)

    def remove_expired(self, now: float, most: int) -> None:
        """Remove buffers that have expired, up to `most`."""
        due: list[bytes] = []
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            while len(due) < most and is_due(cursor, microseconds(now)):
                due.append(bytes(cursor.key()[TIME.size :]))
                cursor.delete()
                self.writes += 1
        for name in due:
            try:
                record = self.get(name.decode())
            except BufferCorrupt:
                continue  # whoever asks for it is told
            if record is None or record.expires is None:
                continue
            if record.lives(now):
                self._txn.put(TIME.pack(microseconds(record.expires)) + name, b"", db=self._env.deadlines)
            else:
                self.remove(record)
