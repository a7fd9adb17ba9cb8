"""The gradients of attention, which computes its probabilities again: they take more memory than its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from service.dtypes import FLOAT64, INT64, Array
from service.graphs.gradients.arrays import unbroadcast
from service.graphs.gradients.tape import Tape, rule
from service.graphs.nodes.attention import Options, attend, covered_by, heads, merged, pairs, rotated, scale_of, split
from service.graphs.nodes.products import matmul
from service.graphs.plan import Node
from service.kernels import claim
from service.kernels.gather import gather_grad
from service.kernels.softmax import softmax_grad_13


@rule("Attention")
def _attention(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    count = 4 if len(node.inputs) > 3 and node.inputs[3] in tape.on_the_way else 3
    step = partial(_gradients, node.attributes, count)
    gradients: Sequence[str] = tape.call(step, dY, *node.inputs, outputs=count)
    return gradients


def _gradients(
    options: Options, count: int, dY: Array, Q: Array, K: Array, V: Array, *others: Array | None
) -> tuple[Array, ...]:
    q, k, v = heads(Q, K, V, options)
    probabilities, tanh = attend(q, k, options, *others)
    mask = others[0] if count == 4 else None
    dy = split(dY, q.shape[1])
    dv = matmul(probabilities, dy, transA=1)
    scores = softmax_grad_13(matmul(dy, v, transB=1), probabilities)
    d_mask = [] if mask is None else [unbroadcast(scores[covered_by(mask, scores.shape)], mask.shape)]
    if tanh is not None:
        scores = scores * (1 - tanh * tanh)
    dq, dk = (matmul(scores, one, transA=flip, alpha=scale_of(q, options)) for one, flip in ((k, 0), (q, 1)))
    return merged(dq, Q.ndim), *(_of_groups(one, like) for one, like in ((dk, K), (dv, V))), *d_mask


def _of_groups(gradient: Array, tensor: Array) -> Array:
    """Return the gradient of the keys or values, whose heads several heads of queries share."""
    batch, count, length, size = gradient.shape
    own = tensor.shape[1] if tensor.ndim == 4 else tensor.shape[2] // size
    grouped = gradient.reshape(batch, own, count // own, length, size)
    summed = unbroadcast(grouped, (batch, own, 1, length, size)).reshape(batch, own, length, size)
    return merged(summed, tensor.ndim)


@rule("RotaryEmbedding")
def _rotary_embedding(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    X, cos, *_ = node.inputs
    step, places = partial(_of_table, node.attributes), node.inputs[3:]
    tables = [tape.call(partial(step, number), dY, X, tape.shape(cos), *places) for number in (0, 1)]
    return [tape.call(partial(rotated, node.attributes, sign=-1), dY, *node.inputs[1:]), *tables]


def _of_table(
    options: Options, number: int, dY: Array, X: Array, shape: tuple[int, ...], places: Array | None = None
) -> Array:
    """Return the gradient of the cosines, number 0, or of the sines, 1."""
    claim(4 * FLOAT64.itemsize * X.size)
    given = (split(one.astype(FLOAT64), options.get("num_heads", 0)) for one in (dY, X))
    (d1, d2), (x1, x2) = (pairs(one, options) for one in given)
    total: Array = (d2 * x1 - d1 * x2 if number else d1 * x1 + d2 * x2).sum(axis=1)
    return (total if places is None else gather_grad(np.array(shape, INT64), places, total)).astype(dY.dtype)
