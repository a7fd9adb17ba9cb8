"""Products of matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import InvalidGraph, ShapeMismatch, shown
from service.graphs.nodes.elementwise import apply, converted, shared_dtype
from service.graphs.nodes.shapes import contiguous
from service.graphs.nodes.table import Function, function_of, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, check_work, claim

MAX_OPERANDS = 32
"""Operands of an Einsum: the search for a path takes time that grows with the fourth power of their number."""

SLOWNESS = 16
"""How much longer NumPy takes for a product in a sum of products than BLAS does, where it does not call it."""

_PRODUCT = OPERATORS["FusedMatMul"]


@function_of("MatMul")
def matmul(A: Array, B: Array, **attributes: Any) -> Array:
    """Return the product of FusedMatMul, with its attributes."""
    shared_dtype(A, B)
    assert _PRODUCT.multiply_adds is not None
    check_work("MatMul", _PRODUCT.multiply_adds(A, B, **attributes))
    product: Array = _PRODUCT.kernel(A, B, **attributes)
    return product


@function_of("Gemm")
def _gemm(
    A: Array,
    B: Array,
    C: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    if A.ndim != 2 or B.ndim != 2:
        raise ShapeMismatch(f"A has shape {list(A.shape)} and B {list(B.shape)}, but both must have two dimensions")
    product = matmul(A, B, alpha=alpha, transA=transA, transB=transB)
    if C is None:
        return product
    if np.broadcast_shapes(C.shape, product.shape) != product.shape:
        problem = f"C has shape {list(C.shape)}, but must broadcast to that of A @ B, {list(product.shape)}"
        raise ShapeMismatch(problem)
    if beta == 0:
        return product
    return apply(np.add, product, C if beta == 1 else apply(lambda x, out: np.multiply(x, beta, out=out), C))


@maker("Einsum")
def _einsum(node: Node) -> Function:
    if len(node.inputs) > MAX_OPERANDS:
        raise InvalidGraph(f"there are {len(node.inputs)} operands; the limit is {MAX_OPERANDS}", limit=MAX_OPERANDS)
    return partial(einsum, node.attributes["equation"])


def einsum(equation: str, *operands: Array) -> Array:
    """Return the sum of products, taken two operands at a time. Raises `TensorTooLarge` for too much work."""
    *terms, result = letters(equation, operands)
    dtype = shared_dtype(*operands)
    claim(sum(one.size for one in operands) * compute_dtype(dtype).itemsize)
    wide = [one.astype(compute_dtype(dtype), copy=False) for one in operands]
    given = f"{','.join(terms)}->{result}"
    path, _ = np.einsum_path(given, *wide, optimize="greedy")
    _check_path(path[1:], terms, result, operands)
    return converted(contiguous(np.asarray(np.einsum(given, *wide, optimize=path))), dtype)


def letters(equation: str, operands: Sequence[Array]) -> list[str]:
    """Return the letters of each operand and of the result, with letters in place of an ellipsis."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        result = "..." * ("..." in left) + "".join(sorted(one for one in {*left} - {*",."} if left.count(one) == 1))
    if len(terms) != len(operands):
        raise ShapeMismatch(f"equation is {shown(equation)}, with {len(terms)} operands, but there are {len(operands)}")
    free = [one for one in string.ascii_letters if one not in equation]
    ranks = [one.ndim - len(term.replace("...", "")) for one, term in zip(operands, terms, strict=True)]
    longest = max([rank for rank, term in zip(ranks, terms, strict=True) if "..." in term], default=0)
    spread = [
        term.replace("...", "".join(free[longest - rank : longest])) for rank, term in zip(ranks, terms, strict=True)
    ]
    return [*spread, result.replace("...", "".join(free[:longest]))]


def _check_path(path: Sequence[Any], terms: Sequence[str], result: str, operands: Sequence[Array]) -> None:
    """Raise unless the products along the path are bounded, and claim the memory of their results."""
    left, work, size = [*terms], 0, 0
    lengths: dict[str, int] = {}
    for term, one in zip(terms, operands, strict=True):
        lengths.update({k: max(n, lengths.get(k, 0)) for k, n in zip(term, one.shape, strict=True)})
    for places in path:
        taken = {*"".join(left[place] for place in places)}
        left = [term for place, term in enumerate(left) if place not in places]
        kept = taken & {*"".join(left), *result}
        left.append("".join(kept))
        work += math.prod(lengths[one] for one in taken)
        size += math.prod(lengths[one] for one in kept)
    check_work("Einsum", SLOWNESS * work)
    claim(2 * size * operands[0].itemsize)
