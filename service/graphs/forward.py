"""A forward model with a loss, made into a graph that gives the loss and the gradients of the trained parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from service.dtypes import FLOATS, INT64, Array
from service.errors import InvalidGraph, ShapeMismatch, shown
from service.graphs.gradients.tape import Tape, completed, dependent, differentiate, without_rule
from service.graphs.model import Model, Value
from service.graphs.nodes import step_of
from service.graphs.plan import NODE_BYTES, Node, Step, paced
from service.graphs.training import Program, statistics_of
from service.graphs.weights import parameters_of

LOSSES = {
    "SoftmaxCrossEntropyLoss": "SoftmaxCrossEntropyLoss output labels -> ~loss ~log_prob",
    "NegativeLogLikelihoodLoss": "NegativeLogLikelihoodLoss output labels -> ~loss",
    "MSELoss": "Sub output ~target -> ~error; Mul ~error ~error -> ~terms; ReduceMean ~terms -> ~loss",
    "L1Loss": "Sub output ~target -> ~error; Abs ~error -> ~terms; ReduceMean ~terms -> ~loss",
    "BCEWithLogitsLoss": "Softplus output -> ~softplus; Mul output ~target -> ~product;"
    " Sub ~softplus ~product -> ~terms; ReduceMean ~terms -> ~loss",
}
"""The nodes of each loss, which is a mean. `output` stands for the model's first output."""

IGNORED_LABEL = -100
"""The label of samples that do not count, as in PyTorch."""

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "ReduceMean": {"keepdims": 0},
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), {"ignore_index": IGNORED_LABEL}),
}
"""The attributes of these nodes."""


MAX_LISTED = 1000
"""Nodes that an error lists: names may be long."""


def training_of(model: Model, loss: str, train: str | None = None) -> Program:
    """Return the program of a model's training. `loss` is one of `LOSSES`, or the name of an output that is the loss.

    `train` chooses the parameters: see `parameters_of`. The others are constants. Dropout takes its training form, and
    so does BatchNormalization with a trained scale or bias, or, if it has neither, with a trained parameter before it.
    They have their other form in the program's `inference`. Raises `InvalidGraph`.
    """
    inputs, value, losses, checks = _loss(model, loss)
    nodes, tensors = [*model.nodes, *losses], {**model.initializers, **model.constants}
    chosen = parameters_of(model, train)
    on_the_way = dependent(nodes, chosen)
    nodes = [_in_training(node, on_the_way, model.constants) for node in nodes]
    if lacking := without_rule(nodes, value.name, chosen):
        labels = ", ".join(shown(node.label) for node in lacking[:MAX_LISTED])
        problem = f"on the way to the loss, these nodes have no gradient: {labels}"
        raise InvalidGraph(f"{problem}. train= can leave out the parameters before them", nodes=labels)
    size = len(model.nodes)
    tape = Tape([*_steps(nodes[:size]), *checks, *_steps(nodes[size:])], model.budget)
    gradients = differentiate(tape, nodes, value.name, chosen)
    _check_reached(gradients, train or "*", chosen)
    statistics = statistics_of(nodes, tensors)
    if both := [name for name in gradients if name in statistics]:
        problem = f"{shown(', '.join(both))} is a parameter and a running statistic: an exporter has made one of two"
        raise InvalidGraph(f"{problem} that began equal. Export the model with dynamo=True, optimize=False")
    initial = {name: tensors[name] for name in (*gradients, *statistics) if name in tensors}
    program = Program(
        steps=tape.steps,
        constants={TRUE: np.array(True), **{k: v for k, v in tensors.items() if k not in initial}},
        inputs=tuple(one for one in inputs if one.name not in gradients),
        outputs=tuple(one for one in model.outputs if one.name != value.name),
        parameters=tuple(chosen[name] for name in gradients),
        loss=value,
        gradients=gradients,
        statistics=statistics,
        initial=initial,
    )
    plain = [*_steps([one for node in model.nodes for one in _in_inference(node)]), *checks, *_steps(losses)]
    return replace(
        program, inference=replace(program, steps=plain, gradients={}, statistics={one: one for one in statistics})
    )


def _steps(nodes: Iterable[Node]) -> list[Step]:
    return [*map(step_of, paced(nodes, NODE_BYTES))]


