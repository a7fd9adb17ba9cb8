"""Kernels whose output depends, element by element, on the same element of each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from service.dtypes import Array, compute_dtype
from service.kernels._blocks import block_length, new_output, scratch, share_out
from service.kernels._narrow import narrow, widen

T = TypeVar("T", bound=Array)


def elementwise(formula: Callable[..., None], inputs: Sequence[T], out: T | None, *, temporaries: int) -> T:
    """Call `formula(*blocks, out, *temporaries)` on every block of `inputs`, which share shape and dtype.

    `formula` writes its result to `out`. On the way it may write to `out` and to the scratch arrays `temporaries`.
    """
    result, tensors = prepare(inputs, out)
    flats, target = [tensor.reshape(-1) for tensor in tensors], result.reshape(-1)
    dtype, length = compute_dtype(result.dtype), block_length(result.dtype, temporaries)
    is_narrow = dtype != result.dtype
    if target.size <= length and not is_narrow:
        with np.errstate(all="ignore"):
            formula(*flats, target, *(scratch(slot, target.size, dtype) for slot in range(temporaries)))
        return result

    def compute(number: int) -> None:
        part = slice(number * length, (number + 1) * length)
        blocks, block_out = [flat[part] for flat in flats], target[part]
        spare = [scratch(slot, block_out.size, dtype) for slot in range(temporaries)]
        if is_narrow:
            wide_out = scratch(temporaries, block_out.size, dtype)
            formula(*(widen(block, temporaries + 1 + k) for k, block in enumerate(blocks)), wide_out, *spare)
            narrow(wide_out, block_out, (temporaries + 1, temporaries + 2))  # no longer the inputs'
        else:
            formula(*blocks, block_out, *spare)

    share_out(compute, -(-target.size // length))
    return result


def prepare(inputs: Sequence[T], out: T | None) -> tuple[T, list[Array]]:
    """Return an array for a result like `inputs[0]`, and the inputs, row-major and outside the result's memory."""
    result = new_output(out, inputs[0].shape, inputs[0].dtype)
    tensors: list[Array] = list(inputs)
    if out is not None:
        tensors = [array.copy() if np.may_share_memory(array, out) else array for array in tensors]
    return result, [
        array if array.flags.c_contiguous else np.ascontiguousarray(array).reshape(array.shape) for array in tensors
    ]
