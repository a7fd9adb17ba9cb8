"""Adds per minute over time, and their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from service.api.dashboard import arrivals
from service.api.dashboard.arrivals import MINUTES, Arrivals
from service.api.dashboard.statistics import BURST_ELEMENTS, RATE_ELEMENTS, Budget, Cache
from service.buffers.changes import Add, Delete
from service.buffers.perform import Outcome


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 60.0 * 1000

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def count(arrived: Arrivals, *names: str, contributor: str | None = None, updated: bool = True) -> None:
    """Count an add to each of these buffers, or none if they are not `updated`."""
    adds = [Add(name=name, gradient=np.ones(1), contributor=contributor) for name in names]
    arrived.count("", adds, Outcome({name: {"updated": updated} for name in names}))


def shown(arrived: Arrivals, name: str) -> dict[str, Any]:
    """Return the minutes with adds, counted back from the last one, by contributor."""
    found = arrived.of("", name)["contributors"]
    return {
        contributor: {MINUTES - 1 - at: number for at, number in enumerate(counts) if number}
        for contributor, counts in found.items()
    }


def test_minutes_pass(clock: Clock) -> None:
    arrived = Arrivals(clock)
    count(arrived, "w", contributor="a")
    count(arrived, "w")
    clock.now += 59
    count(arrived, "w", contributor="a")
    assert arrived.of("", "w")["until"] == 60 * 1001
    assert shown(arrived, "w") == {"a": {0: 2}, "": {0: 1}}
    clock.now += 60 * 5
    count(arrived, "w", contributor="a")
    assert shown(arrived, "w") == {"a": {0: 1, 5: 2}, "": {5: 1}}
    clock.now += 60 * 54
    assert shown(arrived, "w") == {"a": {54: 1, 59: 2}, "": {59: 1}}
    clock.now += 60
    count(arrived, "w", contributor="a")
    assert shown(arrived, "w") == {"a": {0: 1, 55: 1}}
    clock.now += 60 * 500
    assert shown(arrived, "w") == {}
    count(arrived, "w", contributor="a")
    assert shown(arrived, "w") == {"a": {0: 1}}


def test_only_changes_that_are_made_count(clock: Clock) -> None:
    arrived = Arrivals(clock)
    count(arrived, "w", updated=False)
    arrived.count("", [Add(name="w", gradient=np.ones(1))], Outcome({"w": {"updated": True}}, replayed=True))
    assert shown(arrived, "w") == {}
    count(arrived, "w", "v")
    arrived.count("", [Delete(name="w")], Outcome({"w": {"updated": True}}))
    assert (shown(arrived, "w"), shown(arrived, "v")) == ({}, {"": {0: 1}})


def test_the_buffer_without_adds_for_longest_makes_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_SERIES", 3)
    arrived = Arrivals(clock)
    count(arrived, "a", "b", "c")
    count(arrived, "a")
    count(arrived, "d")
    assert [shown(arrived, name) for name in "abcd"] == [{"": {0: 2}}, {}, {"": {0: 1}}, {"": {0: 1}}]


def test_the_first_contributor_to_a_buffer_makes_room(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "MAX_CONTRIBUTORS", 2)
    arrived = Arrivals(clock)
    for contributor in "abc":
        count(arrived, "w", contributor=contributor)
    assert shown(arrived, "w").keys() == {"b", "c"}


def test_a_cache_keeps_what_was_used_last() -> None:
    cache: Cache[str] = Cache(10)
    for key in "abc":
        cache.put(key, key, 3)
    assert cache.get("a") == "a"
    cache.put("d", "d", 4)
    assert [cache.get(key) for key in "abcd"] == ["a", None, "c", "d"]
    cache.put("d", "D", 1)
    cache.put("e", "e", 3)
    assert [cache.get(key) for key in "acde"] == ["a", "c", "D", "e"]


def test_a_budget_fills_with_time(clock: Clock) -> None:
    budget = Budget(clock)
    assert budget.allows()
    budget.spend(BURST_ELEMENTS + RATE_ELEMENTS)
    assert not budget.allows()
    clock.now += 1.5
    assert budget.allows()
    budget.spend(RATE_ELEMENTS)
    assert not budget.allows()
    clock.now += 3600
    assert budget.allows()
    budget.spend(BURST_ELEMENTS)
    assert not budget.allows()
