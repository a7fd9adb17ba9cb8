"""Values of middle size: where a transaction changes many of them, they lie together in slots and are written at once.

`meta` lists which values share a slot, with their sizes, sealed. The slot is free as soon as none of them is in it any
more. Those that are left in one that is half empty are to go to LMDB: a few that never change would else hold slots of
many times their size. If the list is damaged, the slot stays taken for good.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from service.buffers.lmdb.format import FORMAT
from service.buffers.lmdb.slots import CHUNK, NUMBER, Databases, Slots
from service.buffers.lmdb.values import opened, seal

PACK = b"pack:"
"""What the names of these lists in `meta` begin with; that of the slot follows, 8 bytes."""

_MEMBER = struct.Struct("<QI")


class Lonely(NamedTuple):
    """A value in a slot that is half empty, and its size in bytes."""

    value: int
    slot: int
    nbytes: int


class Packs:
    """The slots with several values that a transaction fills and leaves. `written` is called after each write."""

    def __init__(self, env: Databases, txn: Any, slots: Slots, written: Callable[[], None]) -> None:
        self._env, self._txn, self._slots, self._written = env, txn, slots, written
        self._lists: dict[int, dict[int, int] | None] = {}  # as `lists` has them, of slots that were looked at
        self._filled = set[int]()  # those that are new
        self._left_bytes = 0
        self._open, self._inside = -1, dict[int, int]()  # the slot that is being filled, and its list
        self._pieces: list[memoryview] = []  # what is to be written, from `_start` to `_end`
        self._start = self._end = 0

    def add(self, value: int, data: memoryview) -> tuple[int, int]:
        """The slot, and the first byte there, of a value whose memory must stay as it is until `flush`."""
        if self._open < 0 or self._end + len(data) > CHUNK:
            self._close()
            self._open = self._slots.take()
            self._lists[self._open] = self._inside = {}
            self._filled.add(self._open)
        offset, self._end = self._end, self._end + len(data)
        self._pieces.append(data)
        self._inside[value] = len(data)
        return self._open, offset

    def leave(self, value: int, slot: int) -> None:
        """A value is in this slot no more."""
        listed = self._list(slot)
        size = listed.pop(value, None) if listed else None
        if size is None:
            return
        self._left_bytes += size
        if not listed and slot != self._open:
            self._slots.leave(slot)

    def leave_unknown(self, value: int) -> None:
        """A value, of which is damaged where it was, is in no slot any more."""
        for slot, listed in {**lists(self._env, self._txn), **self._lists}.items():
            if listed and value in listed:
                self.leave(value, slot)

    def lonely(self) -> list[Lonely]:
        """The values in slots that others have left half empty, the emptiest slots first.

        They are no more bytes than have left slots in this transaction, so that it does not take many times as long,
        or than half a slot has.
        """
        budget, found = max(self._left_bytes, CHUNK // 2), list[Lonely]()
        left = [(slot, listed) for slot, listed in self._lists.items() if listed and slot not in self._filled]
        for size, slot, listed in sorted((sum(listed.values()), slot, listed) for slot, listed in left):
            if size > min(budget, CHUNK // 2):
                break
            budget -= size
            found += [Lonely(value, slot, nbytes) for value, nbytes in listed.items()]
        return found

    def flush(self) -> None:
        """Write what is to be written, so that it can be read."""
        if self._pieces:
            self._slots.put(self._open, self._pieces, self._start)
            self._written()
        self._pieces, self._start = [], self._end

    def finish(self) -> None:
        """Write everything, and store which values each slot has."""
        self._close()
        for slot, listed in self._lists.items():
            if listed:
                data = b"".join(itertools.starmap(_MEMBER.pack, listed.items()))
                self._txn.put(PACK + NUMBER.pack(slot), seal(data, slot), db=self._env.meta)
            elif listed is not None:
                self._txn.delete(PACK + NUMBER.pack(slot), db=self._env.meta)
        if self._lists:
            self._txn.put(b"format", str(FORMAT).encode(), db=self._env.meta)

    def _close(self) -> None:
        if self._open < 0:
            return
        self.flush()
        if not self._inside:
            self._slots.leave(self._open)
        self._open, self._start, self._end = -1, 0, 0

    def _list(self, slot: int) -> dict[int, int] | None:
        if slot not in self._lists:
            sealed = self._txn.get(PACK + NUMBER.pack(slot), db=self._env.meta)
            self._lists[slot] = None if sealed is None else _listed(slot, sealed)
        return self._lists[slot]


def lists(env: Databases, txn: Any) -> dict[int, dict[int, int] | None]:
    """By slot that several values may share the ids and the bytes of these values; None: that is damaged."""
    found = {}
    with txn.cursor(db=env.meta) as cursor:
        more = cursor.set_range(PACK)
        while more and bytes(cursor.key()).startswith(PACK):
            slot = NUMBER.unpack(cursor.key()[len(PACK) :])[0]
            found[slot] = _listed(slot, cursor.value())
            more = cursor.next()
    return found


def _listed(slot: int, sealed: memoryview) -> dict[int, int] | None:
    data = opened(sealed, slot)
    return None if data is None or len(data) % _MEMBER.size else dict(_MEMBER.iter_unpack(data))
