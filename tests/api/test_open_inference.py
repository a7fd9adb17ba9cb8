"""The Open Inference Protocol over plain HTTP: its answers, its errors and the forms that clients may ask for."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from service.engine.engine import Engine
from service.kernels import OPERATORS
from service.kernels._op import op
from service.kernels._types import T
from tests.serving import serving

FAMILY = "Tests"
INFER = "/v2/models/InPlaceAccumulatorV2/infer"
RELU = "/v2/models/ReluGrad/infer"
LENGTH = "Inference-Header-Content-Length"


def listed(name: str, data: Any, datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}


INPUTS = [listed("gradient_buffer", [1, 2]), listed("gradient", [10, 20])]


RELU_INPUTS = [listed("dY", [1, 2]), listed("X", [1, 0])]


def assert_error(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json()) == ["error"]
    for word in words:
        assert word in answer.json()["error"], answer.text
    assert "Traceback" not in answer.text


def infer(client: httpx.Client, **more: Any) -> httpx.Response:
    answer = client.post(INFER, json={"inputs": INPUTS, **more})
    assert answer.status_code == 200, answer.text
    return answer


def parts(answer: httpx.Response) -> tuple[dict[str, Any], bytes]:
    length = int(dict(answer.headers.raw)[LENGTH.encode()])  # some clients look for this spelling only
    return json.loads(answer.content[:length]), answer.content[length:]


def with_bytes(tensors: Mapping[str, Any], **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return a body with float32 tensors in binary form, and the header that such a body needs."""
    arrays = {name: np.array(data, np.float32) for name, data in tensors.items()}
    form: dict[str, Any] = {"datatype": "FP32"}
    inputs = [
        {"name": name, **form, "shape": a.shape, "parameters": {"binary_data_size": a.nbytes}}
        for name, a in arrays.items()
    ]
    head = json.dumps({"inputs": inputs, **more}).encode()
    return head + b"".join(a.tobytes() for a in arrays.values()), {LENGTH: str(len(head))}


# ----- models -----


def test_the_server_describes_itself(client: httpx.Client) -> None:
    answer = client.get("/v2").json()
    assert answer.keys() == {"name", "version", "extensions"}
    assert "binary_tensor_data" in answer["extensions"]


def test_a_model_describes_its_tensors(client: httpx.Client) -> None:
    for path in ("/v2/models/GatherGrad", "/v2/models/GatherGrad/versions/1"):
        types = {"shape": "INT64", "indices": "INT64", "grad": "FP32", "output": "FP32"}
        *inputs, output = ({"name": name, "datatype": one, "shape": [-1]} for name, one in types.items())
        described = {"name": "GatherGrad", "versions": ["1"], "platform": "gradserve"}
        assert client.get(path).json() == {**described, "inputs": inputs, "outputs": [output]}
        assert client.get(f"{path}/ready").json() == {"name": "GatherGrad", "ready": True}
        config = client.get(f"{path}/config").json()
        assert config["input"][0] == {"name": "shape", "data_type": "TYPE_INT64", "dims": [-1], "optional": False}
        assert [one["name"] for one in client.get(f"{path}/stats").json()["model_stats"]] == ["GatherGrad"]


def test_a_model_tells_the_rank_of_its_tensors(client: httpx.Client) -> None:
    described = client.get("/v2/models/GRUTraining").json()
    shapes = {one["name"]: one["shape"] for one in described["inputs"] + described["outputs"]}
    ranks = {"X": 3, "W": 3, "R": 3, "B": 2, "SL": 1, "H0": 3, "HAll": 4, "HFinal": 3, "ZRH": 4}
    assert shapes == {name: [-1] * rank for name, rank in ranks.items()}


def test_the_index_lists_every_model(client: httpx.Client) -> None:
    for content in (b"", b"{}"):
        index = client.post("/v2/repository/index", content=content).json()
        assert index[0] == {"name": next(iter(OPERATORS)), "version": "1", "state": "READY", "reason": ""}


# ----- forms of requests and answers -----


