"""Operators that choose numbers by their places, sort them, or write to places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, INT64, Array
from service.errors import InvalidTensor, ShapeMismatch
from service.graphs.nodes.shapes import axes_of, contiguous, new
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import claim

UPDATES = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
"""What a write does with the number that is there, by the attribute `reduction`."""


@maker("Gather")
def _gather(node: Node) -> Function:
    axis = node.attributes.get("axis", 0)

    def gather(data: Array, indices: Array) -> Array:
        claim(indices.size * (data.nbytes // max(1, data.shape[axis])))
        return np.take(data, indices, axis=axis)

    return gather


@maker("GatherElements")
def _gather_elements(node: Node) -> Function:
    axis = node.attributes.get("axis", 0)

    def gather(data: Array, indices: Array) -> Array:
        _claim_places(indices.size * (data.itemsize + 8), indices.shape, data.shape)
        return np.take_along_axis(*_along(data, indices, axis))

    return gather


def _claim_places(size: int, *shapes: Sequence[int]) -> None:
    """Claim bytes, and an int for each place along each axis: an empty tensor may have long ones."""
    claim(size + 16 * sum(sum(shape) for shape in shapes))


def _along(data: Array, indices: Array, axis: int) -> tuple[Array, Array, int]:
    """Return the part of the data beside the indices, the indices, and the axis."""
    (at,) = axes_of([axis], data.ndim)
    sizes = [slice(None) if k == at else slice(length) for k, length in enumerate(indices.shape)]
    part = data[tuple(sizes)]
    if indices.dtype.kind not in "iu":
        raise InvalidTensor(f"indices is {indices.dtype}, but must be of integers")
    if (
        indices.ndim != data.ndim
        or part.shape[:at] + part.shape[at + 1 :] != indices.shape[:at] + indices.shape[at + 1 :]
    ):
        problem = f"indices has shape {list(indices.shape)}, which is no part of that of the data"
        raise ShapeMismatch(f"{problem}, {list(data.shape)}, beside axis {axis}")
    return part, indices.astype(INT64, copy=False), at


@maker("ScatterElements")
def _scatter_elements(node: Node) -> Function:
    axis, update = node.attributes.get("axis", 0), UPDATES[node.attributes.get("reduction", "none")]

    def scatter(data: Array, indices: Array, updates: Array) -> Array:
        out = new(data.shape, data.dtype)
        out[...] = data
        part, places, at = _along(out, indices, axis)
        _claim_places(8 * indices.size * indices.ndim, indices.shape)
        grid = [
            np.arange(n).reshape([-1 if k == j else 1 for j in range(data.ndim)]) for k, n in enumerate(places.shape)
        ]
        grid[at] = places
        _write(part, tuple(grid), places.shape, updates, update)
        return out

    return scatter


def _write(target: Array, places: Any, shape: tuple[int, ...], updates: Array, update: Any) -> None:
    if updates.shape != shape:
        raise ShapeMismatch(f"updates has shape {list(updates.shape)}, but must have {list(shape)}")
    if update is None:
        target[places] = updates
    else:
        update.at(target, places, updates)


@maker("GatherND")
def _gather_nd(node: Node) -> Function:
    batch = node.attributes.get("batch_dims", 0)

    def gather(data: Array, indices: Array) -> Array:
        if data.shape[:batch] != indices.shape[:batch]:
            raise ShapeMismatch(f"the first {batch} dimensions of data and indices differ")
        count, depth = math.prod(data.shape[:batch]), indices.shape[-1]
        shape = (*indices.shape[:-1], *data.shape[batch + depth :])
        _claim_places(math.prod(shape) * data.itemsize + 2 * indices.nbytes, [count])
        places = np.moveaxis(indices.reshape(count, -1, depth), -1, 0)
        numbers: Array = data.reshape(count, *data.shape[batch:])[np.arange(count)[:, None], *places]
        return numbers.reshape(shape)

    return gather


@maker("ScatterND")
def _scatter_nd(node: Node) -> Function:
    update = UPDATES[node.attributes.get("reduction", "none")]

    def scatter(data: Array, indices: Array, updates: Array) -> Array:
        out = new(data.shape, data.dtype)
        out[...] = data
        shape = (*indices.shape[:-1], *data.shape[indices.shape[-1] :])
        _write(out, tuple(np.moveaxis(indices, -1, 0)), shape, updates, update)
        return out

    return scatter


@maker("OneHot")
def _one_hot(node: Node) -> Function:
    axis = node.attributes.get("axis", -1)

    def encode(indices: Array, depth: Array, values: Array) -> Array:
        count = int(depth.item())
        (at,) = axes_of([axis], indices.ndim + 1)
        out = new([*indices.shape[:at], count, *indices.shape[at:]], values.dtype)
        _claim_places(out.size + indices.nbytes, [count])
        out[...] = values[0]
        places = np.arange(count).reshape([-1 if k == at else 1 for k in range(out.ndim)])
        kept = np.expand_dims(np.where(indices < 0, indices + count, indices), at) == places
        np.copyto(out, values[1], where=kept)
        return out

    return encode


@maker("ArgMax", "ArgMin")
def _arg(node: Node) -> Function:
    axis, keepdims = node.attributes.get("axis", 0), bool(node.attributes.get("keepdims", 1))
    function, is_last = (np.argmax if node.op == "ArgMax" else np.argmin), node.attributes.get("select_last_index", 0)

    def arg(data: Array) -> Array:
        claim(8 * (data.size // max(1, data.shape[axis])))
        places = function(np.flip(data, axis) if is_last else data, axis=axis, keepdims=keepdims)
        return np.asarray(data.shape[axis] - 1 - places if is_last else places)

    return arg


@maker("TopK")
def _top(node: Node) -> Function:
    axis, is_largest = node.attributes.get("axis", -1), node.attributes.get("largest", 1)

    def top(data: Array, k: Array) -> tuple[Array, Array]:
        count, length = int(k.item()), data.shape[axis]
        if not 0 <= count <= length:
            raise InvalidTensor(f"k is {count}, but must be from 0 to {length}, the length along axis {axis}")
        _claim_places(3 * 8 * data.size, data.shape)
        if is_largest:  # of equal numbers the first ones
            order = length - 1 - np.flip(np.argsort(np.flip(data, axis), axis=axis, kind="stable"), axis)
        else:
            order = np.argsort(data, axis=axis, kind="stable")
        places = contiguous(order[(slice(None),) * (axis % data.ndim) + (slice(count),)])
        return np.take_along_axis(data, places, axis), places

    return top


@maker("CumSum")
def _cumulate(node: Node) -> Function:
    is_exclusive, is_reversed = node.attributes.get("exclusive", 0), node.attributes.get("reverse", 0)

    def cumulate(data: Array, axis: Array) -> Array:
        (at,) = axes_of([int(axis.item())], data.ndim)
        given = np.flip(data, at) if is_reversed else data
        wide = data.dtype if data.dtype.kind in "iu" else FLOAT64
        claim(2 * data.size * wide.itemsize)
        total = np.cumsum(given, axis=at, dtype=wide)
        if is_exclusive:
            total = np.roll(total, 1, at)
            total[(slice(None),) * at + (slice(1),)] = 0
        return np.ascontiguousarray(np.flip(total, at) if is_reversed else total).astype(data.dtype)

    return cumulate


@maker("NonZero")
def _non_zero(node: Node) -> Function:
    def places(data: Array) -> Array:
        claim(16 * data.size * max(1, data.ndim))
        return np.stack(np.nonzero(np.atleast_1d(data))).astype(INT64)

    return places
