"""Operators with groups of tensors, required attributes and lists of numbers, in every format of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import safetensors.numpy

from service.api.operators import rest
from service.api.telemetry.metrics import KERNEL_SECONDS, OPERATOR_REQUESTS
from service.dtypes import OPEN_INFERENCE, Array
from service.kernels import OPERATORS
from service.kernels._op import op
from service.kernels._types import Element, Flag, Group, Positive, T
from tests.api.calls import as_file, create, loaded, ok, read, value
from tests.api.headers import SAFE, TO_SAFETENSORS
from tests.serving import assert_problem, serving

FAMILY = "Tests"
MAX_TENSORS = 200
STEP, SPLIT, COPY = "/v1/ops/Step", "/v1/ops/Halves", "/v1/ops/Copy"

WEIGHTS = {"fc.weight": [[1.0, 2.0]], "fc.bias": [3.0]}
GRADIENTS = {"fc.bias": [1.0], "fc.weight": [[2.0, 4.0]]}
STEPPED = {"fc.weight": [[0.0, 0.0]], "fc.bias": [2.5]}
BODY = {"weights": WEIGHTS, "gradients": GRADIENTS}
FLAT = {
    f"{group}.{name}": np.array(one, np.float32) for group, members in BODY.items() for name, one in members.items()
}


def step(
    weights: Group[T], gradients: Group[T], /, *, rate: float, steps: Positive = 1, sign: Literal[-1, 1] = 1
) -> tuple[Flag, Group[T]]:
    """updated = weights - sign * rate * steps * gradients."""
    factor = sign * rate * steps
    return np.array(True), {name: one - (factor * gradients[name]).astype(one.dtype) for name, one in weights.items()}


def halves(X: T, /, *, sizes: list[Positive], scales: list[float] | None = None) -> Group[T]:
    """parts = split(X, sizes) * scales."""
    parts: Any = np.split(X, np.cumsum(sizes)[:-1].tolist())
    return {str(k): (part * (scales or [1.0] * len(sizes))[k]).astype(X.dtype) for k, part in enumerate(parts)}


def copy(X: Element, /) -> Element:
    """Y = X."""
    return X.copy()


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    """Yield a client of a server with three more operators."""
    known, routes = {*OPERATORS}, [*rest.router.routes]
    with pytest.MonkeyPatch.context() as patch:
        op("Step", outputs="done updated:weights", example={**BODY, "rate": 0.5})(step)
        op("Halves", outputs="parts", example={"X": [1.0, 2.0, 3.0], "sizes": [1, 2]})(halves)
        op("Copy", outputs="Y", example={"X": [1.0]})(copy)
        try:
            for name in OPERATORS.keys() - known:
                rest.add_endpoint(OPERATORS[name])
                for family in (OPERATOR_REQUESTS, KERNEL_SECONDS):
                    patch.setitem(family.at, name, family.at["ReluGrad"])
            with serving(max_tensors=MAX_TENSORS) as url, httpx.Client(base_url=url, timeout=30) as client:
                yield client
        finally:
            rest.router.routes[:] = routes
            for name in OPERATORS.keys() - known:
                del OPERATORS[name]


def data(answer: httpx.Response) -> Any:
    """Return the data of an answer's tensors."""
    return {
        name: one["data"]
        if isinstance(one.get("dtype"), str)
        else {member: each["data"] for member, each in one.items()}
        for name, one in ok(answer).items()
    }


# ----- JSON -----


def test_a_group_is_an_object(http: httpx.Client) -> None:
    answer = http.post(STEP, json=BODY, params={"rate": 0.5})
    assert data(answer) == {"done": True, "updated": STEPPED}
    assert list(answer.json()["updated"]) == list(WEIGHTS)
    again = http.post(STEP, json={"weights": answer.json()["updated"], "gradients": GRADIENTS}, params={"rate": -0.5})
    assert data(again)["updated"] == WEIGHTS


