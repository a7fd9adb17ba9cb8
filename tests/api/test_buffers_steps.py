"""`/v1/buffers` over real HTTP, with each store: steps, and requests for many buffers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.calls import add, create, etag, fresh, get, loaded, metadata, naming, ok, post, saved, state, value
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.serving import assert_problem

# ----- steps -----


def test_zero_begins_the_next_step(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2])
    answer = post(http, name, "zero")
    assert answer.headers["etag"] == etag(http, name) == '"1-2"'
    expected = {"name": name, "updated": True, "closed": False, "step": 1, "version": 2, "count": 0, "weight": 0.0}
    assert ok(answer) == expected
    assert value(http, name) == [0, 0]
    problem = assert_problem(get(http, name, step=0), 410, "step_gone", name, "zeroed")
    assert problem["step"] == 1
    assert loaded(post(http, name, "zero", TO_SAFETENSORS))[1][name]["step"] == 2


def test_take_answers_the_value_and_closes_the_step(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, 2], weight=2)
    add(http, name, [4, 4], weight=2)
    answer = post(http, name, "take", reduce="mean", dtype="float64")
    assert answer.headers["etag"] == etag(http, name) == '"1-3"'
    expected = {"name": name, "updated": True, "closed": True, "step": 0, "version": 3, "count": 2, "weight": 4.0}
    expected |= {"closed_by": "take", "contributors": {}}
    assert ok(answer) == {**expected, "value": {"dtype": "float64", "shape": [2], "data": [2.5, 3.0]}}
    assert value(http, name) == [0, 0]
    closed = ok(get(http, name, step=0))
    assert closed == {**expected, "updated": False, "value": {"dtype": "float32", "shape": [2], "data": [10.0, 12.0]}}
    assert value(http, name, step=0, reduce="mean") == [2.5, 3]
    add(http, name, [1, 1])
    tensors, receipts = loaded(post(http, name, "take", TO_SAFETENSORS))
    assert tensors["value"].tolist() == [1, 1]
    assert receipts == {name: {**expected, "step": 1, "version": 5, "count": 1, "weight": 1.0}}
    assert ok(post(http, name, "take", encoding="base64"))["value"]["base64"] == "AAAAAAAAAAA="


@pytest.mark.parametrize("sent", ["application/x-www-form-urlencoded", "text/plain"])
def test_a_request_without_a_body_may_have_any_content_type(http: httpx.Client, sent: str) -> None:
    """`curl -d ''` sends a form's content type."""
    name, headers = create(http), {"Content-Type": sent}
    for what in ("zero", "take"):
        answer = http.post(f"/v1/buffers/{name}/{what}", content=b"", headers=headers)
        assert ok(answer)["updated"] is True
    assert_problem(http.post(f"/v1/buffers/{name}/accumulate", content=b"", headers=headers), 400, "malformed_body")
    assert http.delete(f"/v1/buffers/{name}", headers={**headers, "Content-Length": "0"}).status_code == 204


def test_take_needs_min_count(http: httpx.Client) -> None:
    name = create(http, contributors=["x", "y"], per_contributor=2, quorum=3)
    add(http, name, [1, 2], contributor="x")
    before = state(http, name)
    for params in ({}, {"timeout": 0.05}):
        problem = assert_problem(post(http, name, "take", min_count=2, **params), 409, "too_few_gradients", name, "2")
        assert (problem["buffer"], problem["step"], problem["count"]) == (name, 0, 1)
    assert state(http, name) == before
    many = http.post("/v1/buffers/take", json=naming(name), params={"min_count": 2})
    for answer in (post(http, name, "take", min_count=2), many):
        problem = assert_problem(answer, 409, "too_few_gradients", "y is missing")
        assert (problem["missing"], problem["quorum"], problem["min_count"]) == (["y"], 3, 2)
    assert ok(post(http, name, "take", min_count=1))["count"] == 1
    assert ok(post(http, name, "take", min_count=0))["count"] == 0


@pytest.mark.parametrize("close", ["take", "quorum"])
def test_the_last_closed_steps_are_kept(http: httpx.Client, close: str) -> None:
    name = create(http, keep=3, quorum=1 if close == "quorum" else None)
    for step in range(5):
        receipt = ok(add(http, name, [step, 1], step=step))
        if close == "take":
            receipt = ok(post(http, name, "take"))
        assert (receipt["closed"], receipt["step"], receipt["count"]) == (True, step, 1)
    assert metadata(http, name)["closed_steps"] == [2, 3, 4]
    assert [value(http, name, step=step)[0] for step in (2, 3, 4)] == [2, 3, 4]
    problem = assert_problem(get(http, name, step=1), 410, "step_gone", name, "last 3")
    assert (problem["buffer"], problem["step"]) == (name, 5)
    for step in (5, 6, 10**30):
        problem = assert_problem(get(http, name, step=step), 409, "step_open", name, f"Step {step}", "step 5")
        assert (problem["step"], problem["count"]) == (5, 0)


