"""The incomplete pushes of a store: found, summed up for their namespaces, stored, and forgotten in time."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import FORGET, TIME, microseconds, with_prefix
from service.buffers.packed import pack_push, seal, seed_of, unpack_push, unseal
from service.buffers.pushes import MAX_STORED_BYTES, Push, PushName
from service.errors import BufferCorrupt

_HEAD = struct.Struct(">QQ")
"""Of a stored push: the bytes that it has staged, and when the store forgets it."""


class PushReader:
    """The pushes that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn

    def find(self, name: PushName) -> Push | None:
        """Return the push, even if its time is over. Raises `BufferCorrupt`."""
        sealed = self._txn.get(_key(name), db=self._env.pushes)
        return None if sealed is None else _unpacked(name, sealed)

    def all(self, namespace: str | None = None) -> Iterator[tuple[PushName, Push | None]]:
        """Yield the pushes of a namespace, or of all: name and push, None if that is damaged."""
        for key, sealed in self._stored(namespace):
            name = _name(key)
            try:
                yield name, _unpacked(name, sealed)
            except BufferCorrupt:
                yield name, None

    def staged_bytes(self, namespace: str) -> int:
        """Return the bytes that the pushes of a namespace have staged."""
        counted = (_HEAD.unpack_from(sealed)[0] for _, sealed in self._stored(namespace))
        return sum(nbytes for nbytes in counted if nbytes <= MAX_STORED_BYTES)

    def is_scheduled(self, name: PushName, push: Push) -> bool:
        """Return whether the store forgets the push when its time is over."""
        return self._txn.get(_entry(push, name), db=self._env.deadlines) is not None

    def first_due(self) -> bytes | None:
        """Return the first entry of `deadlines` for a push."""
        with self._txn.cursor(db=self._env.deadlines) as cursor:
            found = cursor.set_range(FORGET) and bytes(cursor.key()).startswith(FORGET)
            return bytes(cursor.key()) if found else None

    def anything_due(self, now: float) -> bool:
        """Return whether the time of a push is over."""
        entry = self.first_due()
        return entry is not None and is_over(entry, now)

    def _stored(self, namespace: str | None) -> Iterator[tuple[bytes, memoryview]]:
        return with_prefix(self._txn, self._env.pushes, b"" if namespace is None else _key((namespace, "")))


class PushWriter(PushReader):
    """The pushes that a transaction changes."""

    def put(self, name: PushName, push: Push | None) -> None:
        """Store the push in place of its earlier state; None removes it."""
        key = _key(name)
        if push is not None:
            packed = _HEAD.pack(push.nbytes, microseconds(push.until)) + pack_push(push)
            self._txn.put(key, seal(packed, seed_of(key)), db=self._env.pushes)
            self._txn.put(_entry(push, name), b"", db=self._env.deadlines)
        elif (sealed := self._txn.get(key, db=self._env.pushes)) is not None:
            until = bytes(sealed[_HEAD.size - TIME.size : _HEAD.size])
            self._txn.delete(key, db=self._env.pushes)
            self._txn.delete(FORGET + until + key, db=self._env.deadlines)

    def take_due(self, now: float) -> PushName | None:
        """Remove the first entry of `deadlines` for a push whose time is over. Return the push's name."""
        entry = self.first_due()
        if entry is None or not is_over(entry, now):
            return None
        self._txn.delete(entry, db=self._env.deadlines)
        return _name(entry[len(FORGET) + TIME.size :])


def is_over(entry: bytes, now: float) -> bool:
    """Return whether the time of an entry of `deadlines` for a push is over."""
    return bool(TIME.unpack_from(entry, len(FORGET))[0] <= microseconds(now))


def _key(name: PushName) -> bytes:
    return "\0".join(name).encode()


def _name(key: bytes) -> PushName:
    namespace, _, push = key.decode(errors="replace").partition("\0")
    return namespace, push


def _entry(push: Push, name: PushName) -> bytes:
    """Return the entry of `deadlines` that says when to forget the push."""
    return FORGET + TIME.pack(microseconds(push.until)) + _key(name)


def _unpacked(name: PushName, sealed: memoryview) -> Push:
    data = unseal(sealed, seed_of(_key(name)))
    if data is None:
        raise BufferCorrupt(f"The stored parts of the push {name[1]!r} are damaged on the disk")
    return unpack_push(data[_HEAD.size :])
