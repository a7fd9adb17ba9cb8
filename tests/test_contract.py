"""Rules for every operator, read from its declaration: a new operator needs no new test here."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping
from typing import Any, get_args

import httpx
import numpy as np
import pytest

from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import DTYPES, OPEN_INFERENCE, Array
from service.kernels import OPERATORS, Operator, Tensor
from service.limits import Limits
from tests.cases import case
from tests.serving import assert_problem

EVERY = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
FLOATS = ("float16", "bfloat16", "float32", "float64")


def example(operator: Operator, dtypes: dict[str, str] | None = None) -> dict[str, Array]:
    """Return the operator's example as arrays, with the default dtypes or `dtypes` by kind of input.

    An input that takes more than floats gets the dtype of floats, unless the example gives it another.
    """

    def converted(name: str, array: Array) -> Array:
        kind = operator.inputs_by_name[name.partition(".")[0]].kind
        name = "float" if kind.default == "float32" else kind.name
        return array.astype(DTYPES[(dtypes or {}).get(name, kind.default)]) if array.dtype == kind.default else array

    return {name: converted(name, array) for name, array in operator.example_tensors.items()}


def parameters(operator: Operator) -> dict[str, Any]:
    """Return the attributes of the example as parameters of the Open Inference Protocol."""
    given = operator.example_attributes.items()
    return {name: ",".join(map(str, one)) if isinstance(one, list) else one for name, one in given}


def run(operator: Operator, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs for the tensors, with the attributes of the example."""
    return operator(tensors, operator.example_attributes)


def post(client: httpx.Client, operator: Operator, body: Any = None, **params: Any) -> httpx.Response:
    """Run the operator over HTTP on its example, or on another body, with the attributes of the example."""
    given = {**operator.example_attributes, **params}
    body = dict(operator.example) if body is None else body
    return client.post(f"/v1/ops/{operator.name}", json=body, params=given)


def named(tensor: Tensor, value: Any) -> dict[str, Any]:
    """Return a part of a request: the input has this value, or, if it is a group, its only tensor `a`."""
    return {tensor.name: {"a": value} if tensor.group else value}


def decode(answer: httpx.Response) -> dict[str, Array]:
    """Return the tensors of an answer that is JSON, the tensor `b` of the group `weights` as `weights.b`."""
    assert answer.status_code == 200, answer.text
    groups = [name for name, one in answer.json().items() if not isinstance(one.get("dtype"), str)]
    document = json_codec.Document(answer.content, Limits(1 << 30), groups)
    decoded = {}
    for name, value in document.members.items():
        members = {f"{name}.{member}": one for member, one in value.items()} if name in groups else {name: value}
        for place, form in members.items():
            dtype = DTYPES[form["dtype"]]
            if "base64" in form:
                decoded[place] = document.base64(place, form["base64"], dtype, form["shape"])
            else:
                decoded[place] = document.tensor(place, form["data"], dtype, form["shape"])
    document.finish()
    return decoded


