"""`/v1/buffers` over real HTTP, with each store: add gradients and read values, in JSON and in safetensors."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest

from service.dtypes import DTYPES
from service.kernels.accumulate import in_place_accumulator_v2
from tests.api.calls import add, as_file, create, fresh, get, loaded, metadata, ok, post, saved, state, value
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.serving import assert_problem

STORES = ["lmdb", "postgres"]

FLOAT_NAMES = ["float16", "bfloat16", "float32", "float64"]

# ----- value -----


def test_a_value_is_read_in_json_and_safetensors(http: httpx.Client) -> None:
    name = create(http, shape=(2, 1))
    add(http, name, [[1], [2]], weight=2)
    add(http, name, [[4], [5]], weight=3)
    answer = get(http, name)
    assert answer.headers["etag"].startswith('"0-2-')
    assert answer.headers["vary"] == "Accept, Accept-Encoding"
    expected = {"name": name, "updated": False, "closed": False, "step": 0, "version": 2, "count": 2, "weight": 5.0}
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
def test_a_value_is_answered_in_the_asked_dtype(http: httpx.Client, dtype: str, asked: str, reduce: str) -> None:
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


def test_there_is_no_mean_without_weights(http: httpx.Client) -> None:
    name = create(http)
    for words in (f"Nothing was added to '{name}' yet", f"The weights in '{name}' sum to zero"):
        for answer in (get(http, name, reduce="mean"), post(http, name, "take", reduce="mean")):
            problem = assert_problem(answer, 409, "nothing_to_average", words)
            assert problem["buffer"] == name
        add(http, name, [1, 2], weight=2)
        add(http, name, [1, 2], weight=-2)
    assert value(http, name) == [0, 0]
    answer = http.post("/v1/buffers/value", json={"names": [name]}, params={"reduce": "mean"})
    assert_problem(answer, 409, "nothing_to_average", name)


def test_a_take_without_a_mean_takes_nothing(http: httpx.Client) -> None:
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
    ("value", "encoding", "hex", "'list', 'base64' or 'int8'"),
    ("value", "step", "-1", "0"),
    ("value", "step", "x", "integer"),
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
    ("accumulate", "step", "-1", "0"),
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


def test_a_duplicate_parameter_is_refused(http: httpx.Client) -> None:
    name = create(http)
    answer = http.post(f"/v1/buffers/{name}/accumulate?weight=1&weight=2", json={"gradient": [1, 1]})
    assert_problem(answer, 422, "invalid_parameter", "'weight'", "2 times")
    assert_problem(http.post(f"/v1/buffers/{name}/take?timeout=0&timeout=0"), 422, "invalid_parameter", "'timeout'")
    assert_problem(http.get(f"/v1/buffers/{name}/value?step=0&step=0"), 422, "invalid_parameter", "'step'")
    assert_problem(http.post(f"/v1/buffers/{name}/zero?x=1"), 422, "unknown_parameter", "'x'")
    assert_problem(http.delete(f"/v1/buffers/{name}?x=1"), 422, "unknown_parameter", "'x'")
    assert metadata(http, name)["version"] == 0


# ----- accumulate -----


def test_accumulate_adds_a_gradient(http: httpx.Client) -> None:
    name = create(http, shape=(2, 2))
    answer = add(http, name, [[1, 2], [3, 4]])
    assert answer.headers["etag"] == '"0-1"'
    expected = {"name": name, "updated": True, "closed": False, "step": 0, "version": 1, "count": 1, "weight": 1.0}
    assert ok(answer) == expected
    answer = add(http, name, {"shape": [2, 2], "base64": "AACAPwAAAEAAAEBAAACAQA=="}, weight=0.5)
    assert ok(answer) == {**expected, "version": 2, "count": 2, "weight": 1.5}
    content = saved({"gradient": np.array([[0.5, 0], [0, -1]])})
    answer = http.post(f"/v1/buffers/{name}/accumulate", content=content, headers=SAFE)
    assert loaded(answer) == ({}, {name: {**expected, "version": 3, "count": 3, "weight": 2.5}})
    assert value(http, name) == [[2, 3], [4.5, 5]]


def test_a_body_that_is_no_gradient_gets_the_form_of_one(http: httpx.Client) -> None:
    name = create(http)
    path = f"/v1/buffers/{name}/accumulate"
    answer = http.post(path, json={"gradient": [1, 2], "weight": 3})
    assert_problem(answer, 422, "unknown_tensor", "weight goes into the query: ?weight=3")
    answer = http.post(path, content=b" [1, 2]", headers={"Content-Type": "application/json"})
    assert_problem(answer, 400, "malformed_body", 'send {"gradient": [1, 2]}')
    assert metadata(http, name)["version"] == 0
    weight = create(http, "weight")
    assert http.post("/v1/buffers/accumulate", json={weight: [1, 2]}).status_code == 200, "a buffer's name"


@pytest.mark.parametrize("gradient_dtype", FLOAT_NAMES)
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_a_gradient_may_have_another_float_dtype(http: httpx.Client, dtype: str, gradient_dtype: str) -> None:
    name = create(http, shape=(4,), dtype=dtype)
    gradient = np.array([0.1, -3, 1000, 1 / 3], DTYPES[gradient_dtype])
    expected = np.zeros(4, DTYPES[dtype])
    for _ in range(2):
        answer = http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": gradient}))
        assert answer.status_code == 200
        _, expected = in_place_accumulator_v2(expected, gradient)
    tensors, _ = loaded(get(http, name, headers=TO_SAFETENSORS))
    assert tensors["value"].tobytes() == expected.tobytes()


@pytest.mark.parametrize("gradient", [[1, 2, 3], [[1, 2]] * 4, [[[1, 2]]], []])
def test_a_gradient_that_does_not_broadcast_is_refused(http: httpx.Client, gradient: Any) -> None:
    name = create(http, shape=(3, 2))
    answer = add(http, name, gradient)
    problem = assert_problem(answer, 422, "shape_mismatch", "gradient", "[3, 2]", str(list(np.shape(gradient))))
    assert problem["tensor"] == "gradient"
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
def test_scalar_and_empty_buffers_take_gradients(http: httpx.Client, shape: tuple[int, ...]) -> None:
    name = create(http, shape=shape)
    gradient = {"shape": list(shape), "data": 1 if shape == () else []}
    assert ok(add(http, name, gradient))["count"] == 1
    taken = ok(post(http, name, "take"))["value"]
    assert (taken["shape"], taken["data"]) == (list(shape), gradient["data"])


def test_a_large_value_is_exact(http: httpx.Client) -> None:
    """The value has many chunks, and the pool computes it."""
    shape = (1021, 1021)
    name = create(http, shape=shape, keep=2)
    gradient = np.random.default_rng(5).standard_normal(shape, np.float32)
    for _ in range(2):
        answer = http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": gradient}), params={"weight": 2})
        assert answer.status_code == 200
    for answer in (
        get(http, name, headers=TO_SAFETENSORS),
        post(http, name, "take", TO_SAFETENSORS),
        get(http, name, headers=TO_SAFETENSORS, step=0),
    ):
        assert loaded(answer)[0]["value"].tobytes() == (gradient * 2 + gradient * 2).tobytes()


def test_an_add_to_another_step_is_refused(http: httpx.Client) -> None:
    name = create(http)
    assert ok(add(http, name, [1, 1], step=0))["count"] == 1
    problem = assert_problem(add(http, name, [1, 1], step=1), 409, "stale_step", name, "not begun", "step 0")
    assert (problem["buffer"], problem["step"]) == (name, 0)
    post(http, name, "take")
    before = state(http, name)
    problem = assert_problem(add(http, name, [1, 1], step=0), 409, "stale_step", name, "passed", "step 1")
    assert problem["step"] == 1
    assert_problem(add(http, name, [1, 1], step=0, do_update=False), 409, "stale_step")
    assert_problem(add(http, name, [1, 1], step=10**30), 409, "stale_step")
    assert state(http, name) == before
    assert ok(add(http, name, [1, 1], step=1))["count"] == 1


def test_do_update_and_overwrite_work_as_in_onnx_runtime(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2], weight=3)
    before = state(http, name)
    receipt = ok(add(http, name, [5, 5], do_update=False))
    expected = {"name": name, "updated": False, "closed": False, "step": 0, "version": 1, "count": 1, "weight": 3.0}
    assert receipt == expected
    assert state(http, name) == before
    receipt = ok(add(http, name, [5, 6], overwrite=True, weight=0.5))
    assert (receipt["updated"], receipt["version"], receipt["count"], receipt["weight"]) == (True, 2, 1, 0.5)
    assert value(http, name) == [2.5, 3]


def test_return_value_answers_the_value_after_the_add(http: httpx.Client) -> None:
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
def test_a_nonfinite_gradient_is_added_or_refused_by_the_buffers_rule(http: httpx.Client, gradient: Any) -> None:
    allows, rejects = create(http), create(http, nonfinite="reject")
    assert ok(add(http, allows, gradient))["count"] == 1
    assert value(http, allows) == gradient
    add(http, rejects, [1, 2])
    before = state(http, rejects)
    for params in ({}, {"overwrite": True}):
        problem = assert_problem(add(http, rejects, gradient, **params), 422, "nonfinite_gradient", "nonfinite=reject")
        assert problem["tensor"] == "gradient"
    assert state(http, rejects) == before


@pytest.mark.parametrize("nonfinite", ["allow", "reject"])
def test_nothing_of_a_gradient_of_weight_0_counts(http: httpx.Client, nonfinite: str) -> None:
    one, other = create(http, nonfinite=nonfinite), create(http, nonfinite=nonfinite)
    for name in (one, other):
        add(http, name, [1, 2])
    receipt = ok(add(http, one, ["NaN", "Infinity"], weight=0, **{"return": "value"}))
    assert (receipt["updated"], receipt["count"], receipt["weight"]) == (True, 2, 1.0)
    assert receipt["value"]["data"] == [1, 2]
    body = {one: "NaN", other: ["-Infinity", 0]}
    receipts = ok(http.post("/v1/buffers/accumulate", json=body, params={"weight": 0}))["buffers"]
    assert [(receipts[name]["count"], value(http, name)) for name in (one, other)] == [(3, [1, 2]), (2, [1, 2])]
    receipt = ok(add(http, one, ["NaN", 0], weight=0, overwrite=True))
    assert (receipt["count"], receipt["weight"], value(http, one)) == (1, 0.0, [0, 0])


def test_a_gradient_with_a_larger_norm_is_refused(http: httpx.Client) -> None:
    name, other = create(http, max_norm=5), create(http)
    assert ok(add(http, name, [3, 4], weight=7))["count"] == 1
    before = state(http, name, other)
    problem = assert_problem(add(http, name, [6, 8]), 422, "norm_too_large", "gradient", "10.0", "5.0")
    assert [problem[member] for member in ("norm", "max_norm", "tensor", "buffer")] == [10, 5, "gradient", name]
    assert assert_problem(add(http, name, ["NaN", 0]), 422, "norm_too_large")["norm"] is None
    many = http.post("/v1/buffers/accumulate", json={other: [9, 9], name: 4})
    assert assert_problem(many, 422, "norm_too_large", name)["norm"] == pytest.approx(32**0.5)
    assert state(http, name, other) == before


def test_a_sum_that_overflows_is_not_finite(http: httpx.Client) -> None:
    name = create(http, nonfinite="reject", dtype="float16")
    add(http, name, [40_000, 0])
    before = state(http, name)
    assert_problem(add(http, name, [40_000, 0]), 422, "nonfinite_gradient")
    assert_problem(add(http, name, [1, 1], weight=1e6), 422, "nonfinite_gradient")
    assert_problem(add(http, name, {"dtype": "float64", "data": [1e300, 0]}), 422, "nonfinite_gradient")
    assert state(http, name) == before


@pytest.mark.parametrize("dtype", ["int32", "int64", "bool"])
def test_a_gradient_must_be_a_float(http: httpx.Client, dtype: str) -> None:
    name = create(http)
    tensor = np.ones(2, DTYPES[dtype])
    path = f"/v1/buffers/{name}/accumulate"
    for answer in (
        add(http, name, {"dtype": dtype, "data": tensor.tolist()}),
        http.post(path, **as_file({"gradient": tensor})),
        http.post("/v1/buffers/accumulate", **as_file({name: tensor})),
    ):
        problem = assert_problem(answer, 422, "dtype_mismatch", dtype, "float32")
        assert problem["tensor"] in ("gradient", name)
    assert metadata(http, name)["version"] == 0


def test_missing_and_unknown_tensors_are_named(http: httpx.Client) -> None:
    name = create(http)
    path = f"/v1/buffers/{name}/accumulate"
    ones = np.ones(2, np.float32)
    given: Any
    for given in ({"json": {}}, as_file({})):
        assert assert_problem(http.post(path, **given), 422, "missing_tensor", "'gradient'")["tensor"] == "gradient"
    for given in (
        {"json": {"gradient": [1, 1], "grad": [1, 1]}},
        {"json": {"grad": [1, 1]}},
        as_file({"gradient": ones, "grad": ones}),
    ):
        assert assert_problem(http.post(path, **given), 422, "unknown_tensor", "'grad'", "gradient")["tensor"] == "grad"
    for given in ({"json": {}}, as_file({})):
        assert_problem(http.post("/v1/buffers/accumulate", **given), 422, "missing_tensor")
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("request_line", ["GET {name}/value", "POST {name}/zero", "POST {name}/take", "DELETE {name}"])
def test_a_request_without_a_body_ignores_its_content_type(http: httpx.Client, request_line: str) -> None:
    """Some clients send the same headers with all requests, and no Content-Length without a body."""
    name = create(http)
    method, path = request_line.format(name=name).split()
    request = http.build_request(method, f"/v1/buffers/{path}", headers={"Content-Type": "text/plain"})
    request.headers.pop("content-length", None)
    assert http.send(request).is_success
    chunked = http.request("POST", f"/v1/buffers/{name}/zero", content=iter([b"{}"]), headers=request.headers)
    assert_problem(chunked, 415, "unsupported_media_type", "'text/plain'")


@pytest.mark.parametrize("path", ["/v1/buffers/{name}/accumulate", "/v1/buffers/accumulate"])
def test_an_unreadable_body_is_refused(http: httpx.Client, path: str) -> None:
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
def test_bodies_and_answers_may_be_compressed(http: httpx.Client, coding: str) -> None:
    name, large = create(http), create(http, shape=(1000,))
    gradient = saved({"gradient": np.array([1, 2], np.float32)})
    body = json.dumps({"gradient": [1, 2]}).encode()
    if coding == "gzip":
        headers = {"Content-Encoding": "gzip"}
        path = f"/v1/buffers/{name}/accumulate"
        assert ok(http.post(path, content=gzip.compress(body), headers=headers))["count"] == 1
        answer = http.post(path, content=gzip.compress(gradient), headers={**headers, **SAFE})
        assert loaded(answer)[1][name]["count"] == 2
        many = json.dumps({name: [1, 2]}).encode()
        answer = ok(http.post("/v1/buffers/accumulate", content=gzip.compress(many), headers=headers))
        assert answer["buffers"][name]["count"] == 3
        assert_problem(http.post(path, content=b"{}", headers=headers), 400, "malformed_body", "gzip")
        made = http.put(f"/v1/buffers/{fresh()}", content=gzip.compress(b'{"shape": [3]}'), headers=headers)
        assert made.json()["shape"] == [3]
        assert value(http, name) == [3, 6]
    for answer in (
        get(http, large, headers={"Accept-Encoding": coding}),
        add(http, large, 0, {"Accept-Encoding": coding}, **{"return": "value"}),
        post(http, large, "take", {"Accept-Encoding": coding}),
    ):
        assert answer.headers["content-encoding"] == coding
        assert answer.json()["value"]["shape"] == [1000]


def test_a_mean_is_exact_for_weights_that_float32_cannot_sum(http: httpx.Client) -> None:
    name = create(http)
    for _ in range(2):
        ok(add(http, name, [0.001, 0.5], weight=3e38))
    assert value(http, name, reduce="mean") == pytest.approx([0.001, 0.5])
    assert_problem(add(http, name, [1, 1], weight=1e-46), 422, "invalid_parameter", "1e-46", "range of float32")
