"""Scaled dot product attention without a cache of keys and values, and the rotation of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from service.dtypes import BOOL, Array, compute_dtype
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
    if any(node.inputs[4:6]) or any(node.outputs[1:]):
        raise InvalidGraph("it has a cache of keys and values, or gives their products, which is not served")
    return partial(attention, node.attributes)


def attention(options: Options, Q: Array, K: Array, V: Array, *others: Array | None) -> Array:
    """Return softmax(Q @ K^T * scale + mask) @ V for each head, in the layout of Q. Raises `ShapeMismatch`.

    The other inputs are the mask, None for the cache, and the number of each sample's keys, [batch].
    """
    q, k, v = heads(Q, K, V, options)
    probabilities, _ = attend(q, k, options, *others)
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


def attend(
    q: Array, k: Array, options: Options, mask: Array | None = None, *others: Array | None
) -> tuple[Array, Array | None]:
    """Return the probabilities [batch, heads, queries, keys], and, with softcap, the tanh of the scores."""
    scores, tanh = matmul(q, k, transB=1, alpha=scale_of(q, options)), None
    if softcap := options.get("softcap", 0.0):
        claim(2 * scores.nbytes)
        tanh = np.tanh(scores / scores.dtype.type(softcap))
        scores = tanh * scores.dtype.type(softcap)
    if mask is not None:
        covered = scores[covered_by(mask, scores.shape)]
        if mask.dtype == BOOL:
            np.copyto(covered, -np.inf, where=~mask)
        else:
            np.add(covered, mask, out=covered)
        scores[..., covered.shape[-1] :] = -np.inf
    seen = _in_sight(scores.shape, options, *others[2:])
    if not seen.all():
        np.copyto(scores, -np.inf, where=~seen)
    probabilities = softmax_13(scores)
    probabilities[np.isneginf(scores).all(axis=-1)] = 0
    return probabilities, tanh


def covered_by(mask: Array, shape: Sequence[int]) -> Any:
    """Return NumPy's index of the scores that a mask covers: it may leave out the last keys, which nobody sees."""
    length = mask.shape[-1] if mask.ndim else 1
    return ..., slice(shape[-1] if length == 1 else length)


def _in_sight(shape: Sequence[int], options: Options, lengths: Array | None = None) -> Array:
    """Return which keys each query may see, as what broadcasts to the shape of the scores. Raises `ShapeMismatch`."""
    batch, _, queries, keys = shape
    if lengths is not None and lengths.shape != (batch,):
        raise ShapeMismatch(f"nonpad_kv_seqlen has shape {list(lengths.shape)}, but must have [{batch}]")
    claim(4 * (1 if lengths is None else batch) * queries * keys)
    places, ends = np.arange(keys), np.array([keys]) if lengths is None else lengths
    own = np.arange(queries)[:, None] + (0 if lengths is None else lengths[:, None, None, None] - queries)
    left, right = options.get("left_window_size", -1), options.get("right_window_size", -1)
    seen: Array = places < ends[:, None, None, None]
    if options.get("is_causal"):
        seen = seen & (places <= own)
    if left >= 0:
        seen = seen & (places >= own - left)
    return seen & (places <= own + right) if right >= 0 else seen


def scale_of(q: Array, options: Options) -> float:
    """Return what the products of queries and keys are multiplied with."""
    scale = options.get("scale")
    return 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else float(scale)


@maker("RotaryEmbedding")
def _rotary_embedding(node: Node) -> Function:
    return partial(rotated, node.attributes)


def rotated(options: Options, X: Array, cos: Array, sin: Array, places: Array | None = None, *, sign: int = 1) -> Array:
    """Return each pair of numbers of X, turned by the angle of its token. Raises `ShapeMismatch`."""
    wide = compute_dtype(X.dtype)
    claim(4 * X.size * wide.itemsize + (0 if places is None else 2 * places.size * cos.shape[-1] * cos.itemsize))
    out = split(X, options.get("num_heads", 0)).astype(wide, order="C")
    first, second = pairs(out, options)
    tables = [table if places is None else table[places] for table in (cos, sin)]
    if any(table.shape != (first.shape[0], *first.shape[2:]) for table in tables):
        problem = f"the angles have shapes {', '.join(str(list(table.shape)) for table in tables)}"
        raise ShapeMismatch(f"{problem}, but must have {[first.shape[0], *first.shape[2:]]}")
    c, s = tables[0][:, None], sign * tables[1][:, None]
    first[...], second[...] = c * first - s * second, s * first + c * second
    return merged(out.astype(X.dtype, copy=False), X.ndim)


def pairs(x: Array, options: Options) -> tuple[Array, Array]:
    """Return views of the first and of the second numbers of the pairs. Raises `ShapeMismatch`."""
    size = options.get("rotary_embedding_dim", 0) or x.shape[-1]
    if size % 2 or not 0 < size <= x.shape[-1]:
        raise ShapeMismatch(f"{size} numbers of a head are rotated, but must be even, and at most {x.shape[-1]}")
    if options.get("interleaved"):
        return x[..., :size:2], x[..., 1:size:2]
    return x[..., : size // 2], x[..., size // 2 : size]
