"""Products of matrices. Source of the semantics: FusedMatMul of ONNX Runtime 1.19.2."""

from __future__ import annotations

import math

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import ShapeMismatch
from service.kernels._blocks import block_length, new_output, row_major, share_out, spare_memory
from service.kernels._op import op
from service.kernels._types import Bit, Rank2, T

FAMILY = "Arithmetic and sums"

PIECE_MULTIPLY_ADDS = 1 << 26
"""Multiplications and additions of a piece: some milliseconds, which outweigh the start of a helper."""

MIN_PIECE_LENGTH = 64
"""The fewest rows or columns of a piece: BLAS is slow with fewer."""


def _multiply_adds(
    A: Array, B: Array, *, transA: int = 0, transB: int = 0, transBatchA: int = 0, transBatchB: int = 0, **_: object
) -> int:
    a, b = _turned(A, transA, transBatchA), _turned(B, transB, transBatchB)
    if not (A.ndim and B.ndim):
        return 0  # the call will be refused
    columns = b.shape[-1] if b.ndim > 1 else 1
    lead = max(a.ndim, b.ndim)
    pairs = zip((1,) * (lead - a.ndim) + a.shape[:-2], (1,) * (lead - b.ndim) + b.shape[:-2], strict=False)
    batches = math.prod(0 if 0 in pair else max(pair) for pair in pairs)
    return batches * math.prod(a.shape[-2:-1]) * columns * max(1, a.shape[-1])


@op(
    "FusedMatMul",
    outputs="Y",
    example={"A": [[1.0, 2.0], [3.0, 4.0]], "B": [[1.0, 0.5], [-1.0, 2.0]], "alpha": 0.5, "transB": 1},
    multiply_adds=_multiply_adds,
)
def fused_matmul(
    A: Rank2[T],
    B: Rank2[T],
    /,
    *,
    alpha: float = 1.0,
    transA: Bit = 0,
    transB: Bit = 0,
    transBatchA: Bit = 0,
    transBatchB: Bit = 0,
) -> Rank2[T]:
    """Y = alpha * A @ B, where transA and transB swap the last two dimensions of A and B first.

    A [.., M, K], B [.., K, N] -> Y [.., M, N]: the dimensions before the last two broadcast. A of one dimension is a
    row, and B of one dimension a column; Y then lacks that dimension. `transBatchA` and `transBatchB` move the first
    dimension behind those of the batch before all else: A [M, .., K] is read as [.., M, K]. They need A and B of one
    rank, 3 or more. Without terms, K = 0, Y is 0. float16 and bfloat16 are computed in float32 and rounded once.
    Raises `ShapeMismatch`, and `TensorTooLarge` for work of more than about a minute.
    """
    for name, tensor in (("A", A), ("B", B)):
        if tensor.ndim == 0:
            raise ShapeMismatch(f"{name} is a scalar, but must have a dimension", tensor=name)
    if (transBatchA or transBatchB) and (A.ndim != B.ndim or A.ndim < 3):
        problem = "transBatchA and transBatchB need A and B of the same rank, 3 or more"
        raise ShapeMismatch(f"A has rank {A.ndim} and B rank {B.ndim}, but {problem}", tensor="B")
    a, b = _turned(_wide(A), transA, transBatchA), _turned(_wide(B), transB, transBatchB)
    rows, columns = a if a.ndim > 1 else a[None], b if b.ndim > 1 else b[:, None]
    if rows.shape[-1] != columns.shape[-2]:
        problem = f"A has {rows.shape[-1]} columns and B {columns.shape[-2]} rows after their transpositions"
        raise ShapeMismatch(f"{problem}, but these must be equal: their shapes are {_shapes(A, B)}", tensor="B")
    try:
        batch = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    except ValueError:
        problem = f"The shapes of A and B are {_shapes(A, B)}, but the dimensions of their batches must broadcast"
        raise ShapeMismatch(problem, tensor="B") from None
    shape = (*batch, *rows.shape[-2:-1][: a.ndim - 1], *columns.shape[-1:][: b.ndim - 1])
    Y: T = new_output(None, shape, A.dtype)
    wide: Array = Y if a.dtype == A.dtype else spare_memory(shape, a.dtype)
    if columns.ndim == 2 and rows.flags.c_contiguous:  # one product in place of many
        batch, rows = (), rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    if Y.size:
        _multiply(rows, columns, wide.reshape(*batch, rows.shape[-2], columns.shape[-1]), alpha)
    if wide is not Y:
        _round(wide.reshape(-1), Y.reshape(-1))
    return Y


def _shapes(A: Array, B: Array) -> str:
    return f"{list(A.shape)} and {list(B.shape)}"


def _turned(tensor: Array, transpose: int, transpose_batch: int) -> Array:
    """Return a view with the dimensions in the order of a product's."""
    if transpose_batch and tensor.ndim > 2:
        tensor = np.moveaxis(tensor, 0, -2)
    return tensor.swapaxes(-1, -2) if transpose and tensor.ndim > 1 else tensor


def _wide(tensor: Array) -> Array:
    """Return the tensor in the dtype of the arithmetic, row-major: BLAS then takes every order of dimensions."""
    dtype = compute_dtype(tensor.dtype)
    if dtype == tensor.dtype:
        return row_major(tensor)
    wide = spare_memory(tensor.shape, dtype)
    wide[...] = tensor
    return wide


def _multiply(a: Array, b: Array, Y: Array, alpha: float) -> None:
    """Y = alpha * a @ b, in pieces along the longest of the dimensions of the batch, the rows and the columns."""
    *batch, height, width = Y.shape
    lengths = [*batch, height // MIN_PIECE_LENGTH, width // MIN_PIECE_LENGTH]
    axis = lengths.index(max(lengths))
    count = max(1, min(lengths[axis], Y.size * a.shape[-1] // PIECE_MULTIPLY_ADDS))
    step = -(-Y.shape[axis] // count)
    if count > 1:
        a, b = (np.broadcast_to(tensor, (*batch, *tensor.shape[-2:])) for tensor in (a, b))

    def multiply(number: int) -> None:
        rows, columns, target = a, b, Y
        if count > 1:
            part = slice(number * step, (number + 1) * step)
            place = [part if k == axis else slice(None) for k in range(Y.ndim)]
            rows, columns = a[(*place[:-1], slice(None))], b[(*place[:-2], slice(None), place[-1])]
            target = Y[tuple(place)]
        np.matmul(rows, columns, out=target)
        if alpha != 1:
            np.multiply(target, alpha, out=target)

    share_out(multiply, -(-Y.shape[axis] // step))


def _round(wide: Array, Y: Array) -> None:
    length = block_length(Y.dtype)

    def convert(number: int) -> None:
        part = slice(number * length, (number + 1) * length)
        Y[part] = wide[part]

    share_out(convert, -(-Y.size // length))
