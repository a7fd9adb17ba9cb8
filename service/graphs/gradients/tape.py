"""The walk back through a graph, from the loss to the trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import count, zip_longest
from typing import Any, TypeAlias, TypeVar

import numpy as np

from service.dtypes import Array
from service.errors import GradserveError, InvalidGraph, ShapeMismatch
from service.graphs.gradients.arrays import dtype_of, unbroadcast
from service.graphs.nodes.elementwise import converted
from service.graphs.nodes.table import with_attributes
from service.graphs.plan import Node, Step
from service.graphs.protobuf import Budget

Rule: TypeAlias = Callable[..., Sequence[str | None]]
"""A function of the tape, the node, and the name of the gradient of each output, "" where there is none.

It returns the name of the gradient of each input, None where there is none. Inputs at the end may be left out. It may
return gradients that nobody needs: the plan leaves their steps out.
"""

R = TypeVar("R", bound=Rule)

RULES: dict[tuple[str, str], Rule] = {}
"""The rule of each operator, by domain and name."""

OUTPUTS: dict[tuple[str, str], int] = {}
"""How many outputs a rule reads, if they are more than those that every model names."""

TAPE_BYTES = 1 << 11
"""Bytes of memory for a step that a rule adds."""

FLOAT_TYPES = (1, 10, 11, 16)
"""The numbers of the floating dtypes in ONNX's `TensorProto`."""


def rule(*ops: str, domain: str = "", outputs: int = 0) -> Callable[[R], R]:
    """Make the decorated function the rule of these operators. It reads the first `outputs`: see `completed`."""

    def register(function: R) -> R:
        RULES.update({(domain, op): function for op in ops})
        OUTPUTS.update({(domain, op): outputs for op in ops})
        return function

    return register


