"""Whole training graphs, as ONNX Runtime's tool writes them, against its own step.

`models/NAME.onnx` is such a graph, without dropout, and `models/NAME.npz` the step: `input.NAME`, `parameter.NAME`,
`loss` and `gradient.NAME`. `models/forward/NAME.onnx` is its forward part, which the server differentiates.
`make graphs FOLDER=...` takes all in a folder: FOLDER/NAME/still.onnx, eval_model.onnx and expected.npz.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.graph import Graph
from tests.graphs.test_model import model, tensor

OWN = {path.stem: (path, path.with_suffix(".npz")) for path in (Path(__file__).parent / "models").glob("*.onnx")}
FOLDER = os.environ.get("GRADSERVE_GRAPHS_FOLDER")
MODELS = OWN
if FOLDER is not None:
    MODELS = {path.parent.name: (path.with_name("still.onnx"), path) for path in Path(FOLDER).glob("*/expected.npz")}

FORWARD = {
    name: model.with_name("eval_model.onnx") if FOLDER else model.parent / "forward" / model.name
    for name, (model, _) in MODELS.items()
}

TOLERANCE = 3e-6
"""How far a gradient may be from that of ONNX Runtime, in parts of its largest element."""


def step(model: Path, arrays: Path, forward: Path | None = None) -> tuple[Graph, dict[str, Array], dict[str, Array]]:
    """Return the graph, or that of its forward part, its inputs, and the expected outputs, by their names there."""
    names = {"input": "", "parameter": "parameters.", "gradient": "gradients."}
    with np.load(arrays) as file:
        found = {key: file[key] for key in file.files}
    named = {
        kind: {new + key.partition(".")[2]: found[key] for key in found if key.startswith(f"{kind}.")}
        for kind, new in names.items()
    }
    parameters = ",".join(key.partition(".")[2] for key in named["gradient"])
    return (
        Graph.read(model.read_bytes()) if forward is None else differentiated(forward, parameters),
        named["input"] | named["parameter"],
        {"loss": found["loss"]} | named["gradient"],
    )


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_onnx_runtime(name: str) -> None:
    graph, given, expected = step(*MODELS[name])
    got = graph.operator(name)(given, {})
    assert {key for key in got if not key.startswith("statistics.")} == expected.keys()
    assert_close(got, expected)


@pytest.mark.parametrize("name", FORWARD)
def test_the_forward_part_has_the_same_gradients(name: str) -> None:
    graph, given, expected = step(*MODELS[name], FORWARD[name])
    got = graph.operator(name)(given, {}, ["loss", "gradients"])
    assert got.keys() == expected.keys()
    assert_close(got, expected)


def assert_close(got: dict[str, Array], expected: dict[str, Array]) -> None:
    for key, right in expected.items():
        assert got[key].shape == right.shape
        np.testing.assert_allclose(got[key], right, rtol=0, atol=TOLERANCE * np.abs(right).max(initial=0), err_msg=key)


def differentiated(forward: Path, parameters: str) -> Graph:
    """Return the graph with the gradients of these inputs, and a Dropout that drops nothing."""
    proto = onnx.load(forward)
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0, np.float32), "ratio"))
    for node in proto.graph.node:
        if node.op_type == "Dropout":
            node.input[1] = "ratio"
    return Graph.read(proto.SerializeToString(), loss=proto.graph.output[0].name, train=parameters)


def test_a_training_graph_does_not_ask_for_buffers() -> None:
    graph, given, _ = step(*OWN["dlrm"])
    signature = graph.signature()
    assert signature["kind"] == "training"
    assert {*signature["inputs"]} | {f"parameters.{one}" for one in signature["parameters"]} == given.keys()
    assert signature["gradients"] == signature["parameters"]
    assert "com.microsoft.InPlaceAccumulatorV2" in signature["nodes"]


def test_new_statistics_are_outputs_and_may_be_inputs() -> None:
    graph, given, _ = step(*OWN["resnet"])
    operator = graph.operator("resnet")
    first = operator(given, {}, ["statistics"])
    assert (
        {*first}
        == {f"statistics.{one}" for one in graph.signature()["statistics"]}
        == {name for name in graph.initial if name.startswith("statistics.")}
    )
    mean = "statistics.1.running_mean"
    again = operator({**given, **first}, {}, [mean])[mean]
    np.testing.assert_allclose(again, first[mean] * 0.9 + first[mean] - graph.initial[mean] * 0.9, rtol=1e-5, atol=1e-6)


def test_labels_of_scores_with_more_dimensions_have_their_own_shape() -> None:
    """ONNX Runtime's tool says that labels of scores [N, C, D] are [N, C]; they are [N, D]."""
    text = """<ir_version: 8, opset_import: ["": 15, "com.microsoft": 1]>
        g (float[2, 5, 3] x, float[1] w, int64[2, 5] labels, float[1] sum, bool[1] reset) => (float loss, bool[1] done)
        <float one = {1.0}, int64[3] axes = {0, 1, 2}>
        { s = Mul(x, w)  loss, p = SoftmaxCrossEntropyLoss(s, labels)
          d = com.microsoft.SoftmaxCrossEntropyLossGrad(one, p, labels)  m = Mul(d, x)
          w_grad = ReduceSum<keepdims = 0>(m, axes)  done = com.microsoft.InPlaceAccumulatorV2(sum, w_grad, reset) }"""
    graph = Graph.read(onnx.parser.parse_model(text).SerializeToString())
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    labels: Array = np.zeros((2, 3), np.int64)
    given = {"x": x, "labels": labels, "parameters.w": np.zeros(1, np.float32)}
    assert graph.operator("g")(given, {}, ["loss"])["loss"] == pytest.approx(np.log(5))


@pytest.mark.parametrize(
    ("inputs", "outputs", "problem"),
    [
        (["b"], ["f"], "InPlaceAccumulatorV2 n has 1 inputs, but must have 2 to 3"),
        (["b", ""], ["f"], "has 2 inputs, but must have 2 to 3"),
        (["b", "x"], [], "has 0 outputs, but must have 1 to 2"),
        (["b", "x"], ["f", "g", "h"], "has 3 outputs, but must have 1 to 2"),
        (["b", "x"], ["", "g"], "must have its first output"),
        (["b", "b"], ["f"], "a node reads an accumulation buffer, which is the server's here"),
    ],
)
def test_damaged_accumulations_are_refused(inputs: list[str], outputs: list[str], problem: str) -> None:
    add = helper.make_node("InPlaceAccumulatorV2", inputs, outputs, name="n", domain="com.microsoft")
    nodes = [helper.make_node("Relu", ["x"], ["y"]), add]
    with pytest.raises(InvalidGraph, match=problem):
        Graph.read(model(*nodes, inputs=[tensor("x"), tensor("b")]).SerializeToString())
