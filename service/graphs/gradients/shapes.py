"""The gradients of operators that move, copy and leave out elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from service.dtypes import INT64, Array
from service.graphs.gradients.arrays import unbroadcast
from service.graphs.gradients.tape import Tape, gradient_of, gradients, rule
from service.graphs.nodes.shapes import sources, to_depth, to_space, triangle
from service.graphs.plan import Node
from service.graphs.unrolled import OURS
from service.kernels.gather import gather_grad

Shape = tuple[int, ...]


rule("Identity")(lambda tape, node, dY: [dY])
rule("Expand")(lambda tape, node, dY: [tape.like(dY, node.inputs[0])])
for _op in ("Flatten", "Reshape", "Squeeze", "Unsqueeze"):
    gradients(_op, lambda dY, shape: dY.reshape(shape))
gradients("If", None, lambda dY, shape: dY.reshape(shape), domain=OURS)


@gradient_of("Transpose")
def _transpose(dY: Array, *, perm: Sequence[int] | None = None) -> Array:
    return dY.transpose(None if perm is None else np.argsort(np.mod(perm, dY.ndim)))


@rule("Concat")
def _concat(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    if len(node.inputs) == 1:
        return [dY]
    shapes = [tape.shape(one) for one in node.inputs]
    parts: Sequence[str] = tape.call(partial(_parts, node.attributes["axis"]), dY, *shapes, outputs=len(shapes))
    return parts


def _parts(axis: int, whole: Array, *shapes: Shape) -> tuple[Array, ...]:
    stops = [*itertools.accumulate(shape[axis] for shape in shapes)]
    return tuple(np.split(whole, stops[:-1], axis))


@rule("Split")
def _split(tape: Tape, node: Node, *gradients: str) -> list[str]:
    X, *sizes = node.inputs
    step = partial(_joined, node.attributes.get("axis", 0))
    return [tape.call(step, tape.shape(X), *(sizes or [""]), *gradients)]


def _joined(axis: int, shape: Shape, sizes: Array | None, *parts: Array | None) -> Array:
    """Return the gradients side by side, with zeros for a part that nobody has read."""
    step = -(-shape[axis] // len(parts))
    lengths = [step] * len(parts) if sizes is None or not sizes.size else sizes.tolist()
    whole = np.zeros(shape, next(one.dtype for one in parts if one is not None))
    along, stops = np.moveaxis(whole, axis, 0), itertools.accumulate(lengths)
    for part, length, stop in zip(parts, lengths, stops, strict=True):
        if part is not None:
            along[stop - length : stop] = np.moveaxis(part, axis, 0)
    return whole


@gradient_of("Tile")
def _sum_of_tiles(dY: Array, shape: Shape, B: Array) -> Array:
    pairs = [*itertools.chain(*zip(B.tolist(), shape, strict=True))]
    once = tuple(itertools.chain(*((1, size) for size in shape)))
    return unbroadcast(dY.reshape(pairs), once).reshape(shape)


@gradient_of("Pad")
def _without_padding(dY: Array, shape: Shape, B: Array, D: Array | None, *, mode: str = "constant") -> Array:
    pads, count = B.tolist(), len(B) // 2
    axes = [*range(count)] if D is None else [axis % len(shape) for axis in D.reshape(-1).tolist()]
    for axis, before, after in zip(axes, pads[:count], pads[count:], strict=True):
        if before or after:
            places = sources(mode, shape[axis], before, after)
            inside = places >= 0
            within = (*dY.shape[:axis], shape[axis], *dY.shape[axis + 1 :])
            dY = gather_grad(np.array(within, INT64), places[inside], dY.compress(inside, axis), axis=axis)
    return dY


gradients("DepthToSpace", lambda dY, *, blocksize, mode="DCR": to_depth(dY, blocksize=blocksize, mode=mode))
gradients("SpaceToDepth", lambda dY, *, blocksize: to_space(dY, blocksize=blocksize))
gradients("Trilu", lambda dY, B, *, upper=1: triangle(dY, B, upper=upper))
