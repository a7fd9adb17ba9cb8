"""The steps of a push in parts, and the bytes of a graph, in a transaction that writes."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress

from service.buffers.gradients import Gradient
from service.buffers.lmdb.caches import WriterState
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.value_writer import ValueWriter
from service.buffers.names import BufferName, pushes_of
from service.buffers.pushes import Place
from service.buffers.record import Record, Spec
from service.buffers.room import check_staged
from service.dtypes import Array
from service.errors import BufferCorrupt


class Staging(Reader):
    """A transaction that stages gradients, and adds staged gradients."""

    values: ValueWriter
    _state: WriterState
    writes: int
    to_fold: dict[int, BufferName]
    """Values that should be folded soon after the commit, and their buffers."""
    staged_bytes: Counter[str]
    """How many bytes more each namespace of pushes has staged."""
    most_bytes: int = sys.maxsize
    """What this transaction may write of a request that several may make."""

    def admit_part(self, namespace: str, nbytes: int) -> None:
        own = pushes_of(namespace)
        check_staged(self.bytes_of(own) + self.staged_bytes[own] + nbytes, self._env.max_bytes)

    def _count_staged(self, name: BufferName, nbytes: int) -> None:
        """Count that a push has staged this many bytes from now on. Other buffers are not counted."""
        if name.push is not None:
            with suppress(BufferCorrupt):
                old = self.get(name)
                nbytes -= 0 if old is None else old.spec.nbytes
            self.staged_bytes[name.namespace] += nbytes

    def stage(self, record: Record, gradient: Gradient) -> Place:
        self.writes += 1
        return self.values.stage(record.spec, gradient)

    def staged(self, spec: Spec, place: Place) -> Gradient:
        return self.values.staged(spec, place)

    def add_staged(self, record: Record, place: Place, weight: float) -> int:
        self.writes += 1
        value, is_waiting = self.values.add_staged(record.spec, record.value, place, weight)
        if is_waiting:
            self.to_fold[value] = record.full_name
        return value

    def store_bytes(self, content: Array) -> int:
        self.writes += 1
        return self.values.store_bytes(content)

    def fold(self, record: Record, value: int) -> None:
        """Add to a value of the buffer some of what waits for it."""
        if self.values.has_waiting(value):
            self.writes += 1
            if self.values.fold(record.spec, value, self.most_bytes):
                self.to_fold[value] = record.full_name
