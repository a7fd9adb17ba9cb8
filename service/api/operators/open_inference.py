"""`/v2/models/.../infer`: the Open Inference Protocol. Every operator is a model, its attributes are parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from service.api.buffers.receipts import receipts_text
from service.api.http.answer import JSON, Answer
from service.api.http.body import is_quick, read_body
from service.api.http.call import GRAPHS, Call, CurrentCall
from service.api.http.negotiation import invalid_parameter, parameters_of
from service.api.http.routing import access
from service.api.operators import openapi
from service.api.operators.job import (
    NO_BUFFERS,
    BufferUse,
    Job,
    buffers_of,
    chosen,
    is_known,
    is_output,
    listed,
    unknown_operator,
)
from service.api.operators.models import attribute_fields
from service.api.operators.planned import planned
from service.api.operators.protocol_models import BufferParameters
from service.api.operators.run import Result, is_small, run
from service.api.operators.shared_memory import SCOPE, read_inputs
from service.api.operators.step import step
from service.codecs import open_inference as codec
from service.codecs.json import Encoding
from service.codecs.parts import SharedInput
from service.dtypes import DTYPES
from service.errors import (
    Invalid,
    InvalidParameter,
    MalformedBody,
    UnknownGraph,
    UnknownOperator,
    UnknownParameter,
    shown,
)
from service.kernels import OPERATORS, Operator
from service.limits import Limits

router = APIRouter(prefix="/v2", tags=["open inference protocol"])

VERSION = "1"
"""The only version of every model."""

HEADER_LENGTH = b"inference-header-content-length"

_IGNORED = frozenset({"priority", "timeout", "sequence_id", "sequence_start", "sequence_end"})
"""Parameters of Triton's scheduler, which clients may set for any model."""

MAX_PARAMETER_CHARACTERS = 1 << 12
"""Characters of a parameter that is text: a name of a buffer for each tensor of an operator takes 2,500."""


Decoded: TypeAlias = tuple[Job, str | None, Mapping[str, SharedInput]]
"""A job, the id of its request, and the inputs that are in shared memory."""


async def find_model(call: Call, name: str) -> Operator:
    """Return the operator, or else the graph, of this model, in the version of the path. The body must have been read.

    Raises `UnknownOperator`, and what `planned` raises.
    """
    try:
        operator = OPERATORS[name] if name in OPERATORS else (await planned(call, name)).operator
    except (UnknownGraph, InvalidParameter):
        raise unknown_operator(name) from None
    if (version := call.parameters.get("version", VERSION)) != VERSION:
        raise UnknownOperator(f"{name} has version {VERSION} only, not {shown(version)}", op=name)
    return operator


@router.post("/models/{op}/infer", summary="Run a model", **openapi.INFER)
@router.post("/models/{op}/versions/{version}/infer", include_in_schema=False)
@access("ops", label="infer")
async def infer(call: CurrentCall, op: str) -> Answer:
    """Inference-Header-Content-Length: the bytes of JSON in the body, which tensors follow as bytes."""
    if op in OPERATORS:
        call.operator = op
    if call.query_string:  # an attribute in an ignored query would keep its default
        raise UnknownParameter(
            f"{call.path} takes no query; attributes are members of the request's parameters, like"
            ' {"parameters": {"axis": 0}, "inputs": [...]}',
            op=op,
        )
    length = _header_length(call)
    body = await read_body(call, length or 0)
    operator = await find_model(call, op)
    if op not in OPERATORS:
        call.operator, call.graph = GRAPHS, op
    text, given = body[:length], (call, operator, length, body)
    job, identity, shared = _decode(*given) if is_quick(text) else await call.decode_in_pool(text, _decode, *given)
    if shared or job.parts:
        call.caller.require(SCOPE)
        inline = is_small(call, sum(one.part.size for one in shared.values()))
        job = await call.offload(inline, read_inputs, call, job, shared)
    result = await (run(call, job) if job.buffers is NO_BUFFERS else step(call, job))
    if not result.is_large(job.encoding is not None):
        return _encode(call, job, result, identity)
    return await call.offload(False, _encode, call, job, result, identity, changed=bool(result.receipts))


def _header_length(call: Call) -> int | None:
    """Return the length of the JSON if bytes follow, else None."""
    value = call.headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        text = shown(value.decode("latin-1"))
        raise MalformedBody(f"Inference-Header-Content-Length is {text}, but must be a number of bytes")
    return int(value)


def _decode(call: Call, operator: Operator, length: int | None, body: memoryview) -> Decoded:
    began = time.perf_counter_ns()
    limits = call.engine.limits
    decoded = _decode_raw(operator, limits, body) if length == 0 else _decode_tensors(operator, limits, length, body)
    call.spent["decode"] = time.perf_counter_ns() - began
    return decoded