def test_an_answer_is_json_by_default(client: httpx.Client) -> None:
    answer = infer(client, id="x")
    assert answer.headers["content-type"] == "application/json"
    assert LENGTH not in answer.headers
    outputs = [listed("updated", [True], "BOOL"), listed("accumulated_gradient", [11.0, 22.0])]
    model = {"model_name": "InPlaceAccumulatorV2", "model_version": "1"}
    assert answer.json() == {"id": "x", **model, "outputs": outputs}
    assert "id" not in infer(client).json()


def test_every_output_may_be_binary(client: httpx.Client) -> None:
    answer = infer(client, parameters={"binary_data_output": True})
    assert answer.headers["content-type"] == "application/octet-stream"
    head, data = parts(answer)
    sizes = [one["parameters"]["binary_data_size"] for one in head["outputs"]]
    assert sizes == [1, 8]
    assert data == b"\1" + np.array([11, 22], np.float32).tobytes()
    assert "id" not in head


@pytest.mark.parametrize("default", [None, False, True])
@pytest.mark.parametrize("first", [None, False, True])
@pytest.mark.parametrize("second", [None, False, True])
def test_each_output_has_its_own_form(client: httpx.Client, default: Any, first: Any, second: Any) -> None:
    asked = {"accumulated_gradient": first, "updated": second}
    outputs = [
        {"name": name, **({} if wanted is None else {"parameters": {"binary_data": wanted}})}
        for name, wanted in asked.items()
    ]
    parameters = {} if default is None else {"binary_data_output": default}
    answer = infer(client, outputs=outputs, parameters=parameters)
    expected = {name: bool(default) if wanted is None else wanted for name, wanted in asked.items()}
    if any(expected.values()):
        head, data = parts(answer)
    else:
        head, data = answer.json(), b""
    assert {one["name"]: "data" not in one for one in head["outputs"]} == expected
    assert [one["name"] for one in head["outputs"]] == list(asked)
    numbers, flag = np.array([11, 22], np.float32).tobytes(), b"\1"
    assert data == numbers * expected["accumulated_gradient"] + flag * expected["updated"]


def test_binary_inputs_may_have_attributes(client: httpx.Client) -> None:
    content, headers = with_bytes({"dY": [2, 4], "Y": [-1, 1]}, parameters={"alpha": 0.5})
    answer = client.post("/v2/models/LeakyReluGrad/versions/1/infer", content=content, headers=headers)
    assert answer.json()["outputs"][0]["data"] == [1.0, 4.0]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_binary_body_may_have_a_length_or_chunks(client: httpx.Client, chunked: bool) -> None:
    content, headers = with_bytes({"dY": [1, 2], "X": [1, 0]}, parameters={"binary_data_output": True})
    pieces: Any = iter([content[:7], content[7:-3], content[-3:]]) if chunked else content
    answer = client.post(RELU, content=pieces, headers=headers)
    assert ("transfer-encoding" in answer.request.headers) is chunked
    assert parts(answer)[1] == np.array([1, 0], np.float32).tobytes()
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", "text/plain", ""])
def test_the_content_type_does_not_matter(client: httpx.Client, content_type: str) -> None:
    content, headers = with_bytes({"dY": [1], "X": [1]})
    answer = client.post(RELU, content=content, headers={**headers, "Content-Type": content_type})
    assert answer.status_code == 200


PLAIN = ("gzip, deflate", "gzip, deflate, br, zstd", "identity", "br", "*", "")
CODINGS = {"gzip": "gzip", "deflate": "deflate", " GZIP ": "gzip", **dict.fromkeys(PLAIN)}


@pytest.mark.parametrize(("accepted", "coding"), CODINGS.items())
@pytest.mark.parametrize("binary", [False, True])
def test_lists_are_compressed_if_the_client_accepts_one_coding(
    client: httpx.Client, accepted: str, coding: str | None, binary: bool
) -> None:
    coding = None if binary else coding
    inputs = [listed("gradient_buffer", [1] * 500), listed("gradient", [10] * 500)]
    body = {"inputs": inputs, "parameters": {"binary_data_output": binary}}
    request = client.build_request("POST", INFER, json=body, headers={"Accept-Encoding": accepted.strip()})
    answer = client.send(request, stream=True)
    raw = b"".join(answer.iter_raw())
    assert answer.headers.get("content-encoding") == coding
    assert int(answer.headers["content-length"]) == len(raw)
    plain = raw if coding is None else zlib.decompress(raw) if coding == "deflate" else gzip.decompress(raw)
    if binary:
        length = int(answer.headers[LENGTH])  # of the inflated JSON
        assert plain[length:] == b"\1" + np.full(500, 11, np.float32).tobytes()
        plain = plain[:length]
    assert [one["name"] for one in json.loads(plain)["outputs"]] == ["updated", "accumulated_gradient"]


