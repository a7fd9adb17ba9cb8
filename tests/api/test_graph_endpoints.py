"""Graphs over HTTP: uploaded, described, run as operators are, and deleted."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import helper
from safetensors.numpy import load, save

from service.codecs.safetensors import MEDIA_TYPE
from service.graphs.graph import Graph
from service.kernels import claim
from service.keys import add as add_key
from tests.api.models import DOUBTS, chain, doubtful, linear, model, trained
from tests.serving import assert_problem, serving

SAFETENSORS = {"Content-Type": MEDIA_TYPE}
X = {"x": [[1, 10], [2, 20]]}
Y = [[33], [65]]
"""The outputs of `linear()` for X."""


@pytest.fixture
def client(http: httpx.Client) -> Iterator[httpx.Client]:
    """Yield a client of a server without graphs."""
    yield http
    for one in http.get("/v1/graphs").json()["graphs"]:
        assert http.delete(f"/v1/graphs/{one['name']}").status_code == 204
    http.delete("/v1/buffers?all=true")


def put(client: httpx.Client, name: str = "g", content: bytes | None = None, **query: Any) -> httpx.Response:
    return client.put(f"/v1/graphs/{name}", content=linear() if content is None else content, params=query)


def run(client: httpx.Client, name: str = "g", json: Any = X, **query: Any) -> httpx.Response:
    return client.post(f"/v1/graphs/{name}", json=json, params=query)


def ok(answer: httpx.Response) -> Any:
    return answer.raise_for_status().json()


def test_a_graph_is_uploaded_described_listed_and_deleted(client: httpx.Client) -> None:
    made = put(client)
    assert (made.status_code, made.headers["location"]) == (201, "./g")
    described = made.json()
    assert described.pop("buffers") == {}
    assert described["inputs"] == {"x": {"dtype": "float32", "shape": [None, 2]}}
    assert described["parameters"].keys() == {"w", "b"}
    assert described["nodes"] == {"MatMul": 1, "Add": 1}
    assert ok(client.get("/v1/graphs/g")) == described
    head = {name: described[name] for name in ("name", "bytes", "digest", "options", "created_at")}
    assert ok(client.get("/v1/graphs")) == {"graphs": [head], "next_cursor": None}
    assert client.delete("/v1/graphs/g").status_code == 204
    for answer in (client.get("/v1/graphs/g"), run(client), client.delete("/v1/graphs/g")):
        assert assert_problem(answer, 404, "unknown_graph", "'g'")["graph"] == "g"


def test_the_bytes_of_a_model_can_be_read(client: httpx.Client) -> None:
    put(client)
    answer = client.get("/v1/graphs/g/model")
    assert answer.content == linear()
    tag = answer.headers["etag"]
    again = client.get("/v1/graphs/g/model", headers={"If-None-Match": tag})
    assert (again.status_code, again.headers["etag"], again.content) == (304, tag, b"")


def test_the_same_graph_again_is_no_error_but_another_is(client: httpx.Client) -> None:
    assert put(client).status_code == 201
    again = put(client)
    assert (again.status_code, again.json()["created_at"]) == (200, ok(client.get("/v1/graphs/g"))["created_at"])
    assert_problem(put(client, content=linear(5)), 409, "graph_exists", "'g'")
    assert ok(run(client))["y"]["data"] == Y
    client.delete("/v1/graphs/g")
    put(client, content=linear(5))
    assert ok(run(client))["y"]["data"] == [[36], [71]]


def test_graphs_are_listed_a_page_at_a_time(client: httpx.Client) -> None:
    for name in "cabd":
        put(client, f"m{name}")
    first = ok(client.get("/v1/graphs?prefix=m&limit=3"))
    assert [one["name"] for one in first["graphs"]] == ["ma", "mb", "mc"]
    rest = ok(client.get("/v1/graphs", params={"prefix": "m", "cursor": first["next_cursor"]}))
    assert ([one["name"] for one in rest["graphs"]], rest["next_cursor"]) == (["md"], None)


@pytest.mark.parametrize("content", [b"", b"no model", b"\x00" * 1000, linear()[:-20]], ids=len)
def test_what_is_no_model_is_refused(client: httpx.Client, content: bytes) -> None:
    assert_problem(put(client, content=content), 422, "invalid_graph")
    assert ok(client.get("/v1/graphs"))["graphs"] == []


def test_a_model_has_a_media_type_of_its_own(client: httpx.Client) -> None:
    answer = client.put("/v1/graphs/g", content=linear(), headers={"Content-Type": "application/json"})
    assert_problem(answer, 415, "unsupported_media_type", "application/onnx")
    assert "application/onnx" in answer.headers["accept"]
    headers = {"Content-Type": "application/onnx"}
    assert client.put("/v1/graphs/g", content=linear(), headers=headers).status_code == 201


def test_a_graph_runs_as_an_operator_does(client: httpx.Client) -> None:
    put(client)
    assert ok(run(client))["y"]["data"] == Y
    assert ok(run(client, json={**X, "parameters": {"b": [0]}}))["y"]["data"] == [[32], [64]]
    assert "base64" in ok(run(client, encoding="base64"))["y"]
    file = save({"x": np.array(X["x"], np.float32), "parameters.b": np.zeros(1, np.float32)})
    answer = client.post("/v1/graphs/g", content=file, headers=SAFETENSORS)
    assert load(answer.content)["y"].tolist() == [[32], [64]]
    assert ok(run(client, outputs="y")).keys() == {"y"}


def test_wrong_requests_name_the_graph(client: httpx.Client) -> None:
    put(client)
    wrong = {
        "missing_tensor": run(client, json={}),
        "unknown_tensor": run(client, json={**X, "z": [1]}),
        "shape_mismatch": run(client, json={"x": [1, 2]}),
        "dtype_mismatch": run(client, json={"x": {"dtype": "float64", "data": [[1, 2]]}}),
        "invalid_parameter": run(client, outputs="z"),
    }
    for code, answer in wrong.items():
        assert assert_problem(answer, 422, code)["graph"] == "g"
    assert_problem(run(client, axis=1), 422, "unknown_parameter", "axis")
    assert_problem(put(client, "a/b"), 404, "not_found")
    assert_problem(put(client, "a b"), 422, "invalid_parameter")
    assert_problem(client.put("/v1/graphs/g?losses=x", content=b""), 422, "unknown_parameter", "losses")


def test_a_micro_batch_of_a_training_graph(client: httpx.Client) -> None:
    content, step = trained()
    info = ok(put(client, content=content))
    assert info["kind"] == "training"
    parameters = step["parameter"]
    assert info["gradients"].keys() == parameters.keys()
    specs = {f"m.{kind}.{name}": {"shape": [*value.shape]} for name, value in parameters.items() for kind in "pg"}
    client.post("/v1/buffers/create", json={"buffers": specs}).raise_for_status()
    file = save({f"m.p.{name}": np.ascontiguousarray(value) for name, value in parameters.items()})
    client.post("/v1/buffers/accumulate", content=file, headers=SAFETENSORS).raise_for_status()
    query: dict[str, Any] = {
        "from": "parameters:m.p.*",
        "into": "gradients:m.g.*",
        "weight": 32,
        "step": 0,
        "encoding": "list",
    }
    body = save({name: np.ascontiguousarray(value) for name, value in step["input"].items()})
    headers = {**SAFETENSORS, "Accept": "application/json"}
    for key in ("first", "second", "second"):
        answer = client.post("/v1/graphs/g", params=query, content=body, headers={**headers, "Idempotency-Key": key})
        assert ok(answer)["loss"]["data"] == pytest.approx(float(step["loss"][""]), rel=1e-5)
    assert answer.headers["idempotency-replayed"] == "true"
    found = load(client.post("/v1/buffers/take?prefix=m.g.&reduce=mean", headers={"Accept": MEDIA_TYPE}).content)
    for name, right in step["gradient"].items():
        np.testing.assert_allclose(found[f"m.g.{name}"], right, rtol=0, atol=4e-6 * np.abs(right).max())
    assert all(one["count"] == 2 for one in ok(answer)["gradients"].values())


def test_a_loss_goes_to_the_answer_and_to_a_buffer(client: httpx.Client) -> None:
    ok(put(client, content=linear(), loss="MSELoss", set="parameters:m.p.*"))
    for name in ("m.loss", "m.g.w", "m.g.b"):
        shape = {"m.loss": [], "m.g.w": [2, 1], "m.g.b": [1]}[name]
        client.put(f"/v1/buffers/{name}", json={"shape": shape, "dtype": "float64"}).raise_for_status()
    query: dict[str, Any] = {"into": ["loss:m.loss", "gradients:m.g.*"], "outputs": "loss,y,gradients", "weight": 2}
    tensors = {"x": [[1.0, 1.0], [0.0, 0.0]], "target": [[6.0], [2.0]]}
    file = save({name: np.array(value, np.float32) for name, value in tensors.items()})
    for _ in range(2):
        answer = client.post("/v1/graphs/g", params=query, json=tensors, headers={"Idempotency-Key": "one"})
        found = ok(answer)
        assert found["loss"]["output"] == {"dtype": "float32", "shape": [], "data": 0.5}
        assert (found["loss"]["name"], found["loss"]["weight"], found["y"]["data"]) == ("m.loss", 2, [[6.0], [1.0]])
        assert [one["count"] for one in found["gradients"].values()] == [1, 1]
        assert not any("output" in one for one in found["gradients"].values())  # they would take long to travel back
    assert answer.headers["idempotency-replayed"] == "true"
    answer = client.post("/v1/graphs/g", params=query, content=file, headers={**SAFETENSORS, "Accept": MEDIA_TYPE})
    assert {name: one.tolist() for name, one in load(answer.content).items()} == {"loss": 0.5, "y": [[6], [1]]}
    assert ok(client.get("/v1/buffers/m.loss/value"))["value"]["data"] == 2
    query["outputs"] = "y"
    answer = client.post("/v1/graphs/g", params=query, json=tensors)
    assert "output" not in ok(answer)["loss"]


def weights(client: httpx.Client) -> dict[str, list[Any]]:
    """The weights of `linear()` in buffers."""
    values = ok(client.post("/v1/buffers/value?prefix=m.p."))["buffers"]
    return {name.removeprefix("m.p."): one["value"]["data"] for name, one in values.items()}


def test_a_models_own_weights_go_into_buffers(client: httpx.Client) -> None:
    made = ok(put(client, set="parameters:m.p.*"))
    assert {name: one["created"] for name, one in made["buffers"].items()} == {"m.p.w": True, "m.p.b": True}
    assert weights(client) == {"w": [[2], [3]], "b": [1]}
    assert ok(run(client, **{"from": "parameters:m.p.*"}))["y"]["data"] == Y


def test_a_worker_that_puts_the_model_late_sets_nothing_back(client: httpx.Client) -> None:
    put(client, set="parameters:m.p.*")
    client.post("/v1/buffers/m.p.b/accumulate", json={"gradient": [5]}).raise_for_status()
    late = ok(put(client, set="parameters:m.p.*"))
    assert [one["updated"] for one in late["buffers"].values()] == [False, False]
    assert weights(client)["b"] == [6]
    client.delete("/v1/buffers/m.p.w")
    put(client, set="parameters:m.p.*")
    assert weights(client) == {"w": [[2], [3]], "b": [6]}
    client.delete("/v1/graphs/g")
    put(client, set="parameters:m.p.*")
    assert weights(client)["b"] == [1]


@pytest.mark.parametrize("text", ["weights:m.p.*", "parameters:m.p.", "parameters.c:m", "parameters:a/*", "y:m"])
def test_only_weights_of_the_model_can_be_set(client: httpx.Client, text: str) -> None:
    assert_problem(put(client, set=text), 422, "invalid_parameter", "set", text.partition(":")[2])
    assert ok(client.get("/v1/graphs"))["graphs"] == []


def test_two_weights_cannot_be_set_into_one_buffer(client: httpx.Client) -> None:
    answer = put(client, set=["parameters.w:m", "parameters.b:m"])
    assert_problem(answer, 422, "invalid_request", "A request may change each buffer once")
    assert ok(client.get("/v1/graphs"))["graphs"] == []


def test_a_model_without_weights_of_its_own_sets_none(client: httpx.Client) -> None:
    answer = put(client, content=trained()[0], set="parameters:m.p.*")
    assert_problem(answer, 422, "invalid_parameter", "set", "the model has no weights of its own")


def test_a_put_with_a_key_is_made_once(client: httpx.Client) -> None:
    for replayed in (None, "true"):
        answer = client.put("/v1/graphs/g", content=linear(), headers={"Idempotency-Key": "k"})
        assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (201, replayed)
    other = client.put("/v1/graphs/g", content=linear(5), headers={"Idempotency-Key": "k"})
    assert_problem(other, 422, "idempotency_key_reused")


def test_a_graph_reads_buffers_as_they_are_now(client: httpx.Client) -> None:
    put(client, set="parameters:m.p.*")
    query = {"from": "parameters:m.p.*"}
    for bias in (1, 2, 3):
        for _ in range(2):
            assert ok(run(client, **query))["y"]["data"] == [[32 + bias], [64 + bias]]
        client.post("/v1/buffers/m.p.b/accumulate", json={"gradient": [1]}).raise_for_status()


def test_a_graph_is_a_model_of_the_open_inference_protocol(client: httpx.Client) -> None:
    put(client)
    described = ok(client.get("/v2/models/g"))
    assert [one["name"] for one in described["inputs"]] == ["x", "parameters.*"]
    assert ok(client.get("/v2/models/g/config"))["output"][0]["name"] == "y"
    assert ok(client.get("/v2/models/g/ready"))["ready"]
    inputs = [{"name": "x", "shape": [2, 2], "datatype": "FP32", "data": X["x"]}]
    answer = ok(client.post("/v2/models/g/infer", json={"inputs": inputs}))
    assert (answer["model_name"], answer["outputs"][0]["data"]) == ("g", [33, 65])
    assert "g" in [one["name"] for one in ok(client.post("/v2/repository/index"))]
    assert ok(client.get("/v2/models/g/stats"))["model_stats"][0]["inference_count"] > 0
    client.delete("/v1/graphs/g")
    for path in ("/v2/models/g", "/v2/models/g/infer", "/v2/models/g/stats"):
        answer = client.post(path, json={"inputs": inputs}) if path.endswith("infer") else client.get(path)
        assert (answer.status_code, "no operator 'g'" in answer.json()["error"]) == (404, True)


def test_a_seed_settles_what_is_random(client: httpx.Client) -> None:
    nodes = helper.make_node("RandomNormalLike", ["x"], ["r"]), helper.make_node("Add", ["x", "r"], ["y"])
    put(client, content=model(*nodes, inputs=["x"], outputs=["y"])).raise_for_status()

    def infer(seed: Any) -> httpx.Response:
        inputs = [{"name": "x", "shape": [1], "datatype": "FP32", "data": [0]}]
        return client.post("/v2/models/g/infer", json={"inputs": inputs, "parameters": {"seed": seed}})

    drawn = [ok(run(client, json={"x": [0]}, seed=seed))["y"]["data"] for seed in (1, 1, 2, (1 << 63) - 1)]
    assert drawn[0] == drawn[1] == ok(infer(1))["outputs"][0]["data"]
    assert len({one for (one,) in drawn}) == 3
    for seed in (-1, 1 << 63, 10**30):
        assert_problem(run(client, json={"x": [0]}, seed=seed), 422, "invalid_parameter", "seed")
        assert infer(seed).status_code == 400


def test_graphs_share_a_label_and_count_what_they_keep() -> None:
    with serving() as url, httpx.Client(base_url=url) as client:
        put(client, "a")
        put(client, "b", set="parameters:m.p.*")
        for name in "aab":
            ok(run(client, name, **{"from": "parameters:m.p.*"}))
        run(client, "a", json={})
        lines = client.get("/metrics").text.splitlines()
        assert 'gradserve_operator_requests_total{op="graphs",status="200"} 3.0' in lines
        assert 'gradserve_operator_requests_total{op="graphs",status="422"} 1.0' in lines
        assert 'gradserve_requests_total{route="graphs",status="201"} 2.0' in lines
        (kept,) = (line.split()[1] for line in lines if line.startswith("gradserve_graph_cache_bytes "))
        assert float(kept) >= 3 * 12  # the weights of two graphs, and those in the buffers


def test_a_graph_that_is_not_planned_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, plans, read = f"lmdb:{tmp_path}", list[int](), Graph.read
    with serving(store=store) as url, httpx.Client(base_url=url) as client:
        put(client, "a")
        put(client, "b")

    def counted(content: Any, *rest: Any, **options: Any) -> Graph:
        plans.append(len(content))
        return read(content, *rest, **options)

    monkeypatch.setattr(Graph, "read", counted)
    for size, expected in ((1 << 20, 2), (0, 20)):
        plans.clear()
        with (
            serving(store=store, threads=2, graph_cache_bytes=size) as url,
            httpx.Client(base_url=url) as client,
            ThreadPoolExecutor(8) as pool,
        ):
            answers = [*pool.map(lambda number, client=client: run(client, "ab"[number % 2]), range(16))]
            assert [ok(answer)["y"]["data"] for answer in answers] == [Y] * 16
            assert [put(client, name).status_code for name in "abab"] == [200] * 4
        assert len(plans) == expected


def test_servers_share_graphs(postgres_url: str) -> None:
    """Each has the graph of the moment, also if another server has replaced it."""
    shared = {"store": postgres_url, "postgres_schema": f"test_{uuid.uuid4().hex}"}
    with (
        serving(**shared) as one,
        serving(**shared) as two,
        httpx.Client(base_url=one) as a,
        httpx.Client(base_url=two) as b,
    ):
        query = {"from": "parameters:m.p.*"}
        for factor in (2, 5):
            assert put(a, content=linear(factor), set="parameters:m.p.*").status_code == 201
            for client in (a, b, a, b):
                assert ok(run(client, **query))["y"]["data"] == [[31 + factor], [61 + 2 * factor]]
                assert ok(run(client))["y"]["data"] == [[31 + factor], [61 + 2 * factor]]
            assert b.get("/v1/graphs/g/model").content == linear(factor)
            assert b.delete("/v1/graphs/g").status_code == 204
            assert run(a).status_code == 404


def test_a_graph_ends_when_its_client_waits_no_longer() -> None:
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        put(client, "slow", chain(2000, 256)).raise_for_status()
        answer = client.post("/v1/graphs/slow", json={}, headers={"Request-Timeout": "0.2"})
        assert_problem(answer, 422, "graph_too_slow", "0.2 seconds", "Request-Timeout")


def test_an_upload_ends_when_its_client_waits_no_longer() -> None:
    """The node reads its input 200,000 times, and the loss is differentiated for each."""
    wide = model(helper.make_node("Sum", ["x"] * 200_000, ["y"]), inputs=["x"], outputs=["y"])
    with serving() as url, httpx.Client(base_url=url, timeout=60) as client:
        query, headers = {"loss": "MSELoss", "train": "x"}, {"Request-Timeout": "0.1"}
        answer = client.put("/v1/graphs/wide", content=wide, params=query, headers=headers)
        assert_problem(answer, 422, "graph_too_slow", "0.1 seconds", "Request-Timeout")
        assert client.get("/v1/graphs").json()["graphs"] == []


def test_a_client_that_leaves_ends_the_reading_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(*_: Any) -> None:
        began.set()
        try:
            while True:
                claim(0)  # as the loops over the parts of a model do
        finally:
            ended.set()

    monkeypatch.setattr("service.graphs.graph.read", endless)
    with serving() as url, socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(b"PUT /v1/graphs/g HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx")
        assert began.wait(30)
        connection.close()
        assert ended.wait(30)


def test_a_key_needs_scopes(tmp_path: Path) -> None:
    everything = ["ops", "buffers:read", "buffers:write", "graphs:write"]
    file, lacking = tmp_path / "keys.json", {scope: [one for one in everything if one != scope] for scope in everything}
    secrets = {scope: add_key(file, scope.replace(":", "-"), scopes) for scope, scopes in lacking.items()}
    secrets["other"] = add_key(file, "other", everything, "other")
    with serving(keys=file) as url:
        people = {
            name: httpx.Client(base_url=url, headers={"Authorization": f"Bearer {one}"})
            for name, one in secrets.items()
        }
        for name, person in people.items():
            answer = put(person, set="parameters:m.p.*")
            if name in ("graphs:write", "buffers:write"):
                assert assert_problem(answer, 403, "forbidden")["scope"] == name
        assert_problem(people["graphs:write"].delete("/v1/graphs/g"), 403, "forbidden", "graphs:write")
        assert_problem(people["ops"].get("/v1/graphs"), 403, "forbidden", "ops")
        assert_problem(run(people["ops"]), 403, "forbidden", "ops")
        assert ok(run(people["graphs:write"]))["y"]["data"] == Y
        query = {"from": "parameters:m.p.*"}
        assert_problem(run(people["buffers:read"], **query), 403, "forbidden", "buffers:read")
        people["other"].delete("/v1/graphs/g").raise_for_status()
        assert run(people["other"]).status_code == 404
        assert ok(run(people["graphs:write"]))["y"]["data"] == Y
        for person in people.values():
            person.close()


WITHOUT_ONNX = """
import sys

