"""The operators' endpoints over real HTTP: the forms of tensors, attributes and answers."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx
import numpy as np
import pytest

from service.kernels import OPERATORS
from tests.serving import assert_problem, serving


def run(client: httpx.Client, op: str, params: dict[str, Any] | None = None, **tensors: Any) -> Any:
    answer = client.post(f"/v1/ops/{op}", json=tensors, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def relu(client: httpx.Client, dY: Any, X: Any) -> Any:
    return run(client, "ReluGrad", dY=dY, X=X)["dX"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ReluGard", "ReluGrad"),
        ("relugrad", "ReluGrad"),
        ("TanhGrd", "TanhGrad"),
        ("gru_training", "GRUTraining"),
        ("SoftmaxGrad13", "SoftmaxGrad_13"),
        *((other, None) for other in ("CosGrad", "SeluGrad", "NoSuchGrad", "G", "Grad", "grad")),
    ],
)
def test_only_a_close_name_is_suggested(client: httpx.Client, name: str, meant: str | None) -> None:
    """Most operators end in Grad: that alone makes no name close."""
    hint = "" if meant is None else f" Did you mean {meant}?"
    detail = f"This server has no operator '{name}'.{hint} GET /v1/ops lists all"
    for answer in (client.post(f"/v1/ops/{name}", json={}), client.get(f"/v1/ops/{name}")):
        assert assert_problem(answer, 404, "unknown_operator")["detail"] == detail


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Relu", "Relu is an operator of ONNX, but not served here. Did you mean ReluGrad?"),
        ("MatMul", "MatMul is an operator of ONNX, but not served here."),
        ("LambOptimizer", "LambOptimizer is an operator of ONNX Runtime, but not served here."),
        ("GistBinarizeEncoder", "GistBinarizeEncoder is an operator of ONNX Runtime, but not served here."),
    ],
)
def test_an_operator_that_exists_elsewhere(client: httpx.Client, name: str, fault: str) -> None:
    for answer in (client.post(f"/v1/ops/{name}", json={}), client.get(f"/v1/ops/{name}")):
        assert assert_problem(answer, 404, "unknown_operator")["detail"] == f"{fault} GET /v1/ops lists all"
    for answer in (client.post(f"/v2/models/{name}/infer", json={}), client.get(f"/v2/models/{name}")):
        assert (answer.status_code, answer.json()) == (404, {"error": f"{fault} GET /v1/ops lists all"})


def test_each_operator_has_a_family(client: httpx.Client) -> None:
    listed = {one["name"]: one["family"] for one in client.get("/v1/ops").json()["operators"]}
    assert listed.keys() == OPERATORS.keys()
    assert 8 <= len({*listed.values()}) <= 14
    assert all(re.fullmatch("[A-Z][a-z, ]{3,40}", family) for family in listed.values())
    assert listed["GRUGrad"] == listed["LSTMTraining"] == "Recurrent networks"
    assert listed["GeluGrad"] == listed["ReluGrad"] == client.get("/v1/ops/TanhGrad").json()["family"] == "Activations"


def test_the_list_says_what_is_not_served(client: httpx.Client) -> None:
    found = {one["name"]: one["why"] for one in client.get("/v1/ops").json()["not_served"]}
    assert found["GistBinarizeEncoder"] == "ends the process of ONNX Runtime"
    assert all(found.values())
    assert found.keys().isdisjoint(OPERATORS)
    for name in found:
        detail = assert_problem(client.get(f"/v1/ops/{name}"), 404, "unknown_operator")["detail"]
        assert detail.startswith(f"{name} is an operator of ONNX Runtime, but not served here.")


def test_a_tensor_may_be_a_list_or_a_scalar(client: httpx.Client) -> None:
    assert relu(client, [[1, 2.5]], [[3, -1]]) == {"dtype": "float32", "shape": [1, 2], "data": [[1.0, 0.0]]}
    assert relu(client, 5, 1) == {"dtype": "float32", "shape": [], "data": 5.0}


def test_a_tensor_may_be_an_object_with_dtype_and_shape(client: httpx.Client) -> None:
    dY = {"dtype": "float64", "data": [0.1, 0.2]}
    X = {"dtype": "float64", "shape": [2], "data": [1, 1]}
    assert relu(client, dY, X) == {"dtype": "float64", "shape": [2], "data": [0.1, 0.2]}


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ([], [0]),
        ([[], []], [2, 0]),
        ({"shape": [0, 3], "data": []}, [0, 3]),
        ({"shape": [2, 0, 3], "data": [[], []]}, [2, 0, 3]),
        ({"shape": [2, 0], "base64": ""}, [2, 0]),
    ],
)
def test_an_empty_tensor_keeps_its_shape(client: httpx.Client, tensor: Any, shape: list[int]) -> None:
    answer = relu(client, tensor, tensor)
    assert answer["shape"] == shape
    assert relu(client, answer, answer) == answer


def test_a_huge_number_of_empty_rows_is_cheap(client: httpx.Client) -> None:
    rows = {"shape": [1 << 60, 0], "data": []}
    assert relu(client, rows, rows) == {"dtype": "float32", **rows}


def test_nonfinite_numbers_travel_as_strings(client: httpx.Client) -> None:
    dY = ["NaN", "Infinity", "-Infinity", 1]
    assert relu(client, dY, [1, 1, 1, 1])["data"] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert relu(client, dY, [0, 0, "NaN", "-Infinity"])["data"] == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_answer_can_be_sent_back_as_input(client: httpx.Client, dtype: str) -> None:
    first = relu(
        client, {"dtype": dtype, "data": [[0.1, 65504, -1e-7, "NaN"]]}, {"dtype": dtype, "data": [[1, 1, 1, 1]]}
    )
    assert first["dtype"] == dtype
    assert relu(client, first, {"dtype": dtype, "data": [[1, 1, 1, 1]]}) == first


def test_base64_is_bit_exact(client: httpx.Client) -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    dY = {"dtype": "float32", "shape": [5], "base64": base64.b64encode(bits.tobytes()).decode()}
    answer = relu(client, dY, [1, 1, 1, 1, 1])
    assert answer == dY


def test_the_answer_has_the_form_of_the_request_unless_asked_otherwise(client: httpx.Client) -> None:
    empty = {"dtype": "float32", "shape": [0], "base64": ""}
    assert relu(client, empty, []) == empty
    one = {"dtype": "float32", "shape": [1], "base64": "AACAPw=="}
    assert relu(client, one, [1]) == one
    as_list = {"dtype": "float32", "shape": [1], "data": [1.0]}
    assert run(client, "ReluGrad", {"encoding": "list"}, dY=one, X=one)["dX"] == as_list
    assert run(client, "ReluGrad", {"encoding": "base64"}, dY=[1], X=[1])["dX"] == one


def test_attributes_are_query_parameters(client: httpx.Client) -> None:
    dY, Y = [[1, 2], [3, 4]], [[0.5, 0.25], [0.5, 0.75]]
    along_last = run(client, "SoftmaxGrad_13", dY=dY, Y=Y)["dX"]["data"]
    assert along_last == run(client, "SoftmaxGrad_13", {"axis": 1}, dY=dY, Y=Y)["dX"]["data"]
    assert along_last != run(client, "SoftmaxGrad_13", {"axis": 0}, dY=dY, Y=Y)["dX"]["data"]
    assert run(client, "LeakyReluGrad", {"alpha": 0.5}, dY=[2.0], Y=[-1.0])["dX"]["data"] == [1.0]
    assert run(client, "LeakyReluGrad", {"alpha": "nan"}, dY=[2.0], Y=[-1.0])["dX"]["data"] == ["NaN"]


def test_indices_may_be_int32_or_int64(client: httpx.Client) -> None:
    grad = [[1, 2], [3, 4]]
    for indices in ([2, -3], {"dtype": "int32", "data": [2, -3]}):
        answer = run(client, "GatherGrad", shape=[3, 2], indices=indices, grad=grad)
        assert answer["output"]["data"] == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]


def test_an_operator_may_have_several_outputs(client: httpx.Client) -> None:
    answer = run(client, "InPlaceAccumulatorV2", gradient_buffer=[1, 2], gradient=[10], overwrite=True)
    assert answer == {
        "updated": {"dtype": "bool", "shape": [1], "data": [True]},
        "accumulated_gradient": {"dtype": "float32", "shape": [2], "data": [10.0, 10.0]},
    }
    axes = run(client, "BroadcastGradientArgs", A_shape=[4, 5], B_shape=[2, 3, 4, 5])
    assert [axes[name]["data"] for name in ("A_axes", "B_axes")] == [[1, 0], []]
    assert axes["B_axes"] == {"dtype": "int64", "shape": [0], "data": []}


def test_the_number_of_threads_does_not_change_the_bytes() -> None:
    generator = np.random.default_rng(1)
    dY, Y = generator.standard_normal((2, 3, 200_000), dtype=np.float32)

    def tensor(array: Any) -> Any:
        return {"dtype": "float32", "shape": array.shape, "base64": base64.b64encode(array).decode()}

    answers = set()
    for threads in (1, 2, 5):
        with serving(threads=threads) as url:
            for op in ("SoftmaxGrad", "LogSoftmaxGrad_13", "TanhGrad"):
                answer = httpx.post(f"{url}/v1/ops/{op}", json={"dY": tensor(dY), "Y": tensor(Y)}, timeout=60)
                assert answer.status_code == 200
                answers.add((op, answer.content))
    assert len(answers) == 3


def test_a_body_may_be_chunked(client: httpx.Client) -> None:
    def pieces() -> Any:
        yield b'{"dY": [1, 2'
        yield b'], "X": [1'
        yield b", 0]}"

    answer = client.post("/v1/ops/ReluGrad", content=pieces(), headers={"Content-Type": "application/json"})
    assert answer.json()["dX"]["data"] == [1.0, 0.0]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", None])
def test_content_types_that_are_json(client: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = client.post("/v1/ops/ReluGrad", content=b'{"dY": 1, "X": 1}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize("accept", ["*/*", "application/*", "text/html, application/json;q=0.9", "APPLICATION/JSON"])
def test_an_accept_header_that_allows_json_is_accepted(client: httpx.Client, accept: str) -> None:
    answer = client.post("/v1/ops/ReluGrad", json={"dY": 1, "X": 1}, headers={"Accept": accept})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"


def test_the_operators_are_listed(client: httpx.Client) -> None:
    names = [info["name"] for info in client.get("/v1/ops").json()["operators"]]
    assert sorted(names) == sorted(OPERATORS)
    assert {"ReluGrad", "SoftmaxGrad_13", "GatherGrad", "InPlaceAccumulatorV2", "GRUGrad"} <= set(names)


def test_the_documentation_loads_nothing_from_other_hosts(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    found = re.findall(r"""(?:src|href|url)[=:]\s*["']([^"']+)""", page.text)
    assert len(found) == 4
    for path in found:
        assert ":" not in path
        answer = client.get(page.url.join(path))
        assert (answer.status_code, len(answer.content) > 100) == (200, True), path
    assert client.get("/docs/LICENSE").headers["content-type"] == "text/plain"
    version = re.search(r"swagger-ui-dist` ([\d.]+\d)", client.get("/docs/README.md").text)
    assert version is not None
    assert f'PACKAGE_VERSION:"{version[1]}"' in client.get("/docs/swagger-ui-bundle.js").text
    assert_problem(client.get("/docs/other.js"), 404, "not_found")
    assert_problem(client.post("/docs/swagger-ui.css"), 405, "method_not_allowed", "it allows GET, HEAD")
