"""What the database says of the requests of a batch, and what they change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from service.buffers.gradients import Gradient
from service.buffers.names import BufferName
from service.buffers.postgres.compactor import Fold
from service.buffers.postgres.deltas import Delta
from service.buffers.postgres.pushes import Stored
from service.buffers.record import Key, Known
from service.errors import BufferCorrupt


@dataclass
class Found:
    """What the database has of the buffers, keys and namespaces of a batch, all of them locked."""

    records: dict[BufferName, Stored | BufferCorrupt | None]
    keys: dict[bytes, bytes]
    """What is stored with each key, packed."""
    counts: Counter[str]
    seqs: dict[int, int]
    """The `seq` of the last delta of each value that grows."""
    staged_bytes: Counter[str]
    """The bytes that each namespace of pushes has staged."""
    staged_values: set[int]
    """The values of the staged gradients that the batch may add."""


@dataclass
class Changes:
    """What requests have changed."""

    records: dict[BufferName, Stored | None] = field(default_factory=dict)
    deltas: dict[int, list[Delta]] = field(default_factory=dict)
    """The new deltas by value."""
    blobs: dict[int, Gradient] = field(default_factory=dict)
    """Blobs that were not staged."""
    freed: list[int] = field(default_factory=list)
    keys: dict[bytes, tuple[Key, Known]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    folds: list[Fold] = field(default_factory=list)
    staged_bytes: Counter[str] = field(default_factory=Counter)
    """How many bytes more each namespace of pushes has staged."""
    added: list[int] = field(default_factory=list)
    """Values of new staged gradients that are part of sums now."""

    def __bool__(self) -> bool:
        return bool(self.records or self.keys)

    def merge(self, others: Changes) -> None:
        """Take over the changes of a request that succeeded."""
        self.records |= others.records
        for value, deltas in others.deltas.items():
            self.deltas.setdefault(value, []).extend(deltas)
        self.blobs |= others.blobs
        self.freed += others.freed
        self.keys |= others.keys
        self.counts.update(others.counts)
        self.folds += others.folds
        self.staged_bytes.update(others.staged_bytes)
        for value in others.added:
            del self.deltas[value]
