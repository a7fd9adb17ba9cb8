"""The names of a model's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from service.errors import InvalidGraph, shown
from service.graphs.plan import Node, paced


def check_names(given: Mapping[str, Iterable[str]], nodes: Iterable[Node], outputs: Sequence[str]) -> None:
    """Raise `InvalidGraph` unless each name stands for one tensor, which is there before it is read.

    `given` has the names of tensors that no node computes, by who gives them.
    """
    known = set[str]()

    def add(names: Iterable[str], label: str) -> None:
        for name in names:
            if not name or name in known or name.startswith("~"):
                fault = "stands for two tensors" if name in known else "is empty" if not name else "begins with a tilde"
                raise InvalidGraph(f"the name {shown(name)}, an output of {label}, {fault}")
            known.add(name)

    for giver, names in given.items():
        add(names, giver)
    for node in paced(nodes):
        for name in node.inputs:
            if name and name not in known:
                raise InvalidGraph(f"{node.label} reads {shown(name)}, which no node before it computes")
        add((name for name in node.outputs if name), node.label)
    for name in outputs:
        if name not in known:
            raise InvalidGraph(f"the output {shown(name)} is computed by no node")
    if len({*outputs}) < len(outputs) or not outputs:
        raise InvalidGraph("the graph has no outputs, or one of them twice")