def test_a_group_may_be_a_list(http: httpx.Client) -> None:
    answer = http.post(STEP, json={"weights": [[1, 2], 3], "gradients": [[2, 4], 1]}, params={"rate": 0.5})
    assert data(answer)["updated"] == {"0": [0, 0], "1": 2.5}
    numbers = list(range(12))
    body = {"weights": numbers, "gradients": numbers}
    assert data(http.post(STEP, json=body, params={"rate": 1}))["updated"] == {str(k): 0 for k in numbers}


def test_members_may_have_the_names_of_the_members_of_a_tensor(http: httpx.Client) -> None:
    group = {"shape": [1.0, 2.0], "data": {"dtype": "float32", "data": [3.0]}, "dtype": 4.0}
    answer = http.post(STEP, json={"weights": group, "gradients": group}, params={"rate": 1})
    assert data(answer)["updated"] == {"shape": [0, 0], "data": [0], "dtype": 0}


def test_the_answer_has_the_form_of_the_request(http: httpx.Client) -> None:
    form = {"dtype": "float32", "shape": [1], "base64": "AACAPw=="}
    answer = http.post(STEP, json={"weights": {"w": form}, "gradients": {"w": [1.0]}}, params={"rate": 0})
    assert answer.json()["updated"] == {"w": form}


@pytest.mark.parametrize(
    ("weights", "code", "words"),
    [
        ({"fc.bias": [1, "x"]}, "invalid_tensor", ["weights.fc.bias[1]", "'x'"]),
        ({"fc.bias": [[1], [2, 3]]}, "invalid_tensor", ["weights.fc.bias[1] has 2 elements"]),
        ({"fc.bias": {"data": [1], "base64": ""}}, "invalid_tensor", ["weights.fc.bias", "either data or base64"]),
        ({"fc.bias": {"data": [1], "other": 1}}, "invalid_tensor", ["weights.fc.bias.other is unknown"]),
        ({"fc.bias": None}, "invalid_tensor", ["weights.fc.bias is null"]),
        ([[1], [1, [2]]], "invalid_tensor", ["weights.1[1] is a list"]),
        ({"fc.bias": {"dtype": "int64", "data": [1]}}, "dtype_mismatch", ["weights.fc.bias is int64"]),
        ({"a": [1], "b": {"dtype": "float64", "data": 1}}, "dtype_mismatch", ["weights.b is float64", "weights.a"]),
        ({}, "missing_tensor", ["'weights', as weights.NAME"]),
        ([], "missing_tensor", ["'weights', as weights.NAME"]),
        (5, "invalid_tensor", ["weights is 5", "an object or a list of tensors"]),
        ("x", "invalid_tensor", ["weights is 'x'", "an object or a list of tensors"]),
        (None, "invalid_tensor", ["weights is null", "an object or a list of tensors"]),
        ({"": [1]}, "unknown_tensor", ["'weights.' is no tensor of the group weights"]),
        ({"a" * 101: [1]}, "unknown_tensor", ["1 to 100 printable characters"]),
        ({"a\n": [1]}, "unknown_tensor", ["is no tensor of the group weights"]),
        ({str(k): 1 for k in range(MAX_TENSORS)}, "too_many_tensors", [f"the limit is {MAX_TENSORS}"]),
        ([1] * MAX_TENSORS, "too_many_tensors", [f"{MAX_TENSORS + 1} tensors"]),
        ([1] * (MAX_TENSORS + 1), "too_many_tensors", [f"{MAX_TENSORS + 1} tensors"]),
    ],
)
def test_errors_name_the_member(http: httpx.Client, weights: Any, code: str, words: list[str]) -> None:
    answer = http.post(STEP, json={"weights": weights, "gradients": {"a": [1]}}, params={"rate": 1})
    assert_problem(answer, 413 if code.startswith("too") else 422, code, *words)