def test_the_quorum_closes_the_step(http: httpx.Client) -> None:
    name = create(http, quorum=3)
    for count in (1, 2):
        receipt = ok(add(http, name, [1, 2], step=0))
        assert (receipt["closed"], receipt["count"]) == (False, count)
    problem = assert_problem(get(http, name, step=0), 409, "step_open", "2 of 3")
    assert problem["count"] == 2
    answer = add(http, name, [1, 2], step=0)
    assert answer.headers["etag"] == etag(http, name) == '"1-3"'
    receipt = ok(answer)
    assert (receipt["closed"], receipt["step"], receipt["count"], receipt["weight"]) == (True, 0, 3, 3.0)
    assert value(http, name, step=0) == [3, 6]
    assert value(http, name) == [0, 0]
    assert_problem(add(http, name, [1, 2], step=0), 409, "stale_step")


# ----- many buffers -----


def test_one_request_changes_many_buffers(http: httpx.Client) -> None:
    prefix = fresh("many.")
    a, b = create(http, f"{prefix}.a"), create(http, f"{prefix}.b", shape=(1,), dtype="float64")
    answer = ok(http.post("/v1/buffers/accumulate", json={b: [3], a: [1, 2]}, params={"weight": 2}))
    one = {"updated": True, "closed": False, "step": 0, "version": 1, "count": 1, "weight": 2.0}
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
    ok(http.post("/v1/buffers/accumulate", json={a: [1, 1], b: [1]}, params={"step": 1}))
    taken = ok(http.post("/v1/buffers/take", params={"prefix": prefix, "dtype": "float16"}))["buffers"]
    assert {name: one["value"]["data"] for name, one in taken.items()} == {a: [1, 1], b: [1]}
    assert taken[b]["value"]["dtype"] == "float16"
    closed = ok(http.post("/v1/buffers/value", json=naming(a, b), params={"step": 1}))["buffers"]
    assert {name: one["value"]["data"] for name, one in closed.items()} == {a: [1, 1], b: [1]}
    zeroed = ok(http.post("/v1/buffers/zero", json=naming(a)))["buffers"]
    assert zeroed == {a: {"name": a, **one, "step": 3, "version": 6, "count": 0, "weight": 0.0}}
    zeroed = ok(http.post("/v1/buffers/zero", params={"prefix": prefix}))["buffers"]
    assert {name: one["step"] for name, one in zeroed.items()} == {a: 4, b: 3}


def test_a_take_of_another_step_takes_nothing(http: httpx.Client) -> None:
    name, other = create(http), create(http)
    add(http, name, [1, 2])
    assert ok(post(http, name, "take", step=0, min_count=1))["closed"] is True
    add(http, name, [3, 4])
    before = state(http, name, other)
    for step, word in ((0, "has passed"), (2, "has not begun")):
        answer = post(http, name, "take", step=step, timeout=60, min_count=2)
        problem = assert_problem(answer, 409, "stale_step", word, "in step 1")
        assert problem["step"] == 1
    many = http.post("/v1/buffers/take", json=naming(other, name), params={"step": 0})
    assert_problem(many, 409, "stale_step", f"'{name}'")
    assert state(http, name, other) == before
    assert ok(post(http, name, "take", step=1))["value"]["data"] == [3, 4]


def test_a_prefix_without_buffers_zeroes_nothing_and_has_no_values(http: httpx.Client) -> None:
    prefix = fresh("none.")
    assert ok(http.post("/v1/buffers/zero", params={"prefix": prefix})) == {"buffers": {}}
    for what in ("take", "value"):
        answer = http.post(f"/v1/buffers/{what}", params={"prefix": prefix})
        assert_problem(answer, 404, "unknown_buffer", f"begins with '{prefix}'")


@pytest.mark.parametrize("what", ["take", "zero", "value"])
def test_unusable_names_are_refused(http: httpx.Client, what: str) -> None:
    name, path = create(http), f"/v1/buffers/{what}"
    assert_problem(http.post(path), 422, "invalid_request", '"names"', "?prefix=")
    assert_problem(http.post(path, json=[name]), 400, "malformed_body", "object")
    assert_problem(http.post(path, json={}), 422, "invalid_request", '"names"', "?prefix=")
    assert_problem(http.post(path, json={"buffers": [name]}), 422, "unknown_parameter", "'buffers'", "one of names")
    assert_problem(http.post(path, json={"names": []}), 422, "invalid_parameter", "names")
    assert_problem(http.post(path, json={"names": [5]}), 422, "invalid_parameter", "names.0", "5")
    assert_problem(http.post(path, json={"names": name}), 422, "invalid_parameter", "names")
    assert_problem(http.post(path, json={"names": ["a b"]}), 422, "invalid_parameter", "'a b'")
    assert_problem(http.post(path, json={"names": [name], "x": 1}), 422, "unknown_parameter", "'x'")
    assert_problem(http.post(path, json={"names": [name]}, params={"prefix": name}), 422, "invalid_request", "prefix")
    assert_problem(http.post(path, json={"names": [name, "a", name]}), 422, "invalid_request", f"'{name}'", "2 times")
    assert metadata(http, name)["version"] == 0


