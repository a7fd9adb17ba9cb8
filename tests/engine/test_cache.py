"""The cache of graphs and parameters: how much it keeps, and what goes first."""

from __future__ import annotations

from typing import Any

import pytest

from service.engine.cache import Cache

Kept = dict[tuple[str, Any], Any]

CASES: dict[str, tuple[list[tuple[Any, ...]], Kept, int]] = {
    "in its state only": ([("a", 1, "first", 10)], {("a", 1): "first", ("a", 2): None, ("b", 1): None}, 10),
    "a newer state": ([("a", 1, "first", 60), ("a", 2, "second", 70)], {("a", 1): None, ("a", 2): "second"}, 70),
    "used longest ago": (
        [*((name, 1, name, 30) for name in "abc"), ("a", 1), ("d", 1, "d", 35)],
        {("a", 1): "a", ("b", 1): None, ("c", 1): "c", ("d", 1): "d"},
        95,
    ),
    "too large": ([("a", 1, "a", 100), ("b", 1, "b", 101)], {("a", 1): "a", ("b", 1): None}, 100),
    "smaller": (
        [*((name, None, name, 30) for name in "abc"), ("a", None), ("d", None, "d", 40), ("d", None, "D", 10)]
        + [("e", None, "e", 30)],
        {("a", None): "a", ("b", None): None, ("c", None): "c", ("d", None): "D", ("e", None): "e"},
        100,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_cache_of_100_bytes_keeps(case: str) -> None:
    """Puts have a value and its size; gets have none."""
    calls, kept, size = CASES[case]
    sizes: list[int] = []
    cache = Cache(100, sizes.append)
    for name, state, *value in calls:
        cache.put(name, state, *value) if value else cache.get(name, state)
    assert {key: cache.get(*key) for key in kept} == kept
    assert sizes[-1] == size
