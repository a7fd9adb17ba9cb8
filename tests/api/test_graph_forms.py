"""A graph that is trained, evaluated and downloaded over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import helper

from tests.api.models import linear, model, trained
from tests.serving import assert_problem

X = {"x": [[1.0, 1.0], [0.0, 0.0]], "target": [[6.0], [2.0]]}


@pytest.fixture
def client(http: httpx.Client) -> Iterator[httpx.Client]:
    """Yield a client of a server without graphs."""
    yield http
    for one in http.get("/v1/graphs").json()["graphs"]:
        http.delete(f"/v1/graphs/{one['name']}").raise_for_status()
    http.delete("/v1/buffers?all=true")


def put(client: httpx.Client, content: bytes, **query: Any) -> None:
    client.put("/v1/graphs/g", content=content, params=query).raise_for_status()


def evaluated(client: httpx.Client, json: Any, **query: Any) -> httpx.Response:
    return client.post("/v1/graphs/g", json=json, params={"form": "inference", "encoding": "list", **query})


def normalized() -> bytes:
    """x w + b, with running statistics and Dropout."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "scale", "bias", "mean", "var"], ["n"], momentum=0.5),
        helper.make_node("Dropout", ["n"], ["y"]),
    ]
    weights = {"scale": [1, 2], "bias": [0, 1], "mean": [3, 0], "var": [1, 4], "w": [[1, 2], [3, 4]], "b": [1, 0]}
    return model(*nodes, inputs=[("x", ["n", 2])], outputs=[("y", ["n", 2])], **weights)


def test_a_graph_is_evaluated_in_inference_form(client: httpx.Client) -> None:
    put(client, normalized(), loss="MSELoss", set=["parameters:m.p.*", "statistics:m.s.*"])
    groups = ["parameters:m.p.*", "statistics.var:m.s.var"]
    given = {"x": [[1, 1], [0, 0]], "target": [[0, 0], [0, 0]]}
    h = np.array([[5, 6], [1, 0]])
    for mean in ([3, 0], [1, 2]):
        tensors = {**given, "statistics": {"mean": mean}}
        found = [evaluated(client, tensors, **{"from": groups}).raise_for_status().json() for _ in range(2)]
        y = (h - mean) / np.sqrt(np.array([1, 4]) + 1e-5) * [1, 2] + [0, 1]
        assert found[0] == found[1]
        assert found[0].keys() == {"loss", "y"}
        np.testing.assert_allclose(found[0]["y"]["data"], y, rtol=1e-5)
        np.testing.assert_allclose(found[0]["loss"]["data"], (y**2).mean(), rtol=1e-5)


@pytest.mark.parametrize("target", ["gradients:m.g.*", "gradients.w:m", "statistics:m.s.*"])
def test_what_the_inference_form_lacks_is_refused_in_words(client: httpx.Client, target: str) -> None:
    put(client, normalized(), loss="MSELoss")
    parameter = "into" if target.startswith("g") else "set"
    wrong = evaluated(client, X, **{parameter: target})
    assert_problem(wrong, 422, "invalid_parameter", "form=inference gives no gradients and no new statistics", target)
    assert_problem(evaluated(client, X, outputs="gradients"), 422, "invalid_parameter", "must name some of loss,y")
    assert_problem(evaluated(client, X, form="evaluation"), 422, "invalid_parameter", "form", "inference")


def test_a_loss_of_the_inference_form_goes_to_a_buffer(client: httpx.Client) -> None:
    put(client, linear(), loss="MSELoss")
    answer = evaluated(client, X, set="loss:m.loss", outputs="loss").raise_for_status()
    assert answer.json()["loss"]["output"]["data"] == 0.5
    assert client.get("/v1/buffers/m.loss/value").json()["value"]["data"] == 0.5


def test_a_graph_without_a_loss_has_one_form(client: httpx.Client) -> None:
    put(client, linear())
    assert evaluated(client, {"x": [[1, 1]]}).json()["y"]["data"] == [[6]]


def test_a_file_that_has_its_gradients_has_no_other_form(client: httpx.Client) -> None:
    put(client, trained()[0])
    assert_problem(evaluated(client, {}), 422, "invalid_parameter", "eval_model.onnx")