sys.modules["onnx"] = None
import httpx
from tests.serving import serving

with serving(store="lmdb:" + sys.argv[1]) as url, httpx.Client(base_url=url) as client:
    made, run = client.put("/v1/graphs/new", content=b"model"), client.post("/v1/graphs/g", json={})
    for answer in made, run, client.get("/v1/graphs/g"):
        print(answer.status_code, answer.json()["code"], "gradserve[graphs]" in answer.json()["detail"])
    print(client.get("/v2/models/g").status_code)
    print(len(client.get("/v1/graphs").json()["graphs"]), len(client.get("/v1/graphs/g/model").content) > 0)
    print(client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1]}).status_code)
    print(client.delete("/v1/graphs/g").status_code)
"""


def test_a_server_without_onnx_says_what_to_install(tmp_path: Path) -> None:
    with serving(store=f"lmdb:{tmp_path}") as url, httpx.Client(base_url=url) as client:
        put(client)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONNX, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    refused = [f"501 {code} True" for code in ["graphs_not_installed"] * 3]
    assert done.stdout.splitlines() == [*refused, "501", "1 True", "200", "204"], done.stderr


def test_the_memory_of_an_upload_is_counted() -> None:
    """A megabyte of names becomes a hundred megabytes of Python's objects."""
    content = model(inputs=[f"{number:06}" for number in range(20_000)], outputs=["000000"])
    with serving(max_bytes_in_flight=16 << 20, max_tensor_bytes=1 << 20) as url, httpx.Client(base_url=url) as small:
        assert_problem(put(small, content=content), 413, "tensor_too_large", "GRADSERVE_MAX_BYTES_IN_FLIGHT")
        assert put(small).status_code == 201


def test_a_model_that_an_exporter_has_changed_has_doubts(client: httpx.Client) -> None:
    refused = put(client, content=doubtful(), loss="MSELoss", strict="true")
    problem = assert_problem(refused, 422, "invalid_graph")
    assert problem["doubts"] == DOUBTS
    assert problem["detail"].endswith(f"{DOUBTS[1]}. Export the model with dynamo=True, optimize=False")
    assert ok(client.get("/v1/graphs"))["graphs"] == []
    assert ok(put(client, content=doubtful(), loss="MSELoss"))["doubts"] == DOUBTS
    described = ok(client.get("/v1/graphs/g"))
    assert (described["doubts"], described["options"]) == (DOUBTS, {"loss": "MSELoss"})
    assert ok(put(client, "right", strict="true"))["doubts"] == []
