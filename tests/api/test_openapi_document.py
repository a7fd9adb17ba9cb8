"""What generators of clients and linters need of the OpenAPI document: ids, formats, references, true errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from service.errors import tree
from service.kernels import OPERATORS

IDS = """
list_operators get_operator
server_metadata repository_index model_metadata model_configuration model_ready all_model_statistics model_statistics
infer regions region register_region unregister_region unregister_regions
create_buffer get_buffer set_rules delete_buffer list_buffers value accumulate zero take statistics
create_many accumulate_many zero_many take_many value_many statistics_many delete_many set_rules_many
server_live server_ready get_limits get_metrics
list_pushes forget_push
list_runs get_run join leave finish delete_run
put_graph list_graphs get_graph get_model delete_graph run_graph
get_caller get_service service_history
"""
"""The ids of operations, besides those of operators. Generated clients have methods of these names: they stay."""


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Any:
    return client.get("/openapi.json").json()


def operations(document: Any) -> Iterator[tuple[str, Any]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dictionary in the document, without its examples."""
    if isinstance(value, dict):
        yield value
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        if name not in ("example", "examples"):
            yield from dictionaries(member)


def test_every_operation_has_a_stable_id(document: Any) -> None:
    ids = [operation["operationId"] for _, operation in operations(document)]
    assert sorted(ids) == sorted([*IDS.split(), *OPERATORS])
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", one) for one in {*ids} - OPERATORS.keys())


def test_every_operation_has_a_described_tag_and_a_description(document: Any) -> None:
    tags = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert all(tags.values())
    assert {tag for _, operation in operations(document) for tag in operation["tags"]} == tags.keys()
    assert all(operation["description"] and operation["summary"] for _, operation in operations(document))


def test_the_document_has_a_licence_and_a_contact(document: Any) -> None:
    assert document["info"]["license"] == {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
    assert document["info"]["contact"]["name"]
    assert document["info"]["description"]


def test_every_number_has_a_format(document: Any) -> None:
    numbers = [one for one in dictionaries(document) if {"integer", "number"} & {str(one.get("type"))}]
    assert len(numbers) > 100
    for one in numbers:
        assert one["format"] in ({"int32", "int64"} if one["type"] == "integer" else {"float", "double"}), one
    schemas = document["components"]["schemas"]
    assert repr(schemas["NewBuffer"]["properties"]["shape"]["items"]["exclusiveMaximum"]) == str(1 << 63)
    assert repr(schemas["NewRegion"]["properties"]["byte_size"]["maximum"]) == str((1 << 63) - 1)
    rules = schemas["NewRules"]["properties"]
    assert rules["quorum"]["anyOf"][0]["format"] == "int32"
    assert rules["max_norm"]["anyOf"][0]["format"] == "double"


def test_no_body_has_a_default(document: Any) -> None:
    """In TypeScript a member with a default is one that must be there."""
    places = [one for one in dictionaries(document) if not isinstance(one.get("default", {}), dict)]
    parameters = [one["schema"] for _, each in operations(document) for one in each.get("parameters", ())]
    assert all(one in parameters for one in places)
    assert any(one["default"] == "sum" for one in parameters if "default" in one)
    new = document["components"]["schemas"]["NewBuffer"]["properties"]
    assert new["dtype"]["description"] == "By default float32."
    assert new["keep"]["description"].endswith("By default 1.")


def test_every_reference_has_a_target(document: Any) -> None:
    references = {one["$ref"] for one in dictionaries(document) if isinstance(one.get("$ref"), str)}
    assert "#/components/schemas/NewRules" in references
    for reference in references:
        target = document
        for name in reference.removeprefix("#/").split("/"):
            target = target[name]


def test_every_operation_has_the_error_of_its_api(document: Any) -> None:
    for path, operation in operations(document):
        name = "ProtocolError" if path.startswith("/v2") else "Problem"
        errors = {status: one for status, one in operation["responses"].items() if status >= "4"}
        assert errors == dict.fromkeys(("4XX", "5XX"), {"$ref": f"#/components/responses/{name}"})


def test_the_examples_of_errors_are_answers_of_the_server(client: httpx.Client, document: Any) -> None:
    responses = document["components"]["responses"]
    (problem,) = responses["Problem"]["content"].items()
    answer = client.post("/v1/ops/ReluGrad", json={"dY": [1, 2], "X": [1]})
    assert (answer.headers["content-type"], answer.json()) == (problem[0], problem[1]["example"])
    (error,) = responses["ProtocolError"]["content"].items()
    tensors = {"dY": [1.0, 2.0], "X": [1.0]}
    inputs = [{"name": name, "shape": [len(data)], "datatype": "FP32", "data": data} for name, data in tensors.items()]
    answer = client.post("/v2/models/ReluGrad/infer", json={"inputs": inputs})
    assert (answer.headers["content-type"], answer.json()) == (error[0], error[1]["example"])


def test_problems_have_the_codes_of_the_error_classes(document: Any) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["Problem"]["properties"]["code"]["$ref"] == "#/components/schemas/ErrorCode"
    assert schemas["ErrorCode"]["enum"] == sorted({error.code for error in tree()})


def test_descriptions_name_errors_by_their_codes(document: Any, client: httpx.Client) -> None:
    texts = [each["description"] for _, each in operations(document)]
    texts += [each["description"] for each in client.get("/v1/ops").json()["operators"]]
    raised = [text.partition("Raises ")[2] for text in texts if "Raises " in text]
    named = {name for text in raised for name in re.findall(r"`(\w+)`", text)}
    assert {"shape_mismatch", "unknown_buffer"} <= named
    classes = {error.__name__ for error in tree()}
    assert not [text for text in texts if classes & {*re.findall(r"`(\w+)`", text)}]
    known = {error.code for error in tree()} | {"accumulate", "take", "value"}
    known |= {one.name for op in OPERATORS.values() for one in op.inputs}
    known |= {one.name for op in OPERATORS.values() for one in op.attributes}
    assert named <= known, named - known
