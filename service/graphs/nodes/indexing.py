"""Operators that choose numbers by their places, sort them, or write to places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import FLOAT64, INT64, Array
from service.errors import InvalidTensor, ShapeMismatch
from service.graphs.nodes.shapes import axes_of, contiguous, new
from service.graphs.nodes.table import Function, function_of, maker
from service.graphs.plan import Node
from service.kernels import claim

UPDATES = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
"""What a write does with the number that is there, by the attribute `reduction`."""


@function_of("Gather")
def _gather(data: Array, indices: Array, *, axis: int = 0) -> Array:
    claim(indices.size * (data.nbytes // max(1, data.shape[axis])))
    return np.take(data, indices, axis=axis)


@function_of("GatherElements")
def _gather_elements(data: Array, indices: Array, *, axis: int = 0) -> Array:
    _claim_places(indices.size * (data.itemsize + 8), indices.shape, data.shape)
    return np.take_along_axis(*_along(data, indices, axis))


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
        _, places, at = _along(data, indices, axis)
        _claim_places(8 * indices.size * indices.ndim, indices.shape)
        return _written(data, elements(at, places), places.shape, updates, update)

    return scatter


def elements(axis: int, indices: Array) -> tuple[Array, ...]:
    """Return NumPy's index of the elements whose places along an axis are the indices, as those of ScatterElements."""
    grid = [*np.ogrid[tuple(slice(size) for size in indices.shape)]]
    grid[axis] = indices
    return tuple(grid)


@maker("ScatterND")
def _scatter_nd(node: Node) -> Function:
    update = UPDATES[node.attributes.get("reduction", "none")]

    def scatter(data: Array, indices: Array, updates: Array) -> Array:
        shape = (*indices.shape[:-1], *data.shape[indices.shape[-1] :])
        return _written(data, rows(indices), shape, updates, update)

    return scatter


def rows(indices: Array) -> tuple[Array, ...]:
    """Return NumPy's index of what the indices of ScatterND choose."""
    return tuple(np.moveaxis(indices, -1, 0))


@maker("TensorScatter")
def _tensor_scatter(node: Node) -> Function:
    def scatter(data: Array, updates: Array, starts: Array | None = None) -> Array:
        places = cache_places(node.attributes, data.shape, updates.shape, starts)
        return _written(data, elements(node.attributes.get("axis", -2), places), places.shape, updates, None)

    return scatter


def cache_places(
    options: Mapping[str, Any], shape: Sequence[int], update: Sequence[int], starts: Array | None = None
) -> Array:
    """Return the place along the axis of each number of an update of a cache. Raises `ShapeMismatch`."""
    (at,), batch = axes_of([options.get("axis", -2)], len(shape)), shape[0]
    if not at or len(update) != len(shape) or update[at] > shape[at]:
        raise ShapeMismatch(f"update has shape {list(update)}, but must fit into {list(shape)} along axis {at}, not 0")
    if starts is not None and starts.shape != (batch,):
        raise ShapeMismatch(f"write_indices has shape {list(starts.shape)}, but must have [{batch}]")
    count, most = update[at], shape[at]
    _claim_places(16 * batch * count, shape)
    places = (np.zeros(1, INT64) if starts is None else starts)[:, None] + np.arange(count)
    if options.get("mode") == "circular":
        places %= most
    elif places.size and not 0 <= places.min() <= places.max() < most:
        problem = f"the places of the update are from {places.min()} to {places.max()}"
        raise InvalidTensor(f"{problem}, but must be from 0 to {most - 1}, unless the mode is circular")
    places = places.reshape(len(places), *(count if axis == at else 1 for axis in range(1, len(shape))))
    return np.broadcast_to(places, (*shape[:at], count, *shape[at + 1 :]))


