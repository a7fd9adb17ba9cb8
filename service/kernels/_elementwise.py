"""Kernels whose output depends, element by element, on the same element of each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from service.dtypes import Array, compute_dtype
from service.kernels._blocks import block_length, new_output, row_major, scratch, share_out
from service.kernels._narrow import narrow, widen

T = TypeVar("T", bound=Array)

LENGTH_STEP = 1024
"""Elements: lengths of blocks are multiples of this. If the tensor begins at a cache line, so does every block."""


def elementwise(
    formula: Callable[..., None], inputs: Sequence[Array], out: T | None, *, temporaries: int, row: Array | None = None
) -> T:
    """Call `formula(*blocks, out, *temporaries)` on every block of `inputs`, which share shape, and dtype if floating.

    `formula` writes its result to `out`. On the way it may write to `out` and to the scratch arrays `temporaries`. All
    blocks are flat. With a `row`, 1-D of the length of the last dimension, the formula gets a piece of it after the
    blocks: its length divides theirs.
    """
    result, tensors = prepare(inputs, out)
    flats, target = [tensor.reshape(-1) for tensor in tensors], result.reshape(-1)
    dtype, length = compute_dtype(result.dtype), block_length(result.dtype, temporaries)
    is_narrow = dtype != result.dtype
    if target.size <= length and not is_narrow and row is None:
        with np.errstate(all="ignore"):
            formula(*flats, target, *(scratch(slot, target.size, dtype) for slot in range(temporaries)))
        return result

    if row is not None and np.may_share_memory(row, result):
        row = row.copy()
    length = _balanced(target.size, length)
    columns = 1 if row is None else max(1, row.size)
    height = columns * max(1, length // columns)  # elements of whole rows: a block's, unless one row is longer
    pieces = -(-height // length)

    def compute(number: int) -> None:
        rows, piece = divmod(number, pieces)
        start = rows * height + piece * length
        part = slice(start, min(start + length, (rows + 1) * height))
        blocks, block_out = [flat[part] for flat in flats], target[part]
        spare = [scratch(slot, block_out.size, dtype) for slot in range(temporaries)]
        bias = [] if row is None else [row[piece * length :][: block_out.size].astype(dtype, copy=False)]
        if is_narrow:
            wide_out = scratch(temporaries, block_out.size, dtype)
            wide = [
                widen(block, temporaries + 1 + k) if block.dtype == result.dtype else block
                for k, block in enumerate(blocks)
            ]
            formula(*wide, *bias, wide_out, *spare)
            narrow(wide_out, block_out, (temporaries + 1, temporaries + 2))  # no longer the inputs'
        else:
            formula(*blocks, *bias, block_out, *spare)

    share_out(compute, -(-target.size // height) * pieces)
    return result


def _balanced(size: int, length: int) -> int:
    """Return a length of blocks up to `length` that leaves two threads the same work, if there are several blocks."""
    count = -(-size // length)
    if count < 2:
        return length
    count += count % 2
    return -(-size // (count * LENGTH_STEP)) * LENGTH_STEP


def bits(block: Array) -> Array:
    """Return the bits of float32 or float64 numbers as unsigned integers, in the same memory."""
    return block.view(np.uint32 if block.itemsize == 4 else np.uint64)


def prepare(inputs: Sequence[Array], out: T | None) -> tuple[T, list[Array]]:
    """Return an array for a result like `inputs[0]`, and the inputs, row-major and outside the result's memory."""
    result: T = new_output(out, inputs[0].shape, inputs[0].dtype)
    return result, apart(inputs, out)


def apart(inputs: Sequence[Array], out: Array | None) -> list[Array]:
    """Return the inputs, row-major and outside the memory of `out`."""
    tensors = list(inputs)
    if out is not None:
        tensors = [array.copy() if np.may_share_memory(array, out) else array for array in tensors]
    return [*map(row_major, tensors)]
