"""`/v1/ops`: the operators, each with an endpoint made from its declaration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from typing_extensions import TypedDict

from service.api.buffers.receipts import receipts_text
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.body import header_of, is_quick, read_body
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import media_types
from service.api.http.routing import access
from service.api.operators import openapi
from service.api.operators.job import BufferUse, Job, buffers_of, find, unknown_operator
from service.api.operators.models import request_model
from service.api.operators.run import Result, run
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.engine.engine import check_names
from service.errors import InvalidParameter, shown
from service.kernels import OPERATORS, Operator, Tensor

router = APIRouter(tags=["operators"])


class TensorInfo(TypedDict):
    """An input or output of an operator."""

    name: str
    dtypes: list[str]
    default_dtype: Annotated[str, Field(description="The dtype of a JSON list that names none.")]
    type_variable: Annotated[str | None, Field(description="Tensors of the same type variable share a dtype.")]
    optional: bool


class AttributeInfo(TypedDict):
    """An attribute of an operator, a query parameter."""

    name: str
    type: str
    default: Any


class OperatorInfo(TypedDict):
    """An operator: its formula, inputs, outputs and attributes."""

    name: str
    formula: str
    description: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    attributes: list[AttributeInfo]
    example: Annotated[dict[str, Any], Field(description="A request and its answer.")]


class OperatorList(TypedDict):
    """All operators."""

    operators: list[OperatorInfo]


@cache
def describe(operator: Operator) -> OperatorInfo:
    """Return the operator's declaration as clients read it."""
    return OperatorInfo(
        name=operator.name,
        formula=operator.formula,
        description=openapi.description(operator),
        inputs=list(map(_tensor_info, operator.inputs)),
        outputs=list(map(_tensor_info, operator.outputs)),
        attributes=[AttributeInfo(name=a.name, type=a.type_name, default=a.default) for a in operator.attributes],
        example={"request": dict(operator.example), "answer": openapi.example_answer(operator)},
    )


def _tensor_info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        name=tensor.name,
        dtypes=list(tensor.kind.dtypes),
        default_dtype=tensor.kind.default,
        type_variable=tensor.variable,
        optional=tensor.optional,
    )


@router.get("/v1/ops", summary="List the operators")
@access("ops")
async def list_operators(call: CurrentCall) -> JsonAnswer[OperatorList]:
    """Each with its formula, inputs, outputs, attributes and an example."""
    return JsonAnswer({"operators": [describe(operator) for operator in OPERATORS.values()]})


@router.get("/v1/ops/{op}", summary="Describe an operator")
@access("ops")
async def get_operator(call: CurrentCall, op: str) -> JsonAnswer[OperatorInfo]:
    """Its formula, inputs, outputs, attributes and an example. Raises `unknown_operator`."""
    return JsonAnswer(describe(find(op)))


_NONE: Any = ()
"""The default of a list: pydantic copies a list for each request, but no tuple."""


class EndpointQuery(BaseModel):
    """The query parameters that every operator's endpoint has."""

    model_config = ConfigDict(extra="forbid")

    encoding: json_codec.Encoding | None = Field(
        None, description="How a JSON answer writes tensors; by default in base64 if the request does, else as lists."
    )
    sources: list[str] = Field(
        _NONE, alias="from", description="`X:acts.1`: take the input X from the buffer acts.1. May repeat."
    )
    into: list[str] = Field(
        _NONE,
        description="`dW:gru.W`: add the output dW to the buffer gru.W, and return a receipt instead. May repeat.",
    )
    weight: float | None = Field(
        None, allow_inf_nan=False, description="With `into`: the weight of each added gradient; by default 1."
    )
    epoch: int | None = Field(None, ge=0, description="With `into`: the epoch that the buffers must be in.")
    contributor: str | None = Field(None, description="With `into`: who adds, 1 to 100 printable characters.")


def query_model(operator: Operator) -> type[EndpointQuery]:
    """Return the query parameters of the operator's endpoint, including its attributes."""
    fields: Any = {a.name: (a.type, a.default) for a in operator.attributes}
    if len(operator.outputs) > 1:
        description = "The outputs to return, separated by commas; by default all."
        if operator.takes_wanted:
            description += " Other outputs are not computed."
        fields["outputs"] = (str | None, Field(None, description=description))
    return create_model(f"{operator.name}Query", __base__=EndpointQuery, **fields)