def _loss(model: Model, loss: str) -> tuple[tuple[Value, ...], Value, list[Node], list[Step]]:
    """Return the inputs of a run, the loss, and the nodes and steps that it adds to the model."""
    outputs = {one.name: one for one in model.outputs}
    if loss in outputs:
        if any(length not in (1, None) for length in outputs[loss].shape or ()):
            shape = list(outputs[loss].shape or ())
            raise InvalidGraph(f"the output {shown(loss)} has shape {shape}, but a loss must be one number")
        return model.inputs, outputs[loss], [], []
    if loss not in LOSSES:
        known = f"{', '.join(LOSSES)}, or an output of the model: {shown(', '.join(outputs))}"
        raise InvalidGraph(f"loss is {shown(loss)}, but must be one of {known}")
    output = model.outputs[0]
    if output.dtype.name not in FLOATS.dtypes:
        raise InvalidGraph(f"the first output, {shown(output.name)}, is {output.dtype}: a loss needs a float")
    wanted = Value("labels", INT64, output.shape and (output.shape[0], *output.shape[2:]))
    if "~target" in LOSSES[loss]:
        wanted = output._replace(name="target")
    if wanted.shape and any(one.shape is None or None in one.shape for one in model.inputs):
        # Exporters that leave the batch open often give the outputs the shape of their example.
        wanted = wanted._replace(shape=(None,) * len(wanted.shape))
    made = {name for node in model.nodes for name in node.outputs} | {one.name for one in model.inputs}
    taken = {wanted.name} & {*model.initializers, *model.constants, *made} | {"loss"} & outputs.keys()
    if taken:
        raise InvalidGraph(f"the model has a tensor {min(taken)}, the name of one that {loss} adds: rename it")
    check = Step(_same_shape, (output.name, "target"), ("~target",), loss)
    nodes = [_parsed(text, {"output": output.name}) for text in LOSSES[loss].split(";")]
    return (*model.inputs, wanted), Value("~loss", output.dtype, ()), nodes, [check]


def _parsed(text: str, names: Mapping[str, str]) -> Node:
    left, _, right = text.partition("->")
    op, *inputs = left.split()
    return Node(op, "", 13, tuple(names.get(one, one) for one in inputs), (*right.split(),), ATTRIBUTES.get(op, {}))


def _same_shape(output: Array, target: Array) -> Array:
    if target.shape != output.shape:
        problem = f"target has shape {list(target.shape)}, but must have that of the output, {list(output.shape)}"
        raise ShapeMismatch(problem, tensor="target")
    return target


TRUE = "~true"
"""The constant that turns Dropout on."""


def _in_training(node: Node, on_the_way: set[str], constants: Collection[str]) -> Node:
    """Return the form of a node for training, with the outputs that its rule reads."""
    if node.op == "Dropout":
        ratio = node.inputs[1] if len(node.inputs) > 1 else ""
        node = replace(node, inputs=(node.inputs[0], ratio, TRUE))
    trained = node.inputs[:1] if all(one in constants for one in node.inputs[1:3]) else node.inputs[1:3]
    if node.op == "BatchNormalization" and not on_the_way.isdisjoint(trained):
        node = replace(node, attributes={**node.attributes, "training_mode": 1})
    return node if on_the_way.isdisjoint(node.inputs) else completed(node)


def _in_inference(node: Node) -> list[Node]:
    """Return the form of a node for inference: Dropout keeps all, and running statistics stay as they are."""
    if node.op == "Dropout":
        return [replace(node, inputs=node.inputs[:2])]
    if node.op != "BatchNormalization":
        return [node]
    kept = [(old, new) for old, new in zip(node.inputs[3:5] * 2, node.outputs[1:], strict=False) if new]
    copies = [Node("Identity", "", node.version, (old,), (new,), {}, node.name) for old, new in kept]
    return [replace(node, outputs=node.outputs[:1], attributes={**node.attributes, "training_mode": 0}), *copies]


def _check_reached(gradients: Collection[str], train: str, chosen: Collection[str]) -> None:
    if not chosen:
        raise InvalidGraph("the model has no weights: name the inputs that are parameters with train=")
    patterns = {*map(str.strip, train.split(","))}
    named = [name for name in chosen if name not in gradients and name in patterns]
    if named or not gradients:
        raise InvalidGraph(f"the loss does not depend on {shown(', '.join(named or chosen))}, which train= chooses")
