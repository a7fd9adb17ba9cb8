"""`POST /v1/buffers/create`: many buffers at once, all or none."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.calls import add, create, fresh, metadata, ok, state, value
from tests.api.headers import KEY, REPLAYED
from tests.serving import assert_problem, serving

JSON = {"Content-Type": "application/json"}


def create_many(http: httpx.Client, buffers: Any, **headers: str) -> httpx.Response:
    return http.post("/v1/buffers/create", json={"buffers": buffers}, headers=headers)


def unknown(http: httpx.Client, *names: str) -> bool:
    return all(http.get(f"/v1/buffers/{name}").status_code == 404 for name in names)


def test_many_buffers_are_created_or_found(http: httpx.Client) -> None:
    a, b, c = fresh(), fresh(), fresh()
    rules: dict[str, Any] = {"shape": [2, 3], "dtype": "float64", "nonfinite": "reject", "max_norm": 1.5}
    rules |= {"quorum": 3, "keep": 2, "ttl_seconds": 60}
    create(http, b)
    add(http, b, [1, 2])
    made = ok(create_many(http, {c: rules, b: {"shape": [2]}, a: {"shape": []}}))["buffers"]
    assert [*made] == [c, b, a]
    assert {name: one.pop("created") for name, one in made.items()} == {c: True, b: False, a: True}
    assert made == {name: metadata(http, name) for name in (c, b, a)}
    assert {name: made[c][name] for name in rules} == rules
    assert value(http, b) == [1, 2]
    again = ok(create_many(http, {c: rules, b: {"shape": [2]}, a: {"shape": []}}))["buffers"]
    assert not any(one.pop("created") for one in again.values())
    assert again == made


def test_a_buffer_that_differs_refuses_the_whole_request(http: httpx.Client) -> None:
    new, same, *differ = (fresh() for _ in range(5))
    create(http, same)
    for name in differ:
        create(http, name, quorum=2)
    before = state(http, same, *differ)
    specs = {name: {"shape": [2]} for name in (new, same, *differ)}
    problem = assert_problem(create_many(http, specs), 409, "buffer_exists", differ[0], "quorum 2", "2 more", differ[1])
    assert (problem["buffer"], problem["buffers"]) == (differ[0], differ)
    alone = assert_problem(create_many(http, {new: specs[new], differ[1]: specs[new]}), 409, "buffer_exists", differ[1])
    assert (alone["buffer"], "buffers" in alone) == (differ[1], False)
    assert state(http, same, *differ) == before
    assert unknown(http, new)


def test_a_repeated_request_gets_the_original_answer(http: httpx.Client) -> None:
    names = [fresh() for _ in range(40)]
    specs = {name: {"shape": [2]} for name in names}
    made = create_many(http, specs, **{KEY: names[0]})
    assert REPLAYED not in made.headers
    add(http, names[0], [1, 2])
    again = create_many(http, specs, **{KEY: names[0]})
    assert (again.headers[REPLAYED], again.content) == ("true", made.content)
    assert_problem(create_many(http, {names[0]: {"shape": [2]}}, **{KEY: names[0]}), 422, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ({}, "invalid_parameter", ("shape", "missing")),
        ({"shape": {}}, "invalid_parameter", ("shape", "list")),
        ({"shape": [True]}, "invalid_parameter", ("shape.0",)),
        ({"shape": [10**30]}, "invalid_parameter", ("shape.0",)),
        ({"shape": [], "quorum": 1.5}, "invalid_parameter", ("quorum", "1.5")),
        ({"shape": [], "ttl_seconds": True}, "invalid_parameter", ("ttl_seconds",)),
        ({"shape": [], "keep": "2"}, "invalid_parameter", ("keep", "'2'")),
        ({"shape": [], "qourum": 2}, "unknown_parameter", ("qourum", "one of shape, dtype")),
        ({"shape": [1] * 65}, "too_many_dimensions", ("65",)),
        ({"shape": [1] * 65 + [0]}, "too_many_dimensions", ("66",)),
    ],
)
def test_a_wrong_member_of_one_buffer_is_named(http: httpx.Client, spec: Any, code: str, words: Any) -> None:
    good, bad = fresh(), fresh("layer.")
    problem = assert_problem(create_many(http, {good: {"shape": []}, bad: spec}), 422, code, bad, *words)
    if "parameter" in problem:
        assert problem["parameter"] == f"buffers.{bad}.{words[0]}"
    assert unknown(http, good, bad)


def test_a_buffer_beyond_a_limit_is_not_created(http: httpx.Client) -> None:
    good, bad = fresh(), fresh()
    specs = {good: {"shape": []}, bad: {"shape": [1 << 21]}}
    assert assert_problem(create_many(http, specs), 413, "tensor_too_large", bad)["buffer"] == bad
    assert unknown(http, good, bad)
    for name in ("a/b", ".", "x" * 201, ""):
        answer = create_many(http, {good: {"shape": []}, name: {"shape": []}})
        assert assert_problem(answer, 422, "invalid_parameter")["parameter"] == "name"
    assert unknown(http, good)


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, ("not JSON",)),
        (b"{", 400, ("not JSON",)),
        (b"[]", 400, ("object",)),
        (b"{}", 422, ("buffers", "missing")),
        (b'{"buffers": {}}', 422, ("buffers", "missing")),
        (b'{"buffers": [1]}', 400, ("buffers", "object")),
        (b'{"buffers": {"a": 1}}', 400, ("buffers.a", "object")),
        (b'{"names": ["a"]}', 422, ("names", "one of buffers")),
        (b'{"buffers": {"a": {"shape": []}, "a": {"shape": [1]}}}', 400, ("two members", "'a'")),
        (b'{"buffers": {"a": {"shape": [], "shape": [1]}}}', 400, ("two members", "'shape'")),
        (b'{"buffers": {"a\\u0000": {"shape": []}}}', 400, ("null character",)),
    ],
)
def test_a_body_of_another_form_is_refused(http: httpx.Client, content: bytes, status: int, words: Any) -> None:
    answer = http.post("/v1/buffers/create", content=content, headers=JSON)
    assert answer.status_code == status
    assert all(word in answer.json()["detail"] for word in words), answer.json()["detail"]


def test_a_request_is_bounded(http: httpx.Client) -> None:
    many: dict[str, Any] = {f"bound.{number}": {"shape": []} for number in range((1 << 14) + 1)}
    assert_problem(create_many(http, many), 413, "too_many_tensors", "16385", "16384")
    text = '{"buffers": {"a": {"shape": [' + "1," * ((1 << 20) + 1) + "1]}}}"
    answer = http.post("/v1/buffers/create", content=text, headers=JSON)
    assert_problem(answer, 422, "invalid_request", "1048576 elements")
    assert http.get("/v1/buffers", params={"prefix": "bound."}).json()["buffers"] == []


def test_a_namespace_that_would_be_too_full_gets_none() -> None:
    with serving(max_buffers=3) as url, httpx.Client(base_url=url) as http:
        specs = {name: {"shape": [2]} for name in "abcd"}
        problem = assert_problem(create_many(http, specs), 409, "too_many_buffers", "GRADSERVE_MAX_BUFFERS")
        assert (problem["limit"], http.get("/v1/buffers").json()["buffers"]) == (3, [])
        del specs["b"]
        assert len(ok(create_many(http, specs))["buffers"]) == 3


def test_a_buffer_may_be_named_create(http: httpx.Client) -> None:
    create(http, "create")
    assert metadata(http, "create")["shape"] == [2]
    assert not ok(create_many(http, {"create": {"shape": [2]}}))["buffers"]["create"]["created"]
    assert http.delete("/v1/buffers/create").status_code == 204


def test_a_thousand_buffers_take_adds(http: httpx.Client) -> None:
    names = [fresh("many.") for _ in range(1000)]
    made = ok(create_many(http, {name: {"shape": [2], "quorum": 1} for name in names}))["buffers"]
    assert all(one["created"] for one in made.values())
    body = json.dumps(dict.fromkeys(names, 1.5))
    receipts = ok(http.post("/v1/buffers/accumulate", content=body, headers=JSON))["buffers"]
    assert all(receipt["closed"] for receipt in receipts.values())
    assert value(http, names[-1], step=0) == [1.5, 1.5]
