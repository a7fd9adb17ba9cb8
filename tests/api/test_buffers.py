"""`/v1/buffers` over real HTTP, with each store: one buffer and many, in JSON and in safetensors."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from service.codecs.safetensors import MEDIA_TYPE
from service.dtypes import DTYPES
from service.kernels import OPERATORS
from service.kernels.accumulate import in_place_accumulator_v2
from tests.api.calls import (
    SAFE,
    add,
    create,
    etag,
    fresh,
    get,
    loaded,
    metadata,
    ok,
    post,
    saved,
    serving_workers,
    state,
    value,
)
from tests.serving import assert_problem, serving

FLOAT_NAMES = ["float16", "bfloat16", "float32", "float64"]

TO_SAFETENSORS = {"Accept": MEDIA_TYPE}

PATIENCE = 30


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


# ----- create -----


def test_create(http: httpx.Client) -> None:
    name = fresh("layer.0:W_-")
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [2, 3]})
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/buffers/{name}"
    assert answer.headers["etag"] == '"0-0"'
    made = answer.json()
    assert {key: made[key] for key in made if not key.endswith("_at")} == {
        "name": name,
        "shape": [2, 3],
        "dtype": "float32",
        "nonfinite": "allow",
        "quorum": None,
        "keep": 1,
        "ttl_seconds": None,
        "epoch": 0,
        "version": 0,
        "count": 0,
        "weight": 0.0,
        "bytes": 24,
        "closed_epochs": [],
    }
    assert made["expires_at"] is None
    assert abs(made["created_at"] - time.time()) < 3600
    assert http.get(answer.headers["location"]).json() == made
    assert value(http, name) == [[0, 0, 0], [0, 0, 0]]


def test_create_again_is_no_change(http: httpx.Client) -> None:
    rules: dict[str, Any] = {
        "shape": [2],
        "dtype": "float64",
        "quorum": 5,
        "keep": 2,
        "ttl_seconds": 60,
        "nonfinite": "reject",
    }
    name = create(http, **rules)
    add(http, name, [1, 2])
    before = metadata(http, name)
    answer = http.put(f"/v1/buffers/{name}", json=rules)
    assert (answer.status_code, answer.headers["etag"], answer.json()) == (200, '"0-1"', before)
    assert metadata(http, name) == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"shape": [3]}, ("shape [3]", "not [4]")),
        ({"dtype": "float16"}, ("dtype", "'float16'", "'float32'")),
        ({"quorum": 2}, ("quorum 2", "not None")),
        ({"keep": 2}, ("keep 2", "not 1")),
        ({"nonfinite": "reject"}, ("nonfinite", "'reject'")),
        ({"ttl_seconds": 60}, ("ttl_seconds 60",)),
    ],
)
def test_create_again_with_other_rules(http: httpx.Client, other: dict[str, Any], words: tuple[str, ...]) -> None:
    name = create(http, **{"shape": (4,), **other})
    before = state(http, name)
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [4]})
    assert assert_problem(answer, 409, "buffer_exists", name, *words)["buffer"] == name
    assert state(http, name) == before


BODIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no shape": ({}, ("shape", "required")),
    "shape is a number": ({"shape": 3}, ("shape", "array", "3")),
    "shape is null": ({"shape": None}, ("shape", "None")),
    "negative dimension": ({"shape": [2, -1]}, ("shape.1", "-1")),
    "fractional dimension": ({"shape": [1.5]}, ("shape.0", "1.5")),
    "a boolean for a dimension": ({"shape": [True]}, ("shape.0", "True")),
    "dimension beyond 64 bits": ({"shape": [10**30]}, ("shape.0",)),
    "dtype": ({"shape": [], "dtype": "float8"}, ("dtype", "'float8'", "'bfloat16'")),
    "integer dtype": ({"shape": [], "dtype": "int64"}, ("dtype", "'int64'", "'float32'")),
    "quorum of none": ({"shape": [], "quorum": 0}, ("quorum", "0")),
    "fractional quorum": ({"shape": [], "quorum": 1.5}, ("quorum", "1.5")),
    "quorum beyond 64 bits": ({"shape": [], "quorum": 10**30}, ("quorum",)),
    "nothing to keep": ({"shape": [], "keep": 0}, ("keep", "0")),
    "too much to keep": ({"shape": [], "keep": 1001}, ("keep", "1000", "1001")),
    "a text to keep": ({"shape": [], "keep": "2"}, ("keep", "'2'")),
    "no time": ({"shape": [], "ttl_seconds": 0}, ("ttl_seconds", "0")),
    "negative time": ({"shape": [], "ttl_seconds": -1}, ("ttl_seconds", "-1")),
    "a boolean for a time": ({"shape": [], "ttl_seconds": True}, ("ttl_seconds", "True")),
    "longer than time lasts": ({"shape": [], "ttl_seconds": 1e300}, ("ttl_seconds",)),
    "nonfinite": ({"shape": [], "nonfinite": "maybe"}, ("nonfinite", "'allow' or 'reject'", "'maybe'")),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_bad_member_is_named(http: httpx.Client, case: str) -> None:
    body, words = BODIES[case]
    name = fresh()
    try:
        problem = assert_problem(http.put(f"/v1/buffers/{name}", json=body), 422, "invalid_parameter", *words)
        assert problem["parameter"] == words[0]
        assert_problem(http.get(f"/v1/buffers/{name}"), 404, "unknown_buffer", name)
        assert http.get("/v1/buffers").status_code == 200
    finally:
        httpx.delete(f"{http.base_url}/v1/buffers/{name}")  # by a connection of its own: a bug closes the other


def test_a_member_that_there_is_not(http: httpx.Client) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", json={"shape": [], "qourum": 3})
    assert assert_problem(answer, 422, "unknown_parameter", "member", "'qourum'")["parameter"] == "qourum"


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"", "not JSON"), (b"{", "not JSON"), (b"[1]", "object"), (b"5", "object"), (b"\xff", "JSON")],
)
def test_a_body_that_is_no_object(http: httpx.Client, content: bytes, word: str) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", content=content)
    assert_problem(answer, 400, "malformed_body", word)


def test_a_body_with_a_member_twice(http: httpx.Client) -> None:
    answer = http.put(f"/v1/buffers/{fresh()}", content=b'{"shape": [2], "shape": [3]}')
    assert_problem(answer, 400, "malformed_body", "two members", "'shape'")
    answer = http.post("/v1/buffers/zero", content=b'{"names": ["a"], "names": ["b"]}')
    assert_problem(answer, 400, "malformed_body", "two members", "'names'")


def test_limits(http: httpx.Client) -> None:
    path = f"/v1/buffers/{fresh()}"
    problem = assert_problem(
        http.put(path, json={"shape": [1 << 21]}), 413, "tensor_too_large", "buffer", "[2097152]", "4194304"
    )
    assert problem["limit"] == 1 << 22
    assert_problem(http.put(path, json={"shape": [1] * 65}), 422, "too_many_dimensions", "buffer", "65", "64")
    answer = http.put(path, content=b" " * (5 << 20))
    assert_problem(answer, 413, "body_too_large")
    assert_problem(http.put(path, json={"shape": []}, params={"quorum": 3}), 422, "unknown_parameter", "'quorum'")
    assert_problem(http.get(path), 404, "unknown_buffer")


@pytest.mark.parametrize("name", ["a b", "é", "a+b", "a,b", "x" * 201, "a~b", "a%0a", "%00"])
@pytest.mark.parametrize(
    ("method", "end"), [("PUT", ""), ("GET", ""), ("GET", "/value"), ("POST", "/accumulate"), ("POST", "/zero")]
)
def test_names(http: httpx.Client, name: str, method: str, end: str) -> None:
    bodies = {"": {"shape": []}, "/accumulate": {"gradient": 1}}
    answer = http.request(method, f"/v1/buffers/{name}{end}", json=bodies.get(end) if method != "GET" else None)
    problem = assert_problem(answer, 422, "invalid_parameter", "name of a buffer", "200")
    assert problem["parameter"] == "name"
    assert_problem(http.delete(f"/v1/buffers/{name}"), 422, "invalid_parameter", "name of a buffer")


@pytest.mark.parametrize("name", ["x" * 200, "accumulate", "value", "A.b_c:d-0"])
def test_names_that_are_fine(http: httpx.Client, name: str) -> None:
    create(http, name)
    assert ok(add(http, name, [1, 2]))["count"] == 1
    assert value(http, name) == [1, 2]
    assert http.delete(f"/v1/buffers/{name}").status_code == 204


# ----- list, metadata, delete -----


def test_list(http: httpx.Client) -> None:
    prefix = fresh("list.")
    names = [create(http, f"{prefix}:{number:02}") for number in range(7)]
    create(http, f"{prefix}.other")
    add(http, names[0], [1, 1])
    for limit in (1, 3, 7, 100):
        found: list[Any] = []
        cursor: str | None = ""
        while cursor is not None:
            answer = http.get("/v1/buffers", params={"prefix": f"{prefix}:", "limit": limit, "cursor": cursor}).json()
            assert len(answer["buffers"]) <= limit
            found += answer["buffers"]
            cursor = answer["next_cursor"]
        assert [one["name"] for one in found] == names
        assert found[0] == metadata(http, names[0])
    everything = http.get("/v1/buffers", params={"limit": 1000}).json()["buffers"]
    assert set(names) < {one["name"] for one in everything}
    assert http.get("/v1/buffers", params={"prefix": f"{prefix}/"}).json() == {"buffers": [], "next_cursor": None}
    for prefix in ("x" * 1000, "é", "\0"):
        assert http.get("/v1/buffers", params={"prefix": prefix}).json()["buffers"] == []


@pytest.mark.parametrize(("name", "wrong"), [("limit", "0"), ("limit", "1001"), ("limit", "x"), ("prefex", "a")])
def test_list_with_mistakes(http: httpx.Client, name: str, wrong: str) -> None:
    code = "invalid_parameter" if name == "limit" else "unknown_parameter"
    assert_problem(http.get("/v1/buffers", params={name: wrong}), 422, code, name)
    answer = http.get("/v1/buffers", params=[("limit", "1"), ("limit", "2")])
    assert_problem(answer, 422, "invalid_parameter", "'limit'", "2 times")


def test_metadata_follows_every_change(http: httpx.Client) -> None:
    name = create(http)
    created = metadata(http, name)

    def now() -> tuple[Any, ...]:
        got = http.get(f"/v1/buffers/{name}")
        one = got.json()
        assert got.headers["etag"] == f'"{one["epoch"]}-{one["version"]}"'
        assert one["created_at"] == created["created_at"] <= one["updated_at"]
        return one["epoch"], one["version"], one["count"], one["weight"], one["closed_epochs"]

    assert now() == (0, 0, 0, 0.0, [])
    add(http, name, [1, 1], weight=2.5)
    add(http, name, [1, 1])
    assert now() == (0, 2, 2, 3.5, [])
    post(http, name, "take")
    assert now() == (1, 3, 0, 0.0, [0])
    post(http, name, "zero")
    assert now() == (2, 4, 0, 0.0, [0])
    add(http, name, [1, 1], overwrite=True, weight=-3)
    assert now() == (2, 5, 1, -3.0, [0])
    assert_problem(http.get(f"/v1/buffers/{name}", params={"x": 1}), 422, "unknown_parameter", "'x'")


def test_delete(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    answer = http.delete(f"/v1/buffers/{name}")
    assert (answer.status_code, answer.content) == (204, b"")
    for again in (
        http.delete(f"/v1/buffers/{name}"),
        http.get(f"/v1/buffers/{name}"),
        get(http, name),
        add(http, name, [1, 2]),
        post(http, name, "zero"),
        post(http, name, "take"),
    ):
        assert assert_problem(again, 404, "unknown_buffer", repr(name))["buffer"] == name
    create(http, name, (3,))
    assert value(http, name) == [0, 0, 0]


def test_methods(http: httpx.Client) -> None:
    name = create(http)
    for method, path in (("POST", name), ("GET", f"{name}/accumulate"), ("PUT", f"{name}/value")):
        assert_problem(http.request(method, f"/v1/buffers/{path}"), 405, "method_not_allowed", method)


def test_time_to_live(http: httpx.Client) -> None:
    name = create(http, ttl_seconds=0.2)
    made = http.get(f"/v1/buffers/{name}")
    if made.status_code == 200:
        assert made.json()["expires_at"] == pytest.approx(made.json()["updated_at"] + 0.2)
    deadline = time.monotonic() + PATIENCE
    while http.get(f"/v1/buffers/{name}").status_code != 404:
        assert time.monotonic() < deadline
    assert_problem(get(http, name), 404, "unknown_buffer")
    assert_problem(add(http, name, [1, 1]), 404, "unknown_buffer")
    assert http.get("/v1/buffers", params={"prefix": name}).json()["buffers"] == []
    assert_problem(http.post("/v1/buffers/zero", json={"names": [name]}), 404, "unknown_buffer")
    create(http, name, (3,))


# ----- ETag, If-None-Match, If-Match -----


def test_what_has_not_changed_is_not_sent(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    for path in (f"/v1/buffers/{name}", f"/v1/buffers/{name}/value"):
        tag = http.get(path).headers["etag"]
        for known in (tag, f'"9-9", {tag}', "*", f"W/{tag}", f'{tag},"x"'):
            answer = http.get(path, headers={"If-None-Match": known})
            assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
        assert http.get(path, headers={"If-None-Match": '"9-9"'}).status_code == 200
        for wrong in ("x", tag.strip('"'), '"'):
            answer = http.get(path, headers={"If-None-Match": wrong})
            assert_problem(answer, 422, "invalid_parameter", "If-None-Match", repr(wrong))
        add(http, name, [1, 2])
        assert http.get(path, headers={"If-None-Match": tag}).status_code == 200


def test_the_tag_of_a_closed_epoch_stays(http: httpx.Client) -> None:
    name = create(http, keep=2)
    add(http, name, [1, 2])
    tag = post(http, name, "take").headers["etag"]
    assert tag == etag(http, name) == '"1-2"'
    closed = get(http, name, epoch=0).headers["etag"]
    assert closed == '"0-2"'
    add(http, name, [1, 2])
    assert get(http, name, epoch=0, headers={"If-None-Match": closed}).status_code == 304
    assert get(http, name, headers={"If-None-Match": closed}).status_code == 200


MUTATIONS: dict[str, Callable[[httpx.Client, str, dict[str, str]], httpx.Response]] = {
    "create": lambda http, name, headers: http.put(f"/v1/buffers/{name}", json={"shape": [2]}, headers=headers),
    "delete": lambda http, name, headers: http.delete(f"/v1/buffers/{name}", headers=headers),
    "accumulate": lambda http, name, headers: add(http, name, [1, 2], headers),
    "zero": lambda http, name, headers: post(http, name, "zero", headers),
    "take": lambda http, name, headers: post(http, name, "take", headers),
    "into": lambda http, name, headers: http.post(
        "/v1/ops/ReluGrad", params={"into": f"dX:{name}"}, json={"dY": [1, 2], "X": [1, 1]}, headers=headers
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_if_match(http: httpx.Client, mutation: str) -> None:
    name = create(http)
    add(http, name, [1, 2])
    mutate, before = MUTATIONS[mutation], state(http, name)
    for stale in ('"0-0"', '"0-2", "1-1"', 'W/"0-1"'):
        problem = assert_problem(mutate(http, name, {"If-Match": stale}), 412, "precondition_failed", name, '"0-1"')
        assert problem["buffer"] == name
        assert state(http, name) == before
    for wrong in ("0-1", "", '"0-1', '"0-1",', "x"):
        problem = assert_problem(mutate(http, name, {"If-Match": wrong}), 422, "invalid_parameter", "If-Match")
        assert problem["parameter"] == "If-Match"
        assert state(http, name) == before
    for right in ('"0-1"', "*", '"5-5", "0-1"'):
        assert mutate(http, name, {"If-Match": right}).is_success
        if mutation == "delete":
            create(http, name)
            add(http, name, [1, 2])
        elif mutation != "create":
            assert state(http, name) != before
            assert mutate(http, name, {"If-Match": '"0-1"'}).status_code == 412
            http.delete(f"/v1/buffers/{name}")
            create(http, name)
            add(http, name, [1, 2])


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_if_match_of_what_is_not_there(http: httpx.Client, mutation: str) -> None:
    status, code = (412, "precondition_failed") if mutation == "create" else (404, "unknown_buffer")
    for tag in ("*", '"0-0"'):
        assert_problem(MUTATIONS[mutation](http, fresh(), {"If-Match": tag}), status, code)


@pytest.mark.parametrize("tag", ["*", '"0-0"', "malformed"])
def test_if_match_is_for_one_buffer(http: httpx.Client, tag: str) -> None:
    a, b = create(http), create(http)
    before = state(http, a, b)
    for what, body in (("accumulate", {a: [1, 1]}), ("zero", {"names": [a]}), ("take", {"names": [a]})):
        answer = http.post(f"/v1/buffers/{what}", json=body, headers={"If-Match": tag})
        assert_problem(answer, 422, "invalid_parameter", "If-Match")
    answer = http.post(
        "/v1/ops/GRUGrad",
        params={"into": [f"dW:{a}", f"dR:{b}"]},
        json=dict(OPERATORS["GRUGrad"].example),
        headers={"If-Match": tag},
    )
    assert_problem(answer, 422, "invalid_parameter", "If-Match")
    assert state(http, a, b) == before


def test_if_match_in_two_headers_is_one_list(http: httpx.Client) -> None:
    name = create(http)
    answer = http.post(f"/v1/buffers/{name}/zero", headers=[("If-Match", '"9-9"'), ("If-Match", '"0-0"')])
    assert answer.status_code == 200


def test_one_of_those_who_saw_the_same_state_wins(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    tag = {"If-Match": etag(http, name)}
    answers = list(pool.map(lambda _: add(http, name, [1, 1], tag).status_code, range(16)))
    assert sorted(answers) == [200] + [412] * 15
    assert value(http, name) == [1, 1]


# ----- value -----


def test_value(http: httpx.Client) -> None:
    name = create(http, shape=(2, 1))
    add(http, name, [[1], [2]], weight=2)
    add(http, name, [[4], [5]], weight=3)
    answer = get(http, name)
    assert answer.headers["etag"] == '"0-2"'
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    expected = {"name": name, "updated": False, "closed": False, "epoch": 0, "version": 2, "count": 2, "weight": 5.0}
    assert ok(answer) == {**expected, "value": {"dtype": "float32", "shape": [2, 1], "data": [[14.0], [19.0]]}}
    assert value(http, name, reduce="mean") == pytest.approx(np.array([[14 / 5], [19 / 5]]), rel=1e-7)
    in_base64 = ok(get(http, name, encoding="base64"))["value"]
    assert in_base64 == {"dtype": "float32", "shape": [2, 1], "base64": "AABgQQAAmEE="}
    tensors, receipts = loaded(get(http, name, headers=TO_SAFETENSORS))
    assert tensors["value"].tolist() == [[14.0], [19.0]]
    assert receipts == {name: expected}


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("asked", FLOAT_NAMES)
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_dtype_of_the_answer(http: httpx.Client, dtype: str, asked: str, reduce: str) -> None:
    name = create(http, shape=(3,), dtype=dtype)
    numbers = np.array([1, -2.5, 40], DTYPES[dtype])
    content = saved({"gradient": numbers})
    for _ in range(3):
        assert http.post(f"/v1/buffers/{name}/accumulate", content=content, headers=SAFE).status_code == 200
    tensors, _ = loaded(get(http, name, headers=TO_SAFETENSORS, dtype=asked, reduce=reduce))
    total = numbers.astype(np.float64) * 3
    expected = (total / 3 if reduce == "mean" else total).astype(DTYPES[asked])
    assert tensors["value"].dtype == expected.dtype
    assert tensors["value"].tobytes() == expected.tobytes()


def test_no_mean_without_weights(http: httpx.Client) -> None:
    name = create(http)
    for _ in range(2):
        problem = assert_problem(get(http, name, reduce="mean"), 409, "nothing_to_average", name, "zero")
        assert problem["buffer"] == name
        add(http, name, [1, 2], weight=2)
        add(http, name, [1, 2], weight=-2)
    assert value(http, name) == [0, 0]
    answer = http.post("/v1/buffers/value", json={"names": [name]}, params={"reduce": "mean"})
    assert_problem(answer, 409, "nothing_to_average", name)


def test_a_take_that_has_no_mean_takes_nothing(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [3, 4], weight=2)
    add(http, name, [1, 1], weight=-2)
    before = state(http, name)
    assert_problem(post(http, name, "take", reduce="mean"), 409, "nothing_to_average", name)
    answer = http.post("/v1/buffers/take", json={"names": [name]}, params={"reduce": "mean"})
    assert_problem(answer, 409, "nothing_to_average", name)
    assert state(http, name) == before


QUERIES = [
    ("value", "reduce", "max", "'sum' or 'mean'"),
    ("value", "dtype", "int64", "'float64'"),
    ("value", "encoding", "hex", "'list' or 'base64'"),
    ("value", "epoch", "-1", "0"),
    ("value", "epoch", "x", "integer"),
    ("value", "timeout", "601", "600"),
    ("value", "timeout", "-1", "0"),
    ("value", "timeout", "nan", "600"),
    ("value", "timeout", "inf", "600"),
    ("take", "reduce", "max", "'sum' or 'mean'"),
    ("take", "dtype", "int64", "'float64'"),
    ("take", "min_count", "-1", "0"),
    ("take", "min_count", "1.5", "integer"),
    ("take", "timeout", "600.1", "600"),
    ("take", "timeout", "nan", "600"),
    ("accumulate", "do_update", "maybe", "boolean"),
    ("accumulate", "overwrite", "2", "boolean"),
    ("accumulate", "weight", "nan", "finite"),
    ("accumulate", "weight", "inf", "finite"),
    ("accumulate", "weight", "x", "number"),
    ("accumulate", "epoch", "-1", "0"),
    ("accumulate", "return", "sum", "'value'"),
    ("accumulate", "encoding", "hex", "'list' or 'base64'"),
]


@pytest.mark.parametrize(("what", "parameter", "wrong", "word"), QUERIES)
def test_a_bad_parameter_is_named(http: httpx.Client, what: str, parameter: str, wrong: str, word: str) -> None:
    name = create(http)
    before = state(http, name)
    one, many = f"/v1/buffers/{name}/{what}", f"/v1/buffers/{what}"
    for path, body in ((one, {"gradient": [1, 1]}), (many, {name: [1, 1]})):
        given: dict[str, Any] = {"json": body if what == "accumulate" else {"names": [name]}}
        method = "POST"
        if path == one and what == "value":
            method, given = "GET", {}
        problem = assert_problem(
            http.request(method, path, params={parameter: wrong}, **given), 422, "invalid_parameter", parameter, word
        )
        assert problem["parameter"] == parameter
        twice = http.request(method, path, params=[(parameter, "1"), (parameter, "1")], **given)
        assert_problem(twice, 422, "invalid_parameter")
        assert_problem(http.request(method, path, params={"x": 1}, **given), 422, "unknown_parameter", "'x'")
    assert state(http, name) == before


def test_a_parameter_given_twice(http: httpx.Client) -> None:
    name = create(http)
    answer = http.post(f"/v1/buffers/{name}/accumulate?weight=1&weight=2", json={"gradient": [1, 1]})
    assert_problem(answer, 422, "invalid_parameter", "'weight'", "2 times")
    assert_problem(http.post(f"/v1/buffers/{name}/take?timeout=0&timeout=0"), 422, "invalid_parameter", "'timeout'")
    assert_problem(http.get(f"/v1/buffers/{name}/value?epoch=0&epoch=0"), 422, "invalid_parameter", "'epoch'")
    assert_problem(http.post(f"/v1/buffers/{name}/zero?x=1"), 422, "unknown_parameter", "'x'")
    assert_problem(http.delete(f"/v1/buffers/{name}?x=1"), 422, "unknown_parameter", "'x'")
    assert metadata(http, name)["version"] == 0


# ----- accumulate -----


def test_accumulate(http: httpx.Client) -> None:
    name = create(http, shape=(2, 2))
    answer = add(http, name, [[1, 2], [3, 4]])
    assert answer.headers["etag"] == '"0-1"'
    expected = {"name": name, "updated": True, "closed": False, "epoch": 0, "version": 1, "count": 1, "weight": 1.0}
    assert ok(answer) == expected
    answer = add(http, name, {"shape": [2, 2], "base64": "AACAPwAAAEAAAEBAAACAQA=="}, weight=0.5)
    assert ok(answer) == {**expected, "version": 2, "count": 2, "weight": 1.5}
    content = saved({"gradient": np.array([[0.5, 0], [0, -1]])})
    answer = http.post(f"/v1/buffers/{name}/accumulate", content=content, headers=SAFE)
    assert loaded(answer) == ({}, {name: {**expected, "version": 3, "count": 3, "weight": 2.5}})
    assert value(http, name) == [[2, 3], [4.5, 5]]


@pytest.mark.parametrize("gradient_dtype", FLOAT_NAMES)
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_dtypes(http: httpx.Client, dtype: str, gradient_dtype: str) -> None:
    name = create(http, shape=(4,), dtype=dtype)
    gradient = np.array([0.1, -3, 1000, 1 / 3], DTYPES[gradient_dtype])
    expected = np.zeros(4, DTYPES[dtype])
    for _ in range(2):
        answer = http.post(f"/v1/buffers/{name}/accumulate", content=saved({"gradient": gradient}), headers=SAFE)
        assert answer.status_code == 200
        _, expected = in_place_accumulator_v2(expected, gradient)
    tensors, _ = loaded(get(http, name, headers=TO_SAFETENSORS))
    assert tensors["value"].tobytes() == expected.tobytes()


@pytest.mark.parametrize(("gradient", "expected"), [(2, [[2, 2]] * 3), ([1, 2], [[1, 2]] * 3), ([[1], [2], [3]], None)])
def test_broadcasting(http: httpx.Client, gradient: Any, expected: Any) -> None:
    name = create(http, shape=(3, 2))
    assert ok(add(http, name, gradient))["count"] == 1
    assert value(http, name) == (expected or [[1, 1], [2, 2], [3, 3]])


@pytest.mark.parametrize("gradient", [[1, 2, 3], [[1, 2]] * 4, [[[1, 2]]], []])
def test_shapes_that_do_not_broadcast(http: httpx.Client, gradient: Any) -> None:
    name = create(http, shape=(3, 2))
    answer = add(http, name, gradient)
    problem = assert_problem(answer, 422, "shape_mismatch", "gradient", "[3, 2]", str(list(np.shape(gradient))))
    assert problem["tensor"] == "gradient"
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalars_and_empty_buffers(http: httpx.Client, shape: tuple[int, ...]) -> None:
    name = create(http, shape=shape)
    gradient = {"shape": list(shape), "data": 1 if shape == () else []}
    assert ok(add(http, name, gradient))["count"] == 1
    taken = ok(post(http, name, "take"))["value"]
    assert (taken["shape"], taken["data"]) == (list(shape), gradient["data"])


def test_large(http: httpx.Client) -> None:
    """A value of many chunks, which is worked on in the pool."""
    shape = (1021, 1021)
    name = create(http, shape=shape, keep=2)
    gradient = np.random.default_rng(5).standard_normal(shape, np.float32)
    for _ in range(2):
        answer = http.post(
            f"/v1/buffers/{name}/accumulate", content=saved({"gradient": gradient}), headers=SAFE, params={"weight": 2}
        )
        assert answer.status_code == 200
    for answer in (
        get(http, name, headers=TO_SAFETENSORS),
        post(http, name, "take", TO_SAFETENSORS),
        get(http, name, headers=TO_SAFETENSORS, epoch=0),
    ):
        assert loaded(answer)[0]["value"].tobytes() == (gradient * 2 + gradient * 2).tobytes()


def test_epoch_of_an_add(http: httpx.Client) -> None:
    name = create(http)
    assert ok(add(http, name, [1, 1], epoch=0))["count"] == 1
    problem = assert_problem(add(http, name, [1, 1], epoch=1), 409, "stale_epoch", name, "not begun", "epoch 0")
    assert (problem["buffer"], problem["epoch"]) == (name, 0)
    post(http, name, "take")
    before = state(http, name)
    problem = assert_problem(add(http, name, [1, 1], epoch=0), 409, "stale_epoch", name, "passed", "epoch 1")
    assert problem["epoch"] == 1
    assert_problem(add(http, name, [1, 1], epoch=0, do_update=False), 409, "stale_epoch")
    assert_problem(add(http, name, [1, 1], epoch=10**30), 409, "stale_epoch")
    assert state(http, name) == before
    assert ok(add(http, name, [1, 1], epoch=1))["count"] == 1


def test_do_update_and_overwrite(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2], weight=3)
    before = state(http, name)
    receipt = ok(add(http, name, [5, 5], do_update=False))
    assert receipt == {
        "name": name,
        "updated": False,
        "closed": False,
        "epoch": 0,
        "version": 1,
        "count": 1,
        "weight": 3.0,
    }
    assert state(http, name) == before
    receipt = ok(add(http, name, [5, 6], overwrite=True, weight=0.5))
    assert (receipt["updated"], receipt["version"], receipt["count"], receipt["weight"]) == (True, 2, 1, 0.5)
    assert value(http, name) == [2.5, 3]


def test_return_value(http: httpx.Client) -> None:
    name = create(http, quorum=3)
    add(http, name, [1, 2])
    answer = ok(add(http, name, [1, 2], **{"return": "value"}))
    assert (answer["count"], answer["value"]) == (2, {"dtype": "float32", "shape": [2], "data": [2.0, 4.0]})
    answer = ok(add(http, name, [1, 2], do_update=False, **{"return": "value"}))
    assert (answer["updated"], answer["value"]["data"]) == (False, [2, 4])
    content = saved({"gradient": np.ones(2, np.float32)})
    answer = http.post(f"/v1/buffers/{name}/accumulate?return=value", content=content, headers=SAFE)
    tensors, receipts = loaded(answer)
    assert tensors["value"].tolist() == [3, 5]
    assert (receipts[name]["closed"], receipts[name]["count"]) == (True, 3)
    answer = ok(add(http, name, {"shape": [2], "base64": "AACAPwAAAEA="}, **{"return": "value"}))
    assert answer["value"] == {"dtype": "float32", "shape": [2], "base64": "AACAPwAAAEA="}
    answer = ok(add(http, name, [0, 0], **{"return": "value"}, encoding="base64"))
    assert answer["value"]["base64"] == "AACAPwAAAEA="


@pytest.mark.parametrize("gradient", [["NaN", 0], [0, "Infinity"], ["-Infinity", 0]])
def test_numbers_that_are_not_finite(http: httpx.Client, gradient: Any) -> None:
    allows, rejects = create(http), create(http, nonfinite="reject")
    assert ok(add(http, allows, gradient))["count"] == 1
    assert value(http, allows) == gradient
    add(http, rejects, [1, 2])
    before = state(http, rejects)
    for params in ({}, {"overwrite": True}):
        problem = assert_problem(add(http, rejects, gradient, **params), 422, "nonfinite_gradient", "nonfinite=reject")
        assert problem["tensor"] == "gradient"
    assert state(http, rejects) == before


def test_a_sum_that_overflows_is_not_finite(http: httpx.Client) -> None:
    name = create(http, nonfinite="reject", dtype="float16")
    add(http, name, [40_000, 0])
    before = state(http, name)
    assert_problem(add(http, name, [40_000, 0]), 422, "nonfinite_gradient")
    assert_problem(add(http, name, [1, 1], weight=1e6), 422, "nonfinite_gradient")
    assert_problem(add(http, name, {"dtype": "float64", "data": [1e300, 0]}), 422, "nonfinite_gradient")
    assert state(http, name) == before


@pytest.mark.parametrize(("dtype", "weight"), [("float32", "1e39"), ("float16", "-1e39"), ("float64", "1e308")])
def test_weights_stay_finite(http: httpx.Client, dtype: str, weight: str) -> None:
    name = create(http, dtype=dtype)
    if dtype == "float64":
        add(http, name, [0, 0], weight=weight)
    before = state(http, name)
    assert_problem(add(http, name, [0, 0], weight=weight), 422, "invalid_parameter", "weight", dtype[:5])
    assert state(http, name) == before


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_gradients_are_floats(http: httpx.Client, dtype: str) -> None:
    name = create(http)
    tensor = np.ones(2, DTYPES[dtype])
    path = f"/v1/buffers/{name}/accumulate"
    for answer in (
        add(http, name, {"dtype": dtype, "data": tensor.tolist()}),
        http.post(path, content=saved({"gradient": tensor}), headers=SAFE),
        http.post("/v1/buffers/accumulate", content=saved({name: tensor}), headers=SAFE),
    ):
        problem = assert_problem(answer, 422, "dtype_mismatch", dtype, "float32")
        assert problem["tensor"] in ("gradient", name)
    assert metadata(http, name)["version"] == 0


def test_tensors_that_are_missing_or_unknown(http: httpx.Client) -> None:
    name = create(http)
    path = f"/v1/buffers/{name}/accumulate"
    ones = np.ones(2, np.float32)
    given: Any
    for given in ({"json": {}}, {"content": saved({}), "headers": SAFE}):
        assert assert_problem(http.post(path, **given), 422, "missing_tensor", "'gradient'")["tensor"] == "gradient"
    for given in (
        {"json": {"gradient": [1, 1], "grad": [1, 1]}},
        {"json": {"grad": [1, 1]}},
        {"content": saved({"gradient": ones, "grad": ones}), "headers": SAFE},
    ):
        assert assert_problem(http.post(path, **given), 422, "unknown_tensor", "'grad'", "gradient")["tensor"] == "grad"
    for given in ({"json": {}}, {"content": saved({}), "headers": SAFE}):
        assert_problem(http.post("/v1/buffers/accumulate", **given), 422, "missing_tensor")
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("path", ["/v1/buffers/{name}/accumulate", "/v1/buffers/accumulate"])
def test_bodies_that_cannot_be_read(http: httpx.Client, path: str) -> None:
    name = create(http)
    path = path.format(name=name)
    for content in (b"", b"{", b"[1]", b'{"gradient": [NaN]}', b'{"gradient": 1, "gradient": 2}'):
        assert_problem(http.post(path, content=content), 400, "malformed_body")
    for content in (b"", b"\1", b"\xff" * 20):
        assert_problem(http.post(path, content=content, headers=SAFE), 400, "malformed_body")
    for wrong in ([1, [2]], [None, 1], {"data": 1, "unit": 2}, {"dtype": "float8", "data": 1}, {"base64": "AA=="}):
        problem = assert_problem(http.post(path, json={"gradient": wrong}), 422, "invalid_tensor", "gradient")
        assert problem["tensor"] == "gradient"
    assert_problem(http.post(path, data={"gradient": 1}), 415, "unsupported_media_type", "application/json")
    answer = http.post(path, json={"gradient": [1, 1]}, headers={"Accept": "image/png"})
    assert_problem(answer, 406, "not_acceptable", "'image/png'")
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compression(http: httpx.Client, coding: str) -> None:
    name = create(http)
    gradient = saved({"gradient": np.array([1, 2], np.float32)})
    body = json.dumps({"gradient": [1, 2]}).encode()
    if coding == "gzip":
        headers = {"Content-Encoding": "gzip"}
        path = f"/v1/buffers/{name}/accumulate"
        assert ok(http.post(path, content=gzip.compress(body), headers=headers))["count"] == 1
        assert (
            loaded(http.post(path, content=gzip.compress(gradient), headers={**headers, **SAFE}))[1][name]["count"] == 2
        )
        many = json.dumps({name: [1, 2]}).encode()
        answer = ok(http.post("/v1/buffers/accumulate", content=gzip.compress(many), headers=headers))
        assert answer["buffers"][name]["count"] == 3
        assert_problem(http.post(path, content=b"{}", headers=headers), 400, "malformed_body", "gzip")
        made = http.put(f"/v1/buffers/{fresh()}", content=gzip.compress(b'{"shape": [3]}'), headers=headers)
        assert made.json()["shape"] == [3]
        assert value(http, name) == [3, 6]
    for answer in (
        get(http, name, headers={"Accept-Encoding": coding}),
        add(http, name, [0, 0], {"Accept-Encoding": coding}, **{"return": "value"}),
        post(http, name, "take", {"Accept-Encoding": coding}),
    ):
        assert answer.headers["content-encoding"] == coding
        assert answer.json()["value"]["shape"] == [2]


# ----- epochs -----


def test_zero(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    answer = post(http, name, "zero")
    assert answer.headers["etag"] == etag(http, name) == '"1-2"'
    assert ok(answer) == {
        "name": name,
        "updated": True,
        "closed": False,
        "epoch": 1,
        "version": 2,
        "count": 0,
        "weight": 0.0,
    }
    assert value(http, name) == [0, 0]
    problem = assert_problem(get(http, name, epoch=0), 410, "epoch_gone", name, "zeroed")
    assert problem["epoch"] == 1
    assert loaded(post(http, name, "zero", TO_SAFETENSORS))[1][name]["epoch"] == 2


def test_take(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2], weight=2)
    add(http, name, [4, 4], weight=2)
    answer = post(http, name, "take", reduce="mean", dtype="float64")
    assert answer.headers["etag"] == etag(http, name) == '"1-3"'
    expected = {"name": name, "updated": True, "closed": True, "epoch": 0, "version": 3, "count": 2, "weight": 4.0}
    assert ok(answer) == {**expected, "value": {"dtype": "float64", "shape": [2], "data": [2.5, 3.0]}}
    assert value(http, name) == [0, 0]
    closed = ok(get(http, name, epoch=0))
    assert closed == {
        **expected,
        "updated": False,
        "value": {"dtype": "float32", "shape": [2], "data": [10.0, 12.0]},
    }
    assert value(http, name, epoch=0, reduce="mean") == [2.5, 3]
    add(http, name, [1, 1])
    tensors, receipts = loaded(post(http, name, "take", TO_SAFETENSORS))
    assert tensors["value"].tolist() == [1, 1]
    assert receipts == {name: {**expected, "epoch": 1, "version": 5, "count": 1, "weight": 1.0}}
    assert ok(post(http, name, "take", encoding="base64"))["value"]["base64"] == "AAAAAAAAAAA="


def test_take_needs_min_count(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    before = state(http, name)
    for params in ({}, {"timeout": 0.05}):
        problem = assert_problem(post(http, name, "take", min_count=2, **params), 409, "too_few_gradients", name, "2")
        assert (problem["buffer"], problem["epoch"], problem["count"]) == (name, 0, 1)
    assert state(http, name) == before
    assert ok(post(http, name, "take", min_count=1))["count"] == 1
    assert ok(post(http, name, "take", min_count=0))["count"] == 0


@pytest.mark.parametrize("close", ["take", "quorum"])
def test_keep(http: httpx.Client, close: str) -> None:
    name = create(http, keep=3, quorum=1 if close == "quorum" else None)
    for epoch in range(5):
        receipt = ok(add(http, name, [epoch, 1], epoch=epoch))
        if close == "take":
            receipt = ok(post(http, name, "take"))
        assert (receipt["closed"], receipt["epoch"], receipt["count"]) == (True, epoch, 1)
    assert metadata(http, name)["closed_epochs"] == [2, 3, 4]
    assert [value(http, name, epoch=epoch)[0] for epoch in (2, 3, 4)] == [2, 3, 4]
    problem = assert_problem(get(http, name, epoch=1), 410, "epoch_gone", name, "last 3")
    assert (problem["buffer"], problem["epoch"]) == (name, 5)
    for epoch in (5, 6, 10**30):
        problem = assert_problem(get(http, name, epoch=epoch), 409, "epoch_open", name, f"Epoch {epoch}", "epoch 5")
        assert (problem["epoch"], problem["count"]) == (5, 0)


def test_quorum(http: httpx.Client) -> None:
    name = create(http, quorum=3)
    for count in (1, 2):
        receipt = ok(add(http, name, [1, 2], epoch=0))
        assert (receipt["closed"], receipt["count"]) == (False, count)
    problem = assert_problem(get(http, name, epoch=0), 409, "epoch_open", "2 of 3")
    assert problem["count"] == 2
    answer = add(http, name, [1, 2], epoch=0)
    assert answer.headers["etag"] == etag(http, name) == '"1-3"'
    receipt = ok(answer)
    assert (receipt["closed"], receipt["epoch"], receipt["count"], receipt["weight"]) == (True, 0, 3, 3.0)
    assert value(http, name, epoch=0) == [3, 6]
    assert value(http, name) == [0, 0]
    assert_problem(add(http, name, [1, 2], epoch=0), 409, "stale_epoch")


# ----- many buffers -----


def naming(*names: str) -> dict[str, Any]:
    return {"names": list(names)}


def test_many(http: httpx.Client) -> None:
    prefix = fresh("many.")
    a, b = create(http, f"{prefix}.a"), create(http, f"{prefix}.b", shape=(1,), dtype="float64")
    answer = ok(http.post("/v1/buffers/accumulate", json={b: [3], a: [1, 2]}, params={"weight": 2}))
    one = {"updated": True, "closed": False, "epoch": 0, "version": 1, "count": 1, "weight": 2.0}
    assert answer == {"buffers": {b: {"name": b, **one}, a: {"name": a, **one}}}
    content = saved({a: np.array([1, 1], np.float16), b: np.ones((1,))})
    tensors, receipts = loaded(http.post("/v1/buffers/accumulate?return=value", content=content, headers=SAFE))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {a: [3, 5], b: [7]}
    assert tensors[b].dtype == np.float64
    assert {name: receipt["count"] for name, receipt in receipts.items()} == {a: 2, b: 2}
    for params, body in (({}, naming(a, b)), ({"prefix": f"{prefix}."}, None)):
        read = ok(http.post("/v1/buffers/value", params={**params, "reduce": "mean"}, json=body))["buffers"]
        assert read[a]["value"]["data"] == [1, pytest.approx(5 / 3)]
        assert read[b]["value"] == {"dtype": "float64", "shape": [1], "data": [7 / 3]}
        assert read[b]["updated"] is False
    tensors, receipts = loaded(http.post("/v1/buffers/take", json=naming(b, a), headers=TO_SAFETENSORS))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {a: [3, 5], b: [7]}
    assert {name: receipt["closed"] for name, receipt in receipts.items()} == {a: True, b: True}
    ok(http.post("/v1/buffers/accumulate", json={a: [1, 1], b: [1]}, params={"epoch": 1}))
    taken = ok(http.post("/v1/buffers/take", params={"prefix": prefix, "dtype": "float16"}))["buffers"]
    assert {name: one["value"]["data"] for name, one in taken.items()} == {a: [1, 1], b: [1]}
    assert taken[b]["value"]["dtype"] == "float16"
    closed = ok(http.post("/v1/buffers/value", json=naming(a, b), params={"epoch": 1}))["buffers"]
    assert {name: one["value"]["data"] for name, one in closed.items()} == {a: [1, 1], b: [1]}
    zeroed = ok(http.post("/v1/buffers/zero", json=naming(a)))["buffers"]
    assert zeroed == {a: {"name": a, **one, "epoch": 3, "version": 6, "count": 0, "weight": 0.0}}
    zeroed = ok(http.post("/v1/buffers/zero", params={"prefix": prefix}))["buffers"]
    assert {name: one["epoch"] for name, one in zeroed.items()} == {a: 4, b: 3}


def test_prefix_of_no_buffer(http: httpx.Client) -> None:
    for what in ("take", "zero", "value"):
        assert ok(http.post(f"/v1/buffers/{what}", params={"prefix": fresh("none.")})) == {"buffers": {}}


@pytest.mark.parametrize("what", ["take", "zero", "value"])
def test_names_in_a_body_that_cannot_be_used(http: httpx.Client, what: str) -> None:
    name, path = create(http), f"/v1/buffers/{what}"
    assert_problem(http.post(path), 400, "malformed_body", "JSON")
    assert_problem(http.post(path, json=[name]), 400, "malformed_body", "object")
    assert_problem(http.post(path, json={}), 422, "invalid_parameter", "names")
    assert_problem(http.post(path, json={"names": []}), 422, "invalid_parameter", "names")
    assert_problem(http.post(path, json={"names": [5]}), 422, "invalid_parameter", "names.0", "5")
    assert_problem(http.post(path, json={"names": name}), 422, "invalid_parameter", "names")
    assert_problem(http.post(path, json={"names": ["a b"]}), 422, "invalid_parameter", "'a b'")
    assert_problem(http.post(path, json={"names": [name], "x": 1}), 422, "unknown_parameter", "'x'")
    assert_problem(http.post(path, json={"names": [name]}, params={"prefix": name}), 422, "invalid_request", "prefix")
    if what != "value":
        assert_problem(http.post(path, json={"names": [name, name]}), 422, "invalid_request", "once")
    assert metadata(http, name)["version"] == 0


ALL_OR_NOTHING: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "unknown name": ("accumulate", {"last": "none"}, 404, "unknown_buffer"),
    "name": ("accumulate", {"last": "a b"}, 422, "invalid_parameter"),
    "shape": ("accumulate", {"gradient": [1, 2, 3]}, 422, "shape_mismatch"),
    "not finite": ("accumulate", {"gradient": ["NaN", 1]}, 422, "nonfinite_gradient"),
    "epoch": ("accumulate", {"params": {"epoch": 0}}, 409, "stale_epoch"),
    "weight": ("accumulate", {"params": {"weight": 1e39}}, 422, "invalid_parameter"),
    "take an unknown name": ("take", {"last": "none"}, 404, "unknown_buffer"),
    "take too few": ("take", {"params": {"min_count": 1}}, 409, "too_few_gradients"),
    "zero an unknown name": ("zero", {"last": "none"}, 404, "unknown_buffer"),
    "read an unknown name": ("value", {"last": "none"}, 404, "unknown_buffer"),
    "read an open epoch": ("value", {"params": {"epoch": 1}}, 409, "epoch_open"),
}


@pytest.mark.parametrize("case", ALL_OR_NOTHING)
def test_all_or_nothing(http: httpx.Client, case: str) -> None:
    what, wrong, status, code = ALL_OR_NOTHING[case]
    names = [create(http, shape=(2,)) for _ in range(3)]
    last = create(http, nonfinite="reject", dtype="float32")
    for name in names:
        add(http, name, [1, 2])
    post(http, last, "zero")
    if code == "stale_epoch":
        wrong = {"params": {"epoch": 0}}
    before = state(http, *names, last)
    given = [*names, wrong.get("last", last)]
    gradients = {name: [1, 1] for name in given} | {given[-1]: wrong.get("gradient", [1, 1])}
    body = gradients if what == "accumulate" else {"names": given}
    problem = assert_problem(http.post(f"/v1/buffers/{what}", json=body, params=wrong.get("params")), status, code)
    assert "Traceback" not in problem["detail"]
    assert state(http, *names, last) == before


def test_the_gradient_that_is_at_fault_is_named(http: httpx.Client) -> None:
    names = [create(http, nonfinite="reject") for _ in range(3)]
    for wrong in ([1, 2, 3], ["NaN", 0]):
        gradients = {name: [1, 1] for name in names} | {names[1]: wrong}
        problem = http.post("/v1/buffers/accumulate", json=gradients).json()
        assert names[1] in str(problem), problem


def test_one_add_completes_several_quorums(http: httpx.Client) -> None:
    a, b, c = create(http, quorum=2), create(http, quorum=2), create(http, quorum=3)
    gradients = {a: [1, 1], b: [2, 2], c: [3, 3]}
    assert ok(http.post("/v1/buffers/accumulate", json=gradients))["buffers"][a]["closed"] is False
    receipts = ok(http.post("/v1/buffers/accumulate", json=gradients))["buffers"]
    assert {name: one["closed"] for name, one in receipts.items()} == {a: True, b: True, c: False}
    closed = ok(http.post("/v1/buffers/value", json=naming(a, b), params={"epoch": 0}))["buffers"]
    assert {name: one["value"]["data"] for name, one in closed.items()} == {a: [2, 2], b: [4, 4]}
    problem = assert_problem(
        http.post("/v1/buffers/value", json=naming(a, b, c), params={"epoch": 0}), 409, "epoch_open", c
    )
    assert problem["buffer"] == c


def test_a_buffer_whose_name_means_something_in_safetensors(http: httpx.Client) -> None:
    """Either it cannot be made, or it can be taken with the others."""
    name = "__metadata__"
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [2]})
    if answer.status_code == 201:
        other = create(http)
        taken = http.post("/v1/buffers/take", json=naming(name, other), headers=TO_SAFETENSORS)
        http.delete(f"/v1/buffers/{name}")
        tensors, receipts = loaded(taken)
        assert tensors.keys() == receipts.keys() == {name, other}


# ----- waiting -----


def wait_in(pool: ThreadPoolExecutor, call: Callable[..., httpx.Response], *args: Any, **more: Any) -> Any:
    """The future answer of a call that has most likely begun to wait."""
    future: Future[httpx.Response] = pool.submit(call, *args, **more)
    time.sleep(0.05)
    assert not future.done()
    return future


@pytest.mark.parametrize("close", ["quorum", "take"])
def test_a_value_is_waited_for(http: httpx.Client, pool: ThreadPoolExecutor, close: str) -> None:
    name = create(http, quorum=2 if close == "quorum" else None)
    waiting = [wait_in(pool, get, http, name, epoch=0, timeout=60) for _ in range(3)]
    add(http, name, [1, 2])
    assert not any(one.done() for one in waiting)
    if close == "quorum":
        add(http, name, [1, 2])
    else:
        post(http, name, "take")
    for one in waiting:
        answer = ok(one.result(PATIENCE))
        assert (answer["epoch"], answer["closed"], answer["value"]["data"][0]) == (0, True, answer["count"])


def test_many_values_are_waited_for(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    a, b = create(http, quorum=1), create(http, quorum=1)
    waiting = wait_in(
        pool,
        http.post,
        "/v1/buffers/value",
        json=naming(a, b),
        params={"epoch": 0, "timeout": 60},
        headers=TO_SAFETENSORS,
    )
    add(http, a, [1, 1])
    time.sleep(0.02)
    assert not waiting.done()
    add(http, b, [2, 2])
    tensors, _ = loaded(waiting.result(PATIENCE))
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {a: [1, 1], b: [2, 2]}


def test_a_take_waits_for_its_count(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name, other = create(http), create(http)
    waiting = wait_in(pool, post, http, name, "take", min_count=3, timeout=60)
    both = wait_in(pool, http.post, "/v1/buffers/take", json=naming(other), params={"min_count": 1, "timeout": 60})
    for _ in range(2):
        add(http, name, [1, 2])
        assert not waiting.done()
    add(http, name, [1, 2])
    answer = ok(waiting.result(PATIENCE))
    assert (answer["count"], answer["value"]["data"]) == (3, [3, 6])
    add(http, other, [1, 2])
    assert ok(both.result(PATIENCE))["buffers"][other]["value"]["data"] == [1, 2]


def test_each_of_several_who_wait_takes_once(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = [wait_in(pool, post, http, name, "take", min_count=2, timeout=PATIENCE) for _ in range(4)]
    added = 0
    while not all(one.done() for one in waiting):
        ok(add(http, name, [1, 2]))
        added += 1
    answers = [ok(one.result()) for one in waiting]
    assert sorted(one["epoch"] for one in answers) == [0, 1, 2, 3]
    assert all(one["count"] >= 2 for one in answers)
    assert sum(one["value"]["data"][0] for one in answers) + value(http, name)[0] == added


def test_a_wait_ends_in_time(http: httpx.Client) -> None:
    name = create(http, quorum=2)
    add(http, name, [1, 1])
    problem = assert_problem(get(http, name, epoch=0, timeout=0.05), 409, "epoch_open", "1 of 2")
    assert problem["count"] == 1
    assert_problem(get(http, name, epoch=3, timeout=0.05), 409, "epoch_open")
    assert ok(get(http, name, timeout=60))["count"] == 1  # there is nothing to wait for
    assert_problem(get(http, fresh(), epoch=0, timeout=60), 404, "unknown_buffer")
    assert_problem(post(http, fresh(), "take", min_count=1, timeout=60), 404, "unknown_buffer")


def test_a_buffer_that_has_expired_meanwhile_is_gone(http: httpx.Client) -> None:
    name = create(http, quorum=2, ttl_seconds=0.2)
    assert_problem(get(http, name, epoch=0, timeout=1), 404, "unknown_buffer", name)


def test_a_prefix_is_not_waited_for_longer_because_buffers_are_deleted(
    http: httpx.Client, pool: ThreadPoolExecutor
) -> None:
    disturbed, calm, ended = fresh("pre") + ".", fresh("pre") + ".", list[str]()
    names = [create(http, prefix + letter) for prefix in (disturbed, calm) for letter in "abcdef"]
    waiting = []
    for prefix, timeout in ((disturbed, 1), (calm, 2)):
        params: dict[str, Any] = {"prefix": prefix, "min_count": 1, "timeout": timeout}
        waiting.append(pool.submit(http.post, "/v1/buffers/take", params=params))
        waiting[-1].add_done_callback(partial(lambda prefix, _: ended.append(prefix), prefix))
    for name in names[:5]:  # were it to begin anew each time, it would wait for 2.5 seconds
        time.sleep(0.3)
        http.delete(f"/v1/buffers/{name}").raise_for_status()
    for one in waiting:
        assert_problem(one.result(PATIENCE), 409, "too_few_gradients")
    assert ended == [disturbed, calm]


def test_a_buffer_that_is_deleted_is_not_waited_for(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = [
        wait_in(pool, get, http, name, epoch=0, timeout=60),
        wait_in(pool, post, http, name, "take", min_count=1, timeout=60),
    ]
    http.delete(f"/v1/buffers/{name}")
    for one in waiting:
        assert_problem(one.result(PATIENCE), 404, "unknown_buffer", name)


def test_an_epoch_that_is_zeroed_is_not_waited_for(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = wait_in(pool, get, http, name, epoch=0, timeout=60)
    post(http, name, "zero")
    assert_problem(waiting.result(PATIENCE), 410, "epoch_gone")


def test_a_wait_with_if_match_ends_when_the_tag_changes(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name = create(http)
    waiting = wait_in(pool, post, http, name, "take", {"If-Match": '"0-0"'}, min_count=2, timeout=60)
    add(http, name, [1, 2])
    assert_problem(waiting.result(PATIENCE), 412, "precondition_failed")


@pytest.mark.parametrize("end", ["/{name}/take?", "/take?prefix={name}&"])
def test_who_leaves_takes_nothing(http: httpx.Client, end: str) -> None:
    name = create(http)
    path = f"/v1/buffers{end.format(name=name)}min_count=1&timeout=60"
    with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        time.sleep(0.2)
    time.sleep(0.2)
    add(http, name, [1, 2])
    time.sleep(0.1)
    assert metadata(http, name)["epoch"] == 0
    assert value(http, name) == [1, 2]


def test_a_server_that_stops_does_not_wait_for_those_who_wait(pool: ThreadPoolExecutor) -> None:
    with serving(drain_timeout=1) as url, httpx.Client(base_url=url, timeout=30) as client:
        waiting = wait_in(pool, get, client, create(client), epoch=0, timeout=600)
    try:
        assert waiting.result(PATIENCE).status_code in (409, 503)
    except httpx.TransportError:
        pass  # to be cut off is as good


def test_a_connection_serves_on_after_a_wait(http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url, limits=httpx.Limits(max_connections=1), timeout=30) as client:
        name = create(client)
        for _ in range(3):
            assert_problem(get(client, name, epoch=0, timeout=0.01), 409, "epoch_open")
            assert_problem(post(client, name, "take", min_count=9, timeout=0.01), 409, "too_few_gradients")
            assert ok(add(client, name, [1, 1]))["updated"] is True


# ----- several processes -----


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_workers(2, tmp_path_factory.mktemp("shared")) as url:
        yield url


@pytest.fixture
def pair(two_workers: str) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two clients, each with a connection to a worker of its own."""
    with ExitStack() as stack:
        clients: dict[int, httpx.Client] = {}
        deadline = time.monotonic() + PATIENCE
        while len(clients) < 2:
            assert time.monotonic() < deadline, "one worker gets all connections"
            client = stack.enter_context(
                httpx.Client(base_url=two_workers, timeout=30, limits=httpx.Limits(max_connections=1))
            )
            if not clients:
                client.post("/v1/ops/ReluGrad", json={"dY": [1], "X": [1]})
            stats = client.get("/v2/models/ReluGrad/stats").json()["model_stats"]
            clients.setdefault(stats[0]["inference_count"], client)
        first, second = clients.values()
        yield first, second


