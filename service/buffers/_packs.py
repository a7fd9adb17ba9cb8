"""Values of middle size: where a transaction changes many of them, they lie together in slots and are written at once.

A slot that several values share is free as soon as none of them is in it any more: `meta` holds how many there are,
sealed. If that is damaged, the slot stays taken for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.buffers._format import FORMAT
from service.buffers._slots import CHUNK, NUMBER, Databases, Slots
from service.buffers._values import opened, seal

PACK = b"pack:"
"""What the names of these numbers in `meta` begin with; that of the slot follows, 8 bytes."""


class Packs:
    """The slots with several values that a transaction fills and leaves. `written` is called after each write."""

    def __init__(self, env: Databases, txn: Any, slots: Slots, written: Callable[[], None]) -> None:
        self._env, self._txn, self._slots, self._written = env, txn, slots, written
        self._counts: dict[int, int | None] = {}
        self._open = -1  # the slot that is being filled; to be written are, from `_start` to `_end`:
        self._pieces: list[memoryview] = []
        self._start = self._end = 0

    def add(self, data: memoryview) -> tuple[int, int]:
        """The slot, and the first byte there, of a value whose memory must stay as it is until `flush`."""
        if self._open < 0 or self._end + len(data) > CHUNK:
            self._close()
            self._open, self._counts[self._open] = self._slots.take(), 0
        offset, self._end = self._end, self._end + len(data)
        self._pieces.append(data)
        self._counts[self._open] = 1 + (self._counts[self._open] or 0)
        return self._open, offset

    def leave(self, slot: int) -> None:
        """A value is in this slot no more."""
        count = self._count(slot)
        if count is None:
            return
        self._counts[slot] = count - 1
        if count == 1 and slot != self._open:
            self._slots.leave(slot)

    def flush(self) -> None:
        """Write what is to be written, so that it can be read."""
        if self._pieces:
            self._slots.put(self._open, self._pieces, self._start)
            self._written()
        self._pieces, self._start = [], self._end

    def finish(self) -> None:
        """Write everything, and store how many values each slot has."""
        self._close()
        for slot, count in self._counts.items():
            if count:
                self._txn.put(PACK + NUMBER.pack(slot), seal(NUMBER.pack(count), slot), db=self._env.meta)
            elif count == 0:
                self._txn.delete(PACK + NUMBER.pack(slot), db=self._env.meta)
        if self._counts:
            self._txn.put(b"format", str(FORMAT).encode(), db=self._env.meta)

    def _close(self) -> None:
        if self._open < 0:
            return
        self.flush()
        if not self._counts[self._open]:
            self._slots.leave(self._open)
        self._open, self._start, self._end = -1, 0, 0

    def _count(self, slot: int) -> int | None:
        if slot not in self._counts:
            sealed = self._txn.get(PACK + NUMBER.pack(slot), db=self._env.meta)
            self._counts[slot] = None if sealed is None else count_of(slot, sealed)
        return self._counts[slot]


def count_of(slot: int, sealed: memoryview) -> int | None:
    """How many values a slot has, of what `meta` holds; None: that is damaged."""
    data = opened(sealed, slot)
    return None if data is None else int(NUMBER.unpack(data)[0])
