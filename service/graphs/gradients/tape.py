"""The walk back through a graph, from the loss to the trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias, TypeVar

import numpy as np

from service.dtypes import Array
from service.graphs.plan import Node, Step

Rule: TypeAlias = Callable[..., Sequence[str | None]]
"""A function of the tape, the node, and the name of the gradient of each output, "" where there is none.

It returns the name of the gradient of each input, None where there is none. Inputs at the end may be left out. It may
return gradients that nobody needs: the plan leaves their steps out.
"""

R = TypeVar("R", bound=Rule)

RULES: dict[tuple[str, str], Rule] = {}
"""The rule of each operator, by domain and name."""


def rule(*ops: str, domain: str = "") -> Callable[[R], R]:
    """Make the decorated function the rule of these operators."""

    def register(function: R) -> R:
        RULES.update({(domain, op): function for op in ops})
        return function

    return register


class Tape:
    """The steps of a graph, to which rules add theirs."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps, self._numbers = [*steps], count()
        self._early: dict[str, list[Step]] = {}
        self._shapes: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        """The tensors that rules have made."""
        self.label = ""
        """The node whose rule runs."""

    def call(self, function: Callable[..., Any], *inputs: str, outputs: int = 1) -> Any:
        """Add a step. Return the name of its result, or, for several `outputs`, a tuple of names.

        A name is no name of the model, as it begins with a tilde.
        """
        names = tuple(f"~{next(self._numbers)}" for _ in range(outputs))
        self._steps.append(Step(function, inputs, names, f"The gradient of {self.label}"))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any) -> str:
        """Return the name of a value that is known now."""
        name = f"~{next(self._numbers)}"
        self.constants[name] = value
        return name

    def shape(self, tensor: str) -> str:
        """Return the name of a tensor's shape, a tuple of ints. It is read early, so that the tensor can die."""
        if tensor not in self._shapes:
            name = self._shapes[tensor] = f"~{next(self._numbers)}"
            self._early.setdefault(tensor, []).append(Step(np.shape, (tensor,), (name,), self.label))
        return self._shapes[tensor]

    def like(self, gradient: str, tensor: str) -> str:
        """Return the name of the gradient, summed to the shape of a tensor that was broadcast."""
        name: str = self.call(unbroadcast, gradient, self.shape(tensor))
        return name

    def total(self, gradients: Sequence[str]) -> str:
        """Return the name of the sum of the gradients, "" if there is none."""
        if not gradients:
            return ""
        first, *others = gradients
        for other in others:
            first = self.call(np.add, first, other)
        return first

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
    """Add the steps of the gradients of the `loss`, a scalar. Return the name of the gradient of each `trained` tensor.

    All nodes on the way from them to the loss have a rule: see `without_rule`. The gradient of a tensor that does not
    reach the loss is zeros.
    """
    on_the_way = dependent(nodes, trained)
    found: dict[str, list[str]] = {loss: [tape.call(np.ones_like, loss)]}
    for node in reversed(nodes):
        gradients = [tape.total(found.pop(name, [])) if name else "" for name in node.outputs]
        if not any(gradients) or on_the_way.isdisjoint(node.inputs):
            continue
        tape.label = node.label
        for name, gradient in zip(node.inputs, RULES[node.domain, node.op](tape, node, *gradients), strict=False):
            if gradient is not None and name in on_the_way:
                found.setdefault(name, []).append(gradient)
    tape.label = "the graph"
    return {name: tape.total(found.get(name, [])) or tape.call(np.zeros_like, name) for name in trained}


def dependent(nodes: Iterable[Node], tensors: Iterable[str]) -> set[str]:
    """Return the tensors, and all that are computed from them."""
    dependents = {*tensors}
    for node in nodes:
        if not dependents.isdisjoint(node.inputs):
            dependents |= {*node.outputs} - {""}
    return dependents


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


def unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient, summed over the axes along which a tensor of this shape was broadcast."""
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    axes = (*range(extra), *(extra + k for k, n in enumerate(shape) if n == 1 and gradient.shape[extra + k] != 1))
    total: Array = gradient.sum(axis=axes, keepdims=True)
    return total.reshape(shape)
