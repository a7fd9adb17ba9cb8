"""The steps of a push in parts, and the bytes of a graph, in a transaction that writes."""

from __future__ import annotations

import sys

from service.buffers.gradients import Gradient
from service.buffers.lmdb.caches import WriterState
from service.buffers.lmdb.pushes import PushWriter
from service.buffers.lmdb.reader import Reader
from service.buffers.lmdb.value_writer import ValueWriter
from service.buffers.names import BufferName
from service.buffers.pushes import Place, Push, PushName
from service.buffers.record import Record, Spec
from service.buffers.room import check_staged
from service.dtypes import Array


class Staging(Reader):
    """A transaction that stages gradients, and adds staged gradients."""

    values: ValueWriter
    pushes: PushWriter
    _state: WriterState
    writes: int
    to_fold: dict[int, BufferName]
    """Values that should be folded soon after the commit, and their buffers."""
    most_bytes: int = sys.maxsize
    """What this transaction may write of a request that several may make."""

    def push(self, name: PushName) -> Push | None:
        return self.pushes.find(name)

    def put_push(self, name: PushName, push: Push | None) -> None:
        self.writes += 1
        self.pushes.put(name, push)

    def admit_part(self, namespace: str, nbytes: int) -> None:
        check_staged(self.pushes.staged_bytes(namespace) + nbytes, self._env.max_bytes)

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

    def free_staged(self, place: Place) -> None:
        self.writes += 1
        self.values.free_staged(place)

    def store_bytes(self, content: Array) -> int:
        self.writes += 1
        return self.values.store_bytes(content)

    def fold(self, record: Record, value: int) -> None:
        """Add to a value of the buffer some of what waits for it."""
        if self.values.has_waiting(value):
            self.writes += 1
            if self.values.fold(record.spec, value, self.most_bytes):
                self.to_fold[value] = record.full_name
