"""Operators with `X:prefix*` and `X:buffer@step`: groups from and into buffers, and inputs from closed steps."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from service.api.operators.job import BufferUse, buffers_of
from service.api.operators.rest import EndpointQuery
from service.errors import InvalidParameter
from service.kernels import OPERATORS, Operator
from tests.api.calls import PATIENCE, add, create, fresh, metadata, ok, post, value
from tests.api.headers import KEY, REPLAYED
from tests.serving import assert_problem

SGD, SPLIT = "/v1/ops/SGDOptimizerV2", "/v1/ops/SplitTraining"

VALUES = {"b": [1.0], "w": [2.0, 3.0]}


@pytest.fixture
def run() -> str:
    """Return the prefix of a run's buffers."""
    return fresh("run") + "."


def fill(http: httpx.Client, prefix: str, values: Mapping[str, list[float]], **rules: Any) -> None:
    for name, numbers in values.items():
        create(http, prefix + name, shape=(len(numbers),), **rules)
        add(http, prefix + name, numbers)


def sgd(http: httpx.Client, *sources: str, body: Any = None, headers: Any = None, **params: Any) -> httpx.Response:
    query = {"from": [*sources], "outputs": "updated_weights", **params}
    return http.post(SGD, json=body or {"lr": 1}, params=query, headers=headers)


def data(answer: httpx.Response, name: str = "updated_weights") -> Any:
    return {member: one["data"] for member, one in ok(answer)[name].items()}


# ----- prefixes -----


def test_a_group_comes_from_all_buffers_of_a_prefix(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}p.", VALUES)
    fill(http, f"{run}g.", {"w": [1, 1], "b": [1]})
    create(http, f"{run}p")
    assert data(sgd(http, f"weights:{run}p.*", f"gradients:{run}g.*")) == {"b": [0], "w": [1, 2]}
    gradients = {"lr": 1, "gradients": VALUES}
    assert data(sgd(http, f"weights:{run}p.*", body=gradients)) == {"b": [0], "w": [0, 0]}
    create(http, f"{run}p.")  # the name of no tensor is empty
    assert data(sgd(http, f"weights:{run}p.*", body=gradients)) == {"b": [0], "w": [0, 0]}


def test_a_group_is_added_to_the_buffers_of_a_prefix(http: httpx.Client, run: str) -> None:
    for name in VALUES:
        create(http, f"{run}s.{name}", shape=(len(VALUES[name]),))
    body: Any = {"lr": 1, "weights": VALUES, "gradients": {"b": [0], "w": [0, 0]}}
    query: Any = {"into": f"updated_weights:{run}s.*", "weight": 2}
    answer = ok(http.post(SGD, json=body, params=query))
    assert answer.keys() == {"update_completed", "updated_weights"}
    assert {name: (one["name"], one["weight"]) for name, one in answer["updated_weights"].items()} == {
        "b": (f"{run}s.b", 2),
        "w": (f"{run}s.w", 2),
    }
    assert (value(http, f"{run}s.b"), value(http, f"{run}s.w")) == ([2], [4, 6])
    body["weights"], body["gradients"] = {"c": [1]}, {"c": [1]}
    assert_problem(http.post(SGD, json=body, params=query), 404, "unknown_buffer", f"{run}s.c")


def test_a_group_of_unknown_length_is_added_to_the_buffers_of_a_prefix(http: httpx.Client, run: str) -> None:
    for name in "01":
        create(http, run + name, shape=(1,))
    body = {"input": [5, 7], "split": [1, 1]}
    assert ok(http.post(SPLIT, json=body, params={"into": f"outputs:{run}*"}))["outputs"].keys() == {"0", "1"}
    assert (value(http, f"{run}0"), value(http, f"{run}1")) == ([5], [7])


