"""Operators that move numbers or make them from shapes. All results are C-contiguous; a Reshape's is a view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from service.dtypes import FLOAT32, INT64, Array, DType
from service.errors import InvalidTensor, ShapeMismatch, shown
from service.graphs.nodes.table import Function, Maker, dtype_of, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, claim, spare_memory

MAX_RANK = 64


def new(shape: Sequence[int], dtype: DType) -> Array:
    """Return uninitialised memory for a shape that comes from data. Raises `InvalidTensor` for one that is none."""
    if min(shape, default=0) < 0 or len(shape) > MAX_RANK:
        raise InvalidTensor(f"{shown(list(shape))} is no shape")
    return spare_memory(tuple(shape), dtype)


def contiguous(view: Array) -> Array:
    """Return the view, or a copy if its numbers are not one behind the other in memory."""
    if view.flags.c_contiguous:
        return view
    out = spare_memory(view.shape, view.dtype)
    out[...] = view
    return out


def integers(tensor: Array | None) -> list[int] | None:
    """Return the ints of a tensor that says a shape, axes or places."""
    if tensor is None:
        return None
    if tensor.dtype.kind not in "iu" or tensor.ndim > 1 or tensor.size > 1 << 16:
        problem = f"an input that says a shape, axes or places is {tensor.dtype} of shape {shown(list(tensor.shape))}"
        raise InvalidTensor(f"{problem}, but must be a list of ints")
    return tensor.reshape(-1).tolist()


def axes_of(axes: Any, rank: int) -> list[int]:
    """Return the axes, which an attribute or an input says, counted from the front."""
    return [np.lib.array_utils.normalize_axis_index(axis, rank) for axis in axes]


@maker("Reshape")
def _reshape(node: Node) -> Function:
    keeps_zeros = node.attributes.get("allowzero", 0)

    def reshape(data: Array, shape: Array) -> Array:
        lengths = integers(shape) or []
        if not keeps_zeros:
            lengths = [data.shape[k] if length == 0 else length for k, length in enumerate(lengths)]
        return data.reshape(lengths)

    return reshape


@maker("Flatten")
def _flatten(node: Node) -> Function:
    axis = node.attributes.get("axis", 1)

    def flatten(data: Array) -> Array:
        at = axis + data.ndim if axis < 0 else axis
        return data.reshape(math.prod(data.shape[:at]), math.prod(data.shape[at:]))

    return flatten


def concatenated(*arrays: Array, axis: int) -> Array:
    """Return the arrays, one behind the other along the axis."""
    result: Array = OPERATORS["ConcatTraining"].kernel({str(k): one for k, one in enumerate(arrays)}, axis=axis)[0]
    return result


SIMPLE: dict[str, Maker] = {
    "Squeeze": lambda _: (
        lambda data, axes=None: np.squeeze(data, None if axes is None else tuple(integers(axes) or ()))
    ),
    "Unsqueeze": lambda _: lambda data, axes: np.expand_dims(data, tuple(integers(axes) or ())),
    "Transpose": lambda node: lambda data: contiguous(data.transpose(node.attributes.get("perm"))),
    "Concat": lambda node: partial(concatenated, axis=node.attributes["axis"]),
    "Shape": lambda node: (
        lambda data: np.array(data.shape[node.attributes.get("start", 0) : node.attributes.get("end")], INT64)
    ),
    "Size": lambda _: lambda data: np.array(data.size, INT64),
}
"""The makers that take a line."""

for op, make in SIMPLE.items():
    maker(op)(make)


@maker("Split")
def _split(node: Node) -> Function:
    axis, count = node.attributes.get("axis", 0), len(node.outputs)

    def split(data: Array, lengths: Array | None = None) -> Any:
        (at,), length = axes_of([axis], data.ndim), data.shape[axis]
        step = -(-length // count)
        given = integers(lengths) or [min(step, max(0, length - k * step)) for k in range(count)]
        if sum(given) != length or min(given) < 0 or len(given) != count:
            problem = f"the lengths {shown(given)} of {count} outputs must add up to {length}"
            raise ShapeMismatch(f"{problem}, the length of the input along axis {axis}")
        places = pairwise(accumulate(given, initial=0))
        parts = tuple(contiguous(data[(slice(None),) * at + (slice(*place),)]) for place in places)
        return parts if count > 1 else parts[0]

    return split


@maker("Slice")
def _slice(node: Node) -> Function:
    def cut(data: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
        firsts, lasts = integers(starts) or [], integers(ends) or []
        along = axes_of(range(len(firsts)) if axes is None else integers(axes), data.ndim)
        strides = [1] * len(firsts) if steps is None else integers(steps) or []
        places = [slice(None)] * data.ndim
        for axis, *place in zip(along, firsts, lasts, strides, strict=True):
            places[axis] = slice(*place)
        return contiguous(data[tuple(places)])

    return cut


@maker("Expand")
def _expand(node: Node) -> Function:
    def expand(data: Array, shape: Array) -> Array:
        out = new(np.broadcast_shapes(data.shape, tuple(integers(shape) or ())), data.dtype)
        out[...] = data
        return out

    return expand


@maker("Tile")
def _tile(node: Node) -> Function:
    def tile(data: Array, repeats: Array) -> Array:
        counts = integers(repeats) or []
        if len(counts) != data.ndim:
            raise ShapeMismatch(f"repeats has {len(counts)} numbers, but the input {data.ndim} dimensions")
        split = [one for pair in zip(counts, data.shape, strict=True) for one in pair]
        out = new([count * length for count, length in zip(counts, data.shape, strict=True)], data.dtype)
        out.reshape(split)[...] = data.reshape([one for length in data.shape for one in (1, length)])
        return out

    return tile


@maker("Pad")
def _pad(node: Node) -> Function:
    mode = node.attributes.get("mode", "constant")

    def pad(data: Array, pads: Array, value: Array | None = None, axes: Array | None = None) -> Array:
        along = axes_of(range(data.ndim) if axes is None else integers(axes), data.ndim)
        counts = integers(pads) or []
        before, after = [0] * data.ndim, [0] * data.ndim
        for axis, first, last in zip(along, counts[: len(along)], counts[len(along) :], strict=True):
            before[axis], after[axis] = first, last
        if mode != "constant":
            for axis in along:
                length = data.shape[axis]
                claim(32 * (before[axis] + length + after[axis]))  # of the places
                places = _PLACES[mode](np.arange(-before[axis], length + after[axis]), length)
                claim(data.nbytes // max(1, length) * len(places))
                data = np.take(data, places, axis=axis)
            return data
        ends = [a + length + b for a, length, b in zip(before, data.shape, after, strict=True)]
        out = new(ends, data.dtype)
        out[...] = 0 if value is None else value.reshape(())
        inner = [slice(max(0, a), max(0, end - max(0, b))) for a, end, b in zip(before, ends, after, strict=True)]
        outer = [slice(max(0, -a), max(0, n + min(0, b))) for a, n, b in zip(before, data.shape, after, strict=True)]
        out[tuple(inner)] = data[tuple(outer)]
        return out

    return pad


_PLACES: dict[str, Any] = {
    "edge": lambda at, length: np.clip(at, 0, length - 1),
    "wrap": lambda at, length: at % length,
    "reflect": lambda at, length: np.abs((at + length - 1) % max(1, 2 * length - 2) - (length - 1)),
}
"""For each mode, where the numbers come from that stand at the places `at`."""


@maker("ConstantOfShape")
def _constant_of_shape(node: Node) -> Function:
    value = node.attributes.get("value", np.zeros(1, FLOAT32))

    def fill(shape: Array) -> Array:
        out = new(integers(shape) or (), value.dtype)
        out[...] = value.reshape(())
        return out

    return fill


@maker("EyeLike")
def _eye_like(node: Node) -> Function:
    offset, number = node.attributes.get("k", 0), node.attributes.get("dtype")

    def eye(data: Array) -> Array:
        height, width = data.shape
        out = new(data.shape, data.dtype if number is None else dtype_of(number))
        out[...] = 0
        np.fill_diagonal(out[min(max(0, -offset), height) :, min(max(0, offset), width) :], 1)
        return out

    return eye


@maker("Range")
def _range(node: Node) -> Function:
    def numbers(start: Array, limit: Array, delta: Array) -> Array:
        first, last, step = start.item(), limit.item(), delta.item()
        out = new([max(0, int(-((first - last) // step)))], start.dtype)
        claim(16 * out.size)
        out[...] = first + np.arange(out.size) * step
        return out

    return numbers


@maker("DepthToSpace", "SpaceToDepth")
def _depth(node: Node) -> Function:
    block, is_deep = node.attributes["blocksize"], node.op == "DepthToSpace"
    is_row_first = node.attributes.get("mode", "DCR") == "CRD"

    def shuffle(data: Array) -> Array:
        n, c, h, w = data.shape
        if not is_deep:
            parts = data.reshape(n, c, h // block, block, w // block, block).transpose(0, 3, 5, 1, 2, 4)
            return contiguous(parts).reshape(n, c * block * block, h // block, w // block)
        depth = c // (block * block)
        if is_row_first:
            parts = data.reshape(n, depth, block, block, h, w).transpose(0, 1, 4, 2, 5, 3)
        else:
            parts = data.reshape(n, block, block, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
        return contiguous(parts).reshape(n, depth, h * block, w * block)

    return shuffle


@maker("Trilu")
def _trilu(node: Node) -> Function:
    is_upper = node.attributes.get("upper", 1)

    def triangle(data: Array, k: Array | None = None) -> Array:
        height, width = data.shape[-2:]
        offset = 0 if k is None else min(max(int(k.item()), -height), width)
        out = new(data.shape, data.dtype)
        claim(2 * height * width + 8 * (height + width))
        lower = np.tri(height, width, offset - 1 if is_upper else offset, bool)
        out[...] = 0
        np.copyto(out, data, where=~lower if is_upper else lower)
        return out

    return triangle
