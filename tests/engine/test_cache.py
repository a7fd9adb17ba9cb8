"""The cache of graphs and parameters: how much it keeps, and what goes first."""

from __future__ import annotations

import pytest

from service.engine.cache import Cache


@pytest.fixture
def sizes() -> list[int]:
    return []


@pytest.fixture
def cache(sizes: list[int]) -> Cache:
    return Cache(100, sizes.append)


def test_a_value_is_found_in_its_state_only(cache: Cache) -> None:
    cache.put("a", 1, "first", 10)
    assert cache.get("a", 1) == "first"
    assert cache.get("a", 2) is None
    assert cache.get("b", 1) is None


def test_a_newer_state_takes_the_place_of_the_older(cache: Cache, sizes: list[int]) -> None:
    cache.put("a", 1, "first", 60)
    cache.put("a", 2, "second", 70)
    assert (cache.get("a", 1), cache.get("a", 2)) == (None, "second")
    assert sizes[-1] == 70


def test_the_value_that_was_used_longest_ago_goes_first(cache: Cache, sizes: list[int]) -> None:
    for name in "abc":
        cache.put(name, 1, name, 30)
    assert cache.get("a", 1) == "a"
    cache.put("d", 1, "d", 35)
    assert [cache.get(name, 1) for name in "abcd"] == ["a", None, "c", "d"]
    assert sizes[-1] == 95


def test_a_value_that_is_too_large_is_not_kept_and_moves_no_other(cache: Cache, sizes: list[int]) -> None:
    cache.put("a", 1, "a", 100)
    cache.put("b", 1, "b", 101)
    assert (cache.get("a", 1), cache.get("b", 1), sizes[-1]) == ("a", None, 100)


def test_a_value_that_gets_smaller_makes_room() -> None:
    cache = Cache(10)
    for key in "abc":
        cache.put(key, None, key, 3)
    assert cache.get("a", None) == "a"
    cache.put("d", None, "d", 4)
    assert [cache.get(key, None) for key in "abcd"] == ["a", None, "c", "d"]
    cache.put("d", None, "D", 1)
    cache.put("e", None, "e", 3)
    assert [cache.get(key, None) for key in "acde"] == ["a", "c", "D", "e"]