def test_a_repeated_request_has_the_buffers_that_it_had(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}p.", VALUES)
    fill(http, f"{run}s.", VALUES)
    key, query = {KEY: fresh("key")}, {"into": f"updated_weights:{run}s.*"}
    body = {"lr": 0, "gradients": VALUES}
    first = sgd(http, f"weights:{run}p.*", body=body, headers=key, **query)
    assert ok(first)["updated_weights"].keys() == {"b", "w"}
    fill(http, f"{run}p.", {"more": [1]})
    post(http, f"{run}p.w", "zero")
    again = sgd(http, f"weights:{run}p.*", body=body, headers=key, **query)
    assert (again.json(), again.headers[REPLAYED]) == (first.json(), "true")
    assert value(http, f"{run}s.w") == [4, 6]
    http.delete(f"/v1/buffers/{run}s.b")
    create(http, f"{run}s.b")
    answer = sgd(http, f"weights:{run}p.*", body=body, headers=key, **query)
    assert_problem(answer, 410, "step_gone", "counted once", f"{run}s.b")


def test_mistakes_in_prefixes_are_named(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}p.", VALUES)
    for wrong, words in {
        f"weights:{run}none.*": "none.",
        f"weights:{run}p.w": "weights.NAME, gradients.NAME",
        f"lr:{run}p.*": "weights or gradients or lrs, a colon, a prefix of names and *",
        f"weights.w:{run}p.*": "weights or gradients",
        "weights:m p.*": "no buffer has such a prefix",
        "weights:*@": "behind the @",
        "weights:m*@x": "behind the @",
        "weights:m*@-1": "behind the @",
        f"weights:{run}p.*@{10**15}": "behind the @",
        "lr:m@1@2": "not a buffer name",
    }.items():
        status, code = (404, "unknown_buffer") if "none" in wrong else (422, "invalid_parameter")
        assert_problem(sgd(http, wrong, body={"lr": 1, "gradients": VALUES}), status, code, words)
    whole, part = f"weights:{run}p.*", f"weights.b:{run}p.b"
    assert_problem(sgd(http, whole, whole), 422, "invalid_parameter", "weights twice")
    assert_problem(sgd(http, whole, part), 422, "invalid_parameter", "weights both as a group and as single tensors")
    body = {"lr": 1, "weights": {"w": [1, 1]}, "gradients": VALUES}
    assert_problem(sgd(http, whole, body=body), 422, "invalid_parameter", "weights.w", "body")
    for into, words in {
        "updated_weights:m.*@1": "updated_weights.NAME",
        "updated_weights:m@1": "updated_weights.NAME",
        "updated_weights.w:m@1": "not a buffer name",
    }.items():
        assert_problem(sgd(http, whole, into=into), 422, "invalid_parameter", words)
    answer = sgd(http, whole, into="updated_weights:m.*", headers={"If-Match": "*"})
    assert_problem(answer, 422, "invalid_parameter", "If-Match")
    body = {"lr": 1, "weights": {"a b": [1]}, "gradients": {"a b": [1]}}
    assert_problem(sgd(http, into="updated_weights:m.*", body=body), 422, "invalid_parameter", "'m.a b'")


def test_prefixes_on_v2(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}p.", VALUES)
    fill(http, f"{run}s.", VALUES)
    post(http, f"{run}p.w", "take")
    parameters = {
        "from": f"weights:{run}s.*,gradients.w:{run}p.w@0,gradients.b:{run}p.b",
        "into": f"updated_weights:{run}s.*",
        "reduce": "mean",
    }
    inputs = [{"name": "lr", "datatype": "FP32", "shape": [1], "data": [2]}]
    body = {"inputs": inputs, "parameters": parameters}
    answer = ok(http.post("/v2/models/SGDOptimizerV2/infer", json=body))
    receipts = json.loads(answer["parameters"]["receipts"])
    assert receipts.keys() == {"updated_weights.b", "updated_weights.w"}
    assert value(http, f"{run}s.w") == [0, 0]
    parameters["from"] = f"weights:{run}s.*,gradients:{run}p.*@1"
    error = http.post("/v2/models/SGDOptimizerV2/infer", json=body)
    assert (error.status_code, "Step 1" in error.json()["error"]) == (409, True)