def test_a_request_may_be_written_for_mlserver(client: httpx.Client) -> None:
    """With null for what is absent, and with the content type that MLServer decodes tensors by."""
    numpy = {"content_type": "np"}
    request = {
        "id": None,
        "parameters": numpy,
        "inputs": [{**listed("dY", [1, 2]), "parameters": numpy}, {**listed("X", [1, 0]), "parameters": None}],
        "outputs": [{"name": "dX", "parameters": numpy}],
    }
    expected = [listed("dX", [1.0, 0.0])]
    assert client.post(RELU, json=request).json()["outputs"] == expected
    for outputs in (None, [{"name": "dX", "parameters": None}]):
        assert client.post(RELU, json={**request, "parameters": None, "outputs": outputs}).json()["outputs"] == expected


NULLS: dict[str, Any] = {
    "of the request": {"parameters": {"content_type": "np", "headers": None}},
    "headers of the request": {"parameters": {"headers": {"x-id": "1"}}},
    "of an attribute": {"parameters": {"axis": None, "foo": None, "into": None, "binary_data_output": None}},
    "of an output": {"outputs": [{"name": "dX", "parameters": {"content_type": "np", "headers": None}}]},
    "of an output's form": {"outputs": [{"name": "dX", "parameters": {"binary_data": None, "foo": None}}]},
    "of an output's place": {"outputs": [{"name": "dX", "parameters": {"shared_memory_region": None}}]},
    "headers of an output": {"outputs": [{"name": "dX", "parameters": {"headers": {"x-id": "1"}}}]},
    "of an input": {"inputs": [{**one, "parameters": {"content_type": "np", "headers": None}} for one in RELU_INPUTS]},
}


