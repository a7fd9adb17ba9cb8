"""Layers: convolutions, pools, normalizations and losses, on the kernels that have their gradients, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array, compute_dtype
from service.errors import InvalidParameter, ShapeMismatch
from service.graphs.nodes.kernels import attributes_of
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, claim
from service.kernels.batch_norm import batch_norm_internal
from service.kernels.conv import conv, conv_transpose
from service.kernels.grid_sample import Sampler
from service.kernels.losses import negative_log_likelihood_loss_internal
from service.kernels.normalization import group_normalization, layer_normalization
from service.kernels.pool import average_pool, max_pool
from service.kernels.resize import resize
from service.kernels.softmax import softmax_13

RMS_NORM = partial(layer_normalization, centered=False)

LAYERS: dict[str, tuple[Callable[..., Any], str]] = {
    "Conv": (conv, "ConvGrad"),
    "ConvTranspose": (conv_transpose, "ConvTransposeGrad"),
    "AveragePool": (average_pool, "AveragePoolGrad"),
    "GlobalAveragePool": (average_pool, "MaxPoolGrad"),
    "LayerNormalization": (layer_normalization, "LayerNormalizationGrad"),
    "SimplifiedLayerNormalization": (RMS_NORM, "SimplifiedLayerNormalizationGrad"),
    "RMSNormalization": (RMS_NORM, "SimplifiedLayerNormalizationGrad"),
    "Resize": (resize, "ResizeGrad"),
    "Softmax": (softmax_13, "SoftmaxGrad_13"),
    "LogSoftmax": (partial(softmax_13, logarithms=True), "LogSoftmaxGrad_13"),
    "InstanceNormalization": (group_normalization, "BatchNormalizationGrad"),
}
"""The function of each operator, and the operator that has its attributes."""


@maker(*LAYERS)
def layer(node: Node) -> Function:
    function, operator = LAYERS[node.op]
    return partial(function, **attributes_of(node, OPERATORS[operator]))


@maker("MaxPool", "GlobalMaxPool")
def max_pool_node(node: Node) -> Function:
    return partial(max_pool, indices=len(node.outputs) > 1, **attributes_of(node, OPERATORS["MaxPoolGrad"]))


@maker("LpPool", "GlobalLpPool")
def lp_pool_node(node: Node) -> Function:
    attributes = {**node.attributes}
    if (p := attributes.pop("p", 2)) < 1:
        raise InvalidParameter(f"p is {p}, but must be an integer of at least 1", parameter="p")
    return partial(lp_pool, p, **attributes_of(replace(node, attributes=attributes), OPERATORS["MaxPoolGrad"]))


def lp_pool(p: int, X: Array, /, **attributes: Any) -> Array:
    """Return (sum |x|^p)^(1/p) of each window: the windows are those of AveragePool, and their paddings are zeros."""
    wide = compute_dtype(X.dtype)
    claim(3 * X.size * wide.itemsize)
    means = average_pool(np.abs(X.astype(wide)) ** p, count_include_pad=1, whole=True, **attributes)
    claim(3 * means.nbytes)
    norms: Array = (means * math.prod(attributes.get("kernel_shape", X.shape[2:]))) ** (1 / p)
    return norms.astype(X.dtype, copy=False)


@maker("LRN")
def local_response_node(node: Node) -> Function:
    size, most = node.attributes["size"], 1 << 31
    if not 1 <= size <= most:
        raise InvalidParameter(f"size is {size}, but must be an integer in [1, {most}]", parameter="size")
    return partial(local_response, **node.attributes)


def local_response(X: Array, *, beta: float = 0.75, **attributes: Any) -> Array:
    """Return X divided by a power of the squares of near channels."""
    x, base, _ = squares(X, **attributes)
    return (x * base**-beta).reshape(X.shape).astype(X.dtype, copy=False)


def squares(X: Array, *, size: int, alpha: float = 1e-4, bias: float = 1.0) -> tuple[Array, Array, dict[str, Any]]:
    """Return X [N, 1, C, rest], bias + alpha * the mean square of near channels, and these as windows of a pool."""
    if X.ndim < 3:
        raise ShapeMismatch(f"X has shape {list(X.shape)}, but must have 3 dimensions or more", tensor="X")
    windows: dict[str, Any] = {
        "kernel_shape": [size, 1],
        "pads": [(size - 1) // 2, 0, size // 2, 0],
        "count_include_pad": 1,
    }
    claim(5 * X.size * compute_dtype(X.dtype).itemsize)
    x = X.astype(compute_dtype(X.dtype), copy=False).reshape(len(X), 1, X.shape[1], math.prod(X.shape[2:]))
    return x, average_pool(x * x, **windows) * x.dtype.type(alpha) + x.dtype.type(bias), windows


@maker("GridSample")
def grid_sample(node: Node) -> Function:
    return Sampler(**node.attributes).sample


@maker("GroupNormalization")
def group_normalization_node(node: Node) -> Function:
    """The node's `stash_type` changes nothing."""
    groups = node.attributes.get("num_groups", 0)
    if groups < 1:
        problem = f"num_groups is {groups}, but must be an integer of at least 1"
        raise InvalidParameter(problem, parameter="num_groups")
    return partial(group_normalization, num_groups=groups, epsilon=node.attributes.get("epsilon", 1e-5))


@maker("BatchNormalization")
def batch_normalization(node: Node) -> Function:
    given = attributes_of(node, OPERATORS["BatchNormInternal"])
    return partial(batch_norm_internal, **{**given, "training_mode": int(is_training(node))})


def is_training(node: Node) -> bool:
    """Whether a BatchNormalization trains. Before opset 14 it does if the model names more outputs than Y."""
    more = any(name and name[0] != "~" for name in node.outputs[1:])
    return bool(node.attributes.get("training_mode", node.version < 14 and more))


@maker("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(node: Node) -> Function:
    given = attributes_of(node, OPERATORS["SoftmaxCrossEntropyLoss"])
    ignored = given.pop("ignore_index", None)
    index = None if ignored is None else np.array(ignored)

    def loss(scores: Array, target: Array, weight: Array | None = None) -> Array:
        return negative_log_likelihood_loss_internal(scores, target, weight, index, **given)

    return loss
