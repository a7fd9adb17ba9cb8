"""Pushes in parts over HTTP: what a client sends, and what it gets."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from service.codecs.safetensors import MEDIA_TYPE
from tests.serving import assert_problem

Client = httpx.Client


@pytest.fixture
def name(client: Client) -> str:
    """Create two buffers with a new prefix, and return the prefix."""
    prefix = f"{uuid.uuid4().hex}."
    client.post(
        "/v1/buffers/create", json={"buffers": {f"{prefix}{n}": {"shape": [2]} for n in "ab"}}
    ).raise_for_status()
    return prefix


def push(client: Client, name: str, part: int, gradients: Any, parts: int = 2, **more: Any) -> httpx.Response:
    query = {"push": name, "part": part, "parts": parts, **more}
    content = {"json": gradients} if isinstance(gradients, dict) else {"content": gradients}
    headers = {} if isinstance(gradients, dict) else {"Content-Type": MEDIA_TYPE}
    return client.post("/v1/buffers/accumulate", params=query, headers=headers, **content)


def value(client: Client, name: str) -> list[float]:
    found: list[float] = client.get(f"/v1/buffers/{name}/value").json()["value"]["data"]
    return found


def test_a_push_in_two_parts(client: Client, name: str) -> None:
    first = push(client, name, 1, {f"{name}a": [1, 2]}, weight=2)
    assert (first.status_code, first.json()) == (202, {"push": name, "parts": 2, "staged": [1]})
    again = push(client, name, 1, {f"{name}a": [1, 2]}, weight=2)
    assert (again.status_code, again.json()) == (202, first.json())
    assert again.headers["Idempotency-Replayed"] == "true"
    assert value(client, f"{name}a") == [0, 0]
    other = push(client, name, 1, {f"{name}a": [1, 3]}, weight=2)
    assert assert_problem(other, 422, "idempotency_key_reused", "Part 1", name)["staged"] == [1]
    last = push(client, name, 2, {f"{name}b": [3, 4]}, weight=2)
    assert last.status_code == 200
    assert {one: receipt["weight"] for one, receipt in last.json()["buffers"].items()} == {f"{name}a": 2, f"{name}b": 2}
    assert (value(client, f"{name}a"), value(client, f"{name}b")) == ([2, 4], [6, 8])
    late = push(client, name, 1, {f"{name}a": [1, 2]}, weight=2)
    assert (late.status_code, late.json()) == (200, last.json())
    assert late.headers["Idempotency-Replayed"] == "true"
    other = push(client, name, 1, {f"{name}a": [1, 3]}, weight=2)
    assert "staged" not in assert_problem(other, 422, "idempotency_key_reused", "Part 1", name)


def test_parts_as_safetensors(client: Client, name: str) -> None:
    first = push(client, name, 0, save({f"{name}a": np.array([1, 2], np.float32)}))
    assert first.status_code == 202
    last = push(client, name, 1, save({}))
    assert last.status_code == 200
    assert value(client, f"{name}a") == [1, 2]


def test_an_answer_in_safetensors(client: Client, name: str) -> None:
    query: dict[str, Any] = {"push": name, "part": 1, "parts": 2}
    head = {"Accept": MEDIA_TYPE}
    answer = client.post("/v1/buffers/accumulate", params=query, headers=head, json={f"{name}a": 1})
    assert answer.status_code == 202
    assert b'"staged":"[1]"' in answer.content


def test_parts_may_be_sent_side_by_side(client: Client, name: str) -> None:
    names = [f"{name}{number}" for number in range(16)]
    client.post("/v1/buffers/create", json={"buffers": dict.fromkeys(names, {"shape": []})}).raise_for_status()

    def send(number: int) -> int:
        return push(client, name, number, {names[number]: number + 1}, parts=16).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = [*pool.map(send, [*range(16)] * 2)]
    assert set(statuses) == {200, 202}
    found: list[Any] = [value(client, one) for one in names]
    assert found == [*range(1, 17)]


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ({"part": 1}, "push"),
        ({"push": "p"}, "part"),
        ({"push": "p", "part": 1}, "parts"),
        ({"push": "p", "part": 3, "parts": 2}, "part"),
        ({"push": "p", "part": -1, "parts": 2}, "part"),
        ({"push": "p", "part": 1, "parts": 1001}, "parts"),
        ({"push": "p", "part": 0, "parts": 0}, "parts"),
        ({"push": "", "part": 1, "parts": 2}, "push"),
        ({"push": "a b", "part": 1, "parts": 2}, "push"),
        ({"push": "x" * 256, "part": 1, "parts": 2}, "push"),
        ({"push": "p", "part": 1, "parts": 2, "do_update": False}, "do_update"),
        ({"push": "p", "part": 1, "parts": 2, "overwrite": True}, "overwrite"),
        ({"push": "p", "part": 1, "parts": 2, "return": "value"}, "return"),
    ],
)
def test_a_query_that_is_wrong_is_refused(client: Client, name: str, query: dict[str, Any], parameter: str) -> None:
    answer = client.post("/v1/buffers/accumulate", params=query, json={f"{name}a": 1})
    problem = assert_problem(answer, 422, "invalid_parameter")
    assert problem["parameter"] == parameter


def test_one_buffer_takes_no_parts(client: Client, name: str) -> None:
    answer = client.post(f"/v1/buffers/{name}a/accumulate", params={"push": "p"}, json={"gradient": 1})
    assert_problem(answer, 422, "unknown_parameter", "push")


@pytest.mark.parametrize(
    ("gradients", "status", "code"),
    [
        ({"a": [1, 2], "none": 1}, 404, "unknown_buffer"),
        ({"a": [1, 2, 3]}, 422, "shape_mismatch"),
        ({"a": {"data": [1, 2], "dtype": "int32"}}, 422, "dtype_mismatch"),
        ({"a": "text"}, 422, "invalid_tensor"),
        ({"a": {"indices": [7], "rows": [1.0]}}, 422, "index_out_of_range"),
    ],
)
def test_a_part_with_a_wrong_tensor_drops_the_push(
    client: Client, name: str, gradients: dict[str, Any], status: int, code: str
) -> None:
    push(client, name, 1, {f"{name}b": 1})
    gradients = {f"{name}{one}": gradient for one, gradient in gradients.items()}
    problem = assert_problem(push(client, name, 2, gradients), status, code, f"The push '{name}' is dropped")
    for number, tensors in ((2, {f"{name}a": 1}), (1, {f"{name}b": 1})):
        assert assert_problem(push(client, name, number, tensors), status, code) == problem
    assert value(client, f"{name}b") == [0, 0]
    (listed,) = [each for each in client.get("/v1/pushes").json()["pushes"] if each["push"] == name]
    assert (listed["refused"], listed["bytes"], listed["staged"]) == (code, 0, [])


@pytest.mark.parametrize(("content", "status"), [(b"{", 400), (b"{" + b" " * (3 << 20) + b"}", 413)])
def test_a_body_that_cannot_be_read_does_not_drop_the_push(
    client: Client, name: str, content: bytes, status: int
) -> None:
    push(client, name, 1, {f"{name}a": 1})
    query: dict[str, Any] = {"push": name, "part": 2, "parts": 2}
    head = {"Content-Type": "application/json"}
    assert client.post("/v1/buffers/accumulate", params=query, headers=head, content=content).status_code == status
    assert push(client, name, 2, {f"{name}b": 1}).status_code == 200


def test_the_list_of_pushes(client: Client, name: str) -> None:
    push(client, name, 1, {f"{name}a": [1, 2]}, step=0, contributor="ann", weight=0.5)
    (listed,) = client.get("/v1/pushes", params={"prefix": name}).json()["pushes"]
    began, expires = listed.pop("began_at"), listed.pop("expires_at")
    assert expires - began == 900
    assert listed == {
        "push": name,
        "parts": 2,
        "staged": [1],
        "bytes": 8,
        "count": 1,
        "buffers": [f"{name}a"],
        "weight": 0.5,
        "step": 0,
        "contributor": "ann",
        "refused": None,
    }
    push(client, name, 2, {}, step=0, contributor="ann", weight=0.5)
    assert client.get("/v1/pushes", params={"prefix": name}).json() == {"pushes": []}


def test_a_take_may_answer_without_values(client: Client, name: str) -> None:
    client.post("/v1/buffers/accumulate", json={f"{name}a": [1, 2], f"{name}b": [3, 4]}).raise_for_status()
    answer = client.post("/v1/buffers/take", params={"prefix": name, "return": "receipt"}).json()
    assert {(receipt["closed"], receipt["step"], "value" in receipt) for receipt in answer["buffers"].values()} == {
        (True, 0, False)
    }
    read = client.post("/v1/buffers/value", params={"step": 0}, json={"names": [f"{name}b"]}).json()
    assert read["buffers"][f"{name}b"]["value"]["data"] == [3, 4]
    one = client.post(f"/v1/buffers/{name}a/take", params={"return": "receipt"}, headers={"Idempotency-Key": name})
    again = client.post(f"/v1/buffers/{name}a/take", params={"return": "receipt"}, headers={"Idempotency-Key": name})
    assert (one.json()["step"], "value" in one.json(), again.json()) == (1, False, one.json())


def test_a_push_can_be_forgotten(client: Client, name: str) -> None:
    push(client, name, 1, {f"{name}a": [1, 2]})
    answer = client.delete("/v1/pushes", params={"push": name})
    assert (answer.status_code, answer.json()) == (200, {"push": name, "forgotten": [1]})
    assert client.delete("/v1/pushes", params={"push": name}).json() == {"push": name, "forgotten": []}
    assert client.get("/v1/pushes", params={"prefix": name}).json() == {"pushes": []}
    push(client, name, 1, {f"{name}a": [5, 6]})
    assert push(client, name, 2, {}).status_code == 200
    assert client.delete("/v1/pushes", params={"push": name}).json() == {"push": name, "forgotten": []}
    assert value(client, f"{name}a") == [5, 6]


@pytest.mark.parametrize("query", [{}, {"push": ""}, {"push": "a b"}, {"push": "x" * 256}])
def test_only_a_push_that_is_named_can_be_forgotten(client: Client, query: dict[str, str]) -> None:
    problem = assert_problem(client.delete("/v1/pushes", params=query), 422, "invalid_parameter")
    assert problem["parameter"] == "push"
