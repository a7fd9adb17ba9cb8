"""Layers: convolutions, pools, normalizations and losses, on the kernels that have their gradients, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidParameter, shown
from service.graphs.nodes.kernels import attributes_of
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS
from service.kernels.batch_norm import batch_norm_internal
from service.kernels.conv import conv, conv_transpose
from service.kernels.losses import negative_log_likelihood_loss_internal
from service.kernels.normalization import group_normalization, layer_normalization
from service.kernels.pool import average_pool, lp_pool, max_pool
from service.kernels.resize import resize
from service.kernels.softmax import softmax_13

RMS_NORM = partial(layer_normalization, centered=False)

LAYERS: dict[str, tuple[Callable[..., Any], str, dict[str, int]]] = {
    "Conv": (conv, "ConvGrad", {}),
    "ConvTranspose": (conv_transpose, "ConvTransposeGrad", {}),
    "AveragePool": (average_pool, "AveragePoolGrad", {}),
    "GlobalAveragePool": (average_pool, "MaxPoolGrad", {}),
    "LpPool": (lp_pool, "MaxPoolGrad", {"p": 2}),
    "GlobalLpPool": (lp_pool, "MaxPoolGrad", {"p": 2}),
    "LayerNormalization": (layer_normalization, "LayerNormalizationGrad", {}),
    "SimplifiedLayerNormalization": (RMS_NORM, "SimplifiedLayerNormalizationGrad", {}),
    "RMSNormalization": (RMS_NORM, "SimplifiedLayerNormalizationGrad", {}),
    "Resize": (resize, "ResizeGrad", {}),
    "Softmax": (softmax_13, "SoftmaxGrad_13", {}),
    "LogSoftmax": (partial(softmax_13, logarithms=True), "LogSoftmaxGrad_13", {}),
    "InstanceNormalization": (group_normalization, "BatchNormalizationGrad", {}),
    "GroupNormalization": (group_normalization, "BatchNormalizationGrad", {"num_groups": 0, "stash_type": 1}),
}
"""The function of each operator, the operator that has its attributes, and more attributes with their defaults."""


def attributes(node: Node, operator: str, others: dict[str, int]) -> dict[str, Any]:
    """Return the node's attributes: those of the operator, and `others`, natural numbers, with their defaults."""
    given = {**others, **node.attributes}
    for name in others:
        if not isinstance(given[name], int) or given[name] < 1:
            problem = f"{name} is {shown(given[name])}, but must be an integer of at least 1"
            raise InvalidParameter(problem, parameter=name)
    checked = attributes_of(OPERATORS[operator], node.op, {k: v for k, v in given.items() if k not in others})
    return {**checked, **{name: given[name] for name in others}}


@maker(*LAYERS)
def layer(node: Node) -> Function:
    function, operator, others = LAYERS[node.op]
    return partial(function, **attributes(node, operator, others))


@maker("MaxPool", "GlobalMaxPool")
def max_pool_node(node: Node) -> Function:
    return partial(max_pool, indices=len(node.outputs) > 1, **attributes(node, "MaxPoolGrad", {}))


@maker("BatchNormalization")
def batch_normalization(node: Node) -> Function:
    given = attributes(node, "BatchNormInternal", {})
    return partial(batch_norm_internal, **{**given, "training_mode": int(is_training(node))})


def is_training(node: Node) -> bool:
    """Whether a BatchNormalization trains. Before opset 14 it does if the model names more outputs than Y."""
    more = any(name and name[0] != "~" for name in node.outputs[1:])
    return bool(node.attributes.get("training_mode", node.version < 14 and more))


@maker("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(node: Node) -> Function:
    given = attributes(node, "SoftmaxCrossEntropyLoss", {})
    ignored = given.pop("ignore_index", None)

    def loss(scores: Array, target: Array, weight: Array | None = None) -> Array:
        index = None if ignored is None else np.array(ignored)
        return negative_log_likelihood_loss_internal(scores, target, weight, index, **given)

    return loss
