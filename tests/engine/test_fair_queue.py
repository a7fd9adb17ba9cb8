"""The queue that namespaces share: order, costs, and who counts as present."""

from __future__ import annotations

import pytest

from service.engine import fair_queue
from service.engine.fair_queue import PRESENT_SECONDS, FairQueue


class Clock:
    """A clock that only a test advances."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(**items: int) -> FairQueue[str]:
    """Return a queue with `a0`, `a1` and so on, as many as `items` says for each namespace."""
    queue: FairQueue[str] = FairQueue()
    for namespace, count in items.items():
        for number in range(count):
            queue.put(namespace, f"{namespace}{number}")
    return queue


def taken(queue: FairQueue[str], cost: dict[str, float] | None = None) -> list[str]:
    """Take all items. Each costs its namespace what `cost` says."""
    items = []
    while (item := queue.take()) is not None:
        items.append(item)
        queue.charge(item[0], (cost or {}).get(item[0], 0.0))
    return items


def test_namespaces_have_their_turns() -> None:
    assert taken(filled(a=4, b=2, c=1)) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert taken(filled(a=5)) == [f"a{number}" for number in range(5)]


def test_a_namespace_that_has_used_much_waits_its_turn() -> None:
    items = taken(filled(a=3, b=9), {"a": 4.0, "b": 1.0})
    assert items == ["a0", "b0", "b1", "b2", "b3", "a1", "b4", "b5", "b6", "b7", "a2", "b8"]


def test_a_namespace_saves_nothing_up_while_it_is_away() -> None:
    queue = filled(a=1, b=100)
    taken(queue, {"a": 1.0, "b": 1.0})
    for namespace in ("a", "b"):
        for number in range(3):
            queue.put(namespace, f"{namespace}{number}")
    assert taken(queue, {"a": 1.0, "b": 1.0})[:4] == ["a0", "b0", "a1", "b1"]


def test_a_cost_is_remembered_while_the_namespace_is_away() -> None:
    queue = filled(a=1, b=1)
    assert taken(queue, {"a": 2.5, "b": 1.0}) == ["a0", "b0"]
    queue.put("a", "a1")
    for number in range(3):
        queue.put("b", f"b{number}")
    assert taken(queue, {"a": 2.5, "b": 1.0}) == ["b0", "b1", "a1", "b2"]


def test_some_namespaces_come_last() -> None:
    queue = filled(a=1, b=1, c=1)
    assert [queue.take(last={"a", "b"}) for _ in range(4)] == ["c0", "a0", "b0", None]


def test_some_namespaces_can_be_left_out() -> None:
    queue = filled(a=2, b=1)
    assert queue.take({"a"}, fits=lambda item: item != "b0") is None
    assert queue.take({"a"}) == "b0"
    assert queue.take({"a"}) is None
    assert (len(queue), queue.count("a"), queue.count("b"), queue.count("c")) == (2, 2, 0, 0)
    queue.remove("a", "a0")
    with pytest.raises(ValueError, match="not in deque"):
        queue.remove("a", "a0")
    assert taken(queue) == ["a1"]


def test_a_queue_is_shared_while_several_namespaces_are_present() -> None:
    clock = Clock()
    queue: FairQueue[str] = FairQueue(clock)
    assert not queue.is_shared()
    queue.put("a", "a0")
    assert not queue.is_shared()
    queue.put("b", "b0")
    clock.now += 2 * PRESENT_SECONDS
    assert queue.is_shared()  # both wait
    taken(queue)
    assert not queue.is_shared()
    queue.put("a", "a1")
    clock.now += PRESENT_SECONDS / 2
    queue.put("b", "b1")
    assert queue.is_shared()


def test_namespaces_that_are_away_are_forgotten() -> None:
    clock = Clock()
    queue: FairQueue[str] = FairQueue(clock)
    for number in range(1000):
        queue.put(str(number), "item")
        queue.charge(str(number), 1.0)
        assert queue.take() == "item"
        clock.now += fair_queue.PRESENT_SECONDS
    assert len(queue._lanes) < 10
