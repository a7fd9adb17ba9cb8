"""The gradients of products of matrices."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from service.dtypes import Array
from service.graphs.gradients.arrays import rounded_once, unbroadcast
from service.graphs.gradients.tape import Tape, gradients, rule
from service.graphs.nodes.products import einsum, letters
from service.graphs.plan import Node
from service.kernels import claim
from service.kernels.matmul import fused_matmul


def _d_left(dY: Array, shape: tuple[int, ...], B: Array) -> Array:
    if B.ndim == 1:
        dY, B = dY[..., None], B[:, None]
    if len(shape) == 1:
        return unbroadcast(fused_matmul(dY[..., None, :], B, transB=1)[..., 0, :], shape)
    if len(shape) == 2 < B.ndim:  # one product of all columns
        columns = math.prod(dY.shape[:-2]) * dY.shape[-1]
        claim(dY.nbytes + B.nbytes)
        dY, B = (np.moveaxis(one, -2, 0).reshape(one.shape[-2], columns) for one in (dY, B))
    return unbroadcast(fused_matmul(dY, B, transB=1), shape)


def _d_right(dY: Array, A: Array, shape: tuple[int, ...]) -> Array:
    if A.ndim == 1:
        dY, A = dY[..., None, :] if len(shape) > 1 else dY[None], A[None]
    if len(shape) == 1:
        dY = dY[..., None]
    if len(shape) <= 2:  # one product of all rows, as for a layer's weights
        A, rows = np.broadcast_to(A, (*dY.shape[:-1], A.shape[-1])), math.prod(dY.shape[:-1])
        A, dY = (one.reshape(rows, one.shape[-1]) for one in (A, dY))
    return unbroadcast(fused_matmul(A, dY, transA=1), (*shape, 1)[: max(2, len(shape))]).reshape(shape)


gradients("MatMul", _d_left, _d_right)


@rule("FusedMatMul", domain="com.microsoft")
def _fused_matmul(tape: Tape, node: Node, dY: str) -> list[str]:
    of_A, of_B = (tuple(node.attributes.get(name + one, 0) for name in ("trans", "transBatch")) for one in "AB")
    step = partial(_fused, node.attributes.get("alpha", 1.0), of_A, of_B)
    return [tape.call(partial(step, place), dY, *node.inputs) for place in (0, 1)]


def _fused(
    alpha: float, of_A: tuple[int, int], of_B: tuple[int, int], place: int, dY: Array, A: Array, B: Array
) -> Array:
    dY, left, right = _scaled(dY, alpha), _turned(A, *of_A), _turned(B, *of_B)
    if place == 0:
        return _turned_back(_d_left(dY, left.shape, right), *of_A)
    return _turned_back(_d_right(dY, left, right.shape), *of_B)


def _turned(tensor: Array, transposed: int, batch_behind: int) -> Array:
    tensor = np.moveaxis(tensor, 0, -2) if batch_behind else tensor
    return tensor.swapaxes(-1, -2) if transposed and tensor.ndim > 1 else tensor


def _turned_back(tensor: Array, transposed: int, batch_behind: int) -> Array:
    tensor = tensor.swapaxes(-1, -2) if transposed and tensor.ndim > 1 else tensor
    return np.moveaxis(tensor, -2, 0) if batch_behind else tensor


@rounded_once
def _scaled(dY: Array, alpha: float) -> Array:
    return dY * alpha


@rule("Gemm")
def _gemm(tape: Tape, node: Node, dY: str) -> list[str]:
    A, B, *C = node.inputs
    alpha, beta = (node.attributes.get(name, 1.0) for name in ("alpha", "beta"))
    a, b = (node.attributes.get(name, 0) for name in ("transA", "transB"))
    product = partial(fused_matmul, alpha=alpha)
    dA = [(dY, B, {"transB": 1 - b}), (B, dY, {"transA": b, "transB": 1})][a]
    dB = [(A, dY, {"transA": 1 - a}), (dY, A, {"transA": 1, "transB": a})][b]
    gradients = [tape.call(partial(product, **flags), left, right) for left, right, flags in (dA, dB)]
    if C and C[0]:
        scaled = dY if beta == 1 else tape.call(partial(_scaled, alpha=beta), dY)
        gradients.append(tape.like(scaled, C[0]))
    return gradients


@rule("Einsum")
def _einsum(tape: Tape, node: Node, dY: str) -> list[str]:
    equation = node.attributes["equation"]
    return [tape.call(partial(_d_operand, equation, place), dY, *node.inputs) for place in range(len(node.inputs))]


def _d_operand(equation: str, place: int, dY: Array, *operands: Array) -> Array:
    """Return the gradient of one operand: the product of dY and the others, with the letters of the operand left."""
    *terms, result = letters(equation, operands)
    operand, term = operands[place], terms[place]
    others = [one for k, one in enumerate(operands) if k != place]
    known = {*result, *"".join(terms[:place] + terms[place + 1 :])}
    kept = "".join(letter for letter in dict.fromkeys(term) if letter in known)
    gradient = einsum(",".join([result, *terms[:place], *terms[place + 1 :]]) + f"->{kept}", dY, *others)
    unique = "".join(dict.fromkeys(term))
    sizes = dict(zip(term, operand.shape, strict=True))
    # What only this operand has, the forward product sums: each place there gets the same.
    spread = gradient[tuple(slice(None) if one in kept else None for one in unique)]
    full = [sizes[one] if n == 1 else n for one, n in zip(unique, spread.shape, strict=True)]
    gradient = unbroadcast(np.broadcast_to(spread, full), tuple(sizes[one] for one in unique))
    if unique == term:
        return gradient
    diagonal = np.zeros(operand.shape, gradient.dtype)
    np.einsum(f"{term}->{unique}", diagonal)[...] = gradient
    return diagonal
