"""A graph as an operator: its names, its checks, and what of it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.dtypes import Array
from service.engine.engine import Engine
from service.errors import DtypeMismatch, GradserveError, InvalidGraph, MissingTensor, ShapeMismatch, UnknownTensor
from service.graphs.graph import MAX_COMPARED, Graph
from service.kernels import Operator
from service.limits import Limits
from tests.graphs.test_model import model, tensor

FLOATS = np.array([[1.0, -2.0, 3.0]], np.float32)


def graph(*nodes: onnx.NodeProto, **changes: Any) -> Graph:
    return Graph.read(model(*nodes, **changes).SerializeToString())


def run(operator: Operator, tensors: dict[str, Array], wanted: list[str] | None = None, seed: int | None = None) -> Any:
    engine = Engine(threads=1, limits=Limits(1 << 20), reuse_bytes=0)
    try:
        return engine.run(operator, tensors, {} if seed is None else {"seed": seed}, wanted, reserve=lambda size: None)
    finally:
        engine.pool.close()


def scaled(name: str = "x.1", weight: str = "fc 1/scale:0", output: str = "out::y.1") -> Graph:
    nodes = [helper.make_node("Mul", [name, weight], ["a"]), helper.make_node("Add", ["a", "eps"], [output])]
    weights = [
        numpy_helper.from_array(np.array([1.0, 2.0, 3.0], np.float32), weight),
        numpy_helper.from_array(np.array(0.5, np.float32), "eps"),
    ]
    return graph(*nodes, inputs=[tensor(name)], outputs=[tensor(output, None)], initializer=weights)


def test_weights_are_optional_members_with_names_that_buffers_may_have() -> None:
    made = scaled()
    assert made.signature() == {
        "kind": "inference",
        "inputs": {"x.1": {"dtype": "float32", "shape": [None, 3]}},
        "parameters": {"fc_1_scale:0": {"dtype": "float32", "shape": [3]}},
        "statistics": {},
        "outputs": {"out::y.1": {"dtype": "float32", "shape": None}},
        "gradients": {},
        "nodes": {"Mul": 1, "Add": 1},
        "doubts": [],
    }
    assert {name: one.tolist() for name, one in made.initial.items()} == {"parameters.fc_1_scale:0": [1, 2, 3]}
    operator = made.operator("scaled")
    assert run(operator, {"x.1": FLOATS})["out::y.1"].tolist() == [[1.5, -3.5, 9.5]]
    others = {"x.1": FLOATS, "parameters.fc_1_scale:0": np.zeros(3, np.float32)}
    assert run(operator, others, ["out::y.1"])["out::y.1"].tolist() == [[0.5, 0.5, 0.5]]
    assert operator.outputs_for(others) == ["out::y.1"]


def test_members_have_unique_names() -> None:
    nodes = [helper.make_node("Add", ["x", "w/1"], ["a"]), helper.make_node("Add", ["a", "w:1"], ["b"])]
    nodes.append(helper.make_node("Add", ["b", "w 1"], ["y"]))
    weights = [numpy_helper.from_array(FLOATS[0], name) for name in ("w/1", "w:1", "w 1")]
    assert [*graph(*nodes, initializer=weights).signature()["parameters"]] == ["w_1", "w:1", "w_1_2"]


WRONG: list[tuple[dict[str, Any], type[GradserveError], str]] = [
    ({}, MissingTensor, r"scaled needs the input 'x\.1'"),
    ({"x.1": FLOATS.astype(np.float64)}, DtypeMismatch, r"x\.1 is float64, but must be float32: cast to float32$"),
    ({"x.1": FLOATS[0]}, ShapeMismatch, r"x\.1 has shape \[3\], but must have \[null, 3\], where null is any length"),
    ({"x.1": FLOATS[:, :2]}, ShapeMismatch, r"x\.1 has shape \[1, 2\], but must have \[null, 3\]"),
    ({"x.1": FLOATS, "y": FLOATS}, UnknownTensor, r"scaled has no input 'y'; its inputs are x\.1, parameters\.NAME"),
    (
        {"x.1": FLOATS, "parameters.w": FLOATS},
        UnknownTensor,
        "'parameters.w' is no tensor of the group parameters, which has fc_1_scale:0",
    ),
    (
        {"x.1": FLOATS, "parameters.fc_1_scale:0": FLOATS},
        ShapeMismatch,
        r"parameters\.fc_1_scale:0 has shape \[1, 3\], but must have \[3\]",
    ),
]


@pytest.mark.parametrize(("tensors", "error", "problem"), WRONG)
def test_other_inputs_are_refused(tensors: Any, error: type[GradserveError], problem: str) -> None:
    with pytest.raises(error, match=problem):
        run(scaled().operator("scaled"), tensors)


@pytest.mark.parametrize(("length", "is_batch"), [(3, True), (None, False)])
def test_a_model_for_one_length_of_batches_says_so(length: int | None, is_batch: bool) -> None:
    made = graph(helper.make_node("Relu", ["x"], ["y"]), inputs=[tensor("x", (length, 3))]).operator("fixed")
    with pytest.raises(ShapeMismatch) as error:
        run(made, {"x": FLOATS if is_batch else FLOATS[:, :2]})
    words = "exported for batches of 3, without dynamic_axes or dynamic_shapes"
    assert (words in str(error.value)) == is_batch
    with pytest.raises(ShapeMismatch, match=r"must have \S+, 3\](, where null is any length)?$"):
        run(made, {"x": np.ones((2, 2), np.float32)})


def test_int32_is_taken_where_a_model_has_int64() -> None:
    inputs = [tensor("x"), tensor("of", (2,), TensorProto.INT64)]
    made = graph(helper.make_node("Gather", ["x", "of"], ["y"]), inputs=inputs)
    answers = [run(made.operator("rows"), {"x": FLOATS, "of": np.zeros(2, dtype)})["y"] for dtype in ("i4", "i8")]
    assert answers[0].tobytes() == answers[1].tobytes()
    with pytest.raises(DtypeMismatch, match="of is float32, but must be one of int64, int32"):
        run(made.operator("rows"), {"x": FLOATS, "of": np.zeros(2, np.float32)})


@pytest.mark.parametrize("count", [MAX_COMPARED, MAX_COMPARED + 1])
def test_the_inputs_of_many_outputs_are_checked_as_they_run(count: int) -> None:
    """To plan each output of thousands would take minutes."""
    names = [f"y{number}" for number in range(count)]
    made = graph(
        *[helper.make_node("Relu", ["x"], [name]) for name in names], outputs=[tensor(name) for name in names]
    ).operator("many")
    assert made.needed_names == (("x",) if count == MAX_COMPARED else ())
    assert run(made, {"x": FLOATS}).keys() == {*names}
    with pytest.raises(MissingTensor, match="needs the input 'x'"):
        run(made, {})


def test_only_what_the_outputs_need_runs_and_is_asked_for() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["score"]),
        helper.make_node("Reshape", ["score", "to"], ["wrong"]),
        helper.make_node("Sub", ["wrong", "target"], ["loss"]),
    ]
    made = graph(
        *nodes,
        inputs=[tensor("x"), tensor("target")],
        outputs=[tensor("score"), tensor("loss", None)],
        initializer=[numpy_helper.from_array(np.array([7]), "to")],
    ).operator("scores")
    assert run(made, {"x": FLOATS}, ["score"])["score"].tolist() == [[1, 0, 3]]
    with pytest.raises(MissingTensor, match="the graph needs the input 'target'"):
        run(made, {"x": FLOATS})
    with pytest.raises(
        GradserveError,
        match=r"Reshape cannot be computed of float32 \[1, 3\], int64 \[1\]: cannot reshape array of size 3",
    ):
        run(made, {"x": FLOATS, "target": FLOATS})


def test_a_plain_tensor_has_no_name_of_a_group() -> None:
    with pytest.raises(InvalidGraph, match=r"'parameters\.x' is an input or output, but parameters is a group here"):
        scaled("parameters.x")


def test_a_seed_settles_what_is_random() -> None:
    drop = helper.make_node("Dropout", ["x", "ratio", "training"], ["y"])
    weights = [
        numpy_helper.from_array(np.array(0.5, np.float32), "ratio"),
        numpy_helper.from_array(np.array(True), "training"),
    ]
    made = graph(drop, inputs=[tensor("x", ["n"])], initializer=weights).operator("drop")
    assert [one.name for one in made.attributes] == ["seed"]
    ones = {"x": np.ones(1000, np.float32)}
    first, again, other, free = (run(made, ones, seed=seed)["y"].tobytes() for seed in (1, 1, 2, None))
    assert first == again
    assert len({first, other, free}) == 3
    assert scaled().operator("scaled").attributes == ()


def test_outputs_of_other_dtypes_are_refused() -> None:
    cast = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.UINT8)
    with pytest.raises(DtypeMismatch, match="the output 'y' is uint8"):
        run(graph(cast).operator("bytes"), {"x": FLOATS})


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gather", ["x", "at"], ["y"], axis=3),
        helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2),
    ],
)
def test_an_error_has_words_of_tensors(node: onnx.NodeProto) -> None:
    made = graph(node, initializer=[numpy_helper.from_array(np.array([0]), "at")]).operator("g")
    with pytest.raises(
        GradserveError, match=r"cannot be computed of float32 \[1, 3\].*: the operator takes no such inputs"
    ):
        run(made, {"x": FLOATS})
