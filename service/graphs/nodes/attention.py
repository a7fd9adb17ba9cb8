"""Scaled dot product attention, of opset 23, without a cache of keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from service.dtypes import BOOL, Array
from service.errors import InvalidGraph, ShapeMismatch
from service.graphs.nodes.products import matmul
from service.graphs.nodes.shapes import contiguous
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import claim
from service.kernels.softmax import softmax_13

Options: TypeAlias = Mapping[str, Any]
"""The attributes of a node."""


@maker("Attention")
def _attention(node: Node) -> Function:
    if any(node.inputs[4:]) or any(node.outputs[1:]):
        raise InvalidGraph("it has a cache of keys and values, or gives their products, which is not served")
    return partial(attention, node.attributes)


def attention(options: Options, Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
    """Return softmax(Q @ K^T * scale + mask) @ V for each head, in the layout of Q. Raises `ShapeMismatch`."""
    q, k, v = heads(Q, K, V, options)
    probabilities, _ = attend(q, k, mask, options)
    return merged(matmul(probabilities, v), Q.ndim)


def heads(Q: Array, K: Array, V: Array, options: Options) -> tuple[Array, Array, Array]:
    """Return the tensors as [batch, heads, length, size], with as many heads of keys and values as of queries."""
    counts = [options.get(name, 0) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    q, k, v = (split(one, count) for one, count in zip((Q, K, V), counts, strict=True))
    fits = q.shape[0] == k.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[-1] == k.shape[-1]
    if not fits or q.shape[1] % max(1, k.shape[1]):
        problem = "they must have one batch, Q the size of K, V the length of K, and Q a multiple of their heads"
        raise ShapeMismatch(f"Q has shape {list(q.shape)}, K {list(k.shape)} and V {list(v.shape)}, but {problem}")
    times = q.shape[1] // max(1, k.shape[1])
    if times > 1:
        claim(times * (k.nbytes + v.nbytes))
        k, v = np.repeat(k, times, axis=1), np.repeat(v, times, axis=1)
    return q, k, v


def split(tensor: Array, count: int) -> Array:
    """Return [batch, length, heads * size] as [batch, heads, length, size]. Raises `ShapeMismatch`."""
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim != 3 or count < 1 or tensor.shape[2] % count:
        raise ShapeMismatch(f"a tensor has shape {list(tensor.shape)}, which are not {count} heads")
    size = tensor.shape[2] // count
    return tensor.reshape(*tensor.shape[:2], count, size).transpose(0, 2, 1, 3)


def merged(tensor: Array, rank: int) -> Array:
    """Return [batch, heads, length, size] in the layout of a tensor with this rank."""
    if rank == 4:
        return tensor
    batch, count, length, size = tensor.shape
    return contiguous(tensor.transpose(0, 2, 1, 3)).reshape(batch, length, count * size)


def attend(q: Array, k: Array, mask: Array | None, options: Options) -> tuple[Array, Array | None]:
    """Return the probabilities [batch, heads, queries, keys], and, with softcap, the tanh of the scores."""
    scores, tanh = matmul(q, k, transB=1, alpha=scale_of(q, options)), None
    if softcap := options.get("softcap", 0.0):
        claim(2 * scores.nbytes)
        tanh = np.tanh(scores / scores.dtype.type(softcap))
        scores = tanh * scores.dtype.type(softcap)
    if mask is not None and mask.dtype == BOOL:
        np.copyto(scores, -np.inf, where=~mask)
    elif mask is not None:
        np.add(scores, mask, out=scores)
    if options.get("is_causal"):
        claim(math.prod(scores.shape[-2:]))
        np.copyto(scores, -np.inf, where=~np.tri(*scores.shape[-2:], dtype=BOOL))
    probabilities = softmax_13(scores)
    probabilities[np.isneginf(scores).all(axis=-1)] = 0
    return probabilities, tanh


def scale_of(q: Array, options: Options) -> float:
    """Return what the products of queries and keys are multiplied with."""
    scale = options.get("scale")
    return 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)
