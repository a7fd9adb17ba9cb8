"""The pages of data.mdb, read without LMDB, which trusts them: some damaged pages end the process that reads or writes.

A page begins with its own number. LMDB (0.9) has trees of pages: the main tree names the roots of the databases, and
the free tree lists the free pages. A reader's pages do not change while its transaction lasts.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

from service.buffers.lmdb.format import DATABASES

_HEAD = struct.Struct("<QHHHH")
"""Of a page: its number, padding, flags, the end of the places of its nodes, and the start of its nodes."""

_NODE = struct.Struct("<HHHH")
"""Of a node: in a leaf the size of its data, in a branch the page below, with the flags; the size of its key."""

_TREE = struct.Struct("<IHHQQQQQ")
"""Of a tree: padding, flags, its height, its pages of three kinds, its entries, and its root."""

_META = struct.Struct("<QQ")
"""At the end of a meta page: the last page, and the transaction."""

_TREES_AT = 40
"""Where a meta page has the free tree, and behind it the main tree."""

_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_DIRTY = 16
_BIG, _SUBTREE = 1, 2
_NO_PAGE = (1 << 64) - 1

BEHIND = b"\xff" * 512
"""Behind a prefix, it makes a key behind all that LMDB can have with the prefix, damaged or not."""

MOST_FAULTS = 20
"""Faults to report: more of them tell nobody more."""


def faults_of(path: Path, txn: Any, page_bytes: int) -> list[str]:
    """Return a line for each damaged page of the state that a transaction sees, up to `MOST_FAULTS`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk, metas = _Walk(data, page_bytes), data[: 2 * page_bytes]  # at once: a server changes them
        for trees in (_TREES_AT, page_bytes + _TREES_AT):
            *_, number = _META.unpack_from(metas, trees + 2 * _TREE.size)
            if number == txn.id():  # else a server has committed since, and the roots of the older state are gone
                walk.tree(metas[trees : trees + _TREE.size], is_free=True)
                walk.tree(metas[trees + _TREE.size : trees + 2 * _TREE.size])
            elif number < txn.id() - 1:
                walk.faults.append(f"page {trees // page_bytes} of data.mdb is damaged: its transaction is {number}")
        for name in () if walk.is_short else ("meta", *DATABASES):  # where the file ends, LMDB would end the process
            tree = txn.get(name.encode())
            if tree is not None:
                walk.tree(bytes(tree))
    return walk.faults[:MOST_FAULTS]


class _Walk:
    """A walk through trees of pages. Each page must be whole, in its place, and must have one use, or be free."""

    def __init__(self, data: mmap.mmap, page_bytes: int) -> None:
        self._data, self._page_bytes = data, page_bytes
        self._seen = bytearray(len(data) // page_bytes)
        self.faults: list[str] = []
        self.is_short = False

    def tree(self, described: bytes, *, is_free: bool = False) -> None:
        """Walk through a tree, a level after the other. In the free tree keys are numbers, and data free pages."""
        _, flags, height, *_, entries, root = _TREE.unpack(described)
        level: list[Any] = [] if root == _NO_PAGE else [(root, b"", BEHIND)]
        for left in range(height, 0, -1):
            level = [below for page in level for below in self._page(page, left == 1, is_free)]
        if len(level) != entries or flags != 8 * is_free:  # of keys that are numbers
            self.faults.append(f"a tree of data.mdb is damaged: it has {len(level)} entries, not {entries}")

    def _page(self, page: tuple[int, bytes, bytes], is_leaf: bool, is_free: bool) -> list[Any]:
        """Check a page of a tree, with the first key that it may have, and where its keys end. Return what it names."""
        number, first, stop = page
        if not self._takes(number, 1):
            return []
        start = number * self._page_bytes
        own, _, flags, low, high = _HEAD.unpack_from(self._data, start)
        kind, count = _LEAF if is_leaf else _BRANCH, (low - _HEAD.size) // 2
        if own != number or flags & ~_DIRTY != kind or not _HEAD.size < low <= high <= self._page_bytes:
            return self._fault(number, "its head is wrong")
        places = struct.unpack_from(f"<{count}H", self._data, start + _HEAD.size)
        if not all(high <= place <= self._page_bytes - _NODE.size for place in places):
            return self._fault(number, "a node is not on it")
        below, keys = list[int](), [first]
        for index, place in enumerate(places):
            one, two, three, key_bytes = _NODE.unpack_from(self._data, start + place)
            key_at = start + place + _NODE.size
            key = self._data[key_at : key_at + key_bytes][:: -1 if is_free else 1]
            if is_leaf or index:  # LMDB ignores the first key of a branch
                if not keys[-1] <= key < stop or (key == keys[-1] and index > (not is_leaf)):
                    return self._fault(number, "its keys are not in order")
                keys.append(key)
            below.append(one | two << 16 | (0 if is_leaf else three << 32))
            if is_leaf and not self._holds(key_at - start + key_bytes, below[-1], three, start, is_free):
                return self._fault(number, "the data of a node is not on it")
        return [*zip(below, keys, [*keys[1:], stop], strict=False)]

    def _holds(self, place: int, size: int, flags: int, start: int, is_free: bool) -> bool:
        """Return whether a node's data ends on its page, or check its own pages. The file may end before free pages."""
        if flags & ~(_BIG | _SUBTREE) or place + (8 if flags & _BIG else size) > self._page_bytes:
            return False
        at = start + place
        if flags & _BIG:
            first = int.from_bytes(self._data[at : at + 8], "little")
            at, count = first * self._page_bytes, math.ceil((_HEAD.size + size) / self._page_bytes)
            if not self._takes(first, count):
                return True
            own, _, kind, low, high = _HEAD.unpack_from(self._data, at)
            if (own, kind & ~_DIRTY, low | high << 16) != (first, _OVERFLOW, count):
                self._fault(first, "its head is wrong")
            at += _HEAD.size
        count, *pages = struct.unpack_from(f"<{max(1, size // 8)}Q", self._data, at) if is_free else (0,)
        return count <= len(pages) and all([self._takes(page, 1) for page in pages[:count] if page < len(self._seen)])

    def _takes(self, number: int, count: int) -> bool:
        """Mark pages as used. Return whether they are there, and were not used before."""
        seen = self._seen[number : number + count]
        if len(seen) < count or number < 2:
            self.is_short = True
            self._fault(number, "it is not there")
            return False
        if any(seen):
            self._fault(number, "it has more than one use")
            return False
        self._seen[number : number + count] = b"\1" * count
        return True

    def _fault(self, number: int, what: str) -> list[Any]:
        self.faults.append(f"page {number} of data.mdb is damaged: {what}")
        return []
