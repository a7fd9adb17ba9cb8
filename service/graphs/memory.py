"""The memory that a planned graph holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from sys import getrefcount, getsizeof
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from service.graphs.plan import paced
from service.kernels import OPERATORS


def bytes_of(graph: object) -> int:
    """Return the bytes of all that a graph holds and that it does not share with others."""
    return sum(map(getsizeof, paced(_held(graph))))


def _held(graph: object) -> Iterator[object]:
    """Yield all that a graph holds and that it does not share with others, once."""
    seen, left = {*map(id, OPERATORS.values())}, list[Any]([graph])
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, ModuleType | CodeType | type):
            continue
        if getrefcount(one) > 3:  # more than `one`, the argument and an owner
            seen.add(id(one))
        yield one
        parts = one.__closure__ if isinstance(one, FunctionType) else one
        left += [one.base] if isinstance(one, np.ndarray) else gc.get_referents(parts)
