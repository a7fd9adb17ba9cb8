"""The gradients of operators that read or write elements by their indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from service.dtypes import INT64, Array
from service.graphs.gradients.tape import Tape, gradients, rule
from service.graphs.nodes.indexing import cache_places, elements, rows
from service.graphs.plan import Node
from service.kernels.gather import gather_grad
from service.kernels.indexing import gather_elements_grad, gather_nd_grad, slice_grad

Shape = tuple[int, ...]


def _list(shape: Shape) -> Array:
    return np.array(shape, INT64)


gradients("Gather", lambda dY, shape, B, *, axis=0: gather_grad(_list(shape), B, dY, axis=axis))
gradients("GatherElements", lambda dY, shape, B, *, axis=0: gather_elements_grad(dY, _list(shape), B, axis=axis))
gradients("GatherND", lambda dY, shape, B, *, batch_dims=0: gather_nd_grad(_list(shape), B, dY, batch_dims=batch_dims))
gradients("Slice", lambda dY, shape, B, C, D, E: slice_grad(dY, _list(shape), B, C, D, E))
gradients("TopK", lambda dY, shape, Z, *, axis=-1: gather_elements_grad(dY, _list(shape), Z, axis=axis), outputs=2)

Place = Callable[[Array], tuple[Array, ...]]
"""A function of the indices. It returns NumPy's index of the elements that they choose."""


@rule("ScatterElements", "ScatterND")
def _scatter(tape: Tape, node: Node, dY: str) -> list[str | None]:
    data, indices, updates = node.inputs
    Y, reduction = node.outputs[0], node.attributes.get("reduction", "none")
    place = rows if node.op == "ScatterND" else partial(elements, node.attributes.get("axis", 0))
    if reduction == "mul":
        step = partial(_factors, place)
        d_data, d_updates = tape.call(step, dY, data, indices, updates, outputs=2)
        return [d_data, None, d_updates]
    if reduction in ("max", "min"):
        d_data, d_updates = tape.call(partial(_shares, place), dY, Y, data, indices, updates, outputs=2)
        return [d_data, None, d_updates]
    d_data = dY if reduction == "add" else tape.call(partial(_cleared, place), dY, indices)
    return [d_data, None, tape.call(partial(_taken, place), dY, indices)]


@rule("TensorScatter")
def _tensor_scatter(tape: Tape, node: Node, dY: str) -> list[str]:
    data, updates, *starts = node.inputs
    shapes = tape.shape(data), tape.shape(updates)
    indices = tape.call(partial(cache_places, node.attributes), *shapes, *starts)
    place = partial(elements, node.attributes.get("axis", -2))
    return [tape.call(partial(step, place), dY, indices) for step in (_cleared, _taken)]


def _taken(place: Place, dY: Array, indices: Array) -> Array:
    taken: Array = dY[place(indices)]
    return taken


def _cleared(place: Place, dY: Array, indices: Array) -> Array:
    cleared = dY.copy()
    cleared[place(indices)] = 0
    return cleared


def _shares(place: Place, dY: Array, Y: Array, data: Array, indices: Array, updates: Array) -> tuple[Array, Array]:
    """Return the gradients of data and updates, which share that of an element if they are equal to it."""
    at = place(indices)
    first, others = data == Y, updates == Y[at]
    count = first.astype(dY.dtype)
    np.add.at(count, at, others.astype(dY.dtype))
    share = dY / np.maximum(count, dY.dtype.type(1))
    return share * first, share[at] * others


def _factors(place: Place, dY: Array, data: Array, indices: Array, updates: Array) -> tuple[Array, Array]:
    """Return the gradients of data and updates: dY times the product of all other factors of an element."""
    at, zero = place(indices), updates == 0
    product, zeros = np.ones_like(data), np.zeros(data.shape, INT64)
    one = updates.dtype.type(1)
    np.multiply.at(product, at, np.where(zero, one, updates))
    np.add.at(zeros, at, zero)
    others = np.where(zeros[at] - zero == 0, product[at] / np.where(zero, one, updates), 0)
    return dY * np.where(zeros == 0, product, 0), (dY * data)[at] * others