@rule(
    *("And", "ArgMax", "ArgMin", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Ceil"),
    *("ConstantOfShape", "Equal", "EyeLike", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN", "Less"),
    *("LessOrEqual", "NonZero", "Not", "OneHot", "Or", "RandomNormalLike", "RandomUniformLike", "Range", "Round"),
    *("Shape", "Sign", "Size", "Xor"),
)
def no_gradient(tape: Tape, node: Node, *gradients: str) -> Sequence[None]:
    """The rule of operators whose outputs are constant where they are smooth: the walk ends there."""
    return ()


def gradients(
    op: str, *functions: Callable[..., Array] | None, domain: str = "", outputs: int = 0, broadcast: bool = False
) -> None:
    """Make a rule of functions: one for each input, in order, that returns its gradient. None stands for no gradient.

    The parameters say what a function reads: `dY`, the inputs `A` (or `X`) to `E`, the outputs `Y` and `Z`, the `shape`
    of its input, and, if they are keyword-only, attributes. With `broadcast`, a gradient is then summed to that shape.
    """

    def apply(tape: Tape, node: Node, dY: str, *_: str) -> list[str | None]:
        if not dY:
            return []
        tensors = dict(zip("ABCDE", node.inputs, strict=False)) | dict(zip("YZ", node.outputs, strict=False))
        tensors |= {"X": node.inputs[0], "dY": dY}

        def gradient(tensor: str, function: Callable[..., Array]) -> str:
            parameters = signature(function).parameters.values()
            reads = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
            names = [tape.shape(tensor) if name == "shape" else tensors.get(name, "") for name in reads]
            result: str = tape.call(with_attributes(function, node), *names)
            return tape.like(result, tensor) if broadcast else result

        pairs = zip(node.inputs, functions, strict=False)
        return [gradient(tensor, function) if tensor and function else None for tensor, function in pairs]

    rule(op, domain=domain, outputs=outputs)(apply)


F = TypeVar("F", bound=Callable[..., Array])


def gradient_of(*ops: str, domain: str = "", outputs: int = 0) -> Callable[[F], F]:
    """Make the decorated function the gradient of the first input of these operators: see `gradients`."""

    def register(function: F) -> F:
        for op in ops:
            gradients(op, function, domain=domain, outputs=outputs)
        return function

    return register


def completed(node: Node) -> Node:
    """Return the node with names for the outputs that its rule reads and the model leaves out."""
    first = next(filter(None, node.outputs), "")
    needed = [f"~{first}.{k}" for k in range(OUTPUTS.get((node.domain, node.op), 0))]
    pairs = zip_longest(node.outputs, needed, fillvalue="")
    return replace(node, outputs=tuple(name or other for name, other in pairs))


class Tape:
    """The steps of a graph, to which rules add theirs."""

    def __init__(self, steps: Iterable[Step], budget: Budget | None = None) -> None:
        self._steps, self._numbers, self._budget = [*steps], count(), budget or Budget()
        self._early: dict[str, list[Step]] = {}
        self._known: dict[tuple[Callable[..., Any], str], str] = {}
        self.label = "the loss"
        """The node whose rule runs."""
        self.on_the_way: Collection[str] = ()
        """The tensors whose gradients matter."""

    def call(self, function: Callable[..., Any], *inputs: str, outputs: int = 1) -> Any:
        """Add a step. Return the name of its result, or, for several `outputs`, a tuple of names.

        A name is no name of the model, as it begins with a tilde.
        """
        self._budget.take(TAPE_BYTES)
        names = tuple(self._name() for _ in range(outputs))
        self._steps.append(Step(function, inputs, names, f"The gradient of {self.label}"))
        return names[0] if outputs == 1 else names

    def _name(self) -> str:
        return f"~{next(self._numbers)}"

    def wanted(self, node: Node, gradients: str) -> tuple[str, ...]:
        """Return those of the `gradients`, one for each input of the node, that matter."""
        return tuple(one for one, name in zip(gradients.split(), node.inputs, strict=False) if name in self.on_the_way)

    def shape(self, tensor: str) -> str:
        """Return the name of a tensor's shape, a tuple of ints."""
        return self.early(np.shape, tensor)

    def early(self, function: Callable[[Any], Any], tensor: str) -> str:
        """Return the name of what the function says of a tensor. It runs early, so that the tensor can die."""
        if (function, tensor) not in self._known:
            name = self._known[function, tensor] = self._name()
            self._early.setdefault(tensor, []).append(Step(function, (tensor,), (name,), self.label))
        return self._known[function, tensor]

    def like(self, gradient: str, tensor: str) -> str:
        """Return the name of the gradient, summed to the shape of a tensor that was broadcast."""
        name: str = self.call(unbroadcast, gradient, self.shape(tensor))
        return name

    def typed(self, gradient: str, tensor: str) -> str:
        """Return the name of the gradient in the dtype of a tensor."""
        name: str = self.call(converted, gradient, self.early(dtype_of, tensor))
        return name

    @property
    def steps(self) -> list[Step]:
        """All steps, each behind those that make its inputs."""
        made = {name for step in self._steps for name in step.outputs}
        steps = [step for tensor, early in self._early.items() if tensor not in made for step in early]
        for step in self._steps:
            steps.append(step)
            steps += [early for name in step.outputs for early in self._early.get(name, ())]
        return steps


def differentiate(tape: Tape, nodes: Sequence[Node], loss: str, trained: Collection[str]) -> Mapping[str, str]:
    """Add the steps of the gradients of the `loss`, one number. Return the name of each `trained` tensor's gradient.

    All nodes on the way from them to the loss have a rule: see `without_rule`. A tensor that does not reach the loss is
    left out.
    """
    tape.on_the_way = on_the_way = dependent(nodes, trained)
    found = {loss: tape.call(_one, loss)}
    for node in reversed(nodes):
        gradients = [found.pop(name, "") if name else "" for name in node.outputs]
        if not any(gradients) or on_the_way.isdisjoint(node.inputs):
            continue
        for name, gradient in zip(node.inputs, _apply(tape, node, gradients), strict=False):
            if gradient and name in on_the_way:
                # At once, so that a tensor that many nodes read has no gradient of each in memory.
                found[name] = tape.call(np.add, found[name], gradient) if name in found else gradient
    return {name: tape.typed(found[name], name) for name in trained if name in found}


def _apply(tape: Tape, node: Node, gradients: Sequence[str]) -> Sequence[str | None]:
    """Return what the node's rule returns. Raises `InvalidGraph`."""
    tape.label = node.label
    try:
        return RULES[node.domain, node.op](tape, node, *gradients)
    except GradserveError:
        raise
    except Exception as error:  # a node of ONNX Runtime may lack inputs, and attributes be of another kind
        raise InvalidGraph(f"{node.label} has inputs or attributes that do not fit: {error}", node=node.name) from error


def _one(loss: Array) -> Array:
    if loss.size != 1:
        raise ShapeMismatch(f"the loss has shape {list(loss.shape)}, but must be one number", tensor="loss")
    return np.ones_like(loss)


def dependent(nodes: Iterable[Node], tensors: Iterable[str]) -> set[str]:
    """Return the tensors, and all that have a gradient with respect to them."""
    dependents = {*tensors}
    for node in nodes:
        if not dependents.isdisjoint(node.inputs) and not _is_constant(node):
            dependents |= {*node.outputs} - {""}
    return dependents


def _is_constant(node: Node) -> bool:
    """Return whether no gradient goes through the node."""
    to_integers = node.op == "Cast" and node.attributes["to"] not in FLOAT_TYPES
    return to_integers or RULES.get((node.domain, node.op)) is no_gradient


def without_rule(nodes: Sequence[Node], loss: str, trained: Collection[str]) -> list[Node]:
    """Return the nodes on the way from the trained tensors to the loss whose operator has no rule."""
    on_the_way, needed, lacking = dependent(nodes, trained), {loss}, list[Node]()
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs) or on_the_way.isdisjoint(node.inputs):
            continue
        needed |= {*node.inputs}
        if (node.domain, node.op) not in RULES:
            lacking.append(node)
    return lacking[::-1]
