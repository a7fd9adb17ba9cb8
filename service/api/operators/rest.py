"""`/v1/ops`: the operators, each with an endpoint made from its declaration."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, create_model

from service.api.buffers.models import MAX_WAIT_SECONDS
from service.api.buffers.receipts import receipts_text
from service.api.buffers.specs import Life
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.body import header_of, is_quick, read_body
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import media_types, parse_query
from service.api.http.routing import access
from service.api.http.tensor_forms import read_tensor
from service.api.operators import openapi
from service.api.operators.descriptions import NotServed, OperatorInfo, OperatorList, describe
from service.api.operators.job import NO_BUFFERS, BufferUse, Job, buffers_of, is_output, unknown_operator
from service.api.operators.models import attribute_fields
from service.api.operators.onnx_names import NOT_SERVED
from service.api.operators.run import Result, run
from service.api.operators.step import step
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import Array
from service.engine.engine import check_known, unknown_input
from service.errors import InvalidParameter, shown
from service.kernels import OPERATORS, Operator

router = APIRouter(tags=["operators"])


@router.get("/v1/ops", summary="List the operators")
@access("ops")
async def list_operators(call: CurrentCall) -> JsonAnswer[OperatorList]:
    """Each with its family, formula, inputs, outputs, attributes and an example; and what is not served."""
    operators = [describe(operator) for operator in OPERATORS.values()]
    not_served: list[NotServed] = [{"name": name, "why": why} for name, why in NOT_SERVED.items()]
    return JsonAnswer({"operators": operators, "not_served": not_served})


@router.get("/v1/ops/{op}", summary="Describe an operator")
@access("ops")
async def get_operator(call: CurrentCall, op: str) -> JsonAnswer[OperatorInfo]:
    """Its formula, inputs, outputs, attributes and an example. Raises `unknown_operator`."""
    if op not in OPERATORS:
        raise unknown_operator(op)
    return JsonAnswer(describe(OPERATORS[op]))


_NONE: Any = ()
"""The default of a list: pydantic copies a list for each request, but no tuple."""


class EndpointQuery(BaseModel):
    """The query parameters that every operator's endpoint has."""

    encoding: json_codec.Encoding | None = Field(
        None, description="How a JSON answer writes tensors; by default in base64 if the request does, else as lists."
    )
    sources: list[str] = Field(
        _NONE,
        alias="from",
        description="`X:acts.1`: take the input X from the buffer acts.1. `weights:m.p.*`: take a group from the"
        " buffers of a prefix. `X:acts.1@3`: take what its step 3 closed with. May repeat.",
    )
    into: list[str] = Field(
        _NONE,
        description="`dW:gru.W`: add the output dW to the buffer gru.W, and return a receipt instead. `dWs:m.g.*`:"
        " add a group to the buffers of a prefix. May repeat.",
    )
    sets: list[str] = Field(
        _NONE,
        alias="set",
        description="`updated_weights:m.p.*`: write the output over the buffers, or create them, and return receipts"
        " instead. All outputs go to their buffers or none, and only if no buffer of `from` has changed. May repeat.",
    )
    reduce: Literal["sum", "mean"] | None = Field(
        None, description="With `@`: the sum of the step, or the sum divided by the sum of the weights."
    )
    timeout: float | None = Field(
        None, ge=0, le=MAX_WAIT_SECONDS, description="With `@`: seconds to wait until the steps have closed."
    )
    weight: float | None = Field(
        None, allow_inf_nan=False, description="With `into`: the weight of each added gradient; by default 1."
    )
    step: int | None = Field(None, ge=0, description="With `into`: the step that the buffers must be in.")
    contributor: str | None = Field(None, description="With `into`: who adds, 1 to 100 printable characters.")
    life: Life = None


@cache
def query_model(operator: Operator) -> type[EndpointQuery]:
    """Return the query parameters of the operator's endpoint, including its attributes."""
    fields = attribute_fields(operator)
    if len(operator.outputs) > 1 or operator.outputs[0].group:
        description = "The outputs to return, separated by commas; by default all."
        if operator.takes_wanted:
            description += " Other outputs are not computed."
        fields["outputs"] = (str | None, Field(None, description=description))
    return create_model(f"{operator.name}Query", __base__=EndpointQuery, **fields)


def wanted_outputs(operator: Operator, outputs: str | None) -> list[str] | None:
    """Return the names in the query parameter `outputs`. Raises `InvalidParameter`."""
    if outputs is None:
        return None
    names = outputs.split(",")
    if not all(is_output(operator, name) for name in names) or len(set(names)) < len(names):
        known = ",".join(one.name + "[.NAME]" * one.group for one in operator.outputs)
        problem = f"outputs is {shown(outputs)}, but must name some of {known}, each once"
        raise InvalidParameter(problem, parameter="outputs")
    return names


Decoded: TypeAlias = tuple[dict[str, Array], BufferUse, json_codec.Encoding]
"""The tensors of a body, the buffers in its query, and the default form of tensors in a JSON answer."""


