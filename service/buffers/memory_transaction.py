"""The changes of a request to a store in memory, before they take effect."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from service.buffers.gradients import Gradient, add_whole, copied, stored_bytes
from service.buffers.graphs import StoredGraph, check_count
from service.buffers.memory_state import State, room_of
from service.buffers.names import BufferName
from service.buffers.packed import pack_record
from service.buffers.pushes import Place, Push, PushName
from service.buffers.record import Key, Known, Record, Spec, too_many
from service.buffers.room import check_keys, check_staged
from service.buffers.store import Allocate
from service.dtypes import Array

K = TypeVar("K")
V = TypeVar("V")


class MemoryTransaction:
    """The changes of a request, which `commit` merges into `state`."""

    def __init__(self, state: State, allocate: Allocate, *, max_buffers: int, max_bytes: int, max_graphs: int) -> None:
        self._state, self._allocate, self._max_graphs = state, allocate, max_graphs
        self._max_buffers, self._max_bytes = max_buffers, max_bytes
        self._counted: Counter[str] = Counter()
        self._records: dict[BufferName, Record | None] = {}
        self._values: dict[int, Array | None] = {}
        self._keys: dict[tuple[str, str], tuple[float, Known]] = {}
        self._pushes: dict[PushName, Push | None] = {}
        self._staged: dict[int, Gradient | None] = {}
        self._graphs: dict[BufferName, StoredGraph | None] = {}
        self._last_id = state.last_id

    def commit(self) -> None:
        for namespace, change in self._counted.items():
            self._state.counts[namespace] += change
        _merge(self._state.records, self._records)
        _merge(self._state.timed, {name: _timed(record) for name, record in self._records.items()})
        self._state.value_bytes += self._more_value_bytes()
        _merge(self._state.values, self._values)
        _merge(self._state.pushes, self._pushes)
        _merge(self._state.staged, self._staged)
        _merge(self._state.graphs, self._graphs)
        for key, stored in self._keys.items():
            self._state.forget(key)
            self._state.keys[key] = stored
            self._state.key_bytes[key[0]] += room_of(stored[1])
        self._state.last_id = self._last_id

    def used(self) -> int:
        """Return the bytes of all values, keys and staged gradients after these changes."""
        staged = sum(stored_bytes(each) for each in self._staged.values() if each is not None)
        freed = sum(stored_bytes(self._state.staged[each]) for each in self._staged if each in self._state.staged)
        keys = sum(room_of(known) for _, known in self._keys.values())
        return self._state.used + self._more_value_bytes() + keys + staged - freed

    def _more_value_bytes(self) -> int:
        old = sum(self._state.values[value].nbytes for value in self._values if value in self._state.values)
        return sum(array.nbytes for array in self._values.values() if array is not None) - old

    def get(self, name: BufferName) -> Record | None:
        return self._records[name] if name in self._records else self._state.records.get(name)

    def names(self, namespace: str, prefix: str) -> list[str]:
        own = (name for name in self._state.records if name.namespace == namespace)
        return sorted(name.name for name in own if name.name.startswith(prefix))

    def count_new(self, name: BufferName, now: float) -> None:
        count = self._state.counts[name.namespace] + self._counted[name.namespace]
        if count >= self._max_buffers:
            raise too_many(count, self._max_buffers)
        self._counted[name.namespace] += 1

    def put(self, record: Record) -> None:
        self._records[record.full_name] = record.changed(packed_bytes=len(pack_record(record)))

    def remove(self, record: Record) -> None:
        self._counted[record.full_name.namespace] -= 1
        self._records[record.full_name] = None
        for value in record.values:
            self.free(value)

    def remove_damaged(self, name: BufferName) -> None:
        raise AssertionError("memory is not damaged")

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        total = None if record.value is None else self._values.get(record.value, self._state.values[record.value])
        result = np.empty(record.spec.size, record.spec.dtype)
        add_whole(record.spec, result, total, gradient, weight, overwrite)
        self.free(record.value)
        value = self.new_id()
        self._values[value] = result
        return value

    def free(self, value: int | None) -> None:
        if value is not None:
            self._values[value] = None

    def load(self, spec: Spec, value: int | None) -> Array:
        result = self._allocate(spec.shape, spec.dtype)
        if value is None:
            result[...] = 0
            return result
        stored = self._values.get(value, self._state.values.get(value))
        assert stored is not None
        result.reshape(-1)[...] = stored
        return result

    def recall(self, key: Key, names: Sequence[str]) -> Known | None:
        stored = self._state.keys.get((key.caller, key.text))
        return None if stored is None else copy.deepcopy(stored[1])

    def admit_key(self, key: Key) -> None:
        check_keys(self._state.key_bytes[key.caller], self._max_bytes)

    def remember(self, key: Key, known: Known, now: float) -> None:
        self._keys[key.caller, key.text] = (now, copy.deepcopy(known))

    def push(self, name: PushName) -> Push | None:
        return self._pushes[name] if name in self._pushes else self._state.pushes.get(name)

    def put_push(self, name: PushName, push: Push | None) -> None:
        self._pushes[name] = push

    def admit_part(self, namespace: str, nbytes: int) -> None:
        own = sum(push.nbytes for name, push in self._state.pushes.items() if name[0] == namespace)
        check_staged(own + nbytes, self._max_bytes)

    def stage(self, record: Record, gradient: Gradient) -> Place:
        value = self.new_id()
        self._staged[value] = copied(gradient)
        return [value]

    def staged(self, spec: Spec, place: Place) -> Gradient:
        found = self._staged.get(place[0], self._state.staged.get(place[0]))
        assert found is not None
        return found

    def add_staged(self, record: Record, place: Place, weight: float) -> int | None:
        value = self.accumulate(record, self.staged(record.spec, place), weight, overwrite=False)
        self.free_staged(place)
        return value

    def free_staged(self, place: Place) -> None:
        self._staged[place[0]] = None

    def graph(self, name: BufferName) -> StoredGraph | None:
        return self._state.graphs.get(name)

    def admit_graph(self, namespace: str) -> None:
        check_count(sum(name.namespace == namespace for name in self._state.graphs), self._max_graphs)

    def put_graph(self, name: BufferName, graph: StoredGraph | None) -> None:
        self._graphs[name] = graph

    def store_bytes(self, content: Array) -> int:
        value = self.new_id()
        self._values[value] = content.copy()
        return value


def _timed(record: Record | None) -> Record | None:
    """Return the record if its buffer may expire, or is due at some time."""
    return None if record is None or (record.expires is None and record.due is None) else record


def _merge(stored: dict[K, V], changes: Mapping[K, V | None]) -> None:
    for name, changed in changes.items():
        if changed is None:
            stored.pop(name, None)
        else:
            stored[name] = changed
