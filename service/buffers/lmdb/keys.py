"""The idempotency keys of a store: remembered, found, counted for their namespaces, and forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import KEYS, TIME, USE, index, keep, microseconds, with_prefix
from service.buffers.packed import digest_of, pack_known, seal, seed_of, unpack_known, unseal
from service.buffers.record import Key, Known

PAGE_BYTES = 4096
"""LMDB's page on nearly all machines."""

LARGEST_INLINE_BYTES = 2000
"""Larger data has pages of its own: LMDB wants two entries on each page."""

ENTRY_BYTES = 160
"""What an entry takes besides its data: the digest twice, LMDB's own, and a third of each page, which is free."""


class Use(NamedTuple):
    """The entries of a namespace in `outcomes`, and the bytes that they take of the store."""

    entries: int = 0
    bytes: int = 0


class KeyReader:
    """The idempotency keys that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn

    def find(self, key: Key, names: Sequence[str], oldest: int) -> Known | None:
        """Return what is stored with a key, unless it is older than `oldest`. Raises `BufferCorrupt`.

        `names` are as `Transaction.recall` wants them.
        """
        digest = digest_of(key)
        time = self._env.unseal(self._txn.get(digest, default=b"", db=self._env.keys), digest)
        if time is None:
            return None  # or its digest is damaged: the writer finds it
        outcome = self._outcome(bytes(time), digest)
        packed = b"" if outcome is None else outcome[1 + outcome[0] :]
        return unpack_known(packed, names) if outcome is None or TIME.unpack(time)[0] > oldest else None

    def damaged(self) -> int:
        """Return the number of keys whose digest or outcome is damaged."""
        with self._txn.cursor(db=self._env.keys) as cursor:
            times = ((bytes(digest), self._env.unseal(sealed, digest)) for digest, sealed in cursor)
            return sum(time is None or self._outcome(bytes(time), digest) is None for digest, time in times)

    def newest(self) -> float:
        """Return the time of the newest key, in seconds since 1970; 0.0 if there is no sound key."""
        with self._txn.cursor(db=self._env.outcomes) as cursor:
            if not cursor.last() or unseal(cursor.value(), seed_of(bytes(cursor.key()))) is None:
                return 0.0
            return float(TIME.unpack_from(cursor.key())[0] / 1e6)

    def uses(self) -> dict[str, Use]:
        """Return the stored use of each namespace."""
        stored = with_prefix(self._txn, self._env.meta, KEYS)
        return {key[len(KEYS) :].decode(errors="replace"): _unpacked(self._env.unseal(use, key)) for key, use in stored}

    def count_all(self) -> dict[str, Use]:
        """Count the entries of each namespace."""
        uses: dict[str, Use] = {}
        with self._txn.cursor(db=self._env.outcomes) as cursor:
            for data in cursor.iternext(keys=False):
                namespace = _owner(data)
                entries, size = uses.get(namespace, Use())
                uses[namespace] = Use(entries + 1, size + room_of(data))
        return uses

    def _outcome(self, time: bytes, digest: bytes) -> memoryview | None:
        """Return the outcome of a key, unsealed; None if it is missing or damaged."""
        place = time + digest
        sealed = self._txn.get(place, db=self._env.outcomes)
        return None if sealed is None else unseal(sealed, seed_of(place))


class KeyWriter(KeyReader):
    """The idempotency keys that a transaction changes."""

    def __init__(self, env: Environment, txn: Any) -> None:
        super().__init__(env, txn)
        self._cursor = txn.cursor(db=env.keys)
        self._uses: dict[str, Use] = {}
        self._changed: set[str] = set()

    def find(self, key: Key, names: Sequence[str], oldest: int) -> Known | None:
        digest, cursor = digest_of(key), self._cursor
        found = cursor.set_range(digest)  # a digest that has changed on the disk is still beside its place
        is_known = cursor.key() == digest
        near = [self._env.unseal(value, at) and bytes(at) >= digest for at, value in islice(cursor.iterprev(), 2)]
        if near != [found, False][: len(near)] or (is_known and self._txn.get(digest, db=self._env.keys) is None):
            index(self._txn, self._env.keys, self._env.outcomes)
        elif not is_known:
            return None
        return super().find(key, names, oldest)

    def use(self, namespace: str) -> Use:
        """Return what the keys of a namespace take."""
        use = self._uses.get(namespace)
        if use is None:
            stored = self._txn.get(key := KEYS + namespace.encode(), default=b"", db=self._env.meta)
            use = self._uses[namespace] = _unpacked(self._env.unseal(stored, key))
        return use

    def recount(self) -> None:
        """Count all entries."""
        self._uses = {**dict.fromkeys(self.uses(), Use()), **self.count_all()}
        self._changed.update(self._uses)

    def remember(self, key: Key, known: Known, now: float) -> None:
        """Store a key with its data."""
        digest, time, owner = digest_of(key), TIME.pack(microseconds(now)), key.caller.encode()
        place = time + digest
        sealed = seal(b"".join([bytes([len(owner)]), owner, pack_known(known)]), seed_of(place))
        self._txn.put(place, sealed, db=self._env.outcomes)
        keep(self._txn, self._env.keys, digest, time)
        self._count(key.caller, 1, room_of(sealed))

    def _count(self, namespace: str, entries: int, size: int) -> None:
        use = self.use(namespace)
        self._uses[namespace] = Use(use.entries + entries, use.bytes + size)
        self._changed.add(namespace)

    def forget(self, latest: int, most: int, namespace: str | None = None, start: bytes = b"") -> tuple[int, bytes]:
        """Look at up to `most` outcomes from the place `start` to the time `latest`, and delete those of a namespace.

        Without a namespace delete all. Return the number of the deleted, and the place to go on from, b"" at the end.
        """
        forgotten = 0
        with self._txn.cursor(db=self._env.outcomes) as cursor:
            more = cursor.set_range(start)
            for _ in range(most):
                if not more or TIME.unpack_from(cursor.key())[0] > latest:
                    return forgotten, b""
                if namespace in (None, _owner(cursor.value())):
                    self._forget_digest(bytes(cursor.key()))
                    forgotten += 1
                    more = self._delete(cursor)
                else:
                    more = cursor.next()
            return forgotten, bytes(cursor.key())

    def _forget_digest(self, place: bytes) -> None:
        time, digest = place[: TIME.size], place[TIME.size :]
        if self._txn.get(digest, default=b"", db=self._env.keys)[: TIME.size] == time:  # else the key was used again
            self._txn.delete(digest, db=self._env.keys)

    def _delete(self, cursor: Any) -> bool:
        """Delete the outcome of the cursor, and move to the next. Return whether there is one."""
        data = cursor.value()
        self._count(_owner(data), -1, -room_of(data))
        cursor.delete()
        return len(cursor.key()) > 0

    def finish(self) -> None:
        """Store what the namespaces use."""
        for namespace in self._changed:
            entries, size = self._uses[namespace]
            if entries > 0:
                keep(self._txn, self._env.meta, KEYS + namespace.encode(), USE.pack(entries, max(0, size)))
            else:
                self._txn.delete(KEYS + namespace.encode(), db=self._env.meta)


def _owner(outcome: memoryview) -> str:
    """Return the namespace of an outcome."""
    return bytes(outcome[1 : 1 + outcome[0]]).decode(errors="replace") if outcome else ""


def _unpacked(stored: memoryview | None) -> Use:
    """Return a stored use, nothing for None: the next start counts what is damaged."""
    return Use(*USE.unpack(stored)) if stored else Use()


def room_of(data: bytes | memoryview) -> int:
    """Return what an entry takes of the store, in bytes."""
    size = len(data)
    return ENTRY_BYTES + (size if size <= LARGEST_INLINE_BYTES else (size // PAGE_BYTES + 1) * PAGE_BYTES)