def test_a_wait_ends_with_the_add_in_another_process(
    pair: tuple[httpx.Client, httpx.Client], pool: ThreadPoolExecutor
) -> None:
    for here, there in (pair, pair[::-1]):
        name, taken = create(here, quorum=2), create(there)
        reading = wait_in(pool, get, here, name, epoch=0, timeout=60)
        add(there, name, [1, 2])
        time.sleep(0.02)
        assert not reading.done()
        add(there, name, [1, 2])
        assert ok(reading.result(PATIENCE))["value"]["data"] == [2, 4]
        taking = wait_in(pool, post, here, taken, "take", min_count=1, timeout=60)
        add(there, taken, [1, 2])
        assert ok(taking.result(PATIENCE))["value"]["data"] == [1, 2]


def test_many_wait_and_add_in_two_processes(two_workers: str, pool: ThreadPoolExecutor) -> None:
    """An all-reduce by 16 who each have a connection of their own for every request."""

    def work(number: int) -> list[Any]:
        read = []
        for epoch in range(8):
            with httpx.Client(base_url=two_workers, timeout=PATIENCE) as client:
                add(client, name, [number, 1], epoch=epoch)
            with httpx.Client(base_url=two_workers, timeout=PATIENCE) as client:
                read.append(value(client, name, epoch=epoch, timeout=PATIENCE))
        return read

    with httpx.Client(base_url=two_workers) as client:
        name = create(client, quorum=16, keep=2)
    for read in pool.map(work, range(16)):
        assert read == [[sum(range(16)), 16]] * 8