def _decode_tensors(operator: Operator, limits: Limits, length: int | None, body: memoryview) -> Decoded:
    request = codec.decode(body, length, limits)
    wanted = None if request.outputs is None else list(request.outputs)
    for name in wanted or ():
        if not is_output(operator, name):
            raise Invalid(f"{operator.name} has no output {shown(name)}; its outputs are {listed(operator.outputs)}")
        if name in request.parts and not is_known(name, operator.outputs):
            raise InvalidParameter(f"{name} is a group: name the place of each of its tensors", parameter="outputs")
    outputs = operator.output_names if wanted is None else wanted
    in_bytes = [name for name in outputs if (request.binary if request.outputs is None else request.outputs[name])]
    attributes, buffers = _attributes(operator, request.parameters)
    for name in filter(buffers.target_of, request.parts):
        raise InvalidParameter(f"{name} goes to a buffer, so it cannot go to shared memory, too", parameter="into")
    encoding: Encoding | None = "list" if len(in_bytes) < len(outputs) else None
    tensors, parts = request.tensors, request.parts
    job = Job(operator, body, len(body), tensors, attributes, wanted, buffers, encoding, in_bytes, parts=parts)
    return job, request.id, request.shared


def _decode_raw(operator: Operator, limits: Limits, body: memoryview) -> Decoded:
    """Read a body that is the bytes of the only input, in its default dtype, of rank 1."""
    needed = [tensor for tensor in operator.inputs if not tensor.optional]
    if len(needed) != 1 or needed[0].group:
        raise MalformedBody(
            "Inference-Header-Content-Length is 0, so the body is bytes alone: that is for models with one input, but"
            f" {operator.name} needs {listed(needed)}"
        )
    name, dtype = needed[0].name, DTYPES[needed[0].kind.default]
    tensor = codec.decode_raw(name, dtype, body, limits)
    attributes, _ = _attributes(operator, {})
    job = Job(operator, body, len(body), {name: tensor}, attributes, None, binary=operator.output_names)
    return job, None, {}


def _encode(call: Call, job: Job, result: Result, identity: str | None) -> Answer:
    began, operator = time.perf_counter_ns(), job.operator
    parameters = receipts_text(result.receipts) if result.receipts else {}
    binary = {*chosen(result.outputs, job.binary)} if operator.has_groups else job.binary
    pieces, length = codec.encode(operator.name, identity, result.outputs, binary, parameters, job.parts)
    if length is None:
        answer = Answer(pieces, JSON, result.fields).coded(result.coding)
    else:
        fields = {"Inference-Header-Content-Length": str(length), **result.fields}
        answer = Answer(pieces, "application/octet-stream", fields)
    call.spent["encode"] = time.perf_counter_ns() - began
    return answer


_BUFFER_PARAMETERS = frozenset(parameters_of(BufferParameters))


_MODELS: WeakKeyDictionary[Operator, type[BaseModel]] = WeakKeyDictionary()
"""The models of attributes of operators that were used. A graph's operator goes with the graph."""


def _attribute_model(operator: Operator) -> type[BaseModel]:
    if (model := _MODELS.get(operator)) is None:
        config = ConfigDict(extra="forbid", strict=True)
        fields = attribute_fields(operator)
        model = _MODELS[operator] = create_model(f"{operator.name}Attributes", __config__=config, **fields)
    return model


def _attributes(operator: Operator, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], BufferUse]:
    """Return the attributes and the buffers in the parameters. A list is a text with commas, as Triton has no lists."""
    if not parameters and not operator.needs_attributes:
        return {}, NO_BUFFERS
    for name, value in parameters.items():
        if isinstance(value, str) and len(value) > MAX_PARAMETER_CHARACTERS:
            raise InvalidParameter(
                f"The parameter {shown(name)} has {len(value)} characters; the limit is {MAX_PARAMETER_CHARACTERS}",
                parameter=name,
                limit=MAX_PARAMETER_CHARACTERS,
            )
    values = {
        name: value for name, value in parameters.items() if name not in _IGNORED and name not in _BUFFER_PARAMETERS
    }
    try:
        attributes = _attribute_model(operator).model_validate(values).model_dump()
        given = {name: parameters[name] for name in _BUFFER_PARAMETERS & parameters.keys()}
        use = BufferParameters.model_validate(given)
    except ValidationError as invalid:
        known = [*parameters_of(_attribute_model(operator)), *parameters_of(BufferParameters)]
        error = invalid.errors(include_url=False, include_context=False)[0]
        raise invalid_parameter(error, "parameter", known) from None
    sources, into, sets = (text.split(",") if text else [] for text in (use.sources, use.into, use.sets))
    return attributes, buffers_of(operator, sources, into, sets, use)
