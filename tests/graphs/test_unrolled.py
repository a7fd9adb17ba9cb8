"""Sequences whose parts are known when a model is read, and branches between views: what exporters write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.graph import Graph
from tests.graphs.test_model import model, tensor

X = np.arange(30, dtype=np.float32).reshape(5, 6)

Nodes = Sequence[tuple[Any, ...]]
"""For each node its operator, its inputs and its outputs as texts, and its attributes, if it has any."""


def made(nodes: Nodes, constants: Mapping[str, Any] = {}, opset: int = 18) -> bytes:
    """Return a model of x, [batch, 6], with the output y. Its constants are nodes."""
    values = [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()]
    protos = [helper.make_node("Constant", [], [one.name], value=one) for one in values]
    protos += [helper.make_node(op, reads.split(), makes.split(), **dict(*more)) for op, reads, makes, *more in nodes]
    content: bytes = model(*protos, opset=opset, inputs=[tensor("x", ("batch", 6))]).SerializeToString()
    return content


def output(content: bytes, x: Array = X) -> Array:
    operator = Graph.read(content).operator("g")
    (y,) = operator.kernel(x, *[None] * (len(operator.inputs) - 1))
    return np.asarray(y)


def split(**attributes: Any) -> tuple[Any, ...]:
    return "SplitToSequence", "x n", "parts", attributes


SEQUENCES: dict[str, tuple[Nodes, dict[str, Any]]] = {
    "equal parts": ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": 2, "k": 1}),
    "a short last part": ([split(axis=-1), ("SequenceAt", "parts k", "y")], {"n": 4, "k": 1}),
    "lengths": ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": [1, 3, 2], "k": 2}),
    "lengths, from the end": ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": [1, 3, 2], "k": -2}),
    "rows": ([("SplitToSequence", "x", "parts", {"axis": 1, "keepdims": 0}), ("SequenceAt", "parts k", "y")], {"k": 4}),
    "rows that stay": ([("SplitToSequence", "x", "parts", {"axis": 1}), ("SequenceAt", "parts k", "y")], {"k": 4}),
    "several parts": (
        [split(axis=1), ("SequenceAt", "parts k", "a"), ("SequenceAt", "parts m", "b"), ("Mul", "a b", "y")],
        {"n": [3, 3], "k": 0, "m": 1},
    ),
    "a sequence of tensors": (
        [("Neg", "x", "z"), ("SequenceConstruct", "x z", "parts"), ("SequenceAt", "parts k", "y")],
        {"k": -1},
    ),
    "put together": ([split(axis=1), ("ConcatFromSequence", "parts", "y", {"axis": 0})], {"n": [3, 3]}),
    "stacked": (
        [
            ("Neg", "x", "z"),
            ("SequenceConstruct", "x z", "parts"),
            ("ConcatFromSequence", "parts", "y", {"axis": 1, "new_axis": 1}),
        ],
        {},
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_known_sequence_is_its_tensors(name: str) -> None:
    nodes, constants = SEQUENCES[name]
    content = made(nodes, constants)
    (expected,) = ReferenceEvaluator(content).run(None, {"x": X})
    np.testing.assert_array_equal(output(content), expected)


@pytest.mark.parametrize(
    ("nodes", "constants", "listed"),
    [
        ([("Size", "x", "n"), split(axis=1), ("SequenceAt", "parts k", "y")], {"k": 0}, "SequenceAt, SplitToSequence"),
        ([split(axis=1), ("Size", "x", "k"), ("SequenceAt", "parts k", "y")], {"n": 2}, "SequenceAt"),
        ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": 2, "k": -1}, "SequenceAt"),
        ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": [3, 3], "k": 2}, "SequenceAt"),
        ([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": 0, "k": 0}, "SequenceAt, SplitToSequence"),
        ([split(axis=1), ("ConcatFromSequence", "parts", "y", {"axis": 0})], {"n": 2}, "ConcatFromSequence"),
        ([split(axis=1), ("SequenceLength", "parts", "y")], {"n": [3, 3]}, "SequenceLength"),
    ],
)
def test_another_sequence_is_refused(nodes: Nodes, constants: dict[str, Any], listed: str) -> None:
    with pytest.raises(InvalidGraph, match=f"operators that are not served: {listed}($|\\. SequenceAt: a seq)"):
        Graph.read(made(nodes, constants))


@pytest.mark.parametrize(
    "node",
    [
        ("SplitToSequence", "x n", ""),
        ("SplitToSequence", "x n", "parts", {"axis": "a"}),
        ("SequenceConstruct", "x x", "parts", {"axis": [1]}),
    ],
)
def test_a_wrong_node_of_a_sequence_is_refused(node: Any) -> None:
    nodes = [node, ("ConcatFromSequence", "parts", "y", {"axis": "a", "new_axis": 1})]
    with pytest.raises(InvalidGraph, match="not served: ConcatFromSequence"):
        Graph.read(made(nodes, {"n": 2}))


@pytest.mark.parametrize(("length", "readers"), [(2_000_000, 1), (3000, 400)])
def test_a_sequence_has_as_many_parts_as_a_file_has_fields(length: int, readers: int) -> None:
    many = [("ConcatFromSequence", "parts", f"y{k}", {"axis": 1}) for k in range(readers)]
    content = made([split(axis=1), *many, ("Neg", "x", "y")], {"n": np.ones(length)})
    with pytest.raises(InvalidGraph, match="the file has more than 1048576 fields"):
        Graph.read(content)


def test_lengths_that_do_not_add_up_are_refused_by_the_run() -> None:
    content = made([split(axis=1), ("SequenceAt", "parts k", "y")], {"n": [1, 2], "k": 0})
    with pytest.raises(Exception, match="must add up to 6"):
        output(content)


def branch(name: str, op: str, reads: str, constant: Any = None) -> Any:
    """Return a branch that is a view, with the constant that it reads."""
    nodes = [helper.make_node(op, [f"{name}k" if one == "k" else one for one in reads.split()], [name])]
    if constant is not None:
        value = numpy_helper.from_array(np.array(constant, np.int64), f"{name}k")
        nodes.insert(0, helper.make_node("Constant", [], [f"{name}k"], value=value))
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])


def squeezed() -> bytes:
    """Return a model as PyTorch's older exporter writes x.squeeze(1), times w."""
    branches = {"then_branch": branch("a", "Squeeze", "h k", [1]), "else_branch": branch("b", "Identity", "h")}
    nodes: Nodes = [
        ("Mul", "x w", "h"),
        ("Shape", "h", "s"),
        ("Gather", "s k", "length"),
        ("Equal", "length one", "is"),
        ("If", "is", "y", branches),
    ]
    values = [numpy_helper.from_array(np.array([1], np.int64), name) for name in ("k", "one")]
    protos = [helper.make_node("Constant", [], [one.name], value=one) for one in values]
    protos += [helper.make_node(op, reads.split(), makes.split(), **dict(*given)) for op, reads, makes, *given in nodes]
    weight = numpy_helper.from_array(np.array([2], np.float32), "w")
    found = model(*protos, inputs=[tensor("x", ("batch", "length"))], initializer=[weight])
    content: bytes = found.SerializeToString()
    return content