def _written(data: Array, places: Any, shape: tuple[int, ...], updates: Array, update: Any) -> Array:
    """Return the data with the updates, which must have this shape, at the places."""
    if updates.shape != shape:
        raise ShapeMismatch(f"updates has shape {list(updates.shape)}, but must have {list(shape)}")
    out = new(data.shape, data.dtype)
    out[...] = data
    if update is None:
        out[places] = updates
    else:
        update.at(out, places, updates)
    return out


@function_of("GatherND")
def _gather_nd(data: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    if data.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ShapeMismatch(f"the first {batch_dims} dimensions of data and indices differ")
    count, depth = math.prod(data.shape[:batch_dims]), indices.shape[-1]
    shape = (*indices.shape[:-1], *data.shape[batch_dims + depth :])
    _claim_places(math.prod(shape) * data.itemsize + 2 * indices.nbytes, [count])
    places = np.moveaxis(indices.reshape(count, -1, depth), -1, 0)
    numbers: Array = data.reshape(count, *data.shape[batch_dims:])[np.arange(count)[:, None], *places]
    return numbers.reshape(shape)


@function_of("OneHot")
def _one_hot(indices: Array, depth: Array, values: Array, *, axis: int = -1) -> Array:
    count = int(depth.item())
    (at,) = axes_of([axis], indices.ndim + 1)
    out = new([*indices.shape[:at], count, *indices.shape[at:]], values.dtype)
    _claim_places(out.size + indices.nbytes, [count])
    out[...] = values[0]
    places = np.arange(count).reshape([-1 if k == at else 1 for k in range(out.ndim)])
    kept = np.expand_dims(np.where(indices < 0, indices + count, indices), at) == places
    np.copyto(out, values[1], where=kept)
    return out


def _place_of(
    function: Callable[..., Any], data: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
) -> Array:
    claim(8 * (data.size // max(1, data.shape[axis])))
    places = function(np.flip(data, axis) if select_last_index else data, axis=axis, keepdims=bool(keepdims))
    return np.asarray(data.shape[axis] - 1 - places if select_last_index else places)


function_of("ArgMax")(partial(_place_of, np.argmax))
function_of("ArgMin")(partial(_place_of, np.argmin))


@function_of("TopK")
def _top(data: Array, k: Array, *, axis: int = -1, largest: int = 1) -> tuple[Array, Array]:
    count, length = int(k.item()), data.shape[axis]
    if not 0 <= count <= length:
        raise InvalidTensor(f"k is {count}, but must be from 0 to {length}, the length along axis {axis}")
    _claim_places(3 * 8 * data.size, data.shape)
    if largest:  # of equal numbers the first ones
        order = length - 1 - np.flip(np.argsort(np.flip(data, axis), axis=axis, kind="stable"), axis)
    else:
        order = np.argsort(data, axis=axis, kind="stable")
    places = contiguous(order[(slice(None),) * (axis % data.ndim) + (slice(count),)])
    return np.take_along_axis(data, places, axis), places


def cumulated(fold: np.ufunc, data: Array, axis: Array, *, exclusive: int = 0, reverse: int = 0) -> Array:
    """Return the fold of each number and those before it along the axis, or, with reverse, those behind it."""
    (at,) = axes_of([int(axis.item())], data.ndim)
    wide = data.dtype if data.dtype.kind in "iu" else FLOAT64
    claim(2 * data.size * wide.itemsize)
    total = fold.accumulate(np.flip(data, at) if reverse else data, axis=at, dtype=wide)
    if exclusive:
        total = np.roll(total, 1, at)
        total[(slice(None),) * at + (slice(1),)] = fold.identity
    return np.ascontiguousarray(np.flip(total, at) if reverse else total).astype(data.dtype)


function_of("CumSum")(partial(cumulated, np.add))
function_of("CumProd")(partial(cumulated, np.multiply))


@function_of("NonZero")
def _non_zero(data: Array) -> Array:
    claim(16 * data.size * max(1, data.ndim))
    return np.stack(np.nonzero(np.atleast_1d(data))).astype(INT64)
