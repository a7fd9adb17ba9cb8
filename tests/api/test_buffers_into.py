"""Operators whose inputs come from buffers, and whose outputs are added into them, on /v1 and on /v2."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton  # type: ignore[import-untyped]
from tritonclient.utils import InferenceServerException  # type: ignore[import-untyped]

from service.dtypes import DTYPES, OPEN_INFERENCE
from service.kernels import OPERATORS, Operator
from tests.api.calls import add, as_file, create, fresh, loaded, metadata, ok, post, read, state, value
from tests.api.headers import KEY, REPLAYED, SAFE
from tests.cases import case
from tests.serving import assert_problem
from tests.test_contract import EVERY, assert_same, decode, example

RELU = {"dY": [1, 2], "X": [1, 1]}

GRU = OPERATORS["GRUGrad"]


def run(http: httpx.Client, op: str, body: Any, headers: Any = None, **params: Any) -> httpx.Response:
    names = {"sources": "from"}
    query = {names.get(name, name): given for name, given in params.items()}
    return http.post(f"/v1/ops/{op}", json=body, headers=headers, params=query)


def stored(http: httpx.Client, array: Any, dtype: str = "float32") -> str:
    """Create a buffer with these numbers and return its name."""
    array = np.asarray(array, DTYPES[dtype])
    name = create(http, shape=array.shape, dtype=dtype)
    answer = http.post(f"/v1/buffers/{name}/accumulate", **as_file({"gradient": array}))
    assert answer.status_code == 200, answer.text
    return name


# ----- from -----


@EVERY
def test_every_input_of_floats_may_come_from_a_buffer(http: httpx.Client, operator: Operator) -> None:
    for dtype in ("float16", "float32"):
        with case(dtype):
            assert_come_from_buffers(http, operator, dtype)


def assert_come_from_buffers(http: httpx.Client, operator: Operator, dtype: str) -> None:
    tensors = example(operator, {"float": dtype})
    kept = {name: stored(http, one, dtype) for name, one in tensors.items() if one.dtype == dtype}
    rest = {name: tensor for name, tensor in tensors.items() if name not in kept}
    params = {"from": [f"{name}:{buffer}" for name, buffer in kept.items()], **operator.example_attributes}
    answer = http.post(f"/v1/ops/{operator.name}", params=params, **as_file(rest, Accept="application/json"))
    assert_same(decode(answer), operator(tensors, operator.example_attributes))
    for name, buffer in kept.items():
        assert metadata(http, buffer)["version"] == 1
        assert read(http, buffer).tobytes() == tensors[name].tobytes()


def test_one_buffer_may_be_two_inputs(http: httpx.Client) -> None:
    name = stored(http, [-1, 2])
    answer = ok(run(http, "ReluGrad", {}, sources=[f"dY:{name}", f"X:{name}"]))
    assert answer["dX"]["data"] == [0, 2]
    add(http, name, [3, 3])
    answer = ok(run(http, "ReluGrad", {"X": [1, 1]}, sources=f"dY:{name}"))
    assert answer["dX"]["data"] == [2, 5]


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/x-www-form-urlencoded"}])
def test_a_request_needs_no_body_if_buffers_hold_every_input(http: httpx.Client, headers: dict[str, str]) -> None:
    name = stored(http, [-1, 2])
    one, both = {"from": [f"X:{name}"]}, {"from": [f"X:{name}", f"dY:{name}"]}
    assert ok(http.post("/v1/ops/ReluGrad", params=both, headers=headers))["dX"]["data"] == [0, 2]
    assert_problem(http.post("/v1/ops/ReluGrad", params=one, headers=headers), 422, "missing_tensor", "dY")
    answer = http.post("/v1/ops/ReluGrad", params=both, headers=SAFE)
    assert loaded(answer)[0]["dX"].tolist() == [0, 2]
    assert_problem(http.post("/v1/ops/ReluGrad", headers=headers), 400, "malformed_body", "empty")


def test_an_input_may_come_from_a_large_buffer(http: httpx.Client) -> None:
    numbers = np.random.default_rng(1).standard_normal((300, 1000), np.float32)
    name = stored(http, numbers)
    answer = http.post("/v1/ops/ReluGrad", params={"from": [f"X:{name}", f"dY:{name}"]}, **as_file({}))
    assert loaded(answer)[0]["dX"].tobytes() == np.where(numbers > 0, numbers, np.float32(0)).tobytes()


def test_mistakes_in_from_are_named(http: httpx.Client) -> None:
    name, narrow = stored(http, [1, 2]), stored(http, [1, 2], "float16")
    problem = assert_problem(run(http, "ReluGrad", RELU, sources=f"X:{name}"), 422, "invalid_parameter", "X", name)
    assert problem["parameter"] == "from"
    answer = http.post("/v1/ops/ReluGrad", params={"from": f"X:{name}"}, **as_file({"X": np.ones(2), "dY": np.ones(2)}))
    assert_problem(answer, 422, "invalid_parameter", "X", name)
    gradient = {"dY": [1, 2]}
    answer = run(http, "ReluGrad", gradient, sources="X:none-there")
    problem = assert_problem(answer, 404, "unknown_buffer", "none-there")
    assert (problem["buffer"], problem["op"]) == ("none-there", "ReluGrad")
    assert_problem(run(http, "ReluGrad", gradient, sources=f"X:{narrow}"), 422, "dtype_mismatch", "float16", "float32")
    indices = {"shape": [2], "grad": [1, 2]}
    assert_problem(run(http, "GatherGrad", indices, sources=f"indices:{name}"), 422, "dtype_mismatch", "indices")
    assert_problem(run(http, "ReluGrad", {}, sources=f"X:{name}"), 422, "missing_tensor", "'dY'")
    assert_problem(run(http, "ReluGrad", {"dY": [1, 2, 3]}, sources=f"X:{name}"), 422, "shape_mismatch", "X")
    for wrong in ("X", "X:", f"Z:{name}", f":{name}", ""):
        answer = run(http, "ReluGrad", gradient, sources=wrong)
        problem = assert_problem(answer, 422, "invalid_parameter", "from", "dY, X")
        assert problem["parameter"] == "from"
    assert_problem(run(http, "ReluGrad", gradient, sources="X:a b"), 422, "invalid_parameter", "'a b'")
    twice = run(http, "ReluGrad", gradient, sources=[f"X:{name}", f"X:{narrow}"])
    assert_problem(twice, 422, "invalid_parameter", "from", "twice")


# ----- into -----


def test_into_answers_a_receipt_in_place_of_the_output(http: httpx.Client) -> None:
    name = create(http)
    receipt = {"name": name, "updated": True, "closed": False, "step": 0, "version": 1, "count": 1, "weight": 1.0}
    assert ok(run(http, "ReluGrad", RELU, into=f"dX:{name}")) == {"dX": receipt}
    file = as_file({"dY": np.array([5, 6], np.float32), "X": np.array([-1, 1], np.float32)})
    answer = http.post("/v1/ops/ReluGrad", **file, params={"into": f"dX:{name}", "weight": 2})
    assert loaded(answer) == ({}, {"dX": {**receipt, "version": 2, "count": 2, "weight": 3.0}})
    assert value(http, name) == [1, 14]


ADDABLE = [one for one in OPERATORS.values() if any("float32" in output.kind.dtypes for output in one.outputs)]


@pytest.mark.parametrize("operator", ADDABLE, ids=lambda one: one.name)
def test_into_equals_the_operator_and_then_accumulate(http: httpx.Client, operator: Operator) -> None:
    added = 0
    for dtype in ("float16", "float32"):
        with case(dtype):
            added += assert_adds_outputs(http, operator, dtype)
    assert added


def assert_adds_outputs(http: httpx.Client, operator: Operator, dtype: str) -> int:
    """Check the sums of all outputs of the dtype. Return how many there are."""
    tensors = example(operator, {"float": dtype})
    whole = operator(tensors, operator.example_attributes)
    floats = {name: one for name, one in whole.items() if one.dtype.name == dtype}
    if not floats:
        return 0
    start = {name: np.full(one.shape, 0.1, DTYPES[dtype]) for name, one in floats.items()}
    kept = {name: stored(http, one, dtype) for name, one in start.items()}
    expected = {name: stored(http, one, dtype) for name, one in start.items()}
    params: dict[str, Any] = {"into": [f"{name}:{buffer}" for name, buffer in kept.items()], "weight": -0.3}
    answer = http.post(f"/v1/ops/{operator.name}", **as_file(tensors), params={**params, **operator.example_attributes})
    outputs, receipts = loaded(answer)
    assert_same(outputs, {name: one for name, one in whole.items() if name not in floats})
    assert {name: one["count"] for name, one in receipts.items()} == dict.fromkeys(floats, 2)
    for name, one in floats.items():
        path = f"/v1/buffers/{expected[name]}/accumulate"
        http.post(path, **as_file({"gradient": one}), params={"weight": -0.3})
        assert read(http, kept[name]).tobytes() == read(http, expected[name]).tobytes()
    return len(floats)


def test_several_outputs_go_into_several_buffers(http: httpx.Client) -> None:
    tensors = example(GRU)
    whole = GRU(tensors, {})
    kept = {name: create(http, shape=whole[name].shape, dtype="float64") for name in ("dW", "dR", "dB")}
    into = [f"{name}:{buffer}" for name, buffer in kept.items()]
    body = {name: tensor.tolist() for name, tensor in tensors.items()}
    for count in (1, 2):
        answer = ok(run(http, "GRUGrad", body, into=into, step=0))
        assert answer.keys() == whole.keys()
        for name, one in answer.items():
            if name in kept:
                assert (one["name"], one["count"], one["version"]) == (kept[name], count, count)
            else:
                assert_same({name: np.array(one["data"], np.float32).reshape(one["shape"])}, {name: whole[name]})
    for name, buffer in kept.items():
        assert read(http, buffer).tobytes() == (whole[name].astype(np.float64) * 2).tobytes()


def test_outputs_may_be_answered_beside_into(http: httpx.Client) -> None:
    tensors = example(GRU)
    whole = GRU(tensors, {})
    body = {name: tensor.tolist() for name, tensor in tensors.items()}
    dW, dR = create(http, shape=whole["dW"].shape), create(http, shape=whole["dR"].shape)
    answer = ok(run(http, "GRUGrad", body, into=[f"dW:{dW}", f"dR:{dR}"], outputs="dX,dR"))
    assert answer.keys() == {"dX", "dR", "dW"}
    assert [answer["dR"]["name"], answer["dW"]["name"]] == [dR, dW]
    assert np.array_equal(np.float32(answer["dX"]["data"]), whole["dX"])
    answer = ok(run(http, "GRUGrad", body, into=f"dW:{dW}", outputs="dW"))
    assert {name: one["count"] for name, one in answer.items()} == {"dW": 2}
    assert read(http, dW).tobytes() == (whole["dW"] * 2).tobytes()
    assert read(http, dR).tobytes() == whole["dR"].tobytes()


def test_into_adds_all_outputs_or_none(http: httpx.Client) -> None:
    tensors = example(GRU)
    whole = GRU(tensors, {})
    body = {name: tensor.tolist() for name, tensor in tensors.items()}
    right = {name: create(http, shape=whole[name].shape) for name in ("dW", "dR")}
    wrong = create(http, shape=(7,))
    before = state(http, *right.values(), wrong)
    into = [f"{name}:{buffer}" for name, buffer in right.items()]
    problem = assert_problem(run(http, "GRUGrad", body, into=[*into, f"dB:{wrong}"]), 422, "shape_mismatch", "[7]")
    assert problem["op"] == "GRUGrad"
    assert_problem(run(http, "GRUGrad", body, into=[*into, f"dB:{fresh()}"]), 404, "unknown_buffer")
    assert state(http, *right.values(), wrong) == before


def test_into_takes_a_weight_and_a_step(http: httpx.Client) -> None:
    name = create(http, quorum=2)
    assert ok(run(http, "ReluGrad", RELU, into=f"dX:{name}", weight=0.5, step=0))["dX"]["weight"] == 0.5
    receipt = ok(run(http, "ReluGrad", RELU, into=f"dX:{name}", weight=2, step=0))["dX"]
    assert (receipt["closed"], receipt["count"], receipt["weight"]) == (True, 2, 2.5)
    assert value(http, name, step=0) == [2.5, 5]
    before = state(http, name)
    problem = assert_problem(run(http, "ReluGrad", RELU, into=f"dX:{name}", step=0), 409, "stale_step", name)
    assert (problem["step"], problem["op"]) == (1, "ReluGrad")
    assert_problem(run(http, "ReluGrad", RELU, into=f"dX:{name}", weight=1e39), 422, "invalid_parameter", "weight")
    for parameter, wrong in (("weight", "nan"), ("weight", "x"), ("step", "-1"), ("step", "1.5")):
        answer = run(http, "ReluGrad", RELU, into=f"dX:{name}", **{parameter: wrong})
        assert_problem(answer, 422, "invalid_parameter", parameter)
    for parameter in ("weight", "step"):
        for more in ({}, {"sources": f"dY:{name}"}):
            body = {"X": [1, 1]} if more else RELU
            answer = run(http, "ReluGrad", body, **{parameter: "1"}, **more)
            assert assert_problem(answer, 422, "invalid_parameter", "into")["parameter"] == parameter
    assert_problem(http.post("/v1/ops/ReluGrad?weight=1&weight=1", json=RELU), 422, "invalid_parameter", "2 times")
    assert state(http, name) == before


def test_a_nonfinite_output_is_refused(http: httpx.Client) -> None:
    name = create(http, nonfinite="reject")
    answer = run(http, "ReluGrad", {"dY": ["NaN", 1], "X": [1, 1]}, into=f"dX:{name}")
    assert_problem(answer, 422, "nonfinite_gradient")
    body = {"shape": [2], "indices": [1], "grad": ["Infinity"]}
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "nonfinite_gradient")
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize("nonfinite", ["allow", "reject"])
def test_nothing_of_an_output_of_weight_0_counts(http: httpx.Client, nonfinite: str) -> None:
    name = create(http, nonfinite=nonfinite)
    add(http, name, [1, 2])
    body = {"shape": [2], "indices": [1], "grad": ["Infinity"]}
    assert ok(run(http, "GatherGrad", body, into=f"output:{name}", weight=0))["output"]["count"] == 2
    body = {"dY": ["NaN", 1], "X": [1, 1]}
    assert ok(run(http, "ReluGrad", body, into=f"dX:{name}", weight=0))["dX"]["count"] == 3
    assert (value(http, name), metadata(http, name)["weight"]) == ([1, 2], 1.0)


def test_an_output_with_a_larger_norm_is_refused(http: httpx.Client) -> None:
    name = create(http, max_norm=5)
    for grad in ([3, 4, 1], [5, 4, -1]):
        body = {"shape": [2], "indices": [0, 1, 1], "grad": grad}
        problem = assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "norm_too_large", "output")
        assert problem["norm"] == pytest.approx((grad[0] ** 2 + (grad[1] + grad[2]) ** 2) ** 0.5)
    assert_problem(run(http, "ReluGrad", {"dY": [6, 8], "X": [1, 1]}, into=f"dX:{name}"), 422, "norm_too_large", "dX")
    assert metadata(http, name)["version"] == 0
    assert ok(run(http, "ReluGrad", {"dY": [6, 4], "X": [-1, 1]}, into=f"dX:{name}"))["dX"]["count"] == 1


def test_mistakes_in_into_are_named(http: httpx.Client) -> None:
    name = create(http)
    for wrong in ("dX", "dX:", f"dY:{name}", f":{name}", ""):
        problem = assert_problem(run(http, "ReluGrad", RELU, into=wrong), 422, "invalid_parameter", "into", "dX")
        assert problem["parameter"] == "into"
    assert_problem(run(http, "ReluGrad", RELU, into="dX:a b"), 422, "invalid_parameter", "'a b'")
    twice = run(http, "ReluGrad", RELU, into=[f"dX:{name}", f"dX:{create(http)}"])
    assert_problem(twice, 422, "invalid_parameter", "into", "twice")
    body = {name: one.tolist() for name, one in example(GRU).items()}
    same = run(http, "GRUGrad", body, into=[f"dW:{name}", f"dR:{name}"])
    assert assert_problem(same, 422, "invalid_parameter", "buffer twice")["parameter"] == "into"
    assert_problem(run(http, "ReluGrad", {"dY": [1], "X": [1, 2]}, into=f"dX:{name}"), 422, "shape_mismatch")
    assert_problem(run(http, "ReluGrad", RELU, into=f"dX:{fresh()}"), 404, "unknown_buffer")
    assert metadata(http, name)["version"] == 0


@pytest.mark.parametrize(("op", "output"), [("InPlaceAccumulatorV2", "updated"), ("BroadcastGradientArgs", "A_axes")])
def test_an_output_that_is_not_a_float_is_not_added(http: httpx.Client, op: str, output: str) -> None:
    name, body = create(http, shape=(1,)), dict(OPERATORS[op].example)
    before = state(http, name)
    problem = assert_problem(run(http, op, body, into=f"{output}:{name}"), 422, "dtype_mismatch", output)
    assert problem["op"] == op
    assert state(http, name) == before


def test_one_buffer_may_be_input_and_target(http: httpx.Client) -> None:
    name = stored(http, [1, -2])
    assert ok(run(http, "ReluGrad", {"dY": [5, 5]}, sources=f"X:{name}", into=f"dX:{name}"))["dX"]["count"] == 2
    assert value(http, name) == [6, -2]


def test_an_output_is_broadcast_into_its_buffer(http: httpx.Client) -> None:
    name = create(http, shape=(3, 2))
    ok(run(http, "ReluGrad", {"dY": [[0], [7], [0]], "X": [[1], [1], [1]]}, into=f"dX:{name}"))
    assert value(http, name) == [[0, 0], [7, 7], [0, 0]]
    ok(run(http, "GatherGrad", {"shape": [3, 1], "indices": [1], "grad": [[7]]}, into=f"output:{name}"))
    assert value(http, name) == [[0, 0], [14, 14], [0, 0]]
    body = {"shape": [3], "indices": [1], "grad": [7]}
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "shape_mismatch", "[3]", "[3, 2]")


GATHERS: dict[str, tuple[tuple[int, ...], Any, int]] = {
    "rows": ((50, 7), [3, 0, 49], 0),
    "duplicates": ((50, 7), [3, 3, -1, 49, 3, 0, 49], 0),
    "columns": ((50, 7), [6, 0, 6, 6], 1),
    "indices of rank 2": ((9, 5, 4), [[1, 2], [2, -3]], 1),
    "a scalar index": ((9, 5), 4, 0),
    "no index": ((9, 5), np.zeros(0), 0),
    "large": ((4000, 60), np.random.default_rng(2).integers(-4000, 4000, 900), 0),
    "large, along the last axis": ((60, 4000), np.random.default_rng(3).integers(0, 4000, 300), 1),
}


@pytest.mark.parametrize("buffer_dtype", ["float16", "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", GATHERS)
def test_gather_into_equals_gather_and_accumulate(http: httpx.Client, case: str, dtype: str, buffer_dtype: str) -> None:
    shape, indices, axis = GATHERS[case]
    indices = np.asarray(indices, np.int64)
    rng = np.random.default_rng(4)
    grad = rng.standard_normal((*shape[:axis], *indices.shape, *shape[axis + 1 :])).astype(DTYPES[dtype])
    tensors = {"shape": np.array(shape), "indices": indices, "grad": grad}
    (whole,) = OPERATORS["GatherGrad"](tensors, {"axis": axis}).values()
    start = rng.standard_normal(shape).astype(DTYPES[buffer_dtype])
    one, other = stored(http, start, buffer_dtype), stored(http, start, buffer_dtype)
    params: dict[str, Any] = {"axis": axis, "into": f"output:{one}", "weight": 0.7}
    answer = http.post("/v1/ops/GatherGrad", **as_file(tensors), params=params)
    assert loaded(answer)[1]["output"]["count"] == 2
    http.post(f"/v1/buffers/{other}/accumulate", **as_file({"gradient": whole}), params={"weight": 0.7})
    assert read(http, one).tobytes() == read(http, other).tobytes()
    assert metadata(http, one)["weight"] == metadata(http, other)["weight"]


def test_mistakes_in_gather_into_are_named(http: httpx.Client) -> None:
    name = create(http, shape=(3, 2))
    body = {"shape": [3, 2], "indices": [3], "grad": [[1, 2]]}
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "index_out_of_range", "indices[0] is 3")
    body = {"shape": [2, 3], "indices": [0], "grad": [[1, 2, 3]]}
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "shape_mismatch", "[2, 3]", "[3, 2]")
    body = {"shape": [3, 2], "indices": [0], "grad": [[1, 2, 3]]}
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}"), 422, "shape_mismatch", "grad")
    assert_problem(run(http, "GatherGrad", body, into=f"output:{name}", axis=2), 422, "axis_out_of_range")
    assert_problem(run(http, "GatherGrad", {"shape": [3, 2]}, into=f"output:{name}"), 422, "missing_tensor")
    assert metadata(http, name)["version"] == 0


# ----- /v2 -----


def infer(http: httpx.Client, op: str, tensors: Any, parameters: Any, headers: Any = None, **more: Any) -> Any:
    arrays = {name: np.asarray(one, np.float32) for name, one in tensors.items()}
    inputs = [
        {"name": name, "datatype": "FP32", "shape": one.shape, "data": one.ravel().tolist()}
        for name, one in arrays.items()
    ]
    body = {"inputs": inputs, "parameters": parameters, **more}
    return http.post(f"/v2/models/{op}/infer", content=json.dumps(body), headers=headers)


def receipts_of(answer: httpx.Response) -> Any:
    return json.loads(ok(answer)["parameters"]["receipts"])


def test_v2_takes_inputs_from_buffers_and_adds_outputs(http: httpx.Client) -> None:
    source, name = stored(http, [1, -1]), create(http)
    answer = infer(http, "ReluGrad", {"dY": [2, 3]}, {"from": f"X:{source}"})
    assert ok(answer)["outputs"][0]["data"] == [2, 0]
    assert "parameters" not in answer.json()
    parameters = {"from": f"X:{source}", "into": f"dX:{name}", "weight": 0.5, "step": 0}
    answer = infer(http, "ReluGrad", {"dY": [2, 3]}, parameters, id="x")
    receipt = {"name": name, "updated": True, "closed": False, "step": 0, "version": 1, "count": 1, "weight": 0.5}
    assert receipts_of(answer) == {"dX": receipt}
    assert (answer.json()["outputs"], answer.json()["id"]) == ([], "x")
    assert value(http, name) == [1, 0]


def test_v2_takes_several_inputs_and_adds_several_outputs(http: httpx.Client) -> None:
    tensors = example(GRU)
    whole = GRU(tensors, {})
    kept = {name: create(http, shape=whole[name].shape) for name in ("dW", "dB")}
    stores = {name: stored(http, tensors[name]) for name in ("X", "W")}
    parameters = {
        "into": ",".join(f"{name}:{buffer}" for name, buffer in kept.items()),
        "from": ",".join(f"{name}:{buffer}" for name, buffer in stores.items()),
    }
    rest = {name: one for name, one in tensors.items() if name not in {*stores, "SL"}}
    answer = infer(http, "GRUGrad", rest, parameters, outputs=[{"name": "dX"}, {"name": "dB"}])
    assert [one["name"] for one in answer.json()["outputs"]] == ["dX"]
    assert receipts_of(answer).keys() == kept.keys()
    assert np.array_equal(np.float32(answer.json()["outputs"][0]["data"]), whole["dX"].ravel())
    for name, buffer in kept.items():
        assert read(http, buffer).tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("binary", [True, False], ids=["bytes", "JSON"])
def test_tritons_client_uses_from_and_into(http: httpx.Client, binary: bool) -> None:
    tensors = example(GRU)
    whole = GRU(tensors, {})
    dW = create(http, shape=whole["dW"].shape)
    source = stored(http, tensors["X"])
    inputs = []
    for name, one in tensors.items():
        if name != "X":
            inputs.append(triton.InferInput(name, one.shape, OPEN_INFERENCE[one.dtype]))
            inputs[-1].set_data_from_numpy(one, binary_data=binary)
    asked = [triton.InferRequestedOutput(name, binary_data=binary) for name in whole]
    parameters = {"from": f"X:{source}", "into": f"dW:{dW}", "weight": 2.0, "step": 0}
    with triton.InferenceServerClient(http.base_url.netloc.decode()) as client:
        headers = {KEY: fresh("key")}
        for count in (1, 1):
            result = client.infer("GRUGrad", inputs, outputs=asked, parameters=parameters, headers=headers)
            response = result.get_response()
            assert json.loads(response["parameters"]["receipts"])["dW"]["count"] == count
            assert [one["name"] for one in response["outputs"]] == [name for name in whole if name != "dW"]
            for name in whole:
                if name != "dW":
                    assert result.as_numpy(name).tobytes() == whole[name].tobytes()
            assert result.as_numpy("dW") is None
        with pytest.raises(InferenceServerException) as raised:
            client.infer("GRUGrad", inputs, parameters={**parameters, "step": 7})
        assert raised.value.status() == "409"
        assert "Step 7" in raised.value.message()
    assert read(http, dW).tobytes() == (whole["dW"] * 2).tobytes()


V2_MISTAKES: dict[str, tuple[dict[str, Any], dict[str, str], int, tuple[str, ...]]] = {
    "unknown buffer": ({"into": "dX:none-there"}, {}, 404, ("'none-there'",)),
    "unknown source": ({"from": "X:none-there"}, {}, 404, ("'none-there'",)),
    "given twice": ({"from": "dY:{name}"}, {}, 400, ("dY", "body")),
    "no buffer": ({"into": "dX"}, {}, 400, ("into", "dX")),
    "no output": ({"into": "dY:{name}"}, {}, 400, ("into", "dX")),
    "a list": ({"into": ["dX:{name}"]}, {}, 400, ("into", "string")),
    "one output twice": ({"into": "dX:{name},dX:other"}, {}, 400, ("into", "twice")),
    "step": ({"into": "dX:{name}", "step": 3}, {}, 409, ("Step 3",)),
    "step as a text": ({"into": "dX:{name}", "step": "0"}, {}, 400, ("step", "'0'")),
    "weight": ({"into": "dX:{name}", "weight": "1"}, {}, 400, ("weight", "'1'")),
    "weight alone": ({"weight": 1.0}, {}, 400, ("weight", "into")),
    "If-Match": ({"into": "dX:{name}"}, {"If-Match": '"9-9"'}, 412, ('"9-9"',)),
    "If-Match, malformed": ({"into": "dX:{name}"}, {"If-Match": "9-9"}, 400, ("If-Match",)),
    "key": ({"into": "dX:{name}"}, {KEY: "x" * 256}, 400, (KEY, "255")),
}


@pytest.mark.parametrize("case", V2_MISTAKES)
def test_v2_names_mistakes_in_from_and_into(http: httpx.Client, case: str) -> None:
    parameters, headers, status, words = V2_MISTAKES[case]
    name = create(http)
    parameters = json.loads(json.dumps(parameters).replace("{name}", name))
    tensors = {"dY": [1, 2]} if parameters.get("from", "").startswith("X") else RELU
    answer = infer(http, "ReluGrad", tensors, parameters, headers)
    assert (answer.status_code, list(answer.json())) == (status, ["error"]), answer.text
    for word in words:
        assert word in answer.json()["error"]
    assert metadata(http, name)["version"] == 0


def test_v2_repeats_no_add_with_the_same_key(http: httpx.Client) -> None:
    name, key = create(http), {KEY: fresh("key")}
    first = infer(http, "ReluGrad", RELU, {"into": f"dX:{name}"}, key)
    again = infer(http, "ReluGrad", RELU, {"into": f"dX:{name}"}, key)
    assert first.json() == again.json()
    assert (REPLAYED in first.headers, again.headers[REPLAYED]) == (False, "true")
    other = infer(http, "ReluGrad", {**RELU, "dY": [3, 4]}, {"into": f"dX:{name}"}, key)
    assert other.status_code == 400
    assert "another request" in other.json()["error"]
    assert value(http, name) == [1, 2]
    post(http, name, "zero")
    assert infer(http, "ReluGrad", RELU, {"into": f"dX:{name}"}, key).json() == first.json()
    assert value(http, name) == [0, 0]