@pytest.mark.parametrize("width", [1, 3])
def test_a_branch_by_shape_is_chosen_in_each_run(width: int) -> None:
    x = np.arange(2 * width, dtype=np.float32).reshape(2, width)
    y = (2 * x)[:, 0] if width == 1 else 2 * x
    np.testing.assert_array_equal(output(squeezed(), x), y)
    graph = Graph.read(squeezed(), loss="MSELoss").operator("g")
    got = dict(zip([one.name for one in graph.outputs], graph.kernel(x, np.zeros_like(y), None), strict=True))
    np.testing.assert_allclose(got["gradients"]["w"], [4 * (x * x).mean()], rtol=1e-6)


def test_a_branch_of_several_views_is_served() -> None:
    def both(name: str, ops: Sequence[tuple[str, str]]) -> Any:
        """Return a branch with an output for each view of p and q."""
        nodes = [helper.make_node(op, [reads], [f"{name}{reads}"]) for op, reads in ops]
        outputs = [helper.make_tensor_value_info(f"{name}{k}", TensorProto.FLOAT, None) for k in "pq"]
        return helper.make_graph(nodes, name, [], outputs)

    branches = {
        "then_branch": both("a", [("Squeeze", "q"), ("Squeeze", "p")]),
        "else_branch": both("b", [("Identity", "p"), ("Identity", "q")]),
    }
    nodes: Nodes = [
        ("Neg", "x", "p"),
        ("Abs", "x", "q"),
        ("Size", "x", "n"),
        ("Equal", "n six", "is"),
        ("If", "is", "r s", branches),
        ("Add", "r s", "y"),
    ]
    content = made(nodes, {"six": 6})
    for rows, shape in ((1, (6,)), (2, (2, 6))):
        got = output(content, X[:rows] + 1)
        assert got.shape == shape
        assert not got.any()


def test_a_branch_in_a_function_is_served() -> None:
    inner = helper.make_node("inner", ["x"], ["y"], domain="f")
    branches = {"then_branch": branch("a", "Squeeze", "h k", [1]), "else_branch": branch("b", "Identity", "h")}
    nodes = [
        helper.make_node("Neg", ["h"], ["n"]),
        helper.make_node("Size", ["n"], ["size"]),
        helper.make_node("Equal", ["size", "size"], ["is"]),
        helper.make_node("If", ["is"], ["out"], **branches),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    function = helper.make_function("f", "inner", ["h"], ["out"], nodes, opsets)
    graph = helper.make_graph([inner], "g", [tensor("x", (2, 1))], [tensor("y", None)])
    content = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8).SerializeToString()
    np.testing.assert_array_equal(output(content, X[:2, :1]), X[:2, 0])


@pytest.mark.parametrize(
    "other", [branch("b", "Neg", "h"), branch("b", "Identity", "x")], ids=["no view", "of another tensor"]
)
def test_another_branch_is_refused_with_a_way(other: Any) -> None:
    branches = {"then_branch": branch("a", "Squeeze", "h k", [1]), "else_branch": other}
    nodes = [("Neg", "x", "h"), ("IsNaN", "h", "is"), ("If", "is", "y", branches)]
    with pytest.raises(InvalidGraph, match=r"not served: If\. If: a branch is served if its sides are views"):
        Graph.read(made(nodes))
