"""Groups of tensors, updated element by element in blocks that threads share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, Array, DType, compute_dtype
from service.kernels._blocks import new_output, row_major, scratch, share_out
from service.kernels._narrow import load, room_for, store

BLOCK_LENGTH = 1 << 17
"""Elements of a block. Threads hand the interpreter lock over more often with smaller blocks, as `_blocks` says."""


def dtype_of(group: Mapping[str, Array]) -> DType:
    """Return the dtype that all tensors of the group have."""
    return next(iter(group.values())).dtype


def sum_of_squares(group: Mapping[str, Array]) -> float:
    """Return the sum of the squares of all tensors, in float64. Its bits do not depend on threads or on names."""
    blocks = _blocks_of(group)
    sums = [0.0] * len(blocks)

    def add(number: int) -> None:
        name, part = blocks[number]
        block = _flat(group[name])[part]
        wide = load(block, FLOAT64, 0)
        sums[number] = float(np.dot(wide, wide))

    share_out(add, len(blocks))
    return math.fsum(sums)


def _flat(tensor: Array) -> Array:
    return row_major(tensor).reshape(-1)


def _blocks_of(group: Mapping[str, Array]) -> list[tuple[str, slice]]:
    """Return the blocks of all tensors: the name of each block's tensor, and its place there."""
    return [
        (name, slice(start, start + BLOCK_LENGTH))
        for name, tensor in group.items()
        for start in range(0, tensor.size, BLOCK_LENGTH)
    ]


def update(
    formulas: Mapping[str, Callable[..., object]],
    groups: Sequence[Mapping[str, Array]],
    dtypes: Sequence[DType],
    temporaries: int = 0,
) -> Any:
    """Call `formulas[name](*blocks, *outputs, *temporaries)` on each block of the tensors of this name in the groups.

    Return a group for each dtype. The groups have the same names and shapes. All blocks of a call have one dtype, the
    widest, at least float32.
    """
    results: list[dict[str, Array]] = [
        {name: new_output(None, one.shape, dtype) for name, one in groups[0].items()} for dtype in dtypes
    ]
    dtype = np.result_type(*(compute_dtype(one) for one in (*map(dtype_of, groups), *dtypes)))
    flats = [{name: _flat(tensor) for name, tensor in group.items()} for group in groups]
    targets = [{name: tensor.reshape(-1) for name, tensor in group.items()} for group in results]
    blocks, given = _blocks_of(groups[0]), len(groups)

    def compute(number: int) -> None:
        name, part = blocks[number]
        inputs = [load(flat[name][part], dtype, slot) for slot, flat in enumerate(flats)]
        outputs = [target[name][part] for target in targets]
        size = len(outputs[0])
        wide = [room_for(output, dtype, given + slot) for slot, output in enumerate(outputs)]
        free = given + len(outputs)
        formulas[name](*inputs, *wide, *(scratch(free + slot, size, dtype) for slot in range(temporaries)))
        for result, output in zip(wide, outputs, strict=True):
            store(result, output, (free, free + 1))

    if blocks:
        share_out(compute, len(blocks))
    return results
