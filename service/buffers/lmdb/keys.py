"""The idempotency keys of a store: remembered, found, counted for their namespaces, and forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import (
    FINGERPRINT_BYTES,
    KEYS,
    TIME,
    USE,
    digest_of,
    microseconds,
    seal,
    seed_of,
    unseal,
)
from service.buffers.lmdb.receipts import LIST_MICROSECONDS, owner_of, pack_known, place_of_list, unpack_known
from service.buffers.record import Key, Known
from service.errors import BufferCorrupt

PAGE_BYTES = 4096
"""LMDB's page on nearly all machines."""

LARGEST_INLINE_BYTES = 2000
"""Larger data has pages of its own: LMDB wants two entries on each page."""

ENTRY_BYTES = 160
"""What an entry takes besides its data: the digest twice, LMDB's own, and a third of each page, which is free."""


class Use(NamedTuple):
    """The entries of a namespace in `outcomes` and `lists`, and the bytes that they take of the store."""

    entries: int = 0
    bytes: int = 0


class KeyReader:
    """The idempotency keys that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn

    def find(self, digest: bytes, oldest: int) -> Known | None:
        """Return what is stored with a key, unless it is older than `oldest`. Raises `BufferCorrupt`."""
        time = self._txn.get(digest, db=self._env.keys)
        if time is None:
            return None
        found = self._outcome(bytes(time), digest)
        if found is None:
            raise BufferCorrupt("The stored outcome of this Idempotency-Key is damaged on the disk")
        return unpack_known(*found) if TIME.unpack(time)[0] > oldest else None

    def damaged(self) -> int:
        """Return the number of keys whose outcome is damaged, or the list of names that it needs."""
        with self._txn.cursor(db=self._env.keys) as cursor:
            return sum(self._outcome(bytes(time), bytes(digest)) is None for digest, time in cursor)

    def newest(self) -> float:
        """Return the time of the newest key, in seconds since 1970; 0.0 if there is no sound key."""
        with self._txn.cursor(db=self._env.outcomes) as cursor:
            if not cursor.last() or unseal(cursor.value(), seed_of(bytes(cursor.key()))) is None:
                return 0.0
            return float(TIME.unpack_from(cursor.key())[0] / 1e6)

    def uses(self) -> dict[str, Use]:
        """Return the stored use of each namespace."""
        uses = {}
        with self._txn.cursor(db=self._env.meta) as cursor:
            more = cursor.set_range(KEYS)
            while more and bytes(cursor.key()).startswith(KEYS):
                namespace = bytes(cursor.key()[len(KEYS) :]).decode(errors="replace")
                uses[namespace] = _unpacked(cursor.value())
                more = cursor.next()
        return uses

    def count_all(self) -> dict[str, Use]:
        """Count the entries of each namespace."""
        uses: dict[str, Use] = {}
        for db in (self._env.outcomes, self._env.lists):
            with self._txn.cursor(db=db) as cursor:
                for data in cursor.iternext(keys=False):
                    namespace = self._owner(db, data)
                    entries, size = uses.get(namespace, Use())
                    uses[namespace] = Use(entries + 1, size + room_of(data))
        return uses

    def _owner(self, db: Any, data: memoryview) -> str:
        return owner_of(data[FINGERPRINT_BYTES:] if db is self._env.outcomes else data)

    def _outcome(self, time: bytes, digest: bytes) -> tuple[memoryview, memoryview | None] | None:
        """Return the outcome of a key and the list that it needs, if any; None if one is missing or damaged."""
        data = self._unsealed(time + digest, self._env.outcomes)
        if data is None:
            return None
        place = place_of_list(data, TIME.unpack(time)[0])
        if place is None:
            return data, None
        names = self._unsealed(place, self._env.lists)
        return None if names is None else (data, names)

    def _unsealed(self, place: bytes, db: Any) -> memoryview | None:
        """Return what is sealed in a database at this place; None if it is missing or damaged."""
        sealed = self._txn.get(place, db=db)
        return None if sealed is None else unseal(sealed, seed_of(place))


class KeyWriter(KeyReader):
    """The idempotency keys that a transaction changes."""

    def __init__(self, env: Environment, txn: Any) -> None:
        super().__init__(env, txn)
        self._uses: dict[str, Use] = {}
        self._changed: set[str] = set()

    def use(self, namespace: str) -> Use:
        """Return what the keys of a namespace take, and the lists that they need."""
        use = self._uses.get(namespace)
        if use is None:
            stored = self._txn.get(KEYS + namespace.encode(), db=self._env.meta)
            use = self._uses[namespace] = Use() if stored is None else _unpacked(stored)
        return use

    def recount(self) -> None:
        """Count all entries."""
        self._uses = {**dict.fromkeys(self.uses(), Use()), **self.count_all()}
        self._changed.update(self._uses)

    def remember(self, key: Key, known: Known, now: float) -> None:
        """Store a key with its data."""
        digest, stored = digest_of(key), microseconds(now)
        data, names = pack_known(known, stored, key.caller)
        if names is not None and self._unsealed(names.place, self._env.lists) is None:
            with self._txn.cursor(db=self._env.lists) as cursor:
                if cursor.set_key(names.place):  # it is damaged
                    self._delete(cursor, self._env.lists)
            self._put(names.place, names.compressed(), self._env.lists, key.caller)
        time = TIME.pack(stored)
        self._put(time + digest, data, self._env.outcomes, key.caller)
        self._txn.put(digest, time, db=self._env.keys)

    def _put(self, place: bytes, data: bytes, db: Any, namespace: str) -> None:
        sealed = seal(data, seed_of(place))
        self._txn.put(place, sealed, db=db)
        self._count(namespace, 1, room_of(sealed))

    def _count(self, namespace: str, entries: int, size: int) -> None:
        use = self.use(namespace)
        self._uses[namespace] = Use(use.entries + entries, use.bytes + size)
        self._changed.add(namespace)

    def forget(self, latest: int, most: int, namespace: str | None = None, start: bytes = b"") -> tuple[int, bytes]:
        """Look at up to `most` outcomes from the place `start` to the time `latest`, and delete those of a namespace.

        Without a namespace delete all. Return the number of the deleted, and the place to go on from, b"" at the end.
        """
        forgotten, db = 0, self._env.outcomes
        with self._txn.cursor(db=db) as cursor:
            more = cursor.set_range(start)
            for _ in range(most):
                if not more or TIME.unpack_from(cursor.key())[0] > latest:
                    return forgotten, b""
                if namespace in (None, self._owner(db, cursor.value())):
                    self._forget_digest(bytes(cursor.key()))
                    forgotten += 1
                    more = self._delete(cursor, db)
                else:
                    more = cursor.next()
            return forgotten, bytes(cursor.key())

    def forget_lists(self, latest: int, most: int) -> int:
        """Delete up to `most` lists that no key behind `latest` needs. Return their number."""
        forgotten, db = 0, self._env.lists
        with self._txn.cursor(db=db) as cursor:
            more = cursor.first()
            while more and forgotten < most and TIME.unpack_from(cursor.key())[0] <= latest:
                more = self._delete(cursor, db)
                forgotten += 1
        return forgotten

    def forget_unneeded_lists(self, latest: int) -> int:
        """Delete the lists that no key needs, if keys shared them at `latest` or before. Return their number."""
        end, unneeded = (latest // LIST_MICROSECONDS + 1) * LIST_MICROSECONDS, set[bytes]()
        with self._txn.cursor(db=self._env.lists) as cursor:
            more = cursor.first()
            while more and TIME.unpack_from(cursor.key())[0] <= end:
                unneeded.add(bytes(cursor.key()))
                more = cursor.next()
            if unneeded:
                unneeded.difference_update(self._needed(end))
            for place in unneeded:
                if cursor.set_key(place):
                    self._delete(cursor, self._env.lists)
        return len(unneeded)

    def _needed(self, end: int) -> Iterator[bytes]:
        """Yield the places of the lists that outcomes before `end` need."""
        with self._txn.cursor(db=self._env.outcomes) as cursor:
            for place, data in cursor:
                time = TIME.unpack_from(place)[0]
                if time >= end:
                    return
                needed = place_of_list(data, time)
                if needed is not None:
                    yield needed

    def _forget_digest(self, place: bytes) -> None:
        time, digest = place[: TIME.size], place[TIME.size :]
        if self._txn.get(digest, db=self._env.keys) == time:  # else the key was used again
            self._txn.delete(digest, db=self._env.keys)

    def _delete(self, cursor: Any, db: Any) -> bool:
        """Delete the entry of the cursor, and move to the next entry. Return whether there is one."""
        data = cursor.value()
        self._count(self._owner(db, data), -1, -room_of(data))
        cursor.delete()
        return len(cursor.key()) > 0

    def finish(self) -> None:
        """Store what the namespaces use."""
        for namespace in self._changed:
            entries, size = self._uses[namespace]
            if entries > 0:
                self._txn.put(KEYS + namespace.encode(), USE.pack(entries, max(0, size)), db=self._env.meta)
            else:
                self._txn.delete(KEYS + namespace.encode(), db=self._env.meta)


def _unpacked(stored: memoryview) -> Use:
    """Return a stored use; nothing if it is damaged."""
    return Use(*USE.unpack(stored)) if len(stored) == USE.size else Use()


def room_of(data: bytes | memoryview) -> int:
    """Return what an entry takes of the store, in bytes."""
    size = len(data)
    return ENTRY_BYTES + (size if size <= LARGEST_INLINE_BYTES else (size // PAGE_BYTES + 1) * PAGE_BYTES)