def test_a_flat_name_is_no_member_of_the_body(http: httpx.Client) -> None:
    answer = http.post(STEP, json={**BODY, "weights.more": [1]}, params={"rate": 1})
    assert_problem(answer, 422, "unknown_tensor", "no input 'weights.more'", "weights.NAME, gradients.NAME")


@pytest.mark.parametrize("group", [{f"m{k}": [k] for k in range(90)}, list(range(90))])
def test_many_members(http: httpx.Client, group: Any) -> None:
    answer = http.post(STEP, json={"weights": group, "gradients": group}, params={"rate": 1})
    assert len(data(answer)["updated"]) == 90
    names = group if isinstance(group, dict) else map(str, group)
    assert list(answer.json()["updated"]) == [*names]
    tensors, _ = loaded(
        http.post(STEP, json={"weights": group, "gradients": group}, params={"rate": 0}, headers=TO_SAFETENSORS)
    )
    assert len(tensors) == 91


@pytest.mark.parametrize("text", ['{"weights": {"a": [1], "a": [2]}}', '{"weights": {"a": [1]}, "weights": {}}'])
def test_a_member_comes_once(http: httpx.Client, text: str) -> None:
    answer = http.post(STEP, content=text, headers={"Content-Type": "application/json"}, params={"rate": 1})
    assert_problem(answer, 400, "malformed_body", "two members")


def test_an_operator_without_groups_refuses_one(http: httpx.Client) -> None:
    answer = http.post("/v1/ops/ReluGrad", json={"dY": {"a": [1]}, "X": [1]})
    assert_problem(answer, 422, "invalid_tensor", "dY.a is unknown")


# ----- outputs -----


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        ("updated.fc.bias", {"updated": ["fc.bias"]}),
        ("updated", {"updated": [*WEIGHTS]}),
        ("updated.fc.bias,done", {"done": None, "updated": ["fc.bias"]}),
    ],
)
def test_outputs_select_members(http: httpx.Client, outputs: str, names: Mapping[str, Any]) -> None:
    answer = ok(http.post(STEP, json=BODY, params={"rate": 1, "outputs": outputs}))
    assert answer.keys() == names.keys()
    assert list(answer["updated"]) == names["updated"]


@pytest.mark.parametrize(
    ("outputs", "code", "words"),
    [
        ("updated.nonsense", "unknown_tensor", "no output 'updated.nonsense' here"),
        ("updated.", "invalid_parameter", "done,updated[.NAME]"),
        ("done.x", "invalid_parameter", "done,updated[.NAME]"),
    ],
)
def test_unknown_members_of_outputs(http: httpx.Client, outputs: str, code: str, words: str) -> None:
    assert_problem(http.post(STEP, json=BODY, params={"rate": 1, "outputs": outputs}), 422, code, words)


# ----- flat names -----


def test_safetensors_have_flat_names(http: httpx.Client) -> None:
    tensors, _ = loaded(http.post(STEP, **as_file(FLAT), params={"rate": 0.5}))
    assert {name: one.tolist() for name, one in tensors.items()} == {
        "done": True,
        **{f"updated.{name}": one for name, one in STEPPED.items()},
    }
    answer = http.post(STEP, content=safetensors.numpy.save({"weights": np.ones(1)}), headers=SAFE, params={"rate": 1})
    assert_problem(answer, 422, "unknown_tensor", "'weights' is no tensor of the group weights")


def infer(http: httpx.Client, model: str, tensors: Mapping[str, Array], binary: bool, **more: Any) -> Any:
    """Run a model with inputs in bytes or lists. Return the data of its outputs, or the error."""
    inputs = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": OPEN_INFERENCE[array.dtype],
            **({"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.tolist()}),
        }
        for name, array in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, **more}).encode()
    body = head + b"".join(array.tobytes() for array in tensors.values()) if binary else head
    fields = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
    answer = http.post(f"/v2/models/{model}/infer", content=body, headers=fields)
    if answer.status_code != 200:
        return answer.json()["error"]
    length = int(answer.headers.get("Inference-Header-Content-Length", len(answer.content)))
    outputs, rest_, found = json.loads(answer.content[:length])["outputs"], answer.content[length:], {}
    for one in outputs:
        size = one.get("parameters", {}).get("binary_data_size")
        found[one["name"]] = one["data"] if size is None else np.frombuffer(rest_[:size], np.float32).tolist()
        rest_ = rest_[size or 0 :]
    return found