def assert_same(got: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


@EVERY
def test_each_example_gives_the_documented_answer(client: httpx.Client, operator: Operator) -> None:
    answer = post(client, operator)
    assert_same(decode(answer), run(operator, example(operator)))
    described = client.get(f"/v1/ops/{operator.name}").json()
    request, attributes = dict(operator.example), dict(operator.example_attributes)
    assert described["example"] == {"request": request, "attributes": attributes, "answer": answer.json()}
    content = client.get("/openapi.json").json()["paths"][f"/v1/ops/{operator.name}"]["post"]
    examples = {one["name"]: one["schema"].get("examples") for one in content["parameters"]}
    assert attributes.items() <= {name: one[0] for name, one in examples.items() if one}.items()
    assert content["requestBody"]["content"]["application/json"]["example"] == dict(operator.example)
    assert content["responses"]["200"]["content"]["application/json"]["example"] == answer.json()


@EVERY
def test_every_dtype_works_in_every_form(client: httpx.Client, operator: Operator) -> None:
    dtypes, forms = itertools.product(FLOATS, ("int32", "int64")), get_args(json_codec.Encoding)
    for (floats, integers), form in itertools.product(dtypes, forms):
        with case(floats, integers, form):
            assert_works(client, operator, floats, integers, form)


def assert_works(
    client: httpx.Client, operator: Operator, floats: str, integers: str, form: json_codec.Encoding
) -> None:
    tensors = example(operator, {"float": floats, "integer": integers})
    expected = run(operator, tensors)
    body = b"".join(json_codec.encode(tensors, form, groups=operator.all_groups))
    path, headers = f"/v1/ops/{operator.name}", {"Content-Type": "application/json"}
    answer = client.post(path, content=body, headers=headers, params=dict(operator.example_attributes))
    assert_same(decode(answer), expected)
    assert (b'"base64"' in answer.content) is (form == "base64")


@EVERY
@pytest.mark.parametrize("floats", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_works_in_bytes(client: httpx.Client, operator: Operator, floats: str) -> None:
    tensors = example(operator, {"float": floats})
    expected = run(operator, tensors)
    answer = client.post(
        f"/v1/ops/{operator.name}",
        content=b"".join(safetensors.encode(tensors)),
        headers={"Content-Type": safetensors.MEDIA_TYPE},
        params=dict(operator.example_attributes),
    )
    assert answer.status_code == 200, answer.text
    got = safetensors.decode(memoryview(answer.content), Limits(1 << 30))
    assert got.keys() == expected.keys()
    assert_same({name: got[name] for name in expected}, expected)
    assert_same(infer(client, operator, tensors), expected)


def infer(client: httpx.Client, operator: Operator, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Run the operator on tensors in bytes, as the Open Inference Protocol has them."""
    inputs = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": OPEN_INFERENCE[array.dtype],
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {**parameters(operator), "binary_data_output": True}}).encode()
    answer = client.post(
        f"/v2/models/{operator.name}/infer",
        content=head + b"".join(array.tobytes() for array in tensors.values()),
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    assert answer.status_code == 200, answer.text
    length = int(answer.headers["Inference-Header-Content-Length"])
    rest, outputs = answer.content[length:], {}
    kinds = {name: dtype for dtype, name in OPEN_INFERENCE.items()}
    for one in json.loads(answer.content[:length])["outputs"]:
        size = one["parameters"]["binary_data_size"]
        outputs[one["name"]] = np.frombuffer(rest[:size], kinds[one["datatype"]]).reshape(one["shape"])
        rest = rest[size:]
    return outputs


@EVERY
def test_outputs_have_the_declared_names_and_dtypes(operator: Operator) -> None:
    for floats in FLOATS:
        tensors = example(operator, {"float": floats})
        outputs = run(operator, tensors)
        of_variables = {operator.inputs_by_name[name.partition(".")[0]].variable: name for name in tensors}
        known = operator.outputs_for(tensors)
        for output in operator.outputs:
            found = [name for name in outputs if name.partition(".")[0] == output.name]
            names = [name for name in known if name.partition(".")[0] == output.name]
            if output.group and not output.like:
                names = [f"{output.name}.{number}" for number in range(len(found))]
            assert found == names
            source = of_variables.get(output.variable) if output.variable else None
            expected = tensors[source].dtype.name if source else output.kind.default
            assert {outputs[name].dtype.name for name in found} == {expected}
        assert {name.partition(".")[0] for name in outputs} == {*operator.output_names}


@EVERY
def test_a_run_leaves_its_inputs_unchanged(operator: Operator) -> None:
    tensors = example(operator)
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.flags.writeable = False
    outputs = run(operator, tensors)
    assert_same(tensors, before)
    for output in outputs.values():
        assert not any(np.may_share_memory(output, tensor) for tensor in tensors.values())


@EVERY
def test_a_missing_required_input_is_refused(client: httpx.Client, operator: Operator) -> None:
    for one in operator.inputs:
        left_out = {name: value for name, value in operator.example.items() if name != one.name}
        answer = post(client, operator, left_out)
        if one.optional:
            assert answer.status_code == 200
        else:
            problem = assert_problem(answer, 422, "missing_tensor", one.name, operator.name)
            assert (problem["op"], problem["tensor"]) == (operator.name, one.name)


@EVERY
def test_a_dtype_outside_its_kind_is_refused(client: httpx.Client, operator: Operator) -> None:
    for one in operator.inputs:
        for dtype in set(DTYPES) - set(one.kind.dtypes):
            wrong = {**operator.example, **named(one, {"dtype": dtype, "shape": [0], "data": []})}
            answer = post(client, operator, wrong)
            problem = assert_problem(answer, 422, "dtype_mismatch", one.name, dtype, *one.kind.dtypes)
            assert problem["tensor"] == (f"{one.name}.a" if one.group else one.name)


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
        mixed = {**operator.example, **named(one, {"dtype": other, "shape": [0], "data": []})}
        answer = post(client, operator, mixed)
        assert_problem(answer, 422, "dtype_mismatch", one.name, other, one.kind.default)


def selects(operator: Operator) -> bool:
    """Whether a request may select some of the outputs."""
    return len(operator.outputs) > 1 or operator.outputs[0].group


@EVERY
def test_a_subset_of_the_outputs_is_answered_in_the_asked_order(client: httpx.Client, operator: Operator) -> None:
    names = [output.name for output in operator.outputs]
    if not selects(operator):
        assert_problem(post(client, operator, outputs=names[0]), 422, "unknown_parameter", "'outputs'")
        return
    whole = run(operator, example(operator))
    of_groups = [name for name in whole if "." in name]
    for subset in ([names[-1]], [names[0]], names[::-1], of_groups[-1:] or [names[0]]):
        answer = post(client, operator, outputs=",".join(subset))
        expected = [one for name in subset for one in whole if name in (one, one.partition(".")[0])]
        assert_same(decode(answer), {name: whole[name] for name in expected})
    for wrong in ("", "nonsense", f"{names[0]},{names[0]}", f"{names[0]},", f"{names[0]}."):
        answer = post(client, operator, outputs=wrong)
        known = ",".join(one.name + "[.NAME]" * one.group for one in operator.outputs)
        assert_problem(answer, 422, "invalid_parameter", repr(wrong), known)


@EVERY
def test_unknown_names_are_refused(client: httpx.Client, operator: Operator) -> None:
    answer = post(client, operator, {**operator.example, "nonsense": [1]})
    assert_problem(answer, 422, "unknown_tensor", "'nonsense'", operator.inputs[0].name)
    answer = post(client, operator, nonsense=1)
    assert_problem(answer, 422, "unknown_parameter", "'nonsense'")


@EVERY
def test_an_attribute_takes_its_type_only(client: httpx.Client, operator: Operator) -> None:
    for attribute in operator.attributes:
        value = operator.example_attributes.get(attribute.name, attribute.default)
        texts = map(str, value if isinstance(value, list) else [value])
        given = {} if value is None else {attribute.name: ",".join(texts)}
        assert_same(decode(post(client, operator, **given)), run(operator, example(operator)))
        wrong = ["nonsense"] if attribute.minimum is None else ["nonsense", attribute.minimum - 1]
        for one in wrong:
            answer = post(client, operator, **{attribute.name: one})
            told = f"is {one}" if attribute.is_list and isinstance(one, int) else f"'{one}'"
            problem = assert_problem(answer, 422, "invalid_parameter", attribute.name, told)
            assert problem["parameter"] == attribute.name
        if attribute.required:
            rest = {name: one for name, one in operator.example_attributes.items() if name != attribute.name}
            answer = client.post(f"/v1/ops/{operator.name}", json=dict(operator.example), params=rest)
            problem = assert_problem(answer, 422, "invalid_parameter", f"{attribute.name} is missing")
            assert problem["parameter"] == attribute.name


def defaults(operator: Operator) -> dict[str, Any]:
    return {one.name: None if one.required else one.default for one in operator.attributes}


@EVERY
def test_every_operator_is_documented(client: httpx.Client, operator: Operator) -> None:
    assert operator.formula.endswith(".")
    assert operator.example.keys() == {one.name for one in operator.inputs}
    listed = {info["name"]: info for info in client.get("/v1/ops").json()["operators"]}
    info = listed[operator.name]
    assert info == client.get(f"/v1/ops/{operator.name}").json()
    assert (info["formula"], info["method"]) == (operator.formula, operator.kernel.__name__)
    assert [one["name"] for one in info["inputs"]] == [one.name for one in operator.inputs]
    assert [one["group"] for one in info["inputs"]] == [one.group for one in operator.inputs]
    assert [one["names_of"] for one in info["outputs"]] == [one.like for one in operator.outputs]
    assert {a["name"]: a["default"] for a in info["attributes"]} == defaults(operator)
    assert [a["name"] for a in info["attributes"] if a["required"]] == [
        a.name for a in operator.attributes if a.required
    ]


@EVERY
def test_the_schema_shows_each_request_and_answer(client: httpx.Client, operator: Operator) -> None:
    schema = client.get("/openapi.json").json()
    components = schema["components"]["schemas"]
    request, answer = (components[f"{operator.name}{part}"] for part in ("Request", "Answer"))
    assert request["properties"].keys() == {one.name for one in operator.inputs}
    for one in operator.inputs:  # the body requires no input: `from` may give any
        assert request["properties"][one.name]["description"].startswith("Optional" if one.optional else "Required")
        assert ("additionalProperties" in request["properties"][one.name]) is one.group
    for two in operator.outputs:
        assert ("additionalProperties" in answer["properties"][two.name]) is two.group
    assert "required" not in request
    assert "required" not in answer
    assert request["additionalProperties"] is False
    assert answer["properties"].keys() == {one.name for one in operator.outputs}
    everywhere = schema["paths"][f"/v1/ops/{operator.name}"]["post"]["parameters"]
    parameters = [p for p in everywhere if p["in"] == "query"]
    general = {"encoding", "from", "into", "set", "weight", "step", "contributor", "life", "reduce", "timeout"} | (
        {"outputs"} if selects(operator) else set()
    )
    assert {p["name"] for p in parameters} == general | {a.name for a in operator.attributes}
    attributes = {p["name"]: p for p in parameters if p["name"] not in general}
    assert {name: p["schema"].get("default") for name, p in attributes.items()} == defaults(operator)
    assert {name for name, p in attributes.items() if p["required"]} == {
        a.name for a in operator.attributes if a.required
    }
    for each in operator.attributes:
        if each.minimum is not None:
            assert f'"minimum": {each.minimum}' in json.dumps(attributes[each.name]["schema"])


@EVERY
def test_each_operator_runs_its_declared_kernel(operator: Operator) -> None:
    positional = [p for p in inspect.signature(operator.kernel).parameters.values() if p.kind is p.POSITIONAL_ONLY]
    assert [p.name for p in positional] == [one.name for one in operator.inputs]
    tensors = example(operator)

    def given(one: Tensor) -> Any:
        members = {name.removeprefix(f"{one.name}."): array for name, array in tensors.items()}
        return {name: members[name] for name in members if name not in tensors} if one.group else tensors[one.name]

    parameters = {one.name: one.parameter for one in operator.attributes}
    attributes = {parameters[name]: value for name, value in operator.example_attributes.items()}
    direct = operator.kernel(*map(given, operator.inputs), **attributes)
    flat = {}
    for output, result in zip(operator.outputs, direct if isinstance(direct, tuple) else (direct,), strict=True):
        members = (
            {f"{output.name}.{name}": one for name, one in result.items()} if output.group else {output.name: result}
        )
        flat.update(members)
    assert_same(flat, run(operator, tensors))
