"""The arena reuses memory only after its last view is gone, and keeps no more than its limit."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from service.dtypes import FLOAT32
from service.engine.arena import MIN_REUSED_BYTES, Arena

ELEMENTS = MIN_REUSED_BYTES // 4


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def test_freed_memory_is_reused() -> None:
    arena = Arena(8 * MIN_REUSED_BYTES)
    first = arena.allocate((ELEMENTS,), FLOAT32)
    place = address(first)
    del first
    assert arena.free_bytes == MIN_REUSED_BYTES
    second = arena.allocate((2, ELEMENTS // 2), FLOAT32)
    assert address(second) == place
    assert (second.shape, second.dtype) == ((2, ELEMENTS // 2), FLOAT32)
    assert second.flags.c_contiguous
    assert second.flags.writeable
    assert arena.free_bytes == 0


def test_memory_with_a_view_is_not_reused() -> None:
    arena = Arena(8 * MIN_REUSED_BYTES)
    array = arena.allocate((ELEMENTS,), FLOAT32)
    array[...] = 7
    view, place = array[5:10].view(), address(array)
    del array
    other = arena.allocate((ELEMENTS,), FLOAT32)
    other[...] = 0
    assert address(other) != place
    assert view.tolist() == [7.0] * 5


def test_free_memory_has_a_limit() -> None:
    arena = Arena(3 * MIN_REUSED_BYTES)
    arrays = [arena.allocate((ELEMENTS,), FLOAT32) for _ in range(5)]
    del arrays
    assert arena.free_bytes == 3 * MIN_REUSED_BYTES
    large = arena.allocate((4 * ELEMENTS,), FLOAT32)
    del large
    assert arena.free_bytes == 3 * MIN_REUSED_BYTES


def test_memory_far_larger_than_needed_is_not_reused() -> None:
    arena = Arena(100 * MIN_REUSED_BYTES)
    large = arena.allocate((10 * ELEMENTS,), FLOAT32)
    del large
    small = arena.allocate((ELEMENTS,), FLOAT32)
    assert arena.free_bytes == 10 * MIN_REUSED_BYTES
    assert small.nbytes == MIN_REUSED_BYTES


def test_small_and_empty_arrays_are_not_reused() -> None:
    arena = Arena(100 * MIN_REUSED_BYTES)
    for shape in ((), (0, 5), (10,)):
        array = arena.allocate(shape, FLOAT32)
        assert array.shape == shape
    del array
    assert arena.free_bytes == 0


def test_many_threads_never_share_memory() -> None:
    arena = Arena(4 * MIN_REUSED_BYTES)
    mixed = []

    def use(number: int) -> None:
        for _ in range(30):
            array = arena.allocate((ELEMENTS,), FLOAT32)
            array[::4096] = number
            if (array[::4096] != number).any():
                mixed.append(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    gc.collect()
    assert not mixed
    assert arena.free_bytes <= 4 * MIN_REUSED_BYTES