@pytest.mark.parametrize("binary", [False, True])
def test_inference_has_flat_names(http: httpx.Client, binary: bool) -> None:
    stepped = {"updated.fc.weight": [0, 0], "updated.fc.bias": [2.5]}
    parameters = {"rate": 0.5}
    assert infer(http, "Step", FLAT, binary, parameters=parameters) == {"done": [True], **stepped}
    for asked in ([{"name": "updated", "parameters": {"binary_data": binary}}], [{"name": one} for one in stepped]):
        assert infer(http, "Step", FLAT, binary, parameters=parameters, outputs=asked) == stepped
    mixed = [{"name": "updated", "parameters": {"binary_data": True}}, {"name": "done"}]
    assert infer(http, "Step", FLAT, binary, parameters=parameters, outputs=mixed) == {"done": [True], **stepped}
    error = infer(http, "Step", FLAT, binary, parameters=parameters, outputs=[{"name": "more"}])
    assert error == "Step has no output 'more'; its outputs are done, updated.NAME"
    error = infer(http, "Step", FLAT, binary, parameters=parameters, outputs=[{"name": "updated.more"}])
    assert "no output 'updated.more' here" in error


def test_a_group_goes_to_shared_memory_tensor_by_tensor(http: httpx.Client) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8}
    error = infer(http, "Step", FLAT, True, parameters={"rate": 1}, outputs=[{"name": "updated", "parameters": place}])
    assert error == "updated is a group: name the place of each of its tensors"


def test_a_prefix_has_as_many_buffers_as_a_request_has_tensors(http: httpx.Client) -> None:
    names = [f"many.{number}" for number in range(MAX_TENSORS + 1)]
    for some in (names[:-1], names[-1:]):
        answer = http.post("/v1/buffers/create", json={"buffers": {name: {"shape": [1]} for name in some}})
        assert answer.status_code == 200, answer.text
    params: dict[str, Any] = {"rate": 1, "from": ["weights:many.*", "gradients:many.*"]}
    answer = http.post(STEP, params=params)
    problem = assert_problem(answer, 413, "too_many_tensors", "has 201 tensors")
    assert problem["limit"] == MAX_TENSORS
    params["from"] = ["weights:many.11*", "gradients:many.11*"]
    assert len(ok(http.post(STEP, params=params))["updated"]) == 10


def test_metadata_show_the_names_of_a_group_as_a_pattern(http: httpx.Client) -> None:
    metadata, config = ok(http.get("/v2/models/Step")), ok(http.get("/v2/models/Step/config"))
    assert [one["name"] for one in metadata["inputs"]] == ["weights.*", "gradients.*"]
    assert metadata["outputs"][1] == {"name": "updated.*", "datatype": "FP32", "shape": [-1]}
    assert [one["name"] for one in config["output"]] == ["done", "updated.*"]
    body, fields = bytes(8), {"Inference-Header-Content-Length": "0"}
    answer = http.post("/v2/models/Step/infer", content=body, headers=fields)
    assert "Step needs weights.NAME, gradients.NAME" in answer.json()["error"]
    answer = http.post("/v2/models/Halves/infer", content=body, headers=fields)
    assert answer.json()["error"] == "The parameter sizes is missing"


