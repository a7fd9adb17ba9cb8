"""The gradients of layers, which are operators of the service."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.gradients.arrays import rounded_once
from service.graphs.gradients.tape import Tape, gradient_of, rule
from service.graphs.nodes.layers import is_training, squares
from service.graphs.plan import Node
from service.kernels import OPERATORS, claim
from service.kernels.grid_sample import Sampler
from service.kernels.normalization import group_normalization_grad
from service.kernels.pool import average_pool_grad, max_pool_grad, spread_means
from service.kernels.resize import resize_grad


def call(tape: Tape, node: Node, operator: str, *inputs: str, **attributes: Any) -> Any:
    """Add a step of an operator whose outputs are the gradients of the node's first inputs. Return their names.

    The operator has those of the node's attributes that it knows, and these ones.
    """
    declared = OPERATORS[operator]
    given = {one.name: node.attributes[one.name] for one in declared.attributes if one.name in node.attributes}
    if declared.takes_wanted:
        attributes["wanted"] = tape.wanted(node, " ".join(declared.output_names))
    return tape.call(partial(declared.kernel, **given | attributes), *inputs, outputs=len(declared.outputs))


@rule("Conv", "ConvTranspose")
def conv(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    gradients: Sequence[str] = call(tape, node, f"{node.op}Grad", dY, *node.inputs[:2])
    return gradients


@gradient_of("MaxPool", "GlobalMaxPool", outputs=2)
def max_pool(dY: Array, Z: Array, shape: tuple[int, ...]) -> Array:
    return max_pool_grad(dY, Z, np.array(shape))


@rule("AveragePool", "GlobalAveragePool")
def average_pool(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    def gradient(dY: Array, shape: tuple[int, ...]) -> Array:
        dX: Array = spread_means(dY, np.array(shape), **{"kernel_shape": [*shape[2:]], **node.attributes})
        return dX

    return [tape.call(gradient, dY, tape.shape(node.inputs[0]))]


@rule("LpPool", "GlobalLpPool")
def lp_pool(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    attributes = {**node.attributes}
    p = attributes.pop("p", 2)

    @rounded_once
    def gradient(dY: Array, X: Array, Y: Array) -> Array:
        given = {"kernel_shape": [*X.shape[2:]], "count_include_pad": 1, **attributes}
        shares = np.where(Y == 0, 0, dY * Y ** (1 - p)) * dY.dtype.type(math.prod(given["kernel_shape"]))
        dX: Array = average_pool_grad(shares, np.array(X.shape), **given) * np.copysign(np.abs(X) ** (p - 1), X)
        return dX

    return [tape.call(gradient, dY, node.inputs[0], node.outputs[0])]


@rule("LRN")
def local_response(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    attributes = {**node.attributes}
    beta = attributes.pop("beta", 0.75)

    def gradient(dY: Array, X: Array) -> Array:
        x, base, windows = squares(X, **attributes)
        claim(4 * base.nbytes)
        power = base**-beta * dY.reshape(x.shape)
        shares = average_pool_grad(power * x / base, np.array(x.shape), **windows)
        dX: Array = power - x.dtype.type(2 * attributes.get("alpha", 1e-4) * beta) * x * shares
        return dX.reshape(X.shape).astype(X.dtype, copy=False)

    return [tape.call(gradient, dY, node.inputs[0])]


@rule("GridSample")
def grid_sample(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    sampler, (X, grid) = Sampler(**node.attributes), node.inputs
    return [tape.call(sampler.image_grad, dY, tape.shape(X), grid), tape.call(sampler.grid_grad, dY, X, grid)]


@rule("Resize")
def resize(tape: Tape, node: Node, dY: str) -> Sequence[str]:
    def gradient(dY: Array, shape: tuple[int, ...], *given: Array | None) -> Array:
        return resize_grad(dY, np.broadcast_to(dY.dtype.type(0), shape), *given, **node.attributes)

    return [tape.call(gradient, dY, tape.shape(node.inputs[0]), *node.inputs[1:3])]


@rule("BatchNormalization", outputs=5)
def batch_normalization(tape: Tape, node: Node, dY: str, *others: str) -> Sequence[str]:
    _refuse(node, others)
    mean, inverse = node.outputs[3:]
    gradients: list[str] = [*call(tape, node, "BatchNormalizationGrad", dY, *node.inputs[:2], mean, inverse)]
    if not is_training(node):
        gradients[0] = tape.call(_scale_channels, dY, node.inputs[1], inverse)
    return gradients


@rounded_once
def _scale_channels(dY: Array, scale: Array, inverse: Array) -> Array:
    factor: Array = (scale * inverse).astype(dY.dtype)
    return dY * factor.reshape(-1, *[1] * (dY.ndim - 2))


@rule("LayerNormalization", outputs=3)
@rule("SimplifiedLayerNormalization", "RMSNormalization", outputs=2)
def layer_normalization(tape: Tape, node: Node, dY: str, *others: str) -> Sequence[str]:
    _refuse(node, others)
    axis = node.attributes.get("axis", -1)
    X, scale, *_ = node.inputs
    kernel = "LayerNormalizationGrad" if node.op == "LayerNormalization" else "SimplifiedLayerNormalizationGrad"
    columns = tape.call(lambda scale, shape: np.broadcast_to(scale, shape[axis:]), scale, tape.shape(X))
    dX, *sums = call(tape, node, kernel, dY, X, columns, *node.outputs[1:])
    return [dX, *(tape.like(one, name) for one, name in zip(sums, node.inputs[1:], strict=False) if name)]


@rule("InstanceNormalization", "GroupNormalization", outputs=3)
def group_normalization(tape: Tape, node: Node, dY: str, *_: str) -> Sequence[str]:
    gradients: Sequence[str] = tape.call(group_normalization_grad, dY, *node.inputs[:2], *node.outputs[1:], outputs=3)
    return gradients


def _refuse(node: Node, gradients: Sequence[str]) -> None:
    """Raise `InvalidGraph` if the loss depends on another output than the first."""
    for name, gradient in zip(node.outputs[1:], gradients, strict=False):
        if gradient:
            raise InvalidGraph(f"{node.label}: there is no rule for the gradient of its output {name}", node=node.name)
