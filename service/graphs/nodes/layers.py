"""Layers: convolutions, pools and normalizations, on the kernels whose gradients are operators of the service."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from service.errors import InvalidParameter, shown
from service.graphs.nodes.kernels import attributes_of
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS
from service.kernels.batch_norm import batch_norm_internal
from service.kernels.conv import conv, conv_transpose
from service.kernels.normalization import group_normalization, layer_normalization, simplified_layer_normalization
from service.kernels.pool import average_pool, lp_pool, max_pool

LAYERS: dict[str, tuple[Callable[..., Any], str, dict[str, int]]] = {
    "Conv": (conv, "ConvGrad", {}),
    "ConvTranspose": (conv_transpose, "ConvTransposeGrad", {}),
    "AveragePool": (average_pool, "AveragePoolGrad", {}),
    "GlobalAveragePool": (average_pool, "MaxPoolGrad", {}),
    "LpPool": (lp_pool, "MaxPoolGrad", {"p": 2}),
    "GlobalLpPool": (lp_pool, "MaxPoolGrad", {"p": 2}),
    "LayerNormalization": (layer_normalization, "LayerNormalizationGrad", {}),
    "SimplifiedLayerNormalization": (simplified_layer_normalization, "SimplifiedLayerNormalizationGrad", {}),
    "RMSNormalization": (simplified_layer_normalization, "SimplifiedLayerNormalizationGrad", {}),
    "InstanceNormalization": (group_normalization, "BatchNormalizationGrad", {}),
    "GroupNormalization": (group_normalization, "BatchNormalizationGrad", {"num_groups": 0}),
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
    """Before opset 14 a node trains if the model names more outputs than Y."""
    training = int(node.version < 14 and any(name and name[0] != "~" for name in node.outputs[1:]))
    return partial(batch_norm_internal, **{"training_mode": training, **attributes(node, "BatchNormInternal", {})})
