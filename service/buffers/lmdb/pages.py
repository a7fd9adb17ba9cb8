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

MOST_FAULTS = 20
"""Faults to report: more of them tell nobody more."""


def faults_of(path: Path, txn: Any, page_bytes: int) -> list[str]:
    """Return a line for each damaged page of the state that a transaction sees, up to `MOST_FAULTS`."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(data, page_bytes)
        for start in (0, page_bytes):
            trees = start + _TREES_AT
            *_, number = _META.unpack_from(data, trees + 2 * _TREE.size)
            if number == txn.id():  # else a server has committed since, and the roots of the older state are gone
                walk.tree(data[trees : trees + _TREE.size], is_sorted=False)  # its keys are numbers
                walk.tree(data[trees + _TREE.size : trees + 2 * _TREE.size])
        for name in () if walk.is_short else ("meta", *DATABASES):  # where the file ends, LMDB would end the process
            tree = txn.get(name.encode())
            if tree is not None:
                walk.tree(bytes(tree))
    return walk.faults[:MOST_FAULTS]


class _Walk:
    """A walk through trees of pages. Each page must be whole, and must have one use."""

    def __init__(self, data: mmap.mmap, page_bytes: int) -> None:
        self._data, self._page_bytes = data, page_bytes
        self._seen = bytearray(len(data) // page_bytes)
        self.faults: list[str] = []
        self.is_short = False

    def tree(self, described: bytes, *, is_sorted: bool = True) -> None:
        """Walk through a tree, a level after the other."""
        _, _, height, *_, root = _TREE.unpack(described)
        level = [] if root == _NO_PAGE else [root]
        for left in range(height, 0, -1):
            level = [below for number in level for below in self._page(number, left == 1, is_sorted)]

    def _page(self, number: int, is_leaf: bool, is_sorted: bool) -> list[int]:
        """Check a page of a tree. Return the pages below it."""
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
        below, last = [], b""
        for index, place in enumerate(places):
            one, two, three, key_bytes = _NODE.unpack_from(self._data, start + place)
            key_at = start + place + _NODE.size
            key = self._data[key_at : key_at + key_bytes]
            if is_sorted and key <= last and index > (not is_leaf):
                return self._fault(number, "its keys are not in order")
            last = key
            if not is_leaf:
                below.append(one | two << 16 | three << 32)
            elif not self._holds(place + _NODE.size + key_bytes, one | two << 16, three, start):
                return self._fault(number, "the data of a node is not on it")
        return below

    def _holds(self, place: int, size: int, flags: int, start: int) -> bool:
        """Return whether a node's data ends on its page, or check the pages that are its own."""
        if flags & ~(_BIG | _SUBTREE):
            return False
        if not flags & _BIG:
            return place + size <= self._page_bytes
        if place + 8 > self._page_bytes:
            return False
        first = int.from_bytes(self._data[start + place : start + place + 8], "little")
        count = math.ceil((_HEAD.size + size) / self._page_bytes)
        if self._takes(first, count):
            own, _, kind, low, high = _HEAD.unpack_from(self._data, first * self._page_bytes)
            if (own, kind & ~_DIRTY, low | high << 16) != (first, _OVERFLOW, count):
                self._fault(first, "its head is wrong")
        return True

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

    def _fault(self, number: int, what: str) -> list[int]:
        self.faults.append(f"page {number} of data.mdb is damaged: {what}")
        return []
