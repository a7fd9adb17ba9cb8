"""A tensor's bytes, little-endian and row-major: viewed where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.dtypes import BOOL, Array, DType
from service.errors import InvalidTensor

_COUNTED_BYTES = 1 << 18
"""Bytes to compare at once when counting: the result of the comparison fits into the cache."""


def count(body: bytes | bytearray | memoryview, byte: bytes) -> int:
    """Return `body.count(byte)`, four times as fast."""
    array, step = np.frombuffer(body, np.uint8), _COUNTED_BYTES
    return sum(int(np.count_nonzero(array[k : k + step] == ord(byte))) for k in range(0, array.size, step))


def view(place: str, name: str, data: bytes | memoryview, dtype: DType, shape: Sequence[int]) -> Array:
    """Return the tensor `name` as a read-only view of `data`. Raises `InvalidTensor`, which quotes `place`.

    The tensor is a copy if the address is not a multiple of the element's size: NumPy is slow on unaligned arrays.
    """
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise wrong_size(place, name, len(data), dtype, shape)
    if dtype == BOOL and np.frombuffer(data, np.uint8).max(initial=0) > 1:
        raise InvalidTensor(f"{place} has a byte that is neither 0 nor 1, which bool does not allow", tensor=name)
    return view_at(data, 0, dtype, shape)


def view_at(data: bytes | memoryview, start: int, dtype: DType, shape: Sequence[int]) -> Array:
    """Return what `view` returns, for the bytes of `data` from `start` on, without its checks."""
    array: Array = np.ndarray(shape, dtype, data, start)
    if not array.flags.aligned:
        array = array.copy()
    array.setflags(write=False)
    return array


def wrong_size(place: str, name: str, size: int, dtype: DType, shape: Sequence[int]) -> InvalidTensor:
    """Return the error for a tensor of `size` bytes, which are too many or too few."""
    expected = math.prod(shape) * dtype.itemsize
    problem = f"{place} holds {size} bytes, but {dtype} of shape {list(shape)} takes {expected}"
    return InvalidTensor(problem, tensor=name)


def bytes_of(tensor: Array) -> memoryview:
    """Return the tensor's bytes: a view if it is C-contiguous, else a copy."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