# ----- names with colons, and groups whose names are fixed -----


def parsed(operator: Operator, *sources: str, into: tuple[str, ...] = ()) -> BufferUse:
    return buffers_of(operator, sources, into, (), EndpointQuery())


def test_a_tensor_may_have_colons_in_its_name() -> None:
    relu = OPERATORS["ReluGrad"]
    dY, X = relu.inputs
    named = replace(relu, inputs=(replace(dY, name="onnx::Gemm_0"), X, replace(X, name="X:y")))
    pairs = [(one.tensor, one.buffer) for one in parsed(named, "onnx::Gemm_0:a", "X:a:b", "X:y:b").sources]
    assert pairs == [("onnx::Gemm_0", "a"), ("X", "a:b"), ("X:y", "b")]
    with pytest.raises(InvalidParameter):
        parsed(named, "onnx:a")
    step = OPERATORS["SGDOptimizerV2"]
    (use,) = parsed(step, "weights.a:b:c").sources
    assert (use.tensor, use.buffer) == ("weights.a", "b:c")


def test_a_group_may_have_fixed_names() -> None:
    step = OPERATORS["SGDOptimizerV2"]
    lr, weights, *rest = step.inputs
    fixed = replace(step, inputs=(lr, replace(weights, members=("onnx::w", "b")), *rest))
    (use,) = parsed(fixed, "weights.onnx::w:m.w").sources
    assert (use.tensor, use.buffer) == ("weights.onnx::w", "m.w")
    with pytest.raises(InvalidParameter):
        parsed(fixed, "weights.c:m.c")


def test_an_output_has_one_buffer_only() -> None:
    step = OPERATORS["AdamWOptimizer"]
    use = parsed(step, into=("updated_weights:m.*", "updated_momentums_1.w:m.w1", "updated_momentums_2:n.*"))
    names = {"updated_weights.w": "m.w", "updated_momentums_1.w": "m.w1", "updated_momentums_2.a.b": "n.a.b"}
    for output, buffer in names.items():
        target = use.target_of(output)
        assert target is not None
        assert (target.buffer, use.output_of(buffer)) == (buffer, output)
    assert use.target_of("updated_momentums_1.b") is None
    for into in (
        ("updated_weights:m.*", "updated_momentums_1:m.v.*"),
        ("updated_weights:*", "updated_momentums_1:m.*"),
        ("updated_weights:m.*", "updated_momentums_1:m.*"),
        ("updated_weights.a:m", "updated_momentums_1.a:m"),
    ):
        with pytest.raises(InvalidParameter):
            parsed(step, into=into)


# ----- closed steps -----


def test_an_input_may_come_from_a_closed_step(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}g.", VALUES, keep=2)
    for name in VALUES:
        add(http, f"{run}g.{name}", VALUES[name], weight=3)
        post(http, f"{run}g.{name}", "take")
        add(http, f"{run}g.{name}", [7])
    weights = {"lr": 1, "weights": {"b": [0], "w": [0, 0]}}
    source = f"gradients:{run}g.*@0"
    assert data(sgd(http, source, body=weights)) == {"b": [-4], "w": [-8, -12]}
    assert data(sgd(http, source, body=weights, reduce="sum")) == {"b": [-4], "w": [-8, -12]}
    assert data(sgd(http, source, body=weights, reduce="mean")) == {"b": [-1], "w": [-2, -3]}
    assert data(sgd(http, f"gradients:{run}g.*", body=weights)) == {"b": [-7], "w": [-7, -7]}
    mixed = sgd(http, f"gradients.w:{run}g.w@0", f"gradients.b:{run}g.b", body=weights, reduce="mean")
    assert data(mixed) == {"b": [-7], "w": [-2, -3]}
    problem = assert_problem(sgd(http, f"gradients:{run}g.*@1", body=weights), 409, "step_open", f"{run}g.b")
    assert (problem["buffer"], problem["step"], problem["op"]) == (f"{run}g.b", 1, "SGDOptimizerV2")
    for _ in range(2):
        post(http, f"{run}g.w", "take")
    assert_problem(sgd(http, source, body=weights), 410, "step_gone", f"{run}g.w")
    for params in ({"reduce": "mean"}, {"reduce": "sum"}, {"timeout": 1}):
        answer = sgd(http, f"gradients:{run}g.*", body=weights, **params)
        assert_problem(answer, 422, "invalid_parameter", "closed step", next(iter(params)))
    assert_problem(sgd(http, source, body=weights, timeout=1e9), 422, "invalid_parameter", "timeout")


