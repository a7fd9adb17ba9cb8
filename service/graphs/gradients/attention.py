"""The gradients of attention, which computes its probabilities again: they take more memory than its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from service.dtypes import Array
from service.graphs.gradients.arrays import unbroadcast
from service.graphs.gradients.tape import Tape, rule
from service.graphs.nodes.attention import Options, attend, heads, merged, scale_of, split
from service.graphs.nodes.products import matmul
from service.graphs.plan import Node
from service.kernels.softmax import softmax_grad_13


@rule("Attention")
def _attention(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    count = 4 if len(node.inputs) > 3 and node.inputs[3] in tape.on_the_way else 3
    step = partial(_gradients, node.attributes, count)
    gradients: Sequence[str] = tape.call(step, dY, *node.inputs, outputs=count)
    return gradients


def _gradients(
    options: Options, count: int, dY: Array, Q: Array, K: Array, V: Array, mask: Array | None = None
) -> tuple[Array, ...]:
    q, k, v = heads(Q, K, V, options)
    probabilities, tanh = attend(q, k, mask, options)
    dy = split(dY, q.shape[1])
    dv = matmul(probabilities, dy, transA=1)
    scores = softmax_grad_13(matmul(dy, v, transB=1), probabilities)
    d_mask = [unbroadcast(scores, mask.shape)] if mask is not None and count == 4 else []
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