# ----- attributes -----


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, ["rate is missing"]),
        ({"rate": "x"}, ["rate", "'x'"]),
        ({"rate": 1, "steps": 0}, ["steps", "greater than or equal to 1", "'0'"]),
        ({"rate": 1, "sign": 0}, ["sign", "-1 or 1", "'0'"]),
        ({"rate": 1, "sign": "1.0"}, ["sign", "-1 or 1"]),
    ],
)
def test_attributes_are_checked(http: httpx.Client, params: dict[str, Any], words: list[str]) -> None:
    problem = assert_problem(http.post(STEP, json=BODY, params=params), 422, "invalid_parameter", *words)
    assert problem["parameter"] == words[0].split()[0]
    given = {name: int(one) if str(one).isdigit() else one for name, one in params.items()}
    error = infer(http, "Step", FLAT, True, parameters=given)
    assert all(word.strip("'") in error for word in words)


def test_a_literal_of_integers(http: httpx.Client) -> None:
    answer = data(http.post(STEP, json=BODY, params={"rate": 0.5, "sign": -1, "steps": 2}))
    assert answer["updated"] == {"fc.weight": [[3, 6]], "fc.bias": [4]}
    found = infer(http, "Step", FLAT, True, parameters={"rate": 0.5, "sign": -1, "steps": 2})
    assert found["updated.fc.bias"] == [4]


@pytest.mark.parametrize(
    "query", ["sizes=1,2&scales=1,10", "sizes=1&sizes=2&scales=1&scales=1e1", "sizes=1%2C2&scales=1.0,+10"]
)
def test_lists_repeat_or_have_commas(http: httpx.Client, query: str) -> None:
    answer = http.post(f"{SPLIT}?{query}", json={"X": [1, 2, 3]})
    assert data(answer) == {"parts": {"0": [1], "1": [20, 30]}}


@pytest.mark.parametrize("sizes", ["1,2", [1, 2], ["1", "2"]])
def test_lists_in_parameters(http: httpx.Client, sizes: Any) -> None:
    X = {"X": np.array([1, 2, 3], np.float32)}
    parameters = {"sizes": sizes, "scales": "1,10"}
    found = infer(http, "Halves", X, True, parameters=parameters)
    assert found == {"parts.0": [1], "parts.1": [20, 30]}
    asked = [{"name": "parts", "parameters": {"binary_data": True}}]
    assert infer(http, "Halves", X, True, parameters=parameters, outputs=asked) == found
    asked = [{"name": "parts.1"}]
    assert infer(http, "Halves", X, False, parameters=parameters, outputs=asked) == {"parts.1": [20, 30]}


@pytest.mark.parametrize("sizes", ["1,x", "1,", "", "1,0", "1.5", "1 2"])
def test_wrong_items_of_lists(http: httpx.Client, sizes: str) -> None:
    wrong = repr(sizes.rpartition(",")[2])
    answer = http.post(SPLIT, json={"X": [1, 2, 3]}, params={"sizes": sizes})
    problem = assert_problem(answer, 422, "invalid_parameter", "sizes is " + wrong.replace("'0'", "0"))
    assert problem["parameter"] == "sizes"
    error = infer(http, "Halves", {"X": np.ones(3, np.float32)}, True, parameters={"sizes": sizes})
    assert "sizes is " in error
    for one in ([1, True], [1, 2.5], [None], 7, {"a": 1}):
        assert "sizes" in infer(http, "Halves", {"X": np.ones(3, np.float32)}, True, parameters={"sizes": one})


# ----- the schema and the list of operators -----


def test_operators_describe_groups_and_attributes(http: httpx.Client) -> None:
    info = ok(http.get(STEP))
    assert [(one["name"], one["group"], one["names_of"]) for one in info["inputs"] + info["outputs"]] == [
        ("weights", True, None),
        ("gradients", True, None),
        ("done", False, None),
        ("updated", True, "weights"),
    ]
    assert [(one["name"], one["type"], one["required"], one["default"]) for one in info["attributes"]] == [
        ("rate", "float", True, None),
        ("steps", "int", False, 1),
        ("sign", "-1 | 1", False, 1),
    ]
    assert info["example"]["attributes"] == {"rate": 0.5}
    assert (
        ok(http.post(STEP, json=info["example"]["request"], params=info["example"]["attributes"]))
        == (info["example"]["answer"])
    )


