"""The operators' endpoints over real HTTP: the forms of tensors, attributes and answers."""

from __future__ import annotations

import base64
import re
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.operators.onnx_names import IN_GRAPHS, ONNX
from service.graphs.nodes import NODES
from service.graphs.unrolled import OURS
from service.kernels import OPERATORS
from tests.serving import assert_problem, serving


def run(client: httpx.Client, op: str, params: dict[str, Any] | None = None, **tensors: Any) -> Any:
    answer = client.post(f"/v1/ops/{op}", json=tensors, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def relu(client: httpx.Client, dY: Any, X: Any) -> Any:
    return run(client, "ReluGrad", dY=dY, X=X)["dX"]


ELSEWHERE = "{} is an operator of {}, but not served here."
UNKNOWN = {
    **{
        name: f"This server has no operator '{name}'. Did you mean {meant}?"
        for name, meant in {
            "ReluGard": "ReluGrad",
            "relugrad": "ReluGrad",
            "TanhGrd": "TanhGrad",
            "gru_training": "GRUTraining",
            "SoftmaxGrad13": "SoftmaxGrad_13",
        }.items()
    },
    **{name: f"This server has no operator '{name}'." for name in "CosGrad SeluGrad NoSuchGrad G Grad grad".split()},
    "Relu": "Relu is an operator of ONNX, which runs in graphs: PUT /v1/graphs/{name}. Did you mean ReluGrad?",
    "MatMul": "MatMul is an operator of ONNX, which runs in graphs: PUT /v1/graphs/{name}.",
    "Unique": ELSEWHERE.format("Unique", "ONNX"),
    **{name: ELSEWHERE.format(name, "ONNX Runtime") for name in ("LambOptimizer", "GistBinarizeEncoder")},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_operator_and_what_may_be_meant(client: httpx.Client, name: str) -> None:
    """Most operators end in Grad: that alone makes no name close."""
    detail = f"{UNKNOWN[name]} GET /v1/ops lists all"
    for answer in (client.post(f"/v1/ops/{name}", json={}), client.get(f"/v1/ops/{name}")):
        assert assert_problem(answer, 404, "unknown_operator")["detail"] == detail
    for answer in (client.post(f"/v2/models/{name}/infer", json={}), client.get(f"/v2/models/{name}")):
        assert (answer.status_code, answer.json()) == (404, {"error": detail})


def test_the_operators_that_run_in_graphs_are_those_with_nodes() -> None:
    assert {op for domain, op in NODES if domain != OURS} & ONNX == IN_GRAPHS


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


def form(data: Any, *shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [*shape], "base64" if isinstance(data, str) else "data": data}


def pair(dY: Any, X: Any) -> dict[str, Any]:
    return {"dY": dY, "X": X}


BITS = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
EXACT, ONE = form(base64.b64encode(BITS.tobytes()).decode(), 5), form("AACAPw==", 1)
WIDE = {"dtype": "float64", "data": [0.1, 0.2]}
LOST = ["NaN", "Infinity", "-Infinity", 1]
LEAKY, GRAD = {"dY": [2.0], "Y": [-1.0]}, {"shape": [3, 2], "grad": [[1, 2], [3, 4]]}
SOFTMAX = {"dY": [[1, 2], [3, 4]], "Y": [[0.5, 0.25], [0.5, 0.75]]}
GATHERED = form([[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]], 3, 2)
ALONG_LAST, ALONG_FIRST = [[0.0, 0.25], [-0.75, -0.375]], [[-0.5, -0.375], [0.5, 0.375]]
ANSWERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "a list": ("ReluGrad", {}, pair([[1, 2.5]], [[3, -1]]), {"dX": form([[1.0, 0.0]], 1, 2)}),
    "a scalar": ("ReluGrad", {}, pair(5, 1), {"dX": form(5.0)}),
    "an object": ("ReluGrad", {}, pair(WIDE, form([1, 1], 2, dtype="float64")), {"dX": {**WIDE, "shape": [2]}}),
    "empty": ("ReluGrad", {}, pair([], []), {"dX": form([], 0)}),
    "empty rows": ("ReluGrad", {}, pair([[], []], [[], []]), {"dX": form([], 2, 0)}),
    "no rows": ("ReluGrad", {}, dict.fromkeys(("dY", "X"), {"shape": [0, 3], "data": []}), {"dX": form([], 0, 3)}),
    "deep": ("ReluGrad", {}, pair(form([[], []], 2, 0, 3), form([[], []], 2, 0, 3)), {"dX": form([], 2, 0, 3)}),
    "empty base64": ("ReluGrad", {}, pair(form("", 2, 0), form("", 2, 0)), {"dX": form("", 2, 0)}),
    "many empty rows": ("ReluGrad", {}, pair(form([], 1 << 60, 0), form([], 1 << 60, 0)), {"dX": form([], 1 << 60, 0)}),
    "not finite": ("ReluGrad", {}, pair(LOST, [1] * 4), {"dX": form([*LOST[:3], 1.0], 4)}),
    "stopped": ("ReluGrad", {}, pair(LOST, [0, 0, "NaN", "-Infinity"]), {"dX": form([0.0] * 4, 4)}),
    "bit exact": ("ReluGrad", {}, pair(EXACT, [1] * 5), {"dX": EXACT}),
    "the form of the request": ("ReluGrad", {}, pair(form("", 0), []), {"dX": form("", 0)}),
    "base64": ("ReluGrad", {}, pair(ONE, [1]), {"dX": ONE}),
    "a list, asked for": ("ReluGrad", {"encoding": "list"}, pair(ONE, ONE), {"dX": form([1.0], 1)}),
    "base64, asked for": ("ReluGrad", {"encoding": "base64"}, pair([1], [1]), {"dX": ONE}),
    "no axis": ("SoftmaxGrad_13", {}, SOFTMAX, {"dX": form(ALONG_LAST, 2, 2)}),
    "the last axis": ("SoftmaxGrad_13", {"axis": 1}, SOFTMAX, {"dX": form(ALONG_LAST, 2, 2)}),
    "the first axis": ("SoftmaxGrad_13", {"axis": 0}, SOFTMAX, {"dX": form(ALONG_FIRST, 2, 2)}),
    "a number": ("LeakyReluGrad", {"alpha": 0.5}, LEAKY, {"dX": form([1.0], 1)}),
    "nan": ("LeakyReluGrad", {"alpha": "nan"}, LEAKY, {"dX": form(["NaN"], 1)}),
    "int64": ("GatherGrad", {}, {**GRAD, "indices": [2, -3]}, {"output": GATHERED}),
    "int32": ("GatherGrad", {}, {**GRAD, "indices": {"dtype": "int32", "data": [2, -3]}}, {"output": GATHERED}),
    "two outputs": (
        "InPlaceAccumulatorV2",
        {},
        {"gradient_buffer": [1, 2], "gradient": [10], "overwrite": True},
        {"updated": form([True], 1, dtype="bool"), "accumulated_gradient": form([10.0, 10.0], 2)},
    ),
    "two lists": (
        "BroadcastGradientArgs",
        {},
        {"A_shape": [4, 5], "B_shape": [2, 3, 4, 5]},
        {"A_axes": form([1, 0], 2, dtype="int64"), "B_axes": form([], 0, dtype="int64")},
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_forms_of_tensors_and_answers(client: httpx.Client, case: str) -> None:
    op, params, tensors, outputs = ANSWERS[case]
    assert run(client, op, params, **tensors) == outputs
    if op == "ReluGrad" and 0 in outputs["dX"]["shape"]:
        assert relu(client, outputs["dX"], outputs["dX"]) == outputs["dX"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_answer_can_be_sent_back_as_input(client: httpx.Client, dtype: str) -> None:
    first = relu(
        client, {"dtype": dtype, "data": [[0.1, 65504, -1e-7, "NaN"]]}, {"dtype": dtype, "data": [[1, 1, 1, 1]]}
    )
    assert first["dtype"] == dtype
    assert relu(client, first, {"dtype": dtype, "data": [[1, 1, 1, 1]]}) == first


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


@pytest.mark.parametrize(
    "headers",
    [
        *({"Content-Type": one} for one in ("application/json; charset=utf-8", "Application/JSON")),
        {},
        *({"Accept": one} for one in ("*/*", "application/*", "text/html, application/json;q=0.9", "APPLICATION/JSON")),
    ],
)
def test_headers_that_mean_json(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = client.post("/v1/ops/ReluGrad", content=b'{"dY": 1, "X": 1}', headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")


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
