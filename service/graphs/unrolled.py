"""Sequences and branches of exporters, which are tensors and views once the model is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from service.dtypes import INT64, Array
from service.graphs.plan import Node
from service.graphs.protobuf import FIELD_BYTES, Budget

VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""The operators that a branch may have: the gradient of each has the shape of its input."""

MAX_BRANCH_NODES = 8
"""Nodes of a branch that is looked at. Exporters write a view and its constant."""

OURS = "gradserve"
"""The domain of the node that chooses a view."""

SEQUENCES = {"ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SplitToSequence"}
"""The operators that `unrolled` takes away."""

ENDLESS = (1 << 63) - 1


class Branch(NamedTuple):
    """A branch of an If: its nodes, and its outputs."""

    nodes: Sequence[Node]
    outputs: Sequence[str]


def chosen(call: Node, branches: Sequence[Branch]) -> list[Node]:
    """Return an If between views of tensors as a node for each output, behind the constants of its branches.

    Its inputs are the condition, the tensor, and what the two views read besides. Other nodes are returned as they are.
    """
    nodes = [one for branch in branches for one in branch.nodes]
    made = {one.outputs[:1]: one for one in nodes if one.op != "Constant"}
    found = [one for one in nodes if one.op == "Constant"]
    for output, *ends in zip_longest(call.outputs, *(branch.outputs for branch in branches), fillvalue=""):
        views = [made[(end,)] for end in ends if (end,) in made and made[(end,)].op in VIEWS]
        reads = [name for one in views for name in one.inputs]
        is_one = len(views) == 2 and len({one.inputs[:1] for one in views}) == 1 and len(call.inputs) == 1
        if not output or not is_one or any(one.domain for one in views) or any((name,) in made for name in reads):
            return [call]
        inputs = call.inputs[0], *views[0].inputs, *views[1].inputs[1:]
        found.append(Node("If", OURS, call.version, inputs, (output,), {"views": views}, call.name))
    return found


def unrolled(nodes: Iterable[Node], known: Mapping[str, Array], budget: Budget) -> list[Node]:
    """Return the nodes, with tensors in place of the sequences whose parts are known when the model is read."""
    parts, rest = dict[str, Node | Sequence[str]](), list[Node]()
    for node in nodes:
        is_of_sequences = node.op in SEQUENCES and not node.domain and node.outputs
        is_right = is_of_sequences and isinstance(node.attributes.get("axis", 0), int)
        rest += (_unrolled(node, parts, known, budget) if is_right else None) or [node]
    return [one for one in rest if not (one.outputs and one.outputs[0] in parts)]


def _unrolled(
    node: Node, parts: dict[str, Node | Sequence[str]], known: Mapping[str, Array], budget: Budget
) -> list[Node] | None:
    """Return the nodes that take the place of this node, None if it stays. `parts` are those of each sequence."""
    first, second, *_ = (*node.inputs, "", "")
    number, found, output = known.get(second), parts.get(first), node.outputs[0]
    index = None if number is None or number.size != 1 or number.dtype.kind not in "iu" else int(number.item())
    match node.op:
        case "SequenceConstruct":
            parts[output] = node.inputs
        case "SplitToSequence" if number is not None and number.ndim == 1:
            budget.take(FIELD_BYTES * number.size, number.size)
            names = parts[output] = [f"{output} {k}" for k in range(number.size)]
            axis = node.attributes.get("axis", 0)
            return [_node(node, "Split", (first, second), names, axis=axis)]
        case "SplitToSequence" if not second or (index or 0) > 0:
            parts[output] = node
        case "SequenceAt" if isinstance(found, Node) and index is not None and index >= 0:
            return _slice(node, found, index, known)
        case "SequenceAt" if found and not isinstance(found, Node) and index is not None:
            if -len(found) <= index < len(found):
                return [_node(node, "Identity", (found[index],), node.outputs)]
        case "ConcatFromSequence" if found and not isinstance(found, Node):
            budget.take(FIELD_BYTES * len(found), len(found))
            axis = node.attributes.get("axis", 0)
            if not node.attributes.get("new_axis", 0):
                return [_node(node, "Concat", found, node.outputs, axis=axis)]
            names = [f"{output} {k}" for k in range(len(found))]
            place = _constant(node, f"{output} axis", [axis])
            wide = [
                _node(node, "Unsqueeze", (one, f"{output} axis"), (name,))
                for one, name in zip(found, names, strict=True)
            ]
            return [place, *wide, _node(node, "Concat", names, node.outputs, axis=axis)]
    return None


def _slice(node: Node, split: Node, index: int, known: Mapping[str, Array]) -> list[Node]:
    """Return the nodes that take a part of equal parts: without lengths, they have the length 1, and no axis."""
    length = int(known[split.inputs[1]].item()) if len(split.inputs) > 1 and split.inputs[1] else 1
    is_row = length == 1 and not any(split.inputs[1:]) and not split.attributes.get("keepdims", 1)
    output, axis = node.outputs[0], split.attributes.get("axis", 0)
    bounds = {"start": min(index * length, ENDLESS), "end": min((index + 1) * length, ENDLESS), "axis": axis}
    names = [f"{output} {bound}" for bound in bounds]
    part = f"{output} part" if is_row else output
    made = [_constant(node, name, [value]) for name, value in zip(names, bounds.values(), strict=True)]
    made.append(_node(node, "Slice", (split.inputs[0], *names), (part,)))
    return [*made, _node(node, "Squeeze", (part, names[2]), (output,))] if is_row else made


def _node(like: Node, op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: object) -> Node:
    return Node(op, "", like.version, tuple(inputs), tuple(outputs), attributes, like.name, like.module)


def _constant(like: Node, name: str, value: Sequence[int]) -> Node:
    return _node(like, "Constant", (), (name,), value=np.array(value, INT64))