ALL_OR_NOTHING: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "unknown name": ("accumulate", {"last": "none"}, 404, "unknown_buffer"),
    "name": ("accumulate", {"last": "a b"}, 422, "invalid_parameter"),
    "shape": ("accumulate", {"gradient": [1, 2, 3]}, 422, "shape_mismatch"),
    "not finite": ("accumulate", {"gradient": ["NaN", 1]}, 422, "nonfinite_gradient"),
    "step": ("accumulate", {"params": {"step": 0}}, 409, "stale_step"),
    "weight": ("accumulate", {"params": {"weight": 1e39}}, 422, "invalid_parameter"),
    "take an unknown name": ("take", {"last": "none"}, 404, "unknown_buffer"),
    "take too few": ("take", {"params": {"min_count": 1}}, 409, "too_few_gradients"),
    "zero an unknown name": ("zero", {"last": "none"}, 404, "unknown_buffer"),
    "read an unknown name": ("value", {"last": "none"}, 404, "unknown_buffer"),
    "read an open step": ("value", {"params": {"step": 1}}, 409, "step_open"),
}


@pytest.mark.parametrize("case", ALL_OR_NOTHING)
def test_a_request_that_fails_for_one_buffer_changes_none(http: httpx.Client, case: str) -> None:
    what, wrong, status, code = ALL_OR_NOTHING[case]
    names = [create(http, shape=(2,)) for _ in range(3)]
    last = create(http, nonfinite="reject", dtype="float32")
    for name in names:
        add(http, name, [1, 2])
    post(http, last, "zero")
    if code == "stale_step":
        wrong = {"params": {"step": 0}}
    before = state(http, *names, last)
    given = [*names, wrong.get("last", last)]
    gradients = {name: [1, 1] for name in given} | {given[-1]: wrong.get("gradient", [1, 1])}
    body = gradients if what == "accumulate" else {"names": given}
    problem = assert_problem(http.post(f"/v1/buffers/{what}", json=body, params=wrong.get("params")), status, code)
    assert "Traceback" not in problem["detail"]
    assert state(http, *names, last) == before


def test_an_error_names_the_wrong_gradient(http: httpx.Client) -> None:
    names = [create(http, nonfinite="reject") for _ in range(3)]
    for wrong in ([1, 2, 3], ["NaN", 0]):
        gradients = {name: [1, 1] for name in names} | {names[1]: wrong}
        problem = http.post("/v1/buffers/accumulate", json=gradients).json()
        assert names[1] in str(problem), problem


def test_an_error_names_the_wrong_tensor_and_its_buffer(http: httpx.Client) -> None:
    a, b = create(http, nonfinite="reject"), create(http)
    problem = assert_problem(http.post("/v1/buffers/accumulate", json={a: 1, b: [1, 2, 3]}), 422, "shape_mismatch", b)
    assert (problem["tensor"], problem["buffer"]) == (b, b)
    problem = assert_problem(http.post("/v1/buffers/accumulate", json={a: "NaN", b: 1}), 422, "nonfinite_gradient")
    assert (problem["tensor"], problem["buffer"]) == (a, a)
    for dY, code in (([1, 2, 3], "shape_mismatch"), (["NaN", 1], "nonfinite_gradient")):
        answer = http.post(f"/v1/ops/ReluGrad?into=dX:{a}", json={"dY": dY, "X": [1] * len(dY)})
        problem = assert_problem(answer, 422, code)
        assert (problem["tensor"], problem["buffer"]) == ("dX", a)


def test_one_add_completes_several_quorums(http: httpx.Client) -> None:
    a, b, c = create(http, quorum=2), create(http, quorum=2), create(http, quorum=3)
    gradients = {a: [1, 1], b: [2, 2], c: [3, 3]}
    assert ok(http.post("/v1/buffers/accumulate", json=gradients))["buffers"][a]["closed"] is False
    receipts = ok(http.post("/v1/buffers/accumulate", json=gradients))["buffers"]
    assert {name: one["closed"] for name, one in receipts.items()} == {a: True, b: True, c: False}
    closed = ok(http.post("/v1/buffers/value", json=naming(a, b), params={"step": 0}))["buffers"]
    assert {name: one["value"]["data"] for name, one in closed.items()} == {a: [2, 2], b: [4, 4]}
    answer = http.post("/v1/buffers/value", json=naming(a, b, c), params={"step": 0})
    assert assert_problem(answer, 409, "step_open", c)["buffer"] == c


def test_a_buffer_named_metadata_does_not_break_safetensors(http: httpx.Client) -> None:
    """The name is refused, or a take with other buffers works."""
    name = "__metadata__"
    answer = http.put(f"/v1/buffers/{name}", json={"shape": [2]})
    if answer.status_code == 201:
        other = create(http)
        taken = http.post("/v1/buffers/take", json=naming(name, other), headers=TO_SAFETENSORS)
        http.delete(f"/v1/buffers/{name}")
        tensors, receipts = loaded(taken)
        assert tensors.keys() == receipts.keys() == {name, other}


@pytest.mark.parametrize("what", ["zero", "take", "value"])
def test_a_prefix_request_survives_concurrent_deletes(http: httpx.Client, what: str) -> None:
    """Another client deletes and creates buffers meanwhile."""
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
