"""Nodes that run on the kernels of the service: the training nodes of ONNX Runtime, and those of ONNX that we have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args, get_origin

from service.errors import InvalidParameter, MissingTensor, shown
from service.graphs.nodes.table import Function, maker
from service.graphs.plan import Node
from service.kernels import OPERATORS, Attribute, Operator, check_dtypes, check_work

IN_ONNX = ("SoftmaxCrossEntropyLoss", "MaxPoolGrad", "AveragePoolGrad")
"""The kernels whose nodes are in the domain of ONNX itself."""

POOLS = {"AveragePoolGrad", "MaxPoolGrad"}
"""The operators whose result has the shape of a tensor that the node in a file does not read."""


def kernel(node: Node) -> Function:
    """Return a function that runs the node's kernel. Raises `InvalidParameter` for attributes that do not fit."""
    operator = OPERATORS[node.op]
    attributes = attributes_of(node, operator)
    wanted = {one.name for one, name in zip(operator.outputs, node.outputs, strict=False) if name}
    return partial(run, operator, attributes, {"wanted": wanted} if operator.takes_wanted else {})


def attributes_of(node: Node, operator: Operator) -> dict[str, Any]:
    """Return the node's attributes by their names in Python, checked against those of the operator."""
    known = {one.name: one for one in operator.attributes}
    for name, value in node.attributes.items():
        if name not in known:
            raise InvalidParameter(f"{node.op} has no attribute {shown(name)}", parameter=name)
        _check(known[name], value)
    for name in known.keys() - node.attributes.keys():
        if known[name].required:
            raise InvalidParameter(f"{node.op} needs the attribute {name}", parameter=name)
    return {known[name].parameter: value for name, value in node.attributes.items()}


def run(operator: Operator, attributes: Mapping[str, Any], selection: Mapping[str, Any], *given: Any) -> Any:
    """Run the kernel with the tensors of a node. A group, which is the last of the kernel's inputs, takes the rest."""
    declared, values = operator.inputs, [*given]
    named = [(one.name, one, array) for one, array in zip(declared, given, strict=False)]
    if declared[-1].group:
        last, start = declared[-1], len(declared) - 1
        values[start:] = [{str(k): array for k, array in enumerate(given[start:])}]
        named[start:] = [(f"{last.name}.{k}", last, array) for k, array in enumerate(given[start:])]
    values += [None] * (len(declared) - len(values))
    for one, value in zip(declared, values, strict=False):
        if not one.optional and (value is None or (one.group and not value)):
            raise MissingTensor(f"it needs the input {one.name!r}", tensor=one.name)
    check_dtypes((name, one, array.dtype) for name, one, array in named if array is not None)
    if operator.multiply_adds is not None:
        check_work(operator.name, operator.multiply_adds(*values, **attributes))
    result = operator.kernel(*values, **attributes, **selection)
    return tuple(result.values()) if isinstance(result, Mapping) else result


def _check(attribute: Attribute, value: Any) -> None:
    """Raise `InvalidParameter` unless the value of a node's attribute is one that the kernel takes."""
    items = value if attribute.is_list else [value]
    if not isinstance(items, Sequence) or not all(_fits(attribute, item) for item in items):
        least = "" if attribute.minimum is None else f" of at least {attribute.minimum}"
        problem = f"{attribute.name} is {shown(value)}, but must be {attribute.type_name}{least}"
        raise InvalidParameter(problem, parameter=attribute.name)


def _fits(attribute: Attribute, item: Any) -> bool:
    kind = attribute.item_type
    if get_origin(kind) is Literal:
        return item in get_args(kind)
    if not isinstance(item, (int, float) if kind is float else kind):
        return False
    return attribute.minimum is None or item >= attribute.minimum


def _is_for_nodes(operator: Operator) -> bool:
    """Whether the tensors of a node have one meaning: only the last input may be a group, and only the last output."""
    return not any(one.group for one in (*operator.inputs[:-1], *operator.outputs[:-1]))


maker(*(name for name, operator in OPERATORS.items() if _is_for_nodes(operator)), domain="com.microsoft")(kernel)
maker(*IN_ONNX)(kernel)
