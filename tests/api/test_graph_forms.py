"""A graph that is trained, evaluated and downloaded over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from service.keys import add as add_key
from tests.api.models import linear, model, trained
from tests.serving import assert_problem, serving

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
    assert_problem(wrong, 422, "invalid_parameter", target, "must be one of loss, y, followed by a colon")
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


def written(client: httpx.Client, prefix: str, **values: Any) -> None:
    """Write buffers of float32."""
    for name, value in values.items():
        shape = np.shape(value)
        client.put(f"/v1/buffers/{prefix}{name}", json={"shape": shape, "dtype": "float32"}).raise_for_status()
        client.post(f"/v1/buffers/{prefix}{name}/accumulate", json={"gradient": value}).raise_for_status()


def test_a_file_has_the_values_of_buffers_and_is_else_the_same(client: httpx.Client) -> None:
    content = normalized()
    put(client, content, loss="MSELoss")
    new = {"scale": [5, 6], "bias": [7, 8], "w": [[1, 2], [3, 5]], "b": [0, 9]}
    written(client, "m.p.", **new)
    written(client, "m.s.", mean=[1, 2], var=[3, 4])
    query = {"parameters": "m.p.*", "statistics": "m.s.*"}
    answer = client.get("/v1/graphs/g/model", params=query).raise_for_status()
    expected = onnx.load_from_string(content)
    for one in expected.graph.initializer:
        value = {**new, "mean": [1, 2], "var": [3, 4]}[one.name]
        one.CopyFrom(numpy_helper.from_array(np.array(value, np.float32), one.name))
    assert answer.content == expected.SerializeToString()
    assert [answer.headers[f"{group}-version"] for group in query] == ["1", "1"]
    again = client.get("/v1/graphs/g/model", params=query, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    client.post("/v1/buffers/m.s.mean/accumulate", json={"gradient": [1, 1]}).raise_for_status()
    other = client.get("/v1/graphs/g/model", params=query, headers={"If-None-Match": answer.headers["etag"]})
    assert (other.status_code, other.headers["statistics-version"]) == (200, "1")
    assert client.get("/v1/graphs/g/model").content == content


def test_buffers_that_are_not_those_of_the_model_are_refused(client: httpx.Client) -> None:
    put(client, linear(), loss="MSELoss")

    def downloaded(**query: str) -> httpx.Response:
        return client.get("/v1/graphs/g/model", params=query)

    written(client, "m.", w=[[1], [2]])
    assert_problem(downloaded(parameters="m.*"), 404, "unknown_buffer", "'m.b'")
    written(client, "m.", b=[1, 2])
    assert_problem(downloaded(parameters="m.*"), 422, "shape_mismatch", "parameters.b has shape [2], but must have [1]")
    client.put("/v1/buffers/n.w", json={"shape": [2, 1], "dtype": "float64"}).raise_for_status()
    client.put("/v1/buffers/n.b", json={"shape": [1], "dtype": "float64"}).raise_for_status()
    assert_problem(downloaded(parameters="n.*"), 422, "dtype_mismatch", "float64", "float32")
    assert_problem(downloaded(statistics="m.*"), 422, "invalid_parameter", "the model has none")
    assert_problem(downloaded(parameters="m."), 422, "invalid_parameter", "a prefix of buffers and *")
    assert_problem(downloaded(gradients="m.*"), 422, "unknown_parameter", "gradients")


def typed(value: Any, name: str, kind: int = TensorProto.FLOAT) -> Any:
    """A tensor whose numbers are in the field of its type."""
    return helper.make_tensor(name, kind, np.shape(value), np.ravel(value).tolist())


CONSTANTS = {
    "a tensor": {"value": numpy_helper.from_array(np.array([2, 3], np.float32))},
    "a typed tensor": {"value": typed([2, 3], "")},
    "a list": {"value_floats": [2.0, 3.0]},
}


@pytest.mark.parametrize("form", CONSTANTS)
def test_constants_are_weights_of_a_file_too(client: httpx.Client, form: str) -> None:
    nodes = helper.make_node("Constant", [], ["c"], **CONSTANTS[form]), helper.make_node("Mul", ["x", "c"], ["y"])
    put(client, model(*nodes, inputs=[("x", [2])], outputs=[("y", [2])]), loss="MSELoss")
    written(client, "m.", c=[5, 7])
    content = client.get("/v1/graphs/g/model?parameters=m.*").raise_for_status().content
    client.delete("/v1/graphs/g").raise_for_status()
    put(client, content)
    assert evaluated(client, {"x": [1, 1]}).json()["y"]["data"] == [5, 7]


def test_a_weight_whose_bytes_cannot_be_replaced_is_refused(client: httpx.Client) -> None:
    half = typed(np.array([2, 3], ml_dtypes.bfloat16).view(np.uint16), "w", TensorProto.BFLOAT16)
    nodes = helper.make_node("Cast", ["w"], ["v"], to=TensorProto.FLOAT), helper.make_node("Mul", ["x", "v"], ["y"])
    put(client, model(*nodes, inputs=["x"], outputs=["y"], initializers=[half]), loss="MSELoss", set="parameters:m.*")
    answer = client.get("/v1/graphs/g/model?parameters=m.*")
    assert_problem(answer, 422, "invalid_graph", "the weight 'w'", "raw_data")
    client.delete("/v1/graphs/g").raise_for_status()
    put(client, trained()[0])
    names = client.get("/v1/graphs/g").json()["parameters"]
    client.post("/v1/buffers/create", json={"buffers": {f"n.{name}": one for name, one in names.items()}})
    answer = client.get("/v1/graphs/g/model?parameters=n.*")
    assert_problem(answer, 422, "invalid_graph", "it is an input of the model")


def test_names_of_buffers_are_those_of_the_groups(client: httpx.Client) -> None:
    node = helper.make_node("Mul", ["x", "a/b c"], ["y"])
    weight = numpy_helper.from_array(np.array([2], np.float32), "a/b c")
    content = model(node, inputs=["x"], outputs=["y"], initializers=[weight])
    put(client, content, loss="MSELoss", set="parameters:m.*")
    assert client.get("/v1/graphs/g/model?parameters=m.*").content == content
    assert client.get("/v1/buffers/m.a_b_c").status_code == 200


def test_a_trained_file_needs_the_scope_of_buffers(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.json", "ops", ["ops", "graphs:write"])
    headers = {"Authorization": f"Bearer {secret}"}
    with serving(keys=tmp_path / "keys.json") as url, httpx.Client(base_url=url, headers=headers) as client:
        put(client, linear())
        assert client.get("/v1/graphs/g/model").content == linear()
        answer = client.get("/v1/graphs/g/model?parameters=m.*")
        assert assert_problem(answer, 403, "forbidden")["scope"] == "buffers:read"


def test_the_memory_of_a_trained_file_is_reserved() -> None:
    """The file, its copy, and the values of the buffers."""
    weights = {f"w{number}": np.ones(1 << 18, np.float32) for number in range(6)}
    content = model(helper.make_node("Sum", [*weights], ["y"]), outputs=["y"], **weights)
    with serving(max_bytes_in_flight=16 << 20, max_tensor_bytes=1 << 20) as url, httpx.Client(base_url=url) as client:
        put(client, content)
        specs = {f"m.{name}": {"shape": [1 << 18], "dtype": "float32"} for name in weights}
        client.post("/v1/buffers/create", json={"buffers": specs}).raise_for_status()
        assert client.get("/v1/graphs/g/model").content == content
        answer = client.get("/v1/graphs/g/model?parameters=m.*")
        assert_problem(answer, 413, "tensor_too_large", "GRADSERVE_MAX_BYTES_IN_FLIGHT")
