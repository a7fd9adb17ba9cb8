"""Nodes of real training graphs with their tensors in one step: what a trainer would send, and the right answers.

`graphs/NAME.npz` has the nodes of a graph. The array `nodes` is their list, as JSON; `tensor/NAME` is a tensor of the
graph, and `sample/K/NAME` every K-th element of one that no node here reads. `make_graphs.py` writes these files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from service.dtypes import Array
from service.kernels import Operator
from service.kernels._types import Tensor

FOLDER = Path(__file__).parent / "graphs"
SAMPLED = 1 << 12
"""Elements of an output that are stored, if there are more."""

Name = str | dict[str, str]
"""The name of a tensor, "" for an optional one that is not there, or a sequence: the name of each member's tensor."""


@dataclass(frozen=True)
class Node:
    """A node of an ONNX graph. Inputs and outputs are tensors of the graph, in the operator's order."""

    operator: str
    inputs: list[Name]
    outputs: list[Name]
    attributes: dict[str, Any]
    shape: list[int] | None = None
    """The shape of the first output, where the graph alone has it."""
    source: str = "onnxruntime"


def named(declared: Sequence[Tensor], given: Sequence[Name]) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor in a request, or in an answer, and its name in the graph.

    A position in the node is a position in the declaration. A sequence is a group; so is any number of inputs or
    outputs, which come last. A tensor that is not there is left out.
    """
    for place, name in enumerate(given):
        tensor = declared[min(place, len(declared) - 1)]
        if isinstance(name, dict):
            yield from ((f"{tensor.name}.{member}", one) for member, one in name.items())
        elif name:
            yield f"{tensor.name}.{place - len(declared) + 1}" if tensor.group else tensor.name, name


def request(operator: Operator, node: Node, tensors: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return what a trainer sends for a node: the tensors by our names, and the attributes, which are the node's own.

    Where ONNX Runtime takes the shape of the output from the graph, a request has it as the input `shape`.
    """
    inputs = {ours: tensors[name] for ours, name in named(operator.inputs, node.inputs)}
    if node.shape is not None:
        inputs["shape"] = np.array(node.shape, np.int64)
    return inputs, node.attributes


def write(path: Path, nodes: Sequence[Node], tensors: Mapping[str, Array]) -> None:
    """Store the nodes with their tensors."""
    read = {name for node in nodes for name in names(node.inputs)}
    arrays = {"nodes": np.array(json.dumps([asdict(node) for node in nodes]))}
    for name in sorted({name for node in nodes for name in names([*node.inputs, *node.outputs])}):
        array = tensors[name]
        step = 1 if name in read else -(-array.size // SAMPLED) or 1
        key, kept = (f"tensor/{name}", array) if step == 1 else (f"sample/{step}/{name}", array.ravel()[::step])
        arrays[key] = kept
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load(path: Path) -> tuple[list[Node], dict[str, Array], dict[str, int]]:
    """Return the nodes, the tensors by name, and for a sampled tensor its step."""
    tensors, steps = {}, {}
    with np.load(path) as file:
        nodes = [Node(**node) for node in json.loads(str(file["nodes"]))]
        for key in file.files:
            kind, _, name = key.partition("/")
            if kind == "sample":
                step, _, name = name.partition("/")
                steps[name] = int(step)
            if name:
                tensors[name] = file[key]
    return nodes, tensors, steps


def names(given: Sequence[Name]) -> Iterator[str]:
    """The names of all tensors."""
    for name in given:
        yield from name.values() if isinstance(name, dict) else [name] if name else []
