"""The graphs that ONNX Runtime's `generate_artifacts` writes for training, as programs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.model import Model, Value
from service.graphs.nodes import step_of
from service.graphs.nodes.kernels import POOLS
from service.graphs.plan import NODE_BYTES, Node, Step, paced
from service.graphs.weights import parameters_of, value_of

ACCUMULATE = "com.microsoft", "InPlaceAccumulatorV2"
"""The operator that adds a gradient to its buffer."""

STATISTICS = {"BatchNormInternal", "BatchNormalization"}
"""The operators whose inputs 3 and 4 are running statistics, which outputs 1 and 2 replace in training."""


@dataclass(frozen=True)
class Program:
    """What a graph computes. All names are those of the model's tensors."""

    steps: Sequence[Step]
    constants: Mapping[str, Any]
    """The tensors that nobody brings."""
    inputs: tuple[Value, ...]
    """What each run brings, beside parameters and statistics."""
    outputs: tuple[Value, ...]
    """What it gives, beside the loss, gradients and statistics."""
    parameters: tuple[Value, ...]
    loss: Value | None = None
    gradients: Mapping[str, str] = field(default_factory=dict)
    """The gradient of each parameter that has one."""
    statistics: Mapping[str, str] = field(default_factory=dict)
    """What replaces each running mean and variance: itself, in inference."""
    initial: Mapping[str, Array] = field(default_factory=dict)
    """The values of parameters and statistics that the model has."""
    inference: Program | None = None
    """The same without gradients and without the training forms of nodes, if the server has added these."""


def program_of(model: Model, train: str | None = None) -> Program:
    """Return the program of a model that has its gradients, or none, with these parameters. Raises `InvalidGraph`."""
    adds = [node for node in model.nodes if (node.domain, node.op) == ACCUMULATE]
    for node in paced(adds):
        if not node.outputs[0]:
            raise InvalidGraph(f"{node.label} must have its first output")
    gradients = {_parameter(node): node.inputs[1] for node in adds}
    flags, buffers = {name for node in adds for name in node.outputs}, {node.inputs[0] for node in adds}
    resets = {name for node in adds for name in node.inputs[2:]}
    nodes = [node for node in model.nodes if (node.domain, node.op) != ACCUMULATE]
    read = {name for node in nodes for name in node.inputs}
    labels = {node.inputs[1] for node in nodes if node.op == "SoftmaxCrossEntropyLoss"}
    if (read | {*gradients.values()}) & (flags | buffers):
        raise InvalidGraph("a node reads an accumulation buffer, which is the server's here")
    known = {one.name: one for one in model.inputs}
    if missing := gradients.keys() - known.keys() - model.initializers.keys():
        raise InvalidGraph(f"the gradient {gradients[min(missing)]!r} belongs to no input of the graph")
    outputs = [one for one in model.outputs if one.name not in flags]
    statistics = statistics_of(nodes, model.initializers)
    tensors = {**model.initializers, **model.constants}
    parameters = parameters_of(model, train) if not adds else {}
    parameters |= {name: known[name] if name in known else value_of((name, tensors[name])) for name in gradients}
    initial = {name: tensors[name] for name in (*parameters, *statistics) if name in tensors}
    return Program(
        steps=[step_of(node) for node in paced(_with_shapes(nodes), NODE_BYTES)],
        constants={name: array for name, array in tensors.items() if name not in initial},
        inputs=tuple(
            _as_labels(one) if adds and one.name in labels else one
            for one in model.inputs
            if one.name not in {*parameters, *buffers, *(resets - read)}
        ),
        outputs=tuple(outputs[1:] if adds else outputs),
        parameters=tuple(parameters.values()),
        loss=outputs[0] if adds and outputs else None,
        gradients=gradients,
        statistics=statistics,
        initial=initial,
    )


def _as_labels(value: Value) -> Value:
    """Return an input without a shape that is wrong: of scores [N, C, ...], ONNX Runtime's tool takes [N, C] for it."""
    return value._replace(shape=None) if len(value.shape or ()) > 1 else value


def _parameter(node: Node) -> str:
    """Return the parameter whose gradient the node adds to its buffer."""
    buffer, gradient = node.inputs[:2]
    suffix = "_grad.accumulation.buffer"
    return buffer.removesuffix(suffix) if buffer.endswith(suffix) else gradient.removesuffix("_grad")


def statistics_of(nodes: Sequence[Node], tensors: Collection[str]) -> dict[str, str]:
    """Return what replaces each running mean and variance that the model has: itself, in inference."""
    found = dict[str, str]()
    for node in nodes:
        if node.op in STATISTICS:
            trains = node.attributes.get("training_mode", node.op == "BatchNormInternal")
            pairs = zip_longest(node.inputs[3:5], node.outputs[1:3] if trains else (), fillvalue="")
            found.update({old: new or old for old, new in pairs if old in tensors})
    return found


def _with_shapes(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes, where gradients of pools read the shape of their result. Raises `InvalidGraph`.

    ONNX Runtime takes it from the types in the file. It is that of the forward node's input.
    """
    makers = {name: node for node in nodes for name in node.outputs}
    behind = dict[str, Node]()
    shaped = list[Node]()
    for node in nodes:
        if node.op in POOLS and len(node.inputs) < 3:
            forward = makers.get(node.inputs[-1] if node.op == "MaxPoolGrad" else _NUMBER.sub("", node.inputs[0]))
            if forward is None or forward.op not in ("MaxPool", "AveragePool"):
                raise InvalidGraph(f"{node.label} belongs to no pool of the graph")
            (shape,) = behind.setdefault(forward.outputs[0], _shape(forward)).outputs
            node = replace(node, inputs=(*node.inputs, shape))
        shaped.append(node)
    return [one for node in shaped for one in (node, behind.get(node.outputs[0])) if one]


def _shape(forward: Node) -> Node:
    return Node("Shape", "", forward.version, forward.inputs[:1], (f"~{forward.inputs[0]}",), {}, forward.name)


_NUMBER = re.compile(r"_grad(_\d+)?$")
