"""A tensor's bytes, little-endian and row-major: viewed, never copied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.dtypes import BOOL, Array, DType
from service.errors import InvalidTensor


def view(place: str, name: str, data: bytes | memoryview, dtype: DType, shape: Sequence[int]) -> Array:
    """The tensor `name` whose bytes, at `place` in the request, are `data`. Raises `InvalidTensor`.

    It is a read-only view, and a copy only where the bytes lie at an address that is no multiple of the element's size,
    which NumPy computes with slowly.
    """
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise wrong_size(place, name, len(data), dtype, shape)
    if dtype == BOOL and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise InvalidTensor(f"{place} has a byte that is neither 0 nor 1, which bool does not allow", tensor=name)
    return view_at(data, 0, dtype, shape)


def view_at(data: bytes | memoryview, start: int, dtype: DType, shape: Sequence[int]) -> Array:
    """What `view` gives, of bytes that are known to be enough from `start` on, and fit."""
    array: Array = np.ndarray(shape, dtype, data, start)
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    return array


def wrong_size(place: str, name: str, size: int, dtype: DType, shape: Sequence[int]) -> InvalidTensor:
    """The error of a tensor that has `size` bytes."""
    expected = math.prod(shape) * dtype.itemsize
    return InvalidTensor(
        f"{place} holds {size} bytes, but {dtype} of shape {list(shape)} takes {expected}", tensor=name
    )


def bytes_of(tensor: Array) -> memoryview:
    """The tensor's bytes: a view, unless its rows are scattered."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