def test_memory_is_not_for_several_processes() -> None:
    environment = {**os.environ, "GRADSERVE_WORKERS": "2", "GRADSERVE_STORE": "memory:", "GRADSERVE_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "service", "serve"], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    for word in ("GRADSERVE_STORE", "memory:", "GRADSERVE_WORKERS", "2", "lmdb:"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_buffers_outlive_the_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": f"lmdb:{tmp_path / 'new' / 'store'}", "store_bytes": 1 << 26}
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        name = create(client, keep=2)
        add(client, name, [1, 2])
        post(client, name, "take")
        add(client, name, [5, 6], weight=2)
        before = state(client, name), value(client, name, epoch=0)
    with serving(**settings) as url, httpx.Client(base_url=url) as client:
        assert (state(client, name), value(client, name, epoch=0)) == before


def test_a_full_store(tmp_path: Path) -> None:
    with (
        serving(store=f"lmdb:{tmp_path}", store_bytes=1 << 20) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        small, large = create(client), create(client, shape=(1 << 19,))
        add(client, small, [1, 2])
        before = state(client, small, large)
        assert_problem(add(client, large, 1), 507, "store_full")
        answer = client.post("/v1/buffers/accumulate", json={small: [1, 1], large: 1})
        assert_problem(answer, 507, "store_full")
        assert state(client, small, large) == before
        assert ok(add(client, small, [1, 2]))["count"] == 2


@pytest.mark.parametrize("what", ["zero", "take", "value"])
def test_a_prefix_means_what_is_there(http: httpx.Client, what: str) -> None:
    """Though others delete and create buffers meanwhile."""
    prefix, stop = fresh("pre") + ".", threading.Event()
    stays = create(http, f"{prefix}stays")

    def disturb() -> None:
        with httpx.Client(base_url=http.base_url) as other:
            while not stop.is_set():
                create(other, f"{prefix}x")
                other.delete(f"/v1/buffers/{prefix}x").raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        disturbing = pool.submit(disturb)
        try:
            for _ in range(40):
                answer = http.post(f"/v1/buffers/{what}", params={"prefix": prefix})
                assert stays in ok(answer)["buffers"]
        finally:
            stop.set()
        disturbing.result()


def test_a_mean_by_weights_that_float32_cannot_sum(http: httpx.Client) -> None:
    name = create(http)
    for _ in range(2):
        ok(add(http, name, [0.001, 0.5], weight=3e38))
    assert value(http, name, reduce="mean") == pytest.approx([0.001, 0.5])
    assert_problem(add(http, name, [1, 1], weight=1e-46), 422, "invalid_parameter", "1e-46", "range of float32")
