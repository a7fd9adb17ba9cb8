"""A byte order mark before JSON, as programs of Windows write it: each endpoint reads the JSON behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.codecs._inference_head import SMALL_JSON_BYTES
from tests.api.calls import create, fresh, value
from tests.serving import serving
from tests.shared_objects import Object

MARK = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serving(shared_memory=True) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def marked(http: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """Send the JSON of `body`, or nothing, behind the mark. Return the answer's JSON, if there is any."""
    content = MARK if body is None else MARK + json.dumps(body).encode()
    answer = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def test_buffers_are_described_named_and_changed(http: httpx.Client) -> None:
    name = fresh()
    marked(http, "PUT", f"/v1/buffers/{name}", {"shape": [2]})
    marked(http, "POST", "/v1/buffers/create", {"buffers": {f"{name}.more": {"shape": [2]}}})
    assert marked(http, "PATCH", f"/v1/buffers/{name}", {"quorum": 9})["quorum"] == 9
    assert marked(http, "PATCH", "/v1/buffers", {"names": [name], "quorum": 8})["buffers"].keys() == {name}
    marked(http, "POST", f"/v1/buffers/{name}/accumulate", {"gradient": [1, 2]})
    marked(http, "POST", "/v1/buffers/accumulate", {name: [1, 2]})
    assert value(http, name) == [2, 4]
    assert marked(http, "POST", "/v1/buffers/value", {"names": [name]})["buffers"].keys() == {name}
    assert marked(http, "POST", f"/v1/buffers/{name}/take")["count"] == 2


@pytest.mark.parametrize("body", [None, {}])
def test_a_mark_alone_is_an_empty_body(http: httpx.Client, body: Any) -> None:
    name = create(http)
    for path in (f"/{name}/take", f"/{name}/zero", f"/take?prefix={name}", f"/zero?prefix={name}"):
        marked(http, "POST", f"/v1/buffers{path}", body)


@pytest.mark.parametrize("size", [2, SMALL_JSON_BYTES])
def test_operators_run(http: httpx.Client, size: int) -> None:
    tensors = {"dY": [1.5] * size, "X": [1.0] * size}
    assert marked(http, "POST", "/v1/ops/ReluGrad", tensors)["dX"]["data"] == tensors["dY"]
    inputs = [{"name": name, "shape": [size], "datatype": "FP32", "data": data} for name, data in tensors.items()]
    assert marked(http, "POST", "/v2/models/ReluGrad/infer", {"inputs": inputs})["outputs"][0]["data"] == tensors["dY"]


@pytest.mark.parametrize("nonfinite", [False, True])
def test_the_mark_counts_in_the_length_of_the_json(http: httpx.Client, nonfinite: bool) -> None:
    form = {"shape": [1], "datatype": "FP32"}
    listed = {"name": "X", **form, "data": [float("inf") if nonfinite else 1]}
    inputs = [{"name": "dY", **form, "parameters": {"binary_data_size": 4}}, listed]
    text = MARK + json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = http.post("/v2/models/ReluGrad/infer", content=text + b"\0\0\x80?", headers=headers)
    assert answer.json()["outputs"][0]["data"] == [1.0]


def test_a_region_is_registered(http: httpx.Client) -> None:
    made = Object(bytes(4))
    try:
        marked(http, "POST", "/v2/systemsharedmemory/region/r/register", {"key": made.key, "byte_size": 4})
    finally:
        made.path.unlink()


def test_a_safetensors_file_has_no_mark(http: httpx.Client) -> None:
    header = MARK + b'{"dY":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    content = len(header).to_bytes(8, "little") + header
    answer = http.post("/v1/ops/ReluGrad", content=content, headers={"Content-Type": "application/vnd.safetensors"})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body")
