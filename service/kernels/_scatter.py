"""Shapes and indices that come as tensors, and the ordered scatter-add."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from service.dtypes import INT64, Array, DType, compute_dtype
from service.errors import IndexOutOfRange, InvalidTensor, TooManyDimensions
from service.kernels._blocks import block_length, claim, share_out, spare_memory
from service.kernels._op import MAX_MULTIPLY_ADDS
from service.limits import MAX_RANK

UNIQUE_BYTES = 40
"""Bytes that NumPy takes to find out whether an index is the first of its value."""

SPARSE_NUMBERS_PER_INDEX = 32
"""Numbers of the output for each index from which on it is faster to find first which rows occur."""


def output_size(shape: Array) -> int:
    """Return the elements of an output of this shape, which nobody has checked, as far as they count as work."""
    return min(abs(math.prod(shape.ravel()[:MAX_RANK].tolist())), MAX_MULTIPLY_ADDS)


def read_shape(shape: Array) -> tuple[int, ...]:
    """Return the dimensions that the tensor `shape` holds. Raises `TooManyDimensions` and `InvalidTensor`."""
    if shape.size > MAX_RANK:
        raise TooManyDimensions(
            f"The output has {shape.size} dimensions; the limit is {MAX_RANK}, or GRADSERVE_MAX_DIMENSIONS if smaller",
            limit=MAX_RANK,
        )
    dims = tuple(shape.ravel().tolist())
    for place, dim in enumerate(dims):
        if dim < 0:
            raise InvalidTensor(f"shape[{place}] is {dim}, but a dimension must be 0 or more", tensor="shape")
    return dims


def flat_indices(indices: Array, size: int) -> Array:
    """Return `indices` of a dimension of `size`, flat and counted from the front. Raises `IndexOutOfRange`."""
    flat = indices.ravel()
    if not flat.size:
        return flat
    lowest = flat.min()
    if lowest < -size or flat.max() >= size:
        place = int(((flat < -size) | (flat >= size)).argmax())
        subscripts = "".join(f"[{k}]" for k in np.unravel_index(place, indices.shape))
        allowed = f"must be in [{-size}, {size - 1}]" if size else "the dimension that it indexes is empty"
        problem = f"indices{subscripts} is {flat[place]}, but {allowed}"
        raise IndexOutOfRange(problem, tensor="indices", index=int(flat[place]))
    if lowest < 0:
        given, flat = flat, spare_memory(flat.shape, INT64)
        flat[...] = given
        np.add(flat, size, out=flat, where=flat < 0)
    return flat


def clear(output: Array) -> None:
    """Fill the output with zeros."""
    flat, length = output.reshape(-1), block_length(output.dtype)

    def clear(number: int) -> None:
        flat[number * length : (number + 1) * length] = 0

    share_out(clear, -(-flat.size // length))


def _zeros(shape: tuple[int, ...], dtype: DType) -> Array:
    zeros = spare_memory(shape, dtype)
    zeros[...] = 0
    return zeros


def scatter_add(output: Array, targets: Array, grad: Array) -> None:
    """output[o, targets[k]] += grad[o, k], k in order; output is [outer, size, inner], grad [outer, count, inner].

    The 16-bit floats are added in float32. Unless most targets occur, the sums have rows for those that do.
    """
    outer, size, inner = output.shape
    count, dtype = targets.size, compute_dtype(grad.dtype)
    occurring: Array | slice = slice(None)
    if dtype != grad.dtype and size > count and size * inner > SPARSE_NUMBERS_PER_INDEX * count:
        claim(UNIQUE_BYTES * count)
        occurring, targets = np.unique(targets, return_inverse=True)
        size = len(occurring)
    height = min(outer, max(1, block_length(grad.dtype) // (count * inner)))
    if height > 1:
        targets = (np.arange(height)[:, None] * size + targets).ravel()

    def add(number: int) -> None:
        target, source = (tensor[number * height : (number + 1) * height] for tensor in (output, grad))
        sums = target if dtype == grad.dtype else _zeros((len(source), size, inner), dtype)
        rows = source.reshape(-1, inner)
        add_rows(sums.reshape(-1, inner), targets[: len(rows)], rows.__getitem__)
        if sums is not target:
            target[:, occurring] = sums

    share_out(add, -(-outer // height))


def add_rows(sums: Array, targets: Array, rows: Callable[[slice], Array]) -> None:
    """sums[targets[k]] += row k, k in order, in blocks of rows; sums is [size, width].

    This is the product of `rows` with a sparse matrix that has a single 1 in each column. For rows of single numbers
    NumPy has a loop of its own.
    """
    size, width = sums.shape
    height = min(len(targets), max(1, block_length(sums.dtype) // width))
    # The private loop behind scipy's `csc_array @ dense`, which adds into existing memory. The public product makes a
    # new array of the output's size and takes 3 to 100 times as long. tests/kernels/test_scipy_private.py fails if it
    # changes. Most servers never need it.
    from scipy.sparse._sparsetools import csc_matvecs

    if width > 1:
        columns, ones = np.arange(height + 1), np.ones(height, sums.dtype)
    for start in range(0, len(targets), height or 1):
        part = slice(start, start + height)
        places = targets[part].astype(np.int64, copy=False)
        block = np.ascontiguousarray(rows(part), sums.dtype).reshape(-1)
        if width == 1:
            np.add.at(sums.reshape(-1), places, block)
        else:
            count = len(places)
            csc_matvecs(size, count, width, columns[: count + 1], places, ones[:count], block, sums.reshape(-1))
