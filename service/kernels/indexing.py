"""Gradients of GatherElements, GatherND and Slice, and the gather of few rows.

`shape` is the shape of the forward input, as a tensor of any rank, read flat, and the shape of the gradient. Negative
indices count from the end. Where several elements go to one place, they are added in their order. float16 and bfloat16
are added in float32 and rounded once. Source of the semantics: the CPU training kernels of ONNX Runtime 1.19.2. These
do not check the shape of the incoming gradient, and write out of bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from service.dtypes import INT64, Array
from service.errors import AxisOutOfRange, IndexOutOfRange, InvalidParameter, InvalidTensor, ShapeMismatch
from service.kernels._blocks import new_output, row_major, spare_memory
from service.kernels._checks import normalize_axis
from service.kernels._op import op
from service.kernels._scatter import clear, flat_indices, output_size, read_shape, scatter_add
from service.kernels._types import Element, NotNegative, Rank2, Shape, T, Tind

FAMILY = "Indexing, slicing and joining"


@op(
    "GatherElementsGrad",
    outputs="dX",
    example={"dY": [[1.0, 2.0]], "shape": [3, 2], "indices": [[0, -1]]},
    multiply_adds=lambda dY, shape, indices, **_: output_size(shape),
)
def gather_elements_grad(dY: T, shape: Shape, indices: Tind, /, *, axis: int = 0) -> T:
    """dX = zeros(shape); dX[i, .., indices[i, j, ..], ..] += dY[i, j, ..], the index along `axis`.

    `dY` and `indices` have one shape, with as many dimensions as `shape` has elements. Each of its dimensions but
    `axis` is at most that of `shape`. Raises `AxisOutOfRange`, `IndexOutOfRange`, `ShapeMismatch`, `InvalidTensor` and
    `TooManyDimensions`.
    """
    dims = read_shape(shape)
    axis = normalize_axis(axis, len(dims), "shape", "the tensor that shape describes")
    if dY.shape != indices.shape:
        problem = f"dY has shape {list(dY.shape)}, but must have the shape of indices, {list(indices.shape)}"
        raise ShapeMismatch(problem, tensor="dY")
    others = [size for place, size in enumerate(dims) if place != axis]
    within = [size for place, size in enumerate(indices.shape) if place != axis]
    if indices.ndim != len(dims) or any(one > most for one, most in zip(within, others, strict=True)):
        raise ShapeMismatch(
            f"indices has shape {list(indices.shape)}, but must have {len(dims)} dimensions, each but dimension {axis}"
            f" at most that of shape, {list(dims)}",
            tensor="indices",
        )
    chosen = flat_indices(indices, dims[axis]).reshape(indices.shape)
    dX: T = new_output(None, dims, dY.dtype)
    clear(dX)
    if dY.size:
        places = spare_memory(indices.shape, INT64)
        places[...] = 0
        for place, size in enumerate(indices.shape):
            along = chosen if place == axis else np.arange(size).reshape(-1, *[1] * (indices.ndim - place - 1))
            np.add(places, along * math.prod(dims[place + 1 :]), out=places)
        scatter_add(dX.reshape(1, -1, 1), places.reshape(-1), row_major(dY).reshape(1, -1, 1))
    return dX


@op(
    "GatherNDGrad",
    outputs="output",
    example={"shape": [2, 2], "indices": [[1, 0], [-1, -2]], "update": [1.0, 2.0]},
    multiply_adds=lambda shape, indices, update, **_: output_size(shape),
)
def gather_nd_grad(shape: Shape, indices: Rank2[Tind], update: T, /, *, batch_dims: NotNegative = 0) -> Rank2[T]:
    """output = zeros(shape); output[batch, indices[batch, i]] += update[batch, i], for all rows i of indices.

    `indices` is [batch, .., k]: `batch` are the first `batch_dims` dimensions of `shape`, and a row has the indices of
    the next k. `update` has a slice of the other dimensions for each row: [batch, .., slice]. Raises
    `InvalidParameter`, `IndexOutOfRange`, `ShapeMismatch`, `InvalidTensor` and `TooManyDimensions`.
    """
    dims = read_shape(shape)
    depth = batch_dims + indices.shape[-1] if indices.ndim else 0
    if batch_dims >= indices.ndim:
        problem = f"batch_dims is {batch_dims}, but indices has shape {list(indices.shape)}: it needs more dimensions"
        raise InvalidParameter(problem, parameter="batch_dims")
    if depth > len(dims) or indices.shape[:batch_dims] != dims[:batch_dims]:
        raise ShapeMismatch(
            f"indices has shape {list(indices.shape)}, but must begin with the {batch_dims} batch dimensions of shape,"
            f" {list(dims)}, and end with at most {len(dims) - batch_dims}",
            tensor="indices",
        )
    expected = (*indices.shape[:-1], *dims[depth:])
    if update.shape != expected:
        problem = f"update has shape {list(update.shape)}, but must have {list(expected)}: a slice for each row"
        raise ShapeMismatch(problem, tensor="update")
    output: T = new_output(None, dims, update.dtype)
    clear(output)
    if not update.size:
        _check_columns(indices, dims[batch_dims:depth])
        return output
    rows = _check_columns(indices, dims[batch_dims:depth]).reshape(math.prod(dims[:batch_dims]), -1)
    rows += np.arange(len(rows))[:, None] * math.prod(dims[batch_dims:depth])
    inner = math.prod(dims[depth:])
    scatter_add(output.reshape(1, -1, inner), rows.reshape(-1), row_major(update).reshape(1, -1, inner))
    return output


def _check_columns(indices: Array, dims: Sequence[int]) -> Array:
    """Return the flat place of each row of indices in a tensor of these dimensions. Raises `IndexOutOfRange`."""
    places = spare_memory(indices.shape[:-1], INT64)
    places[...] = 0
    for column, size in enumerate(dims):
        try:
            along = flat_indices(indices[..., column], size).reshape(places.shape)
        except IndexOutOfRange as error:
            problem = f"{error} (the last dimension of indices at {column})"
            raise IndexOutOfRange(problem, **error.context) from None
        np.add(places, along * math.prod(dims[column + 1 :]), out=places)
    return places


@op(
    "SliceGrad",
    outputs="dX",
    example={"dY": [1.0, 2.0], "shape": [4], "starts": [1], "ends": [3], "axes": [0], "steps": [1]},
    multiply_adds=lambda dY, shape, *_, **__: output_size(shape),
)
def slice_grad(
    dY: T, shape: Shape, starts: Tind, ends: Tind, axes: Tind | None = None, steps: Tind | None = None, /
) -> T:
    """dX = zeros(shape); dX[starts:ends:steps] = dY, along `axes`.

    `starts`, `ends`, `axes` and `steps` have one dimension and one length. Without `axes` they are the first axes, and
    without `steps` the steps are 1. Numbers out of range are cut to it, as in Slice. A step may be negative, which ONNX
    Runtime refuses along the last axis. Raises `AxisOutOfRange`, `ShapeMismatch`, `InvalidTensor` and
    `TooManyDimensions`.
    """
    dims = read_shape(shape)
    if starts.ndim != 1:
        raise ShapeMismatch(f"starts has shape {list(starts.shape)}, but must have one dimension", tensor="starts")
    for name, tensor in (("ends", ends), ("axes", axes), ("steps", steps)):
        if tensor is not None and tensor.shape != starts.shape:
            problem = f"{name} has shape {list(tensor.shape)}, but must have that of starts, {list(starts.shape)}"
            raise ShapeMismatch(problem, tensor=name)
    if starts.size > len(dims):
        problem = f"starts has {starts.size} numbers, but shape {list(dims)} has {len(dims)} axes"
        raise ShapeMismatch(problem, tensor="starts")
    chosen = [slice(None)] * len(dims)
    seen: set[int] = set()
    listed = range(starts.size) if axes is None else axes.tolist()
    for axis, start, end, step in zip(
        listed, starts.tolist(), ends.tolist(), [1] * starts.size if steps is None else steps.tolist(), strict=True
    ):
        place = normalize_axis(axis, len(dims), "axes", "the tensor that shape describes")
        if place in seen:
            raise AxisOutOfRange(f"axes has the axis {axis} twice", tensor="axes", axis=axis)
        if step == 0:
            raise InvalidTensor("steps has a 0, but a step must not be 0", tensor="steps")
        seen.add(place)
        chosen[place] = _slice(start, end, step, dims[place])
    sliced = tuple(len(range(*one.indices(size))) for one, size in zip(chosen, dims, strict=True))
    if dY.shape != sliced:
        raise ShapeMismatch(f"dY has shape {list(dY.shape)}, but the slice has {list(sliced)}", tensor="dY")
    dX: T = new_output(None, dims, dY.dtype)
    clear(dX)
    dX[tuple(chosen)] = dY
    return dX


def _slice(start: int, end: int, step: int, size: int) -> slice:
    """Return ONNX's slice as Python's: there an end before the beginning is None, not a negative number."""
    start += size * (start < 0)
    end += size * (end < 0)
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if size else slice(0, 0)


@op("ShrunkenGather", outputs="output", example={"data": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "indices": [2, 0]})
def shrunken_gather(data: Element, indices: Tind, /, *, axis: int = 0) -> Element:
    """output = data[.., indices, ..] along `axis`, with at most as many indices as the axis has elements.

    `indices` has one dimension. Padding is left out of a batch so. Raises `AxisOutOfRange`, `IndexOutOfRange` and
    `ShapeMismatch`.
    """
    axis = normalize_axis(axis, data.ndim, "data")
    if indices.ndim != 1 or indices.size > data.shape[axis]:
        raise ShapeMismatch(
            f"indices has shape {list(indices.shape)}, but must have one dimension of at most {data.shape[axis]},"
            f" the size of axis {axis} of data",
            tensor="indices",
        )
    output: Element = new_output(None, (*data.shape[:axis], indices.size, *data.shape[axis + 1 :]), data.dtype)
    np.take(data, flat_indices(indices, data.shape[axis]), axis, out=output, mode="clip")
    return output