def test_the_schema_has_groups_and_bounds(http: httpx.Client) -> None:
    document = ok(http.get("/openapi.json"))
    schemas, operation = document["components"]["schemas"], document["paths"][STEP]["post"]
    weights = schemas["StepRequest"]["properties"]["weights"]
    assert weights["additionalProperties"] == {"$ref": "#/components/schemas/FloatTensor"}
    updated = schemas["StepAnswer"]["properties"]["updated"]
    assert updated["additionalProperties"] == {"$ref": "#/components/schemas/FloatTensorOrReceipt"}
    parameters = {one["name"]: one for one in operation["parameters"]}
    assert parameters["rate"]["required"] is True
    assert parameters["rate"]["schema"]["examples"] == [0.5]
    assert parameters["steps"]["schema"]["minimum"] == 1
    assert parameters["sign"]["schema"]["enum"] == [-1, 1]
    sizes = next(one for one in document["paths"][SPLIT]["post"]["parameters"] if one["name"] == "sizes")
    assert sizes["schema"]["items"]["minimum"] == 1


# ----- buffers -----


@pytest.fixture
def buffers(http: httpx.Client) -> dict[str, str]:
    """Return two buffers by the name of a weight that fits."""
    return {name: create(http, shape=np.array(one).shape) for name, one in WEIGHTS.items()}


def test_members_come_from_buffers(http: httpx.Client, buffers: Mapping[str, str]) -> None:
    bias = buffers["fc.bias"]
    http.post(f"/v1/buffers/{bias}/accumulate", json={"gradient": [7.0]})
    body = {"weights": {"fc.weight": WEIGHTS["fc.weight"]}, "gradients": GRADIENTS}
    params: dict[str, Any] = {"rate": 1, "from": f"weights.fc.bias:{bias}"}
    assert data(http.post(STEP, json=body, params=params))["updated"] == {"fc.weight": [[-1, -2]], "fc.bias": [6]}
    twice = http.post(STEP, json=BODY, params=params)
    assert_problem(twice, 422, "invalid_parameter", "weights.fc.bias is in the body, but from= takes it")
    for wrong in ("weights", "weights.", "done.x", "rate"):
        answer = http.post(STEP, json=body, params={"rate": 1, "from": f"{wrong}:{bias}"})
        assert_problem(answer, 422, "invalid_parameter", "weights.NAME, gradients.NAME")
    text = f"weights.fc.bias:{bias}"
    flat = {name: one for name, one in FLAT.items() if name != "weights.fc.bias"}
    assert infer(http, "Step", flat, True, parameters={"rate": 1, "from": text})["updated.fc.bias"] == [6]


@pytest.mark.parametrize("outputs", [None, "done,updated", "updated.fc.bias", "done,updated.fc.bias"])
def test_members_go_to_buffers(http: httpx.Client, buffers: Mapping[str, str], outputs: str | None) -> None:
    bias = buffers["fc.bias"]
    params: dict[str, Any] = {
        "rate": 0.5,
        "into": f"updated.fc.bias:{bias}",
        **({"outputs": outputs} if outputs else {}),
    }
    answer = http.post(STEP, json=BODY, params=params)
    receipt = ok(answer)["updated"]["fc.bias"]
    assert (receipt["name"], receipt["updated"]) == (bias, True)
    assert ("done" in answer.json()) is (outputs is None or "done" in outputs)
    assert ("fc.weight" in answer.json()["updated"]) is (outputs in (None, "done,updated"))
    assert value(http, bias) == [2.5]


