"""What a model may carry, and what it may cost before it is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from onnx import helper, numpy_helper

from service.errors import Busy, InvalidGraph, InvalidTensor
from service.graphs.graph import Graph
from service.graphs.nodes import step_of
from service.graphs.plan import Node, Plan
from service.kernels import Workspace, workspace
from tests.graphs.held import called, function, many_weights, model, relu

FIELDS = "more than 1048576 fields"


def calls(count: int, **kinds: list[str]) -> bytes:
    """A function of one node with so long a list of inputs, outputs or attributes."""
    names = {"inputs": ["a"], "outputs": ["b"], "attributes": list[str]()} | kinds
    made = helper.make_function(
        *("f", "F", names["inputs"], names["outputs"], [relu("a", "b")]),
        *([helper.make_opsetid("", 17)], (), [helper.make_attribute(name, 1) for name in names["attributes"]]),
    )
    nodes = [helper.make_node("F", [f"t{k}"], [f"t{k + 1}"], domain="f") for k in range(count)]
    return model(nodes, ["t0"], [f"t{count}"], functions=[made])


def listed(count: int) -> bytes:
    """A function whose constant is a long list, called `count` times."""
    inner = [helper.make_node("Constant", [], ["c"], value_ints=[*range(20_000)]), helper.make_node("Add", "ac", "b")]
    nodes = [helper.make_node("F", [f"t{k}"], [f"t{k + 1}"], domain="f") for k in range(count)]
    return model(nodes, ["t0"], [f"t{count}"], functions=[function("F", inner)])


MANY = [f"n{k}" for k in range(30_000)]

REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a long name": (lambda: model([relu("x", "y", name="n" * 1001)], ["x"], ["y"]), "limit is 1000 characters"),
    "a wide name": (lambda: model([relu("x", "\U0001f600" * 1001)], ["x"], ["y"]), "limit is 1000 characters"),
    "a very long name": (lambda: model([relu("x", "y", name="n" * 10_000)], ["x"], ["y"]), "a text of 10000 bytes"),
    "a long list": (lambda: model([helper.make_node("Transpose", "x", "y", perm=[0] * 129)], "x", "y"), "129 items"),
    "a list for a kernel": (
        lambda: model([helper.make_node("Conv", "xw", "y", pads=[0] * 300_000)], "xw", "y"),
        "an attribute of 300000 items; the limit is 128",
    ),
    "operands": (
        lambda: model([helper.make_node("Einsum", ["x"] * 33, ["y"], equation=",".join("a" * 33))], ["x"], ["y"]),
        "33 operands; the limit is 32",
    ),
    "inputs of a function": (lambda: calls(50, inputs=["a", *MANY]), FIELDS),
    "outputs of a function": (lambda: calls(50, outputs=["b", *MANY]), FIELDS),
    "attributes of a function": (lambda: calls(50, attributes=MANY), FIELDS),
    "lists of a function": (lambda: listed(60), FIELDS),
}
"""Models that are refused, and why."""


@pytest.mark.parametrize("title", REFUSED)
def test_a_model_that_carries_too_much_is_refused(title: str) -> None:
    make, problem = REFUSED[title]
    with pytest.raises(InvalidGraph, match=problem):
        Graph.read(make())


def test_names_of_a_thousand_characters_are_read() -> None:
    name = "\U0001f600" * 1000
    assert [*Graph.read(model([relu(name, "y")], [name], ["y"])).signature()["inputs"]] == [name]


def test_patterns_and_weights_are_limited_together() -> None:
    content = many_weights(3000)
    Graph.read(content, train=",".join(["*1.weight"] * 100))
    with pytest.raises(InvalidGraph, match=FIELDS):
        Graph.read(content, train=",".join(["*1.weight"] * 400))


def test_a_tensor_with_many_axes_is_refused() -> None:
    axes = numpy_helper.from_array(np.zeros(32_000, np.int64), "axes")
    graph = Graph.read(model([helper.make_node("Unsqueeze", ["x", "axes"], ["y"])], ["x"], ["y"], [axes]))
    with pytest.raises(InvalidTensor, match="a list of ints, at most 128"):
        graph.operator("g")({"x": np.ones(1, np.float32)}, {})


def test_names_that_a_function_multiplies_are_claimed() -> None:
    """A hundred calls with a name of 900 characters, of 200 nodes each, take 18 MB for names alone."""
    claims = list[int]()
    with workspace(Workspace(claim=claims.append)):
        Graph.read(called(90, 200))
    assert sum(claims) > 2 * 900 * 90 * 200


class Enough:
    """Claims that are refused from the `number`th on, as those of a client that has left are."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, size: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise Busy("enough", limit=0)


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_many_steps_end_when_nobody_waits(op: str, gates: int) -> None:
    given = {"x": (4096, 1, 0), "w": (1, gates, 0), "r": (1, gates, 1)}
    step = step_of(Node(op, "", 17, tuple(given), ("y",), {"hidden_size": 1}))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in given.items()}
    with workspace(Workspace(claim=Enough(4))), pytest.raises(Busy):
        Plan([step], {}, ["y"]).run(tensors)


@pytest.mark.parametrize("number", range(40, 400, 60))
def test_planning_ends_when_nobody_waits(number: int) -> None:
    """Claims go on behind the reader: reading these nodes takes fewer than 40."""
    nodes = [helper.make_node("Sum", ["x"] * 60_000, ["y"])]
    content = model(nodes, ["x"], ["y"])
    with workspace(Workspace(claim=Enough(number))), pytest.raises(Busy):
        Graph.read(content, loss="MSELoss", train="x")
