"""The OpenAPI document is valid, and requests and answers conform to its schemas."""

from __future__ import annotations

import re
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from service.api.graph_files import MEDIA_TYPES
from service.kernels import OPERATORS
from tests.serving import serving


@pytest.fixture(scope="module")
def schema(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


def conforms(schema: Any, name: str, value: Any) -> bool:
    """Return whether `value` conforms to the component `name`."""
    component = {"$ref": f"#/components/schemas/{name}", "components": schema["components"]}
    return bool(jsonschema.Draft202012Validator(component).is_valid(value))


def test_the_document_is_valid(schema: Any) -> None:
    validate(schema)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("encoding", ["list", "base64"])
def test_requests_and_answers_conform_to_their_schemas(
    client: httpx.Client, schema: Any, op: str, encoding: str
) -> None:
    request, params = dict(OPERATORS[op].example), {**OPERATORS[op].example_attributes, "encoding": encoding}
    answer = client.post(f"/v1/ops/{op}", json=request, params=params).json()
    assert conforms(schema, f"{op}Request", request)
    assert conforms(schema, f"{op}Answer", answer)
    assert not conforms(schema, f"{op}Request", {**request, "more": 1})
    assert not conforms(schema, f"{op}Request", {name: None for name in request})
    assert not conforms(schema, f"{op}Answer", {name: 1 for name in answer})


def test_no_component_refers_to_itself(schema: Any) -> None:
    """Most client generators cannot read a recursive component."""
    components = schema["components"]["schemas"]

    def refs(value: Any) -> set[str]:
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        own = {value["$ref"].rpartition("/")[2]} if isinstance(value, dict) and "$ref" in value else set()
        return own.union(*map(refs, children))

    held = {name: refs(one) for name, one in components.items()}
    assert "Receipt" in held["Receipts"]
    for _ in held:
        held = {name: some.union(*(held[one] for one in some)) for name, some in held.items()}
    assert not [name for name, some in held.items() if name in some]


def test_answers_share_their_schemas(schema: Any) -> None:
    shared = {"take": "Receipt", "accumulate": "Receipt", "zero": "Receipt"}
    for what, name in shared.items():
        for path, expected in ((f"/v1/buffers/{{name}}/{what}", name), (f"/v1/buffers/{what}", "Receipts")):
            success = schema["paths"][path]["post"]["responses"]["200"]
            assert success["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{expected}"}
            assert "Idempotency-Replayed" in success["headers"]
    one = schema["paths"]["/v1/buffers/{name}"]
    made = one["put"]["responses"]
    assert made["200"]["content"] == made["201"]["content"]
    assert made["201"]["headers"].keys() == {"ETag", "Idempotency-Replayed", "Location"}
    assert one["get"]["responses"]["200"]["headers"].keys() == {"ETag"}
    assert one["delete"]["responses"]["204"]["headers"].keys() == {"Idempotency-Replayed"}


def test_the_examples_of_buffers_can_be_tried_out(schema: Any) -> None:
    def example(method: str, path: str) -> tuple[Any, Any]:
        operation = schema["paths"][path][method]
        sent = operation["requestBody"]["content"]["application/json"]
        given = sent["schema"]
        for _ in range("$ref" in given):
            given = schema["components"]["schemas"][given["$ref"].rpartition("/")[2]]
        names = [one["example"] for one in operation.get("parameters", ()) if one["in"] == "path"]
        return sent.get("example") or given["example"], names

    components = schema["components"]["schemas"]
    with serving() as url, httpx.Client(base_url=url) as client:
        spec, (name,) = example("put", "/v1/buffers/{name}")
        assert client.put(f"/v1/buffers/{name}", json=spec).status_code == 201
        gradient, _ = example("post", "/v1/buffers/{name}/accumulate")
        answer = client.post(f"/v1/buffers/{name}/accumulate", json=gradient)
        assert answer.json() == components["Receipt"]["example"]
        gradients, _ = example("post", "/v1/buffers/accumulate")
        client.put("/v1/buffers/layer.bias", json={"shape": [2]}).raise_for_status()
        assert client.post("/v1/buffers/accumulate", json=gradients).json()["buffers"].keys() == gradients.keys()
        for what in ("value", "take", "zero"):
            names, _ = example("post", f"/v1/buffers/{what}")
            assert client.post(f"/v1/buffers/{what}", json=names).json()["buffers"].keys() == {name}
        body, (op,) = example("post", "/v2/models/{op}/infer")
        assert client.post(f"/v2/models/{op}/infer", json=body).json()["outputs"][0]["data"] == [1.0, 0.0]


def test_buffer_names_have_a_pattern(schema: Any) -> None:
    (name,) = (one for one in schema["paths"]["/v1/buffers/{name}"]["get"]["parameters"] if one["in"] == "path")
    pattern = name["schema"]["pattern"]
    assert re.fullmatch(pattern, "layer.0:weight")
    assert not re.fullmatch(pattern, "layer/weight")


def test_each_endpoint_lists_its_headers(schema: Any) -> None:
    one, many, reading = {"Idempotency-Key", "If-Match"}, {"Idempotency-Key"}, {"If-None-Match"}
    expected = {
        ("put", "/{name}"): one | reading,
        ("get", "/{name}"): reading,
        ("delete", "/{name}"): one,
        ("get", "/{name}/value"): reading,
        **{("post", f"/{{name}}/{what}"): one for what in ("accumulate", "zero", "take")},
        **{("post", f"/{what}"): many for what in ("accumulate", "zero", "take")},
        ("post", "/value"): set(),
        ("get", ""): set(),
    }
    for (method, path), headers in expected.items():
        shown = schema["paths"][f"/v1/buffers{path}"][method].get("parameters", [])
        assert {one["name"] for one in shown if one["in"] == "header"} == headers, (method, path)
        answers = schema["paths"][f"/v1/buffers{path}"][method]["responses"]
        assert ("304" in answers) == (headers == reading), (method, path)
    infer = schema["paths"]["/v2/models/{op}/infer"]["post"]["parameters"]
    assert {one["name"] for one in infer if one["in"] == "header"} == {*one, "Inference-Header-Content-Length"}
    for op in OPERATORS:
        shown = schema["paths"][f"/v1/ops/{op}"]["post"]["parameters"]
        assert {one["name"] for one in shown if one["in"] == "header"} == one


BODIES: dict[tuple[str, str], Any] = {
    ("put", "/v1/buffers/{name}"): {"shape": [2]},
    ("patch", "/v1/buffers/{name}"): {"quorum": 9},
    ("patch", "/v1/buffers"): {"quorum": 9},
    ("post", "/v1/buffers/create"): {"buffers": {"made": {"shape": [2]}}},
    ("post", "/v1/buffers/{name}/accumulate"): {"gradient": [1, 2]},
    ("post", "/v1/buffers/accumulate"): {"b": [1, 2]},
}
"""What a request needs beside the buffer's name, or its prefix."""


def test_each_answer_comes_in_the_types_that_the_document_promises(schema: Any) -> None:
    """The first type comes without `Accept`, each if it is asked for, and no other instead of 406."""
    promised = {
        (method, path): list(operation["responses"].get("200", {}).get("content", ()))
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if path.startswith("/v1/buffers")
    }
    several = [one for one, types in promised.items() if len(types) > 1]
    assert ("delete", "/v1/buffers") in several
    with serving() as url, httpx.Client(base_url=url) as client:
        for (method, path), types in promised.items():
            params = {} if path.endswith(("{name}", "create", "accumulate")) or "{" in path else {"prefix": "b"}
            for wanted in [*types, *(["text/plain"] if len(types) > 1 else [])]:
                client.delete("/v1/buffers/b")
                client.put("/v1/buffers/b", json={"shape": [2]}).raise_for_status()
                body, asked = BODIES.get((method, path)), {"Accept": wanted}
                answer = client.request(
                    method, path.format(name="b"), params=params, json=body, headers=asked, timeout=60
                )
                sent = answer.headers["content-type"] if wanted in types else answer.status_code
                assert sent == (wanted if wanted in types else 406), (method, path, wanted, answer.text)


def test_each_body_may_have_the_types_that_the_document_promises(client: httpx.Client, schema: Any) -> None:
    types = {each for _, _, promised in _types_of_bodies(schema, "/v1") for each in promised}
    assert types == {"application/json", "application/merge-patch+json", "application/vnd.safetensors", MEDIA_TYPES[0]}
    for method, path, promised in _types_of_bodies(schema, "/v1"):
        for sent in types:
            answer = _send(client, method, path, sent)
            assert (answer.status_code != 415) is (sent in promised), (method, path, sent, answer.text)


def test_each_415_names_the_types_that_the_endpoint_takes(client: httpx.Client, schema: Any) -> None:
    """In Accept (RFC 9110, 15.5.16), and of a PATCH in Accept-Patch, too (RFC 5789, 2.2)."""
    for method, path, promised in _types_of_bodies(schema, "/v1"):
        for wrong in {"text/plain", "application/vnd.safetensors", "application/merge-patch+json"} - {*promised}:
            answer = _send(client, method, path, wrong)
            assert answer.status_code == 415, (method, path, wrong)
            named = answer.headers["accept"].split(", ")
            assert {*named} >= {*promised}
            assert answer.headers.get("accept-patch") == (answer.headers["accept"] if method == "patch" else None)
            assert 415 not in [_send(client, method, path, one).status_code for one in named], (method, path, wrong)


def _send(client: httpx.Client, method: str, path: str, media_type: str) -> httpx.Response:
    """Send a body of this type that is neither JSON nor a file."""
    op = OPERATORS.get(path.removeprefix("/v1/ops/"))
    params = None if op is None else dict(op.example_attributes)
    headers = {"Content-Type": media_type}
    return client.request(method, path.format(name="b", run="b"), content=b"{", headers=headers, params=params)


def _types_of_bodies(schema: Any, prefix: str) -> list[tuple[str, str, list[str]]]:
    return [
        (method, path, list(operation["requestBody"]["content"]))
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation and path.startswith(prefix)
    ]


def test_no_header_may_be_empty(client: httpx.Client, schema: Any) -> None:
    """As the document says, and the server."""
    one = schema["paths"]["/v1/buffers/{name}"]
    headers = [each for method in one.values() for each in method["parameters"] if each["in"] == "header"]
    assert {each["name"] for each in headers} == {"Idempotency-Key", "If-Match", "If-None-Match"}
    for each in headers:
        assert each["schema"]["minLength"] == 1
    client.put("/v1/buffers/empty.header", json={"shape": [2]}).raise_for_status()
    for name in ("Idempotency-Key", "If-Match"):
        assert client.patch("/v1/buffers/empty.header", json={}, headers={name: ""}).status_code == 422
    assert client.get("/v1/buffers/empty.header", headers={"If-None-Match": ""}).status_code == 422


def test_requests_and_answers_with_buffers_conform_to_their_schemas(client: httpx.Client, schema: Any) -> None:
    """The body lacks the input that a buffer gives, and the answer has a receipt for the output that a buffer takes."""
    example = dict(OPERATORS["GRUGrad"].example)
    for name, shape in (("schema.X", [2, 1, 1]), ("schema.W", [1, 3, 1])):
        assert client.put(f"/v1/buffers/{name}", json={"shape": shape}).status_code == 201
    request = {name: tensor for name, tensor in example.items() if name != "X"}
    query = {"from": "X:schema.X", "into": "dW:schema.W", "outputs": "dX,dW"}
    answer = client.post("/v1/ops/GRUGrad", json=request, params=query).json()
    assert answer.keys() == {"dX", "dW"}
    assert answer["dW"]["name"] == "schema.W"
    assert conforms(schema, "GRUGradRequest", request)
    assert conforms(schema, "GRUGradAnswer", answer)
    assert not conforms(schema, "GRUGradAnswer", {"dW": {**answer["dW"], "count": "one"}})


TENSORS: list[Any] = [1, [[1, "NaN"], []], {"data": [1]}, {"dtype": "bfloat16", "shape": [1], "base64": "gD8="}]
NONE: list[Any] = [{"base64": "gD8="}, {"dtype": "int64", "data": [1]}, True, "nan", {"data": [1], "unit": "m"}]


@pytest.mark.parametrize("tensor", [*TENSORS, *NONE])
def test_the_schema_accepts_every_form_of_a_tensor_only(schema: Any, tensor: Any) -> None:
    valid = any(tensor is one for one in TENSORS)
    assert conforms(schema, "ReluGradRequest", {"dY": tensor, "X": 1}) is valid


def test_problems_conform_to_their_schema(client: httpx.Client, schema: Any) -> None:
    problem = client.post("/v1/ops/ReluGrad", json={}).json()
    assert conforms(schema, "Problem", problem)
    assert not conforms(schema, "Problem", {"detail": "something"})
