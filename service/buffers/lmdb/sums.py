"""Gradients that are stored as they came, and are sums as well."""

from __future__ import annotations

import numpy as np

from service.buffers.gradients import add_piece
from service.buffers.lmdb.slots import CHUNK_BYTES
from service.buffers.record import Spec
from service.dtypes import Array


def may_be_sum(spec: Spec, array: Array) -> bool:
    """Return whether the array looks like a value, so that its bytes may be those of its sum with zeros."""
    return array.shape == spec.shape and array.dtype == spec.dtype and bool(array.flags.c_contiguous)


def is_sum(array: Array, start: int, stop: int) -> bool:
    """Return whether these bytes of an array are those of its sum with zeros, as values have it: there is no -0."""
    size, spec = array.dtype.itemsize, Spec(array.shape, array.dtype)
    flat, memory = array.reshape(-1)[start // size : stop // size], np.empty(CHUNK_BYTES, np.uint8).view(array.dtype)
    for first in range(0, flat.size, memory.size):
        piece = flat[first : first + memory.size]
        total = memory[: piece.size]
        add_piece(spec, total, 0, piece, 1.0, overwrite=False)
        if not np.array_equal(piece.view(f"u{size}"), total.view(f"u{size}")):
            return False
    return True