async def answer_body(
    call: Call, operator: Operator, query: EndpointQuery, types: tuple[str, str], body: memoryview
) -> Answer:
    """Answer a request whose body has been read. `types` are the media types of the body and of the answer."""
    sent, answers = types
    decode, text = (decode_json, body) if sent == JSON else (decode_safetensors, header_of(body))
    given, inline = (call, operator, query, body), is_quick(text, sent != JSON, operator.has_groups)
    tensors, buffers, form = decode(*given) if inline else await call.decode_in_pool(text, decode, *given)
    attributes = {one.name: getattr(query, one.name) for one in operator.attributes}
    wanted = wanted_outputs(operator, vars(query).get("outputs"))
    encoding = (query.encoding or form) if answers == JSON else None
    job = Job(operator, body, len(body), tensors, attributes, wanted, buffers, encoding)
    result = await (run(call, job) if job.buffers is NO_BUFFERS else step(call, job))
    if not result.is_large(job.encoding is not None):
        return encode(call, job, result)
    return await call.offload(False, encode, call, job, result, changed=bool(result.receipts))


def decode_json(call: Call, operator: Operator, query: EndpointQuery, body: memoryview) -> Decoded:
    """Read a JSON body. By default a JSON answer writes tensors as the body does."""
    began = time.perf_counter_ns()
    # A request needs no body if all its inputs come from buffers.
    text = body if len(body) or not query.sources else b"{}"
    document = json_codec.Document(text, call.engine.limits, operator.groups)
    buffers = buffers_of(operator, query.sources, query.into, query.sets, query, query.timeout)
    tensors = _read_tensors(operator, document)
    document.finish()
    call.spent["decode"] = time.perf_counter_ns() - began
    return tensors, buffers, document.encoding


def _read_tensors(operator: Operator, document: json_codec.Document) -> dict[str, Array]:
    """Read the inputs in the body. Raises `UnknownTensor`, and what `read_tensor` raises."""
    tensors = {}
    for one in operator.inputs:
        if one.name not in document.members:
            continue
        given = document.members[one.name]
        values = {f"{one.name}.{name}": value for name, value in given.items()} if one.group else {one.name: given}
        if one.group:
            check_known(operator, values)
        for name, value in values.items():
            tensors[name] = read_tensor(document, name, value, one.kind.default)
    for name in document.members:
        if name not in operator.inputs_by_name:
            raise unknown_input(operator, name)
    return tensors


def decode_safetensors(call: Call, operator: Operator, query: EndpointQuery, body: memoryview) -> Decoded:
    """Read a safetensors body. A JSON answer to it has base64."""
    began = time.perf_counter_ns()
    tensors = safetensors.decode(body, call.engine.limits) if len(body) or not query.sources else {}
    buffers = buffers_of(operator, query.sources, query.into, query.sets, query, query.timeout)
    call.spent["decode"] = time.perf_counter_ns() - began
    return tensors, buffers, "base64"


def encode(call: Call, job: Job, result: Result) -> Answer:
    """Write the outputs and the receipts as JSON, or, without an encoding, as a safetensors file."""
    began, encoding = time.perf_counter_ns(), job.encoding
    if encoding is None:
        metadata = receipts_text(result.receipts) if result.receipts else None
        answer = Answer(safetensors.encode(result.outputs, metadata), safetensors.MEDIA_TYPE, result.fields)
    else:
        receipts = {name: {**receipt, **_besides(result, name, encoding)} for name, receipt in result.receipts.items()}
        pieces = json_codec.encode(result.outputs, encoding, receipts, groups=job.operator.all_groups)
        answer = Answer(pieces, JSON, result.fields).coded(result.coding)
    call.spent["encode"] = time.perf_counter_ns() - began
    return answer


def _besides(result: Result, name: str, encoding: json_codec.Encoding) -> Mapping[str, Any]:
    """Return the member of a receipt for an output that is answered, too."""
    if name not in result.outputs:
        return {}
    return {"output": orjson.Fragment(b"".join(json_codec.encode_tensor(result.outputs[name], encoding)))}


def add_endpoint(operator: Operator) -> None:
    """Give the operator its endpoint. What it declares for OpenAPI takes long to make, so `declared` does that."""

    async def endpoint(call: CurrentCall) -> Answer:
        query = parse_query(call, query_model(operator))
        types = media_types(call)
        return await answer_body(call, operator, query, types, await read_body(call))

    handler = access("ops", label="ops", operator=operator.name)(endpoint)
    router.add_api_route(f"/v1/ops/{operator.name}", handler, methods=["POST"], include_in_schema=False)


def declared() -> APIRouter:
    """Return a router that declares the endpoints of all operators, and serves none."""
    found = APIRouter(tags=router.tags)
    for operator in OPERATORS.values():

        def endpoint(call: CurrentCall, query: Any) -> None: ...

        endpoint.__annotations__["query"] = Annotated[query_model(operator), Query()]
        path, more = f"/v1/ops/{operator.name}", openapi.declaration(operator)
        found.add_api_route(path, endpoint, methods=["POST"], name=operator.name, **more)
    return found


for _operator in OPERATORS.values():
    add_endpoint(_operator)


@router.post("/v1/ops/{op}", include_in_schema=False)
@access("ops", label="ops")
async def run_unknown(call: CurrentCall, op: str) -> Answer:
    raise unknown_operator(op)  # every operator has its own endpoint
