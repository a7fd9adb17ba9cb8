"""Random small models over HTTP: each is refused or runs, no answer is a 5xx, and what is refused is not stored.

`make fuzz` makes 20,000.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graphs.random_models import random_model
from tests.serving import assert_problem, serving

COUNT = max(300, 200 * int(os.environ.get("GRADSERVE_FUZZ", "1")))


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    limits: dict[str, Any] = {
        "max_tensor_bytes": 1 << 22,
        "max_bytes_in_flight": 64 << 20,
        "graph_cache_bytes": 1 << 22,
    }
    with serving(threads=1, request_timeout=20, **limits) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("part", range(4))
def test_random_models_are_refused_or_run(client: httpx.Client, part: int) -> None:
    statuses = {(put, run) for seed in range(part, COUNT, 4) for put, run in [attempt(client, seed)]}
    assert {put for put, _ in statuses} == {201, 422}
    assert {run for _, run in statuses} >= {None, 200, 422}


def attempt(client: httpx.Client, seed: int) -> tuple[int, int | None]:
    """Upload a model, and run it. Return the statuses of both."""
    content, options = random_model(seed)
    made = client.put("/v1/graphs/g", content=content, params=options)
    assert made.status_code in (201, 413, 422), (seed, options, made.text)
    assert client.get("/v1/graphs/g").status_code == (200 if made.status_code == 201 else 404), seed
    if made.status_code != 201:
        return made.status_code, None
    try:
        answer = client.post("/v1/graphs/g", json=tensors_of(made.json(), random.Random(seed)))
        assert answer.status_code in (200, 413, 422), (seed, options, answer.text)
        return made.status_code, answer.status_code
    finally:
        client.delete("/v1/graphs/g").raise_for_status()


def tensors_of(signature: Any, rng: random.Random) -> dict[str, Any]:
    """Return what the model's inputs may be, as JSON, with some parameters."""

    def tensor(one: Any) -> Any:
        shape = [2] if one["shape"] is None else [rng.choice([0, 1, 2, 2, 3]) if n is None else n for n in one["shape"]]
        size = 1
        for length in shape:
            size *= length
        numbers = [rng.randrange(2) for _ in range(size)]
        data: list[Any] = [bool(one) for one in numbers] if one["dtype"] == "bool" else numbers
        return {"dtype": one["dtype"], "shape": shape, "data": data}

    body = {name: tensor(one) for name, one in signature["inputs"].items()}
    for group in ("parameters", "statistics"):
        if members := {name: tensor(one) for name, one in signature[group].items() if rng.random() < 0.7}:
            body[group] = members
    return body


def node(op: str, inputs: str, outputs: str, domain: str = "com.microsoft", **attributes: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), name="n", domain=domain, **attributes)


def tensor(name: str, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, [2])


ODD: dict[str, tuple[Any, list[str], list[str], str]] = {
    "a gradient of bytes": (node("InPlaceAccumulatorV2", "x b", "o"), ["x"], ["o"], "gradient is uint8"),
    "a parameter of bytes": (
        node("InPlaceAccumulatorV2", "b_grad.accumulation.buffer x", "o"),
        ["b_grad.accumulation.buffer", "x"],
        ["o"],
        "uint8",
    ),
    "three outputs": (node("InPlaceAccumulatorV2", "x x", "o p q"), ["x"], ["o", "p"], "has 3 outputs"),
    "a loss of one input": (node("SoftmaxCrossEntropyLoss", "x", "o"), ["x"], ["o"], "1 inputs, but must have 2 to 3"),
    "an activation of two": (node("Gelu", "x x", "o"), ["x"], ["o"], "2 inputs, but must have 1 to 1"),
    "a gradient without its last": (node("GRUGrad", "x x x", "o"), ["x"], ["o"], "3 inputs, but must have 5 to 10"),
    "a statistic of bytes": (node("BatchNormInternal", "x x x b b", "o"), ["x"], ["o"], "is uint8"),
    "a text": (node("Constant", "", "o", "", value_strings=["a"]), [], ["o"], "a number or a tensor"),
    "no name": (node("Relu", "x", "o", ""), ["x", ""], ["o", ""], "is empty"),
}
"""A node, the inputs and outputs of its graph, which has the initializer b of bytes, and what is wrong."""


@pytest.mark.parametrize("title", ODD)
def test_what_no_graph_may_be_is_refused_and_not_stored(client: httpx.Client, title: str) -> None:
    made, inputs, outputs, problem = ODD[title]
    given, results = [tensor(one) for one in inputs], [tensor(one) for one in outputs]
    graph = helper.make_graph([made], "g", given, results, [numpy_helper.from_array(np.ones(2, np.uint8), "b")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    content = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    assert_problem(client.put("/v1/graphs/g", content=content), 422, "invalid_graph", problem)
    assert client.get("/v1/graphs").json()["graphs"] == []


def test_the_accumulated_buffer_of_a_training_graph_is_the_servers(client: httpx.Client) -> None:
    """ONNX Runtime's node may name its second output; a run then has no such tensor to give."""
    add = node("InPlaceAccumulatorV2", "s x", "o p")
    graph = helper.make_graph([node("Relu", "x", "y", ""), add], "g", [tensor("x"), tensor("s")], [*map(tensor, "yop")])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    content = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    client.put("/v1/graphs/g", content=content).raise_for_status()
    answer = client.post("/v1/graphs/g", json={"parameters": {"x": [1, 2]}})
    assert answer.is_success, answer.text
    client.delete("/v1/graphs/g")
