"""Layers: convolutions, pools, normalizations and losses, on the kernels that have their gradients, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidParameter
from service.graphs.nodes.kernels import attributes_of
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS
from service.kernels.batch_norm import batch_norm_internal
from service.kernels.conv import conv, conv_transpose
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
