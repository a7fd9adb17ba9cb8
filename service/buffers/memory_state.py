"""The data of a store in memory: buffers, values and keys."""

from __future__ import annotations

from collections import Counter

from service.buffers.gradients import Gradient, stored_bytes
from service.buffers.graphs import StoredGraph
from service.buffers.names import BufferName
from service.buffers.pushes import Push, PushName
from service.buffers.record import Known, Record
from service.dtypes import Array

KEY_BYTES = 700
"""What Python takes for a key without receipts."""

RECEIPT_BYTES = 450
"""What Python takes for a receipt, with the id of its buffer."""

CONTRIBUTOR_BYTES = 150
"""What Python takes for a contributor in a receipt."""


class State:
    """All that the store has. `close` forgets it."""

    def __init__(self) -> None:
        self.records: dict[BufferName, Record] = {}
        self.values: dict[int, Array] = {}
        self.keys: dict[tuple[str, str], tuple[float, Known]] = {}  # the oldest first
        self.counts: Counter[str] = Counter()  # buffers by namespace
        self.key_bytes: Counter[str] = Counter()  # bytes of keys by namespace
        self.timed: dict[BufferName, Record] = {}  # those that may expire, or whose epochs are due at some time
        self.pushes: dict[PushName, Push] = {}
        self.staged: dict[int, Gradient] = {}
        self.graphs: dict[BufferName, StoredGraph] = {}
        self.last_id = self.generation = self.value_bytes = 0
        self.closed = False

    def close(self) -> None:
        self.closed, self.value_bytes = True, 0
        for each in (
            self.records,
            self.timed,
            self.values,
            self.keys,
            self.counts,
            self.key_bytes,
            self.pushes,
            self.staged,
            self.graphs,
        ):
            each.clear()

    @property
    def used(self) -> int:
        """The bytes of all values, keys and staged gradients."""
        return self.value_bytes + self.key_bytes.total() + sum(map(stored_bytes, self.staged.values()))

    def forget(self, key: tuple[str, str]) -> None:
        """Forget a key, if it is known."""
        if key in self.keys:
            namespace, _ = key
            self.key_bytes[namespace] -= room_of(self.keys.pop(key)[1])


def room_of(known: Known) -> int:
    """Return the bytes that a key takes with its receipts."""
    contributors = sum(len(receipt.get("contributors") or ()) for receipt in known.receipts.values())
    return KEY_BYTES + RECEIPT_BYTES * len(known.receipts) + CONTRIBUTOR_BYTES * contributors + len(known.answer)
