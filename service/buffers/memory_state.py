"""The data of a store in memory: buffers, values and keys, and when they expire or are due."""

from __future__ import annotations

import heapq
from collections import Counter

from service.buffers.names import BufferName
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
        self.deadlines: list[tuple[float, int, BufferName]] = []  # a heap: when a buffer may expire, and its id
        self.dues: list[tuple[float, int, BufferName]] = []  # a heap: when an epoch is due, and the buffer's id
        self.last_id = self.generation = self.value_bytes = 0
        self.closed = False

    def close(self) -> None:
        self.closed, self.value_bytes = True, 0
        self.records, self.values, self.keys = {}, {}, {}
        for each in (self.counts, self.key_bytes, self.deadlines, self.dues):
            each.clear()

    @property
    def used(self) -> int:
        """The bytes of all values and keys."""
        return self.value_bytes + self.key_bytes.total()

    def forget(self, key: tuple[str, str]) -> None:
        """Forget a key, if it is known."""
        if key in self.keys:
            namespace, _ = key
            self.key_bytes[namespace] -= room_of(self.keys.pop(key)[1])

    def schedule(self, record: Record, old: Record | None) -> None:
        """Put the times at which the changed record may expire, and is due, into the heaps if they are new."""
        if record.spec.ttl_seconds is None and record.began is None:
            return
        ttl, due = (None, None) if old is None or old.id != record.id else (old.spec.ttl_seconds, old.due)
        if record.expires is not None and record.spec.ttl_seconds != ttl:
            heapq.heappush(self.deadlines, (record.expires, record.id, record.full_name))
        if record.due is not None and record.due != due:
            heapq.heappush(self.dues, (record.due, record.id, record.full_name))

    def drop_times(self) -> None:
        """Rebuild a heap that has many times of buffers that are deleted, or that have changed."""
        most, records = 2 * len(self.records) + 100, self.records.values()
        if len(self.deadlines) > most:
            self.deadlines[:] = [(one.expires, one.id, one.full_name) for one in records if one.expires is not None]
            heapq.heapify(self.deadlines)
        if len(self.dues) > most:
            self.dues[:] = [(one.due, one.id, one.full_name) for one in records if one.due is not None]
            heapq.heapify(self.dues)


def room_of(known: Known) -> int:
    """Return the bytes that a key takes with its receipts."""
    contributors = sum(len(receipt.get("contributors") or ()) for receipt in known.receipts.values())
    return KEY_BYTES + RECEIPT_BYTES * len(known.receipts) + CONTRIBUTOR_BYTES * contributors
