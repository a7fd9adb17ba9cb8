"""Operators that write outputs over buffers with `set=`: steps that happen once, and only from what they read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from service.api.operators import rest
from service.api.operators import step as pipeline
from service.api.telemetry.metrics import KERNEL_SECONDS, OPERATOR_REQUESTS
from service.dtypes import Array
from service.errors import NothingToAverage
from service.kernels import OPERATORS
from service.kernels._op import op
from service.kernels._types import T
from tests.api.calls import add, as_file, create, fresh, loaded, metadata, ok, post, read, state, value
from tests.api.headers import KEY, REPLAYED, SAFE
from tests.serving import assert_problem, serving

STORES = ["lmdb", "postgres"]

FAMILY = "Tests"
RELU = {"dY": [1, 2], "X": [1, 1]}

WEIGHTS = {"b": [1.0], "w": [2.0, 3.0]}
GRADIENTS = {"b": [0.5], "w": [-0.5, 1.0]}

ADAMW = (
    "/v1/ops/AdamWOptimizer?from=weights:m.p.*&from=gradients:m.g.*@16&from=momentums_1:m.m.*&from=momentums_2:m.v.*"
    "&set=updated_weights:m.p.*&set=updated_momentums_1:m.m.*&set=updated_momentums_2:m.v.*&reduce=mean"
)


def relu(
    http: httpx.Client, body: Any = None, headers: Any = None, op: str = "ReluGrad", **params: Any
) -> httpx.Response:
    query = {{"sources": "from"}.get(name, name): given for name, given in params.items()}
    return http.post(f"/v1/ops/{op}", json=RELU if body is None else body, headers=headers, params=query)


def fill(http: httpx.Client, prefix: str, values: Mapping[str, list[float]], **rules: Any) -> None:
    for name, numbers in values.items():
        create(http, prefix + name, shape=(len(numbers),), **rules)
        add(http, prefix + name, numbers)


def values(http: httpx.Client, prefix: str) -> dict[str, list[float]]:
    answer = ok(http.post("/v1/buffers/value", params={"prefix": prefix}))["buffers"]
    return {name.removeprefix(prefix): one["value"]["data"] for name, one in answer.items()}


# ----- one output -----


def test_set_writes_an_output_over_a_buffer(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [7, 7], weight=3)
    answer = ok(relu(http, set=f"dX:{name}"))
    receipt = {"name": name, "updated": True, "closed": False, "step": 0, "version": 2, "count": 1, "weight": 1.0}
    assert answer == {"dX": receipt}
    assert value(http, name) == [1, 2]
    file = as_file({"dY": np.array([5, 6], np.float32), "X": np.array([-1, 1], np.float32)})
    answer = http.post("/v1/ops/ReluGrad", **file, params={"set": f"dX:{name}"})
    assert loaded(answer) == ({}, {"dX": {**receipt, "version": 3}})
    assert value(http, name) == [0, 6]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_set_creates_a_buffer_that_is_missing(http: httpx.Client, dtype: str) -> None:
    name = fresh()
    body = {"dY": {"dtype": dtype, "data": [[1, 2]]}, "X": {"dtype": dtype, "data": [[1, 1]]}}
    receipt = ok(relu(http, body, set=f"dX:{name}"))["dX"]
    assert (receipt["created"], receipt["version"]) == (True, 1)
    assert (metadata(http, name)["shape"], metadata(http, name)["dtype"]) == ([1, 2], dtype)
    assert value(http, name) == [[1, 2]]
    assert "created" not in ok(relu(http, body, set=f"dX:{name}"))["dX"]
    assert_problem(relu(http, set=f"dX:{name}"), 422, "shape_mismatch", "dX", "[1, 2]")


def test_a_large_output_goes_to_a_buffer_row_by_row(http: httpx.Client) -> None:
    name = create(http, shape=(3, 2))
    add(http, name, [[1, 1]] * 3)
    body = {"shape": [3, 2], "indices": [0, 2, 0], "grad": [[1, 1], [2, 2], [3, 3]]}
    for buffer in (name, fresh()):
        ok(relu(http, body, op="GatherGrad", set=f"output:{buffer}"))
        assert value(http, buffer) == [[4, 4], [0, 0], [2, 2]]


def test_a_step_may_read_what_it_writes(http: httpx.Client) -> None:
    name = create(http)
    add(http, name, [1, -1])
    for count in range(1, 4):
        answer = relu(http, {"X": [1, 1]}, sources=f"dY:{name}", set=f"dX:{name}")
        assert (ok(answer)["dX"]["version"], value(http, name)) == (1 + count, [1, -1])


def test_set_and_into_share_a_request(http: httpx.Client) -> None:
    body = {name: one.tolist() for name, one in OPERATORS["GRUGrad"].example_tensors.items()}
    whole = OPERATORS["GRUGrad"](OPERATORS["GRUGrad"].example_tensors, {})
    dW, dR = create(http, shape=whole["dW"].shape, quorum=5), fresh()
    query = {"set": f"dR:{dR}", "into": f"dW:{dW}", "weight": 2, "step": 0, "contributor": "a"}
    answer = ok(relu(http, body, op="GRUGrad", **query))
    assert (answer["dW"]["weight"], answer["dR"]["weight"], answer["dR"]["created"]) == (2, 1, True)
    assert answer.keys() == whole.keys()
    before = state(http, dW, dR)
    assert_problem(relu(http, body, op="GRUGrad", **{**query, "step": 3}), 409, "stale_step")
    query = {"set": f"dR:{dR}", "into": f"dW:{dW}", "contributor": "a"}
    assert_problem(relu(http, body, op="GRUGrad", **query), 409, "duplicate_contributor")
    assert state(http, dW, dR) == before
    query = {"set": [f"dR:{dR}", f"dB:{fresh()}"], "into": f"dW:{fresh()}"}
    assert_problem(relu(http, body, op="GRUGrad", **query), 404, "unknown_buffer")
    assert state(http, dW, dR) == before


def test_mistakes_in_set_are_named(http: httpx.Client) -> None:
    name = create(http)
    for wrong in ("dX", "dX:", f"dY:{name}", f":{name}", "", f"dX:{name}@1", "dX:*"):
        problem = assert_problem(relu(http, set=wrong), 422, "invalid_parameter")
        assert problem["parameter"] in ("set", "name")
    assert_problem(relu(http, set=f"dX:{name}", into=f"dX:{name}"), 422, "invalid_parameter", "dX twice")
    for more in ("weight", "step", "contributor"):
        assert_problem(relu(http, set=f"dX:{name}", **{more: "1"}), 422, "invalid_parameter", more, "into=")
    body = {name: one.tolist() for name, one in OPERATORS["GRUGrad"].example_tensors.items()}
    answer = relu(http, body, op="GRUGrad", set=f"dW:{name}", into=f"dR:{name}")
    assert_problem(answer, 422, "invalid_parameter", "set names a buffer twice")
    step = {"lr": 1, "weights": WEIGHTS, "gradients": GRADIENTS}
    problem = assert_problem(
        relu(http, step, op="SGDOptimizerV2", set=f"update_completed:{name}"), 422, "dtype_mismatch"
    )
    assert problem["tensor"] == "update_completed"
    integers = {"input": {"dtype": "int64", "data": [1]}, "split": [1]}
    assert_problem(relu(http, integers, op="SplitTraining", set=f"outputs:{name}.*"), 422, "dtype_mismatch", "int64")
    assert_problem(relu(http, set="dX:" + "x" * 201), 422, "invalid_parameter", "200 characters")
    assert metadata(http, name)["version"] == 0


def test_conditions_of_a_step(http: httpx.Client) -> None:
    name, missing = create(http), fresh()
    assert_problem(relu(http, set=f"dX:{name}", headers={"If-Match": '"0-1"'}), 412, "precondition_failed")
    assert_problem(relu(http, set=f"dX:{missing}", headers={"If-Match": "*"}), 412, "precondition_failed", missing)
    assert ok(relu(http, set=f"dX:{name}", headers={"If-Match": '"0-0"'}))
    strict = create(http, nonfinite="reject", max_norm=3)
    assert_problem(relu(http, {"dY": ["NaN", 1], "X": [1, 1]}, set=f"dX:{strict}"), 422, "norm_too_large")
    assert_problem(relu(http, {"dY": [3, 4], "X": [1, 1]}, set=f"dX:{strict}"), 422, "norm_too_large")
    assert metadata(http, strict)["version"] == 0


def test_limits_hold_for_buffers_that_set_creates() -> None:
    with serving(max_buffers=1, max_name_length=6) as url, httpx.Client(base_url=url) as http:
        problem = assert_problem(relu(http, set="dX:longer.name"), 422, "invalid_parameter", "6", "NAME_LENGTH")
        assert problem["parameter"] == "name"
        ok(relu(http, set="dX:a"))
        assert_problem(relu(http, set="dX:b"), 409, "too_many_buffers")
        ok(relu(http, set="dX:a"))


# ----- keys -----


def test_a_step_with_a_key_happens_once(http: httpx.Client) -> None:
    name, key = create(http), {KEY: fresh("key")}
    add(http, name, [1, 2])
    body, query = {"ETA": 1, "G": [1, 1]}, {"sources": f"W:{name}", "set": f"NW:{name}"}
    first = relu(http, body, key, "SGDOptimizer", **query)
    assert ok(first)["NG"]["data"] == [-1, -1]
    for _ in range(2):
        again = relu(http, body, key, "SGDOptimizer", **query)
        assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
        add(http, name, [1, 1])
    assert value(http, name) == [2, 3]
    http.delete(f"/v1/buffers/{name}")
    create(http, name)
    assert_problem(relu(http, body, key, "SGDOptimizer", **query), 410, "step_gone", "counted once")


def test_many_workers_send_a_step_that_one_does(http: httpx.Client, pool: ThreadPoolExecutor) -> None:
    run, key = fresh("run") + ".", {KEY: fresh("key")}
    fill(http, f"{run}p.", WEIGHTS)
    fill(http, f"{run}g.", GRADIENTS, quorum=2)
    params = {"sources": [f"weights:{run}p.*", f"gradients:{run}g.*@0"], "set": f"updated_weights:{run}p.*"}

    def step(_: int) -> httpx.Response:
        return relu(http, {"lr": 1}, key, "SGDOptimizerV2", **params, reduce="mean", timeout=30)

    workers = [pool.submit(step, number) for number in range(12)]
    for name, numbers in GRADIENTS.items():
        add(http, f"{run}g.{name}", numbers)
    answers = [worker.result(60) for worker in workers]
    assert len({answer.content for answer in answers}) == 1
    assert ok(answers[0])["updated_weights"]["w"]["version"] == 2
    assert sum(REPLAYED not in answer.headers for answer in answers) == 1
    assert values(http, f"{run}p.") == {"b": [0.5], "w": [2.5, 2.0]}


# ----- sources that change -----

LET_GO, READ = threading.Event(), threading.Event()
PAUSES: list[int] = []
"""How many more calls of the operator Slow wait."""
FAULTS: list[Exception] = []
"""The error of the next call that has waited."""


def slow(X: T, /) -> T:
    """Y = X + 1."""
    if PAUSES:
        PAUSES.pop()
        READ.set()
        assert LET_GO.wait(30)
        LET_GO.clear()
        if FAULTS:
            raise FAULTS.pop()
    result = X.copy()
    result += X.dtype.type(1)
    return result


def noise(X: T, /, *, seed: int | None = None) -> T:
    """Y = X + noise."""
    result = X.copy()
    result += np.asarray(np.random.default_rng(seed).standard_normal(X.shape), X.dtype)
    return result


@pytest.fixture(scope="module")
def slowly() -> Iterator[httpx.Client]:
    """Yield a client of a server with an operator that waits between its read and its commit, and one with a seed."""
    routes, added = [*rest.router.routes], {"Slow": slow, "Noise": noise}
    with pytest.MonkeyPatch.context() as patch:
        try:
            for name, kernel in added.items():
                op(name, outputs="Y", example={"X": [1.0]})(kernel)
                rest.add_endpoint(OPERATORS[name])
                for family in (OPERATOR_REQUESTS, KERNEL_SECONDS):
                    patch.setitem(family.at, name, family.at["ReluGrad"])
            with (
                serving(max_tensor_bytes=1 << 20, max_bytes_in_flight=1 << 22) as url,
                httpx.Client(base_url=url, timeout=30) as client,
            ):
                yield client
        finally:
            rest.router.routes[:] = routes
            for name in added:
                del OPERATORS[name]


def interrupted(http: httpx.Client, pool: ThreadPoolExecutor, name: str, times: int, **params: Any) -> httpx.Response:
    """Return the answer of a step during which another request adds 10 to its source, this many times."""
    PAUSES[:] = range(times)
    working = pool.submit(relu, http, {}, op="Slow", sources=f"X:{name}", **params)
    for _ in range(times):
        assert READ.wait(30)
        READ.clear()
        add(http, name, [10])
        LET_GO.set()
    return working.result(60)


def test_a_step_whose_source_has_changed_is_computed_again(slowly: httpx.Client, pool: ThreadPoolExecutor) -> None:
    name, other = create(slowly, shape=(1,)), fresh()
    assert ok(interrupted(slowly, pool, name, 2, set=f"Y:{name}"))["Y"]["version"] == 3
    assert value(slowly, name) == [21]
    ok(interrupted(slowly, pool, name, 1, set=f"Y:{other}"))
    assert value(slowly, other) == [32]
    most = pipeline.MAX_ATTEMPTS
    ok(interrupted(slowly, pool, name, most - 1, set=f"Y:{other}"))
    before = state(slowly, other)
    problem = assert_problem(interrupted(slowly, pool, name, most, set=f"Y:{other}"), 409, "source_changed", name)
    assert problem["buffer"] == name
    assert state(slowly, other) == before
    added = value(slowly, name)
    ok(interrupted(slowly, pool, name, 1, into=f"Y:{create(slowly, shape=(1,))}"))  # an add is what it was
    assert value(slowly, name) == [added[0] + 10]


def test_each_attempt_of_a_step_gives_its_memory_back(slowly: httpx.Client, pool: ThreadPoolExecutor) -> None:
    """An attempt takes half of what a request may hold."""
    name, other = create(slowly, shape=(1 << 18,)), fresh()
    ok(interrupted(slowly, pool, name, pipeline.MAX_ATTEMPTS - 1, set=f"Y:{other}"))
    assert {*read(slowly, other).tolist()} == {10 * (pipeline.MAX_ATTEMPTS - 1) + 1}


def test_a_step_that_another_worker_does_meanwhile_cannot_fail(slowly: httpx.Client, pool: ThreadPoolExecutor) -> None:
    """The step that it reads may be gone by then."""
    name, key = create(slowly, shape=(1,)), {KEY: fresh("key")}
    PAUSES[:], FAULTS[:] = [1], [NothingToAverage("the gradients are gone")]
    late = pool.submit(relu, slowly, {}, key, op="Slow", sources=f"X:{name}", set=f"Y:{name}")
    assert READ.wait(30)
    READ.clear()
    first = relu(slowly, {}, key, op="Slow", sources=f"X:{name}", set=f"Y:{name}")
    LET_GO.set()
    assert (ok(late.result(60)), late.result().headers[REPLAYED]) == (ok(first), "true")
    assert value(slowly, name) == [1]


def test_a_seed_follows_from_the_key(slowly: httpx.Client) -> None:
    def draw(key: str | None, **more: Any) -> list[float]:
        headers = None if key is None else {KEY: key}
        found: list[float] = ok(relu(slowly, {"X": [0] * 8}, headers, "Noise", **more))["Y"]["data"]
        return found

    one, other = fresh("key"), fresh("key")
    assert draw(one) == draw(one) != draw(other)
    assert draw(None) != draw(None)
    assert draw(one, seed=7) == draw(other, seed=7) == draw(None, seed=7)
    inputs = [{"name": "X", "datatype": "FP32", "shape": [8], "data": [0] * 8}]
    answer = slowly.post("/v2/models/Noise/infer", json={"inputs": inputs}, headers={KEY: one})
    assert ok(answer)["outputs"][0]["data"] == draw(one)


# ----- an optimizer -----


def test_adamw_needs_nothing_from_the_trainer(http: httpx.Client) -> None:
    for prefix in ("p", "m", "v"):
        fill(
            http,
            f"m.{prefix}.",
            WEIGHTS if prefix == "p" else {name: [0.0] * len(one) for name, one in WEIGHTS.items()},
        )
    for name in WEIGHTS:
        create(http, f"m.g.{name}", shape=(len(WEIGHTS[name]),), keep=2)
        for _ in range(16):
            post(http, f"m.g.{name}", "take")
        add(http, f"m.g.{name}", GRADIENTS[name], weight=32)
        post(http, f"m.g.{name}", "take")
    headers = {KEY: fresh("step 17 ")}
    first = http.post(ADAMW, json={"lr": 0.001, "step": 17}, headers=headers)
    assert ok(first)["updated_flag"]["data"] is True
    operator, arrays = OPERATORS["AdamWOptimizer"], dict[str, Array]()
    for group, tensors in {"weights": WEIGHTS, "gradients": GRADIENTS}.items():
        arrays |= {f"{group}.{name}": np.array(one, np.float32) for name, one in tensors.items()}
    for group in ("momentums_1", "momentums_2"):
        arrays |= {f"{group}.{name}": np.zeros(len(one), np.float32) for name, one in WEIGHTS.items()}
    arrays |= {"lr": np.array(0.001, np.float32), "step": np.array(17)}
    expected = operator(arrays, {one.name: one.default for one in operator.attributes})
    for group, prefix in {"updated_weights": "p", "updated_momentums_1": "m", "updated_momentums_2": "v"}.items():
        for name in WEIGHTS:
            assert read(http, f"m.{prefix}.{name}").tobytes() == expected[f"{group}.{name}"].tobytes()
            assert first.json()[group][name]["name"] == f"m.{prefix}.{name}"
    before = state(http, *(f"m.{prefix}.{name}" for prefix in "pmv" for name in WEIGHTS))
    again = http.post(ADAMW, json={"lr": 0.001, "step": 17}, headers=headers)
    assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
    assert state(http, *(f"m.{prefix}.{name}" for prefix in "pmv" for name in WEIGHTS)) == before


def test_gradients_are_clipped_in_their_buffers(http: httpx.Client) -> None:
    run = fresh("run") + "."
    fill(http, f"{run}g.", {"a": [3.0], "b": [4.0]})
    params = {"sources": f"gradients:{run}g.*", "set": f"clipped_gradients:{run}g.*", "max_norm": 1}
    ok(relu(http, {}, op="InplaceClipGradNorm", **params))
    assert values(http, f"{run}g.") == {"a": pytest.approx([0.6], rel=1e-5), "b": pytest.approx([0.8], rel=1e-5)}


def test_a_step_on_v2(http: httpx.Client) -> None:
    run = fresh("run") + "."
    fill(http, f"{run}p.", WEIGHTS)
    fill(http, f"{run}g.", GRADIENTS)
    for name in GRADIENTS:
        post(http, f"{run}g.{name}", "take")
    parameters = {
        "from": f"weights:{run}p.*,gradients:{run}g.*@0",
        "set": f"updated_weights:{run}p.*",
        "reduce": "mean",
    }
    inputs = [{"name": "lr", "datatype": "FP32", "shape": [1], "data": [1]}]
    headers = {KEY: fresh("key")}
    body = {"inputs": inputs, "parameters": parameters}
    first = http.post("/v2/models/SGDOptimizerV2/infer", json=body, headers=headers)
    assert [one["name"] for one in ok(first)["outputs"]] == ["update_completed"]
    receipts = json.loads(first.json()["parameters"]["receipts"])
    assert {name: one["name"] for name, one in receipts.items()} == {
        f"updated_weights.{name}": f"{run}p.{name}" for name in WEIGHTS
    }
    again = http.post("/v2/models/SGDOptimizerV2/infer", json=body, headers=headers)
    assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
    assert values(http, f"{run}p.") == {"b": [0.5], "w": [2.5, 2.0]}
    answer = http.post("/v1/ops/SGDOptimizerV2", headers=SAFE, params={"set": "x"})
    assert_problem(answer, 400, "malformed_body")