def test_a_mean_needs_a_weight(http: httpx.Client, run: str) -> None:
    name = create(http, f"{run}g.w")
    post(http, name, "take")
    answer = sgd(http, f"gradients:{run}g.*@0", body={"lr": 1, "weights": {"w": [0, 0]}}, reduce="mean")
    problem = assert_problem(answer, 409, "nothing_to_average", name)
    assert problem["receipt"]["closed"]


def test_a_request_waits_until_all_its_steps_have_closed(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}g.", VALUES, quorum=2)
    weights = {"lr": 1, "weights": {"b": [0], "w": [0, 0]}}
    query: dict[str, Any] = {"timeout": PATIENCE, "reduce": "mean"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sgd, http, f"gradients:{run}g.*@0", body=weights, **query)
        for name in VALUES:
            assert not waiting.done()
            add(http, run + "g." + name, VALUES[name])
        assert data(waiting.result(PATIENCE)) == {"b": [-1], "w": [-2, -3]}
    began = time.monotonic()
    answer = sgd(http, f"gradients:{run}g.*@1", body=weights, timeout=0.2)
    assert_problem(answer, 409, "step_open", f"{run}g.b", "count is 0 of 2")
    assert time.monotonic() - began > 0.2


def test_a_deadline_closes_a_step_before_it_is_read(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}g.", {"w": [1, 2]}, deadline_seconds=0.05)
    body = {"lr": 1, "weights": {"w": [0, 0]}}
    assert data(sgd(http, f"gradients:{run}g.*@0", body=body, timeout=PATIENCE)) == {"w": [-1, -2]}
    add(http, f"{run}g.w", [3, 4])
    time.sleep(0.06)  # the deadline, by any clock: the machine's may be set while the store's runs on
    assert data(sgd(http, f"gradients:{run}g.*@1", body=body)) == {"w": [-3, -4]}


def test_a_repeated_request_waits_for_no_step(http: httpx.Client, run: str) -> None:
    fill(http, f"{run}g.", {"w": [1, 2]}, quorum=1)
    name, key = create(http), {KEY: fresh("key")}
    query: dict[str, Any] = {"into": f"updated_weights.w:{name}", "timeout": PATIENCE}
    body = {"lr": 1, "weights": {"w": [0, 0]}}
    first = sgd(http, f"gradients:{run}g.*@0", body=body, headers=key, **query)
    http.delete(f"/v1/buffers/{run}g.w")
    create(http, f"{run}g.w")
    again = sgd(http, f"gradients:{run}g.*@0", body=body, headers=key, **query)
    assert (ok(again), again.headers[REPLAYED]) == (ok(first), "true")
    assert (value(http, name), metadata(http, name)["count"]) == ([-1, -2], 1)


def test_a_scalar_loss_stays_with_its_key(http: httpx.Client, run: str) -> None:
    """What a repeated request answers is the original answer, though its inputs have changed."""
    fill(http, f"{run}p.", VALUES)
    fill(http, f"{run}s.", VALUES)
    key = {KEY: fresh("key")}
    body = {"lr": 0, "gradients": VALUES}
    params = {"from": f"weights:{run}p.*", "into": f"updated_weights:{run}s.*"}
    first = http.post(SGD, json=body, params=params, headers=key)
    assert ok(first)["update_completed"]["data"] is True
    post(http, f"{run}p.w", "zero")
    again = http.post(SGD, json=body, params=params, headers=key)
    assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