def wanted_outputs(operator: Operator, outputs: str | None) -> list[str] | None:
    """Return the names in the query parameter `outputs`. Raises `InvalidParameter`."""
    if outputs is None:
        return None
    known, names = operator.output_names, outputs.split(",")
    if not set(names) <= set(known) or len(set(names)) < len(names):
        problem = f"outputs is {shown(outputs)}, but must name some of {','.join(known)}, each once"
        raise InvalidParameter(problem, parameter="outputs")
    return names


_NOT_ATTRIBUTES = {*EndpointQuery.model_fields, "outputs"}


async def run_operator(call: Call, operator: Operator, query: EndpointQuery) -> Answer:
    """Answer a request that runs the operator."""
    sent, answers = media_types(call)
    body = await read_body(call)
    decode, text = (decode_json, body) if sent == JSON else (decode_safetensors, header_of(body))
    given, inline = (call, operator, query, body), is_quick(text, sent != JSON)
    job, form = decode(*given) if inline else await call.decode_in_pool(text, decode, *given)
    encoding = (query.encoding or form) if answers == JSON else None
    result = await run(call, job, encoding)
    if encoding is None or not result.is_large:
        return encode(call, result, encoding)
    return await call.offload(False, encode, call, result, encoding, changed=bool(result.receipts))


def decode_json(
    call: Call, operator: Operator, query: EndpointQuery, body: memoryview
) -> tuple[Job, json_codec.Encoding]:
    """Read the job from a JSON body. Return it with the default form of tensors in a JSON answer."""
    began = time.perf_counter_ns()
    # A request needs no body if all its inputs come from buffers.
    document = json_codec.Document(body if len(body) or not query.sources else b"{}", call.engine.limits)
    buffers = _buffers(operator, query)
    try:
        given = request_model(operator).model_validate(document.members, context=document)
    except ValidationError:
        check_names(operator, document.members)
        raise
    names = [tensor.name for tensor in operator.inputs if tensor.name in given.model_fields_set]
    document.finish()
    job = _job(operator, query, body, {name: getattr(given, name) for name in names}, buffers)
    call.spent["decode"] = time.perf_counter_ns() - began
    return job, document.encoding


def decode_safetensors(
    call: Call, operator: Operator, query: EndpointQuery, body: memoryview
) -> tuple[Job, json_codec.Encoding]:
    """Read the job from a safetensors body. A JSON answer to it has base64."""
    began = time.perf_counter_ns()
    tensors = safetensors.decode(body, call.engine.limits) if len(body) or not query.sources else {}
    job = _job(operator, query, body, tensors, _buffers(operator, query))
    call.spent["decode"] = time.perf_counter_ns() - began
    return job, "base64"


def _buffers(operator: Operator, query: EndpointQuery) -> BufferUse:
    return buffers_of(operator, query.sources, query.into, query.weight, query.epoch, query.contributor)


def _job(
    operator: Operator, query: EndpointQuery, body: memoryview, tensors: Mapping[str, Any], buffers: BufferUse
) -> Job:
    attributes = query.model_dump(exclude=_NOT_ATTRIBUTES)
    wanted = wanted_outputs(operator, getattr(query, "outputs", None))
    return Job(operator, body, tensors, attributes, wanted, buffers)


def encode(call: Call, result: Result, encoding: json_codec.Encoding | None) -> Answer:
    """Write the outputs and the receipts as JSON, or, without an `encoding`, as a safetensors file."""
    began = time.perf_counter_ns()
    if encoding is None:
        metadata = receipts_text(result.receipts) if result.receipts else None
        answer = Answer(safetensors.encode(result.outputs, metadata), safetensors.MEDIA_TYPE, result.fields)
    else:
        pieces = json_codec.encode(result.outputs, encoding, result.receipts)
        answer = Answer(pieces, JSON, result.fields).coded(result.coding)
    call.spent["encode"] = time.perf_counter_ns() - began
    return answer


def _add_endpoint(operator: Operator) -> None:
    async def endpoint(call, query):  # type: ignore[no-untyped-def]
        return await run_operator(call, operator, query)

    endpoint.__annotations__ = {
        "call": CurrentCall,
        "query": Annotated[query_model(operator), Query()],
        "return": Answer,
    }
    router.add_api_route(
        f"/v1/ops/{operator.name}",
        access("ops", label="ops", operator=operator.name)(endpoint),
        methods=["POST"],
        name=operator.name,
        **openapi.declaration(operator),
    )


for _operator in OPERATORS.values():
    _add_endpoint(_operator)


@router.post("/v1/ops/{op}", include_in_schema=False)
@access("ops", label="ops")
async def run_unknown(call: CurrentCall, op: str) -> Answer:
    raise unknown_operator(op)  # every operator has its own endpoint
