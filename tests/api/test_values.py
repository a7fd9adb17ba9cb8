"""The values of buffers that a graph reads: each is read once for each state, and all are of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from service.api.operators.values import ENTRY_BYTES, read_cached
from service.buffers.changes import Add, Delete
from service.buffers.memory import MemoryStore
from service.buffers.record import Record, Snapshot
from service.engine.cache import Cache
from service.errors import UnknownBuffer
from tests.buffers.calls import add, create, do


class Watched(MemoryStore):
    """A store that notes the reads of values. Between a look-up and a read it calls `meanwhile` once."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []
        self.meanwhile: Any = None

    def durable(self, names: Sequence[str], step: int | None = None) -> list[Record]:
        found = super().durable(names, step)
        if self.meanwhile is not None:
            self.meanwhile()
            self.meanwhile = None
        return found

    def read(self, names: Sequence[str], step: int | Sequence[int] | None = None) -> list[Snapshot]:
        self.reads.append([*names])
        return super().read(names, step)


class FakeCall:
    """A call with a store and a cache."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.store, self.cache, self.reserved = Watched(), Cache(max_bytes), 0
        create(self.store, "a", "b")

    def reserve(self, size: int) -> None:
        self.reserved += size

    def read(self, *names: str) -> list[Any]:
        return [snapshot.value.tolist() for snapshot in read_cached(self, names)]  # type: ignore[arg-type]


@pytest.fixture
def call() -> FakeCall:
    return FakeCall()


def test_what_has_not_changed_is_read_once(call: FakeCall) -> None:
    add(call.store, "a", [1, 2])
    for _ in range(3):
        assert call.read("a", "b") == [[1, 2], [0, 0]]
    assert (call.store.reads, call.reserved) == ([["a", "b"]], 16)


def test_what_has_changed_is_read_again(call: FakeCall) -> None:
    call.read("a", "b")
    add(call.store, "b", [3, 4])
    assert call.read("b", "a") == [[3, 4], [0, 0]]
    assert (call.store.reads, call.reserved) == ([["a", "b"], ["b"]], 24)


def test_a_buffer_may_be_the_source_of_two_inputs(call: FakeCall) -> None:
    assert call.read("a", "b", "a") == [[0, 0]] * 3
    assert call.store.reads == [["a", "b"]]


def test_all_values_are_of_one_moment(call: FakeCall) -> None:
    """A step writes both buffers after the look-up found only one of them in the cache."""
    call.read("a")
    step = [Add(name=name, gradient=np.ones(2, np.float32)) for name in "ab"]
    call.store.meanwhile = lambda: do(call.store, *step)
    assert call.read("a", "b") == [[1, 1], [1, 1]]
    assert call.read("a", "b") == [[1, 1], [1, 1]]
    assert call.store.reads == [["a"], ["b"], ["a", "b"]]


def test_a_buffer_that_is_made_again_has_its_own_value(call: FakeCall) -> None:
    add(call.store, "a", [1, 2])
    call.read("a")
    do(call.store, Delete(name="a"))
    with pytest.raises(UnknownBuffer):
        call.read("a")
    create(call.store, "a")
    add(call.store, "a", [3, 4])
    assert call.read("a") == [[3, 4]]


def test_nobody_can_write_to_a_kept_value(call: FakeCall) -> None:
    (snapshot,) = read_cached(call, ["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        snapshot.value[0] = 1


def test_values_that_do_not_fit_are_read_each_time() -> None:
    call = FakeCall(max_bytes=ENTRY_BYTES + 7)
    for _ in range(2):
        assert call.read("a") == [[0, 0]]
    assert call.store.reads == [["a"], ["a"]]
