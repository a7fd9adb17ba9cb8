"""Products of matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from service.dtypes import Array, compute_dtype
from service.graphs.nodes.elementwise import apply, narrowed
from service.graphs.nodes.shapes import contiguous
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, check_work

_PRODUCT = OPERATORS["FusedMatMul"]


def matmul(A: Array, B: Array, **attributes: Any) -> Array:
    """Return the product of FusedMatMul, with its attributes."""
    assert _PRODUCT.multiply_adds is not None
    check_work("MatMul", _PRODUCT.multiply_adds(A, B, **attributes))
    product: Array = _PRODUCT.kernel(A, B, **attributes)
    return product


@maker("MatMul")
def _matmul(node: Node) -> Function:
    return matmul


@maker("Gemm")
def _gemm(node: Node) -> Function:
    given = node.attributes
    attributes = {name: given[name] for name in ("alpha", "transA", "transB") if name in given}
    beta = given.get("beta", 1.0)

    def gemm(A: Array, B: Array, C: Array | None = None) -> Array:
        product = matmul(A, B, **attributes)
        if C is None or beta == 0:
            return product
        return apply(np.add, product, C if beta == 1 else apply(lambda x, out: np.multiply(x, beta, out=out), C))

    return gemm


@maker("Einsum")
def _einsum(node: Node) -> Function:
    equation = node.attributes["equation"].replace(" ", "")

    def einsum(*arrays: Array) -> Array:
        dtype = arrays[0].dtype
        wide = [one.astype(compute_dtype(dtype), copy=False) for one in arrays]
        path, _ = np.einsum_path(equation, *wide, optimize="greedy")
        result = contiguous(np.einsum(equation, *wide, optimize=path))
        return result if result.dtype == dtype else narrowed(result, dtype)

    return einsum