@pytest.mark.parametrize("case", NULLS)
def test_a_parameter_that_is_null_is_absent(client: httpx.Client, case: str) -> None:
    """MLServer's `InferenceRequest.dict()` writes null for each parameter that has no value."""
    answer = client.post(RELU, json={"inputs": RELU_INPUTS, **NULLS[case]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"] == [listed("dX", [1.0, 0.0])]


def test_a_parameter_that_is_not_null_must_be_known(client: httpx.Client) -> None:
    for more in ({"parameters": {"foo": 1}}, {"outputs": [{"name": "dX", "parameters": {"foo": 1}}]}):
        assert_error(client.post(RELU, json={"inputs": RELU_INPUTS, **more}), 400, "'foo'")


def test_empty_tensors_need_no_data(client: httpx.Client) -> None:
    inputs = [{"name": name, "datatype": "BF16", "shape": [2, 0]} for name in ("dY", "X")]
    answer = client.post(RELU, json={"inputs": inputs, "parameters": {"binary_data_output": True}})
    parameters = {"binary_data_size": 0}
    assert parts(answer)[0]["outputs"] == [{**inputs[0], "name": "dX", "parameters": parameters}]


# ----- raw bodies -----


@pytest.mark.parametrize(("op", "names"), [("ReluGrad", "dY, X"), ("GatherGrad", "shape, indices, grad")])
def test_a_raw_body_needs_a_model_with_one_input(client: httpx.Client, op: str, names: str) -> None:
    answer = client.post(f"/v2/models/{op}/infer", content=bytes(8), headers={LENGTH: "0"})
    assert_error(answer, 400, f"{LENGTH} is 0", "models with one input", f"{op} needs {names}")


def test_a_raw_body_is_the_only_input(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def negate(x: T, /) -> T:
        """y = -x."""
        return -x

    monkeypatch.setitem(OPERATORS, "Negate", OPERATORS["ReluGrad"])  # to be undone
    del OPERATORS["Negate"]
    op("Negate", outputs="y", example={"x": [1]})(negate)
    content = np.array([1, -2, np.inf], np.float32)
    head, data = parts(client.post("/v2/models/Negate/infer", content=content.tobytes(), headers={LENGTH: "0"}))
    parameters = {"binary_data_size": 12}
    assert head["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [3], "parameters": parameters}]
    assert data == (-content).tobytes()
    for size in (1, 13):
        answer = client.post("/v2/models/Negate/infer", content=bytes(size), headers={LENGTH: "0"})
        assert_error(answer, 400, f"x holds {size} bytes")


# ----- mistakes -----


def test_a_query_is_not_taken_for_parameters(client: httpx.Client) -> None:
    body = {"inputs": [listed("dY", [1, 2]), listed("Y", [1, 2])]}
    path = "/v2/models/SoftmaxGrad_13/infer"
    assert client.post(path, json=body).status_code == 200
    assert_error(client.post(f"{path}?axis=0", json=body), 400, "no query", '{"parameters": {"axis": 0}')
    wrong = {**body, "parameters": {"Axis": 0}}
    assert_error(client.post(path, json=wrong), 400, "'Axis'", "one of axis, from, into, set, weight, step")


@pytest.mark.parametrize("value", ["-1", "x", "1.5", "0x10", "", "+5", "1e3", "٣", "9" * 19, "5, 5"])
def test_a_length_header_that_is_not_a_number_is_refused(client: httpx.Client, value: str) -> None:
    headers = [(LENGTH.encode(), value.encode())]
    assert_error(client.post(RELU, content=b"{}", headers=headers), 400, LENGTH, "must be a number of bytes")


@pytest.mark.parametrize(("value", "words"), [("3", "whole body has 2"), ("9" * 18, "whole body"), ("1", "not JSON")])
def test_a_wrong_length_header_is_refused(client: httpx.Client, value: str, words: str) -> None:
    assert_error(client.post(RELU, content=b"{}", headers={LENGTH: value}), 400, LENGTH, words)


@pytest.mark.parametrize("spaces", [0, 5000, 100_000])
def test_a_miscounted_length_header_is_named(client: httpx.Client, spaces: int) -> None:
    content, headers = with_bytes({"dY": [1], "X": [1]}, id=" " * spaces)
    for wrong in (-1, 1):
        length = str(int(headers[LENGTH]) + wrong)
        answer = client.post(RELU, content=content, headers={LENGTH: length})
        assert_error(answer, 400, "not JSON", f"{LENGTH} says that it has {length} bytes")
    answer = client.post(RELU, json={"inputs": ONE, "id": " " * spaces}, headers={LENGTH: "40"})
    assert_error(answer, 400, "not JSON", f"{LENGTH} says that it has 40 bytes")


def test_binary_inputs_without_the_length_header_are_refused(client: httpx.Client) -> None:
    for length in (1, 200_000):
        content, _ = with_bytes({"dY": [1] * length, "X": [1] * length})
        assert_error(client.post(RELU, content=content), 400, "not JSON", "binary_data_size", LENGTH, "missing")
    assert LENGTH not in client.post(RELU, content=b"{").json()["error"]
    inputs = [{"name": "dY", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]
    assert_error(client.post(RELU, json={"inputs": inputs}), 400, "dY", LENGTH, "missing")


ONE = [listed("dY", [1]), listed("X", [1])]

Mistake = tuple[str, dict[str, Any], int, tuple[str, ...]]


def case(status: int, *words: str, path: str = RELU, **request: Any) -> Mistake:
    """Return a request, and the status and words of the error that it gets."""
    return path, request, status, words


MISTAKES: dict[str, Mistake] = {
    "model": case(404, "'ReluGard'", "Did you mean ReluGrad?", path="/v2/models/ReluGard/infer", json={}),
    "version": case(404, "version 1 only", "'2'", path="/v2/models/ReluGrad/versions/2/infer", json={}),
    "no model": case(404, "/v2/models//infer", path="/v2/models//infer", json={}),
    "a longer path": case(404, "/v2/models/ReluGrad/infer/x", path="/v2/models/ReluGrad/infer/x", json={}),
    "empty": case(400, "not JSON", content=b""),
    "no inputs": case(400, "inputs is null", json={}),
    "missing": case(400, "ReluGrad needs the input 'X'", json={"inputs": ONE[:1]}),
    "unknown": case(400, "no input 'Y'", "dY, X", json={"inputs": [*ONE, listed("Y", [1])]}),
    "twice": case(400, "two inputs named 'dY'", json={"inputs": ONE * 2}),
    "dtype": case(400, "X is int32", json={"inputs": [ONE[0], listed("X", [1], "INT32")]}),
    "shape": case(400, "X", "[2]", "[1]", json={"inputs": [ONE[0], listed("X", [1, 2])]}),
    "output": case(400, "no output 'Z'", "dX", json={"inputs": ONE, "outputs": [{"name": "Z"}]}),
    "parameter": case(400, "parameter 'axis'", json={"inputs": ONE, "parameters": {"axis": 1}}),
    "attribute": case(
        400,
        "alpha",
        "'0.5'",
        path="/v2/models/LeakyReluGrad/infer",
        json={"inputs": [ONE[0], listed("Y", [1])], "parameters": {"alpha": "0.5"}},
    ),
    "an attribute's list": case(
        400,
        "activations is 1, but must be a string",
        path="/v2/models/GRUTraining/infer",
        json={
            "inputs": [{**listed(name, [1.0]), "shape": [1, 1, 1]} for name in ("X", "W", "R")],
            "parameters": {"activations": ["Sigmoid", 1]},
        },
    ),
    "an output twice": case(400, "two outputs named 'dX'", json={"inputs": ONE, "outputs": [{"name": "dX"}] * 2}),
    "too large": case(413, "3145728", "2097152", content=bytes(3 << 20)),
    "tensor too large": case(
        413, "dY", "[1099511627776]", "1048576", json={"inputs": [{**ONE[0], "shape": [1 << 40]}]}
    ),
    "coding": case(400, "'br'", "gzip, deflate", content=b"", headers={"Content-Encoding": "br"}),
    "not as coded": case(400, "deflate", content=b"{}", headers={"Content-Encoding": "deflate"}),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_each_mistake_has_its_own_error(client: httpx.Client, case: str) -> None:
    path, request, status, words = MISTAKES[case]
    assert_error(client.post(path, **request), status, *words)


POSTED = (f"GET {RELU}", f"PUT {RELU}", "GET /v2/models/ReluGrad/versions/1/infer", "GET /v2/repository/index")
READ = ("POST /v2", "POST /v2/models/ReluGrad", "DELETE /v2/models/ReluGrad/ready", "POST /v2/health/live")
ALLOWED = dict.fromkeys(POSTED, "POST") | dict.fromkeys(READ, "GET, HEAD")


@pytest.mark.parametrize(("line", "allowed"), ALLOWED.items())
def test_an_unsupported_method_is_refused(client: httpx.Client, line: str, allowed: str) -> None:
    method, path = line.split()
    answer = client.request(method, path)
    assert_error(answer, 405, path, method, allowed)
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models/ReluGrad/nothing", "/v2/models/Nothing", "/v2/models"])
def test_an_unknown_path_is_not_found(client: httpx.Client, path: str) -> None:
    assert_error(client.get(path), 404)


def test_a_connection_outlives_errors(url: str) -> None:
    with httpx.Client(base_url=url, limits=httpx.Limits(max_connections=1)) as client:
        for case in MISTAKES:
            path, request, status, _ = MISTAKES[case]
            assert client.post(path, **request).status_code == status
            assert client.post(RELU, json={"inputs": ONE}).json()["outputs"][0]["data"] == [1.0]


def test_a_bug_is_answered_without_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(Engine, "run", broken)
    with serving() as url:
        answer = httpx.post(f"{url}/v2/models/ReluGrad/infer", json={"inputs": ONE})
        assert (answer.status_code, list(answer.json())) == (500, ["error"])
        assert "secret" not in answer.text
        assert httpx.get(f"{url}/v2/health/ready").status_code == 200