def test_a_file_has_the_receipts_of_members(http: httpx.Client, buffers: Mapping[str, str]) -> None:
    into = [f"updated.{name}:{buffer}" for name, buffer in buffers.items()]
    tensors, receipts = loaded(http.post(STEP, **as_file(FLAT), params={"rate": 0.5, "into": into}))
    assert list(tensors) == ["done"]
    assert receipts.keys() == {f"updated.{name}" for name in buffers}
    assert read(http, buffers["fc.bias"]).tolist() == [2.5]


@pytest.mark.parametrize("form", ["json", "file"])
def test_a_repeated_request_adds_once(http: httpx.Client, buffers: Mapping[str, str], form: str) -> None:
    """All outputs went to buffers, so the answer is the receipts alone, though an input has changed."""
    source = create(http, shape=(1,))
    body, flat = {"weights": {"fc.weight": WEIGHTS["fc.weight"]}, "gradients": GRADIENTS}, dict(FLAT)
    del flat["weights.fc.bias"]
    params: dict[str, Any] = {
        "rate": 0.5,
        "from": f"weights.fc.bias:{source}",
        "into": [f"updated.{name}:{buffer}" for name, buffer in buffers.items()],
        "outputs": "updated",
    }
    key = {"Idempotency-Key": f"{form}-{source}"}

    def send() -> httpx.Response:
        more: dict[str, Any] = {"json": body, "headers": key} if form == "json" else as_file(flat, **key)
        return http.post(STEP, params=params, **more)

    first = send()
    assert first.status_code == 200, first.text
    http.post(f"/v1/buffers/{source}/accumulate", json={"gradient": [9.0]})
    second = send()
    assert second.headers["Idempotency-Replayed"] == "true"
    assert second.content == first.content
    assert value(http, buffers["fc.bias"]) == [-0.5]


@pytest.mark.parametrize(
    ("into", "code", "words"),
    [
        ("updated", "invalid_parameter", ["done, updated.NAME"]),
        ("done", "dtype_mismatch", ["done is bool", "a buffer holds floats"]),
        ("updated.more", "unknown_tensor", ["no output 'updated.more' here"]),
    ],
)
def test_outputs_that_no_buffer_takes(
    http: httpx.Client, buffers: Mapping[str, str], into: str, code: str, words: list[str]
) -> None:
    answer = http.post(STEP, json=BODY, params={"rate": 1, "into": f"{into}:{buffers['fc.bias']}"})
    assert_problem(answer, 422, code, *words)
    assert value(http, buffers["fc.bias"]) == [0]


def test_parts_of_a_sequence_go_to_buffers(http: httpx.Client, buffers: Mapping[str, str]) -> None:
    bias, params = buffers["fc.bias"], {"sizes": "1,2"}
    answer = http.post(SPLIT, json={"X": [1, 2, 3]}, params={**params, "into": f"parts.0:{bias}"})
    parts = answer.json()["parts"]
    assert (parts["0"]["name"], parts["1"]["data"]) == (bias, [2, 3])
    key = {"Idempotency-Key": bias}
    for _ in range(2):
        given = {**params, "into": f"parts.0:{bias}", "outputs": "parts.0"}
        answer = http.post(SPLIT, json={"X": [1, 2, 3]}, params=given, headers=key)
        assert list(ok(answer)["parts"]) == ["0"]
    assert value(http, bias) == [2]


def test_a_float_of_any_kind_goes_to_a_buffer(http: httpx.Client) -> None:
    name = create(http, shape=(2,))
    body = {"X": [1.5, 2]}
    assert ok(http.post(COPY, json=body, params={"into": f"Y:{name}"}))["Y"]["name"] == name
    integers = {"X": {"dtype": "int64", "data": [1, 2]}}
    answer = http.post(COPY, json=integers, params={"into": f"Y:{name}"}, headers=TO_SAFETENSORS)
    assert_problem(answer, 422, "dtype_mismatch", "Y is int64, but a buffer holds floats")
    assert value(http, name) == [1.5, 2]
