"""Operators that move numbers or make them from shapes. All results are C-contiguous; a Reshape's is a view."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from service.dtypes import FLOAT32, INT64, Array, DType
from service.errors import InvalidTensor, ShapeMismatch, shown
from service.graphs.nodes.table import NODES, Function, dtype_of, function_of, maker
from service.graphs.plan import Node
from service.graphs.unrolled import OURS
from service.kernels import OPERATORS, claim, spare_memory
from service.limits import MAX_RANK


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


def integers(tensor: Array | None, most: int = 2 * MAX_RANK) -> list[int] | None:
    """Return the ints of a tensor that says a shape, axes or places: `most` at most, by default two for each axis."""
    if tensor is None:
        return None
    if tensor.dtype.kind not in "iu" or tensor.ndim > 1 or tensor.size > most:
        problem = f"an input that says a shape, axes or places is {tensor.dtype} of shape {shown(list(tensor.shape))}"
        raise InvalidTensor(f"{problem}, but must be a list of ints, at most {most}")
    return tensor.reshape(-1).tolist()


def axes_of(axes: Any, rank: int) -> list[int]:
    """Return the axes, which an attribute or an input says, counted from the front."""
    return [np.lib.array_utils.normalize_axis_index(axis, rank) for axis in axes]


@function_of("Reshape")
def _reshape(data: Array, shape: Array, *, allowzero: int = 0) -> Array:
    lengths = integers(shape) or []
    if not allowzero:
        lengths = [data.shape[k] if length == 0 else length for k, length in enumerate(lengths)]
    return data.reshape(lengths)


@function_of("Flatten")
def _flatten(data: Array, *, axis: int = 1) -> Array:
    at = axis + data.ndim if axis < 0 else axis
    return data.reshape(math.prod(data.shape[:at]), math.prod(data.shape[at:]))


@function_of("Concat")
def concatenated(*arrays: Array, axis: int) -> Array:
    """Return the arrays, one behind the other along the axis."""
    result: Array = OPERATORS["ConcatTraining"].kernel({str(k): one for k, one in enumerate(arrays)}, axis=axis)[0]
    return result


SIMPLE: dict[str, Function] = {
    "Squeeze": lambda data, axes=None: np.squeeze(data, None if axes is None else tuple(integers(axes) or ())),
    "Unsqueeze": lambda data, axes: np.expand_dims(data, tuple(integers(axes) or ())),
    "Transpose": lambda data, *, perm=None: contiguous(data.transpose(perm)),
    "Shape": lambda data, *, start=0, end=None: np.array(data.shape[start:end], INT64),
    "Size": lambda data: np.array(data.size, INT64),
}
"""The functions that take a line."""

for _op, _function in SIMPLE.items():
    function_of(_op)(_function)


@maker("If", domain=OURS)
def _chosen(node: Node) -> Function:
    then, other = node.attributes["views"]
    views, count = [NODES["", one.op](one) for one in (then, other)], len(then.inputs) - 1

    def choose(condition: Array, data: Array, *others: Array) -> Any:
        view, more = (views[0], others[:count]) if condition.item() else (views[1], others[count:])
        return view(data, *more)

    return choose


@maker("Split")
def _split(node: Node) -> Function:
    axis, count = node.attributes.get("axis", 0), len(node.outputs)

    def split(data: Array, lengths: Array | None = None) -> Any:
        (at,), length = axes_of([axis], data.ndim), data.shape[axis]
        step = -(-length // count)
        given = integers(lengths, count) or [min(step, max(0, length - k * step)) for k in range(count)]
        if sum(given) != length or min(given) < 0 or len(given) != count:
            problem = f"the lengths {shown(given)} of {count} outputs must add up to {length}"
            raise ShapeMismatch(f"{problem}, the length of the input along axis {axis}")
        places = pairwise(accumulate(given, initial=0))
        parts = tuple(contiguous(data[(slice(None),) * at + (slice(*place),)]) for place in places)
        return parts if count > 1 else parts[0]

    return split


@function_of("Slice")
def _slice(data: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None) -> Array:
    firsts, lasts = integers(starts) or [], integers(ends) or []
    along = axes_of(range(len(firsts)) if axes is None else integers(axes), data.ndim)
    strides = [1] * len(firsts) if steps is None else integers(steps) or []
    places = [slice(None)] * data.ndim
    for axis, *place in zip(along, firsts, lasts, strides, strict=True):
        places[axis] = slice(*place)
    return contiguous(data[tuple(places)])


@function_of("Expand")
def _expand(data: Array, shape: Array) -> Array:
    return _filled(np.broadcast_shapes(data.shape, tuple(integers(shape) or ())), data)


def _filled(shape: Sequence[int], value: Array, dtype: DType | None = None) -> Array:
    """Return a tensor of this shape, with the value everywhere, which broadcasts."""
    out = new(shape, dtype or value.dtype)
    out[...] = value
    return out


@function_of("Tile")
def _tile(data: Array, repeats: Array) -> Array:
    counts = integers(repeats) or []
    if len(counts) != data.ndim:
        raise ShapeMismatch(f"repeats has {len(counts)} numbers, but the input {data.ndim} dimensions")
    split = [one for pair in zip(counts, data.shape, strict=True) for one in pair]
    out = new([count * length for count, length in zip(counts, data.shape, strict=True)], data.dtype)
    out.reshape(split)[...] = data.reshape([one for length in data.shape for one in (1, length)])
    return out


@function_of("Pad")
def _pad(
    data: Array, pads: Array, value: Array | None = None, axes: Array | None = None, *, mode: str = "constant"
) -> Array:
    along = axes_of(range(data.ndim) if axes is None else integers(axes), data.ndim)
    counts = integers(pads) or []
    before, after = [0] * data.ndim, [0] * data.ndim
    for axis, first, last in zip(along, counts[: len(along)], counts[len(along) :], strict=True):
        before[axis], after[axis] = first, last
    if mode != "constant":
        for axis in along:
            length = data.shape[axis]
            places = sources(mode, length, before[axis], after[axis])
            claim(data.nbytes // max(1, length) * len(places))
            data = np.take(data, places, axis=axis)
        return data
    ends = [a + length + b for a, length, b in zip(before, data.shape, after, strict=True)]
    out = _filled(ends, np.zeros((), data.dtype) if value is None else value.reshape(()), data.dtype)
    inner = [slice(max(0, a), max(0, end - max(0, b))) for a, end, b in zip(before, ends, after, strict=True)]
    outer = [slice(max(0, -a), max(0, n + min(0, b))) for a, n, b in zip(before, data.shape, after, strict=True)]
    out[tuple(inner)] = data[tuple(outer)]
    return out


def sources(mode: str, length: int, before: int, after: int) -> Array:
    """Return the place that each place along a padded axis is a copy of, or -1. Negative padding cuts off."""
    claim(32 * max(0, before + length + after))
    places: Array = _PLACES[mode](np.arange(-before, length + after), length)
    return places


_PLACES: dict[str, Callable[[Array, int], Any]] = {
    "constant": lambda at, length: np.where((at >= 0) & (at < length), at, -1),
    "edge": lambda at, length: np.clip(at, 0, length - 1),
    "wrap": lambda at, length: at % length,
    "reflect": lambda at, length: np.abs((at + length - 1) % max(1, 2 * length - 2) - (length - 1)),
}
"""For each mode, where the numbers come from that stand at the places `at`."""


@function_of("ConstantOfShape")
def _constant_of_shape(shape: Array, *, value: Array | None = None) -> Array:
    return _filled(integers(shape) or (), np.zeros((), FLOAT32) if value is None else value.reshape(()))


@function_of("EyeLike")
def _eye(data: Array, *, k: int = 0, dtype: int | None = None) -> Array:
    height, width = data.shape
    out = new(data.shape, data.dtype if dtype is None else dtype_of(dtype))
    out[...] = 0
    np.fill_diagonal(out[min(max(0, -k), height) :, min(max(0, k), width) :], 1)
    return out


@function_of("Range")
def _range(start: Array, limit: Array, delta: Array) -> Array:
    first, last, step = start.item(), limit.item(), delta.item()
    out = new([max(0, int(-((first - last) // step)))], start.dtype)
    claim(16 * out.size)
    out[...] = first + np.arange(out.size) * step
    return out


@function_of("DepthToSpace")
def to_space(data: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Return channels as blocks of blocksize x blocksize places. In the mode CRD, those of a block are neighbours."""
    n, c, h, w = data.shape
    depth = c // blocksize**2
    if mode == "CRD":
        parts = data.reshape(n, depth, blocksize, blocksize, h, w).transpose(0, 1, 4, 2, 5, 3)
    else:
        parts = data.reshape(n, blocksize, blocksize, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
    return contiguous(parts).reshape(n, depth, h * blocksize, w * blocksize)


@function_of("SpaceToDepth")
def to_depth(data: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Return blocks of places as channels: what `to_space` makes of them is the data."""
    n, c, h, w = data.shape
    blocks = data.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    parts = blocks.transpose((0, 1, 3, 5, 2, 4) if mode == "CRD" else (0, 3, 5, 1, 2, 4))
    return contiguous(parts).reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@function_of("Trilu")
def triangle(data: Array, k: Array | None = None, *, upper: int = 1) -> Array:
    """Return the data with zeros below the diagonal k, or above it."""
    height, width = data.shape[-2:]
    diagonal = 0 if k is None else min(max(int(k.item()), -height), width)
    claim(data.nbytes + 2 * height * width + 8 * (height + width))
    return (np.triu if upper else np.tril)(data, diagonal)
