"""The functions of a model: the nodes of a function take the place of each node that calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from service.errors import InvalidGraph
from service.graphs.plan import Node
from service.graphs.protobuf import FIELD_BYTES, Budget

MAX_DEPTH = 16
"""Functions that call each other, one inside the other."""


class Reference(NamedTuple):
    """The value of an attribute in a function: that of an attribute of the node that calls the function."""

    name: str


@dataclass(frozen=True)
class Function:
    """A function of a model: the names of its inputs and outputs inside, its nodes, and defaults of attributes."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    nodes: Sequence[Node]
    defaults: Mapping[str, Any]


Functions: TypeAlias = Mapping[tuple[str, str], Function]


def inlined(nodes: Sequence[Node], functions: Functions, most: int, budget: Budget) -> list[Node]:
    """Return the nodes, without calls of functions. Raises `InvalidGraph` for more than `most` nodes and calls."""
    left = iter(range(most))

    def expand(nodes: Sequence[Node], depth: int) -> Iterator[Node]:
        for node in nodes:
            if next(left, None) is None:
                raise InvalidGraph(f"the model has more than {most} nodes with those of its functions", limit=most)
            function = functions.get((node.domain, node.op))
            if depth == 0 and any(isinstance(one, Reference) for one in node.attributes.values()):
                raise InvalidGraph(f"{node.label} refers to an attribute of a function, but is in none")
            if function is None:
                yield node
            elif depth == MAX_DEPTH:
                raise InvalidGraph(f"functions call each other more than {MAX_DEPTH} times, the last one {node.label}")
            else:
                yield from expand(_body(node, function, budget), depth + 1)

    return [*expand(nodes, 0)]


def _body(call: Node, function: Function, budget: Budget) -> list[Node]:
    """Return the nodes of a function, with the tensors and the attributes of a call."""
    names = len(function.inputs) + len(function.outputs) + len(function.defaults)
    budget.take(names * FIELD_BYTES, names)
    given = dict(zip(function.inputs, [*call.inputs, *[""] * len(function.inputs)], strict=False))
    results = dict(zip(function.outputs, call.outputs, strict=False))
    prefix = f"{next(filter(None, call.outputs), call.name)}/{call.op}/"
    known = {**function.defaults, **call.attributes}

    def name_of(name: str) -> str:
        return given[name] if name in given else results.get(name) or (name and prefix + name)

    nodes = list[Node]()
    for node in function.nodes:
        texts, length = [*node.inputs, *node.outputs, *node.attributes, node.name], len(prefix) + len(call.name)
        values = _attributes(node, known)
        items = sum(len(value) for value in values.values() if isinstance(value, list))
        budget.take(sum(map(len, texts)) + len(texts) * (FIELD_BYTES + length) + 8 * items, len(texts) + items)
        inputs, outputs = tuple(map(name_of, node.inputs)), tuple(map(name_of, node.outputs))
        name, module = f"{call.name}/{node.name}", call.module or node.module
        nodes.append(Node(node.op, node.domain, node.version, inputs, outputs, values, name, module, node.rules))
    direct = [(given[name], target) for name, target in results.items() if name in given and target]
    return nodes + [Node("Identity", "", call.version, (old,), (new,), {}, call.name) for old, new in direct]


def _attributes(node: Node, known: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: known.get(one.name) if isinstance(one, Reference) else one for name, one in node.attributes.items()}
    return {name: value for name, value in values.items() if value is not None}
