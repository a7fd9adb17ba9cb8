"""Rules for every operator, read from its declaration: a new operator needs no new test here."""

from __future__ import annotations

import inspect
from typing import Any

import httpx
import numpy as np
import pytest

from service.codecs import json as json_codec
from service.dtypes import DTYPES
from service.kernels import OPERATORS, Operator, Tensor
from service.limits import Limits
from tests.serving import assert_problem

EVERY = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def example(operator: Operator, dtypes: dict[str, str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the operator's example as arrays, with the default dtypes or `dtypes` by kind of input."""
    dtypes = dtypes or {}
    return {
        one.name: np.array(operator.example[one.name], DTYPES[dtypes.get(one.kind.name, one.kind.default)])
        for one in operator.inputs
    }


def decode(answer: httpx.Response) -> dict[str, np.ndarray[Any, Any]]:
    assert answer.status_code == 200, answer.text
    document = json_codec.Document(answer.content, Limits(1 << 30))
    decoded = {}
    for name, form in document.members.items():
        dtype = DTYPES[form["dtype"]]
        if "base64" in form:
            decoded[name] = document.base64(name, form["base64"], dtype, form["shape"])
        else:
            decoded[name] = document.tensor(name, form["data"], dtype, form["shape"])
    document.finish()
    return decoded


def assert_same(got: dict[str, np.ndarray[Any, Any]], expected: dict[str, np.ndarray[Any, Any]]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


@EVERY
def test_each_example_gives_the_documented_answer(client: httpx.Client, operator: Operator) -> None:
    answer = client.post(f"/v1/ops/{operator.name}", json=dict(operator.example))
    assert_same(decode(answer), operator(example(operator), {}))
    described = client.get(f"/v1/ops/{operator.name}").json()
    assert described["example"] == {"request": dict(operator.example), "answer": answer.json()}
    content = client.get("/openapi.json").json()["paths"][f"/v1/ops/{operator.name}"]["post"]
    assert content["requestBody"]["content"]["application/json"]["example"] == dict(operator.example)
    assert content["responses"]["200"]["content"]["application/json"]["example"] == answer.json()


@EVERY
@pytest.mark.parametrize("floats", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("integers", ["int32", "int64"])
@pytest.mark.parametrize("form", ["list", "base64"])
def test_every_dtype_works_in_every_form(
    client: httpx.Client, operator: Operator, floats: str, integers: str, form: json_codec.Encoding
) -> None:
    tensors = example(operator, {"float": floats, "integer": integers})
    expected = operator(tensors, {})
    body = b"".join(json_codec.encode(tensors, form))
    answer = client.post(f"/v1/ops/{operator.name}", content=body, headers={"Content-Type": "application/json"})
    assert_same(decode(answer), expected)
    assert (b'"base64"' in answer.content) is (form == "base64")


@EVERY
def test_outputs_have_the_declared_names_and_dtypes(operator: Operator) -> None:
    for floats in ("float16", "bfloat16", "float32", "float64"):
        tensors = example(operator, {"float": floats})
        outputs = operator(tensors, {})
        assert list(outputs) == [output.name for output in operator.outputs]
        for output in operator.outputs:
            sources = [one.name for one in operator.inputs if one.variable == output.variable and one.variable]
            expected = tensors[sources[0]].dtype.name if sources else output.kind.default
            assert outputs[output.name].dtype.name == expected


@EVERY
def test_a_run_leaves_its_inputs_unchanged(operator: Operator) -> None:
    tensors = example(operator)
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.flags.writeable = False
    outputs = operator(tensors, {})
    assert_same(tensors, before)
    for output in outputs.values():
        assert not any(np.may_share_memory(output, tensor) for tensor in tensors.values())


@EVERY
def test_a_missing_required_input_is_refused(client: httpx.Client, operator: Operator) -> None:
    for one in operator.inputs:
        left_out = {name: value for name, value in operator.example.items() if name != one.name}
        answer = client.post(f"/v1/ops/{operator.name}", json=left_out)
        if one.optional:
            assert answer.status_code == 200
        else:
            problem = assert_problem(answer, 422, "missing_tensor", one.name, operator.name)
            assert (problem["op"], problem["tensor"]) == (operator.name, one.name)


@EVERY
def test_a_dtype_outside_its_kind_is_refused(client: httpx.Client, operator: Operator) -> None:
    for one in operator.inputs:
        for dtype in set(DTYPES) - set(one.kind.dtypes):
            wrong = {**operator.example, one.name: {"dtype": dtype, "shape": [0], "data": []}}
            answer = client.post(f"/v1/ops/{operator.name}", json=wrong)
            problem = assert_problem(answer, 422, "dtype_mismatch", one.name, dtype, *one.kind.dtypes)
            assert problem["tensor"] == one.name


def sharing(operator: Operator) -> list[Tensor]:
    """Return the inputs whose dtype an earlier input decides."""
    variables = [one.variable for one in operator.inputs]
    return [one for k, one in enumerate(operator.inputs) if one.variable and one.variable in variables[:k]]


@pytest.mark.parametrize(
    "operator", [operator for operator in OPERATORS.values() if sharing(operator)], ids=lambda operator: operator.name
)
def test_inputs_of_one_type_variable_share_a_dtype(client: httpx.Client, operator: Operator) -> None:
    for one in sharing(operator):
        other = next(dtype for dtype in one.kind.dtypes if dtype != one.kind.default)
        mixed = {**operator.example, one.name: {"dtype": other, "data": operator.example[one.name]}}
        answer = client.post(f"/v1/ops/{operator.name}", json=mixed)
        assert_problem(answer, 422, "dtype_mismatch", one.name, other, one.kind.default)


@EVERY
def test_a_subset_of_the_outputs_is_answered_in_the_asked_order(client: httpx.Client, operator: Operator) -> None:
    path, names = f"/v1/ops/{operator.name}", [output.name for output in operator.outputs]
    if len(names) == 1:
        assert_problem(client.post(path, json={}, params={"outputs": names[0]}), 422, "unknown_parameter", "'outputs'")
        return
    whole = operator(example(operator), {})
    for subset in ([names[-1]], [names[0]], names[::-1]):
        answer = client.post(path, json=dict(operator.example), params={"outputs": ",".join(subset)})
        assert_same(decode(answer), {name: whole[name] for name in subset})
    for wrong in ("", "nonsense", f"{names[0]},{names[0]}", f"{names[0]},"):
        answer = client.post(path, json=dict(operator.example), params={"outputs": wrong})
        assert_problem(answer, 422, "invalid_parameter", repr(wrong), ",".join(names))


@EVERY
def test_unknown_names_are_refused(client: httpx.Client, operator: Operator) -> None:
    path = f"/v1/ops/{operator.name}"
    answer = client.post(path, json={**operator.example, "nonsense": [1]})
    assert_problem(answer, 422, "unknown_tensor", "'nonsense'", operator.inputs[0].name)
    answer = client.post(path, json=dict(operator.example), params={"nonsense": 1})
    assert_problem(answer, 422, "unknown_parameter", "'nonsense'")


@EVERY
def test_an_attribute_takes_its_type_only(client: httpx.Client, operator: Operator) -> None:
    for attribute in operator.attributes:
        path = f"/v1/ops/{operator.name}"
        given = {} if attribute.default is None else {attribute.name: str(attribute.default)}
        answer = client.post(path, json=dict(operator.example), params=given)
        assert_same(decode(answer), operator(example(operator), {}))
        answer = client.post(path, json=dict(operator.example), params={attribute.name: "nonsense"})
        problem = assert_problem(answer, 422, "invalid_parameter", attribute.name, "'nonsense'")
        assert problem["parameter"] == attribute.name


@EVERY
def test_every_operator_is_documented(client: httpx.Client, operator: Operator) -> None:
    assert operator.formula.endswith(".")
    assert operator.example.keys() == {one.name for one in operator.inputs}
    listed = {info["name"]: info for info in client.get("/v1/ops").json()["operators"]}
    info = listed[operator.name]
    assert info == client.get(f"/v1/ops/{operator.name}").json()
    assert info["formula"] == operator.formula
    assert [one["name"] for one in info["inputs"]] == [one.name for one in operator.inputs]
    assert {a["name"]: a["default"] for a in info["attributes"]} == {a.name: a.default for a in operator.attributes}


@EVERY
def test_the_schema_shows_each_request_and_answer(client: httpx.Client, operator: Operator) -> None:
    schema = client.get("/openapi.json").json()
    components = schema["components"]["schemas"]
    request, answer = (components[f"{operator.name}{part}"] for part in ("Request", "Answer"))
    assert request["properties"].keys() == {one.name for one in operator.inputs}
    for one in operator.inputs:  # the body requires no input: `from` may give any
        assert request["properties"][one.name]["description"].startswith("Optional" if one.optional else "Required")
    assert "required" not in request
    assert "required" not in answer
    assert request["additionalProperties"] is False
    assert answer["properties"].keys() == {one.name for one in operator.outputs}
    everywhere = schema["paths"][f"/v1/ops/{operator.name}"]["post"]["parameters"]
    parameters = [p for p in everywhere if p["in"] == "query"]
    general = {"encoding", "from", "into", "weight", "epoch", "contributor"} | (
        {"outputs"} if len(operator.outputs) > 1 else set()
    )
    assert {p["name"] for p in parameters} == general | {a.name for a in operator.attributes}
    assert {p["name"]: p["schema"].get("default") for p in parameters if p["name"] not in general} == {
        a.name: a.default for a in operator.attributes
    }


@EVERY
def test_each_operator_runs_its_declared_kernel(operator: Operator) -> None:
    positional = [p for p in inspect.signature(operator.kernel).parameters.values() if p.kind is p.POSITIONAL_ONLY]
    assert [p.name for p in positional] == [one.name for one in operator.inputs]
    tensors = example(operator)
    direct = operator.kernel(*tensors.values())
    assert_same(
        dict(zip(operator(tensors, {}), direct if isinstance(direct, tuple) else (direct,), strict=True)),
        operator(tensors, {}),
    )
