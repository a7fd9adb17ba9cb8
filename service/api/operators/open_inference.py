"""`/v2`: the Open Inference Protocol. Every operator is a model, and its attributes are request parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.requests import Request
from starlette.types import Receive, Scope

from service.api.buffers.receipts import receipts_text
from service.api.http.body import Answer
from service.api.http.context import context_of, engine_of
from service.api.http.problems import invalid_parameter, parameters_of
from service.api.operators.rest import buffers_of, find
from service.api.operators.run import NO_BUFFERS, Buffers, Job, respond, statistics_of, text_of
from service.buffers.record import Receipt
from service.codecs import open_inference as codec
from service.dtypes import DTYPES, OPEN_INFERENCE, Array
from service.engine import Engine
from service.errors import Invalid, MalformedBody, MethodNotAllowed, UnknownOperator, UnknownParameter, shown
from service.kernels import OPERATORS, Operator, Tensor

router = APIRouter(prefix="/v2", tags=["open inference protocol"])

VERSION = "1"

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]

HEADER_LENGTH = b"inference-header-content-length"

_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")

_IGNORED = {"priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}
"""Parameters of Triton's scheduler, which clients may set for any model."""


@router.get("", summary="Describe the server")
async def server() -> dict[str, Any]:
    return {"name": "gradserve", "version": version("gradserve"), "extensions": EXTENSIONS}


@router.post("/repository/index", summary="List the models")
async def index() -> list[dict[str, str]]:
    return [{"name": name, "version": VERSION, "state": "READY", "reason": ""} for name in OPERATORS]


@router.get("/models/stats", summary="Statistics of all models")
async def all_statistics(request: Request) -> dict[str, Any]:
    return _statistics(request, *OPERATORS)


@router.get("/models/{op}", summary="A model's inputs and outputs")
@router.get("/models/{op}/versions/{number}", include_in_schema=False)
async def model(request: Request, op: str) -> dict[str, Any]:
    operator = _find(op, _version(request))

    def described(tensor: Tensor) -> dict[str, Any]:
        return {"name": tensor.name, "datatype": _datatype(tensor), "shape": [-1]}

    return {
        "name": operator.name,
        "versions": [VERSION],
        "platform": "gradserve",
        "inputs": list(map(described, operator.inputs)),
        "outputs": list(map(described, operator.outputs)),
    }


@router.get("/models/{op}/config", summary="A model's configuration")
@router.get("/models/{op}/versions/{number}/config", include_in_schema=False)
async def config(request: Request, op: str) -> dict[str, Any]:
    operator = _find(op, _version(request))

    def described(tensor: Tensor) -> dict[str, Any]:
        return {"name": tensor.name, "data_type": f"TYPE_{_datatype(tensor)}", "dims": [-1]}

    return {
        "name": operator.name,
        "platform": "gradserve",
        "max_batch_size": 0,
        "input": [{**described(one), "optional": one.optional} for one in operator.inputs],
        "output": list(map(described, operator.outputs)),
    }


@router.get("/models/{op}/ready", summary="Whether the model is ready")
@router.get("/models/{op}/versions/{number}/ready", include_in_schema=False)
async def ready(request: Request, op: str) -> dict[str, Any]:
    operator = _find(op, _version(request))
    engine_of(request.scope)
    return {"name": operator.name, "ready": True}


@router.get("/models/{op}/stats", summary="A model's statistics")
@router.get("/models/{op}/versions/{number}/stats", include_in_schema=False)
async def statistics(request: Request, op: str) -> dict[str, Any]:
    return _statistics(request, _find(op, _version(request)).name)


def _statistics(request: Request, *names: str) -> dict[str, Any]:
    kept = statistics_of(request.scope)

    def one(name: str) -> dict[str, Any]:
        record = kept.of(name)
        phases = {phase: getattr(record, phase) for phase in _PHASES}
        times = {"success": sum(phases.values()), **phases}
        return {
            "name": name,
            "version": VERSION,
            "last_inference": record.last,
            "inference_count": record.succeeded,
            "execution_count": record.succeeded,
            "inference_stats": {
                **{phase: {"count": record.succeeded, "ns": spent} for phase, spent in times.items()},
                "fail": {"count": record.failed, "ns": record.fail},
                "cache_hit": {"count": 0, "ns": 0},
                "cache_miss": {"count": 0, "ns": 0},
            },
            "batch_stats": [],
        }

    return {"model_stats": list(map(one, names))}


def _version(request: Request) -> str:
    number: str = request.path_params.get("number", VERSION)
    return number


def _find(name: str, number: str) -> Operator:
    operator = find(name)
    if number != VERSION:
        raise UnknownOperator(f"{name} has version {VERSION} only, not {shown(number)}", op=name)
    return operator


def _datatype(tensor: Tensor) -> str:
    return OPEN_INFERENCE[DTYPES[tensor.kind.default]]


_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


def wants_inference(scope: Scope) -> re.Match[str] | None:
    """Whether a request is to run a model; which and in which version, say the groups."""
    path: str = scope["path"]
    return _INFER.fullmatch(path) if path.startswith("/v2/") else None


async def infer(scope: Scope, receive: Receive, path: re.Match[str]) -> Answer:
    """Run a model, without FastAPI, which would add nothing to it but time."""
    if scope["method"] != "POST":
        raise MethodNotAllowed(f"{path[0]} does not allow {scope['method']}; it allows POST")
    operator = _find(path[1], path[2] or VERSION)
    if scope["query_string"]:  # which, ignored, would leave attributes at their defaults
        raise UnknownParameter(
            f"{path[0]} takes no query; attributes are members of the request's parameters, like"
            ' {"parameters": {"axis": 0}, "inputs": [...]}',
            op=operator.name,
        )
    length = _header_length(scope)
    decode = partial(_decode, operator, length)
    return await respond(scope, receive, operator, decode, text=lambda body: text_of(body[:length]), head=length or 0)


def _header_length(scope: Scope) -> int | None:
    """Where the JSON ends, if bytes follow."""
    value = context_of(scope).headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        text = shown(value.decode("latin-1"))
        raise MalformedBody(f"Inference-Header-Content-Length is {text}, but must be a number of bytes")
    return int(value)


def _decode(operator: Operator, length: int | None, engine: Engine, body: memoryview) -> Job:
    if length == 0:
        return _decode_raw(operator, engine, body)
    request = codec.decode(body, length, engine.limits)
    known = operator.output_names
    wanted = None if request.outputs is None else list(request.outputs)
    for name in wanted or ():
        if name not in known:
            raise Invalid(f"{operator.name} has no output {shown(name)}; its outputs are {', '.join(known)}")
    binary = {name: request.binary for name in known} if request.outputs is None else request.outputs
    encode = partial(_encode, operator, request.id, [name for name, in_bytes in binary.items() if in_bytes])
    attributes, buffers = _attributes(operator, request.parameters)
    return Job(request.tensors, attributes, wanted, encode, not all(binary.values()), buffers)


def _decode_raw(operator: Operator, engine: Engine, body: memoryview) -> Job:
    """A body that is nothing but one tensor's bytes: of the only input, in its default dtype, of rank 1."""
    needed = [tensor for tensor in operator.inputs if not tensor.optional]
    if len(needed) != 1:
        raise MalformedBody(
            f"A body of bytes alone is for models with one input, but {operator.name} needs"
            f" {', '.join(tensor.name for tensor in needed)}"
        )
    name, dtype = needed[0].name, DTYPES[needed[0].kind.default]
    tensor = codec.decode_raw(name, dtype, body, engine.limits)
    return Job({name: tensor}, {}, None, partial(_encode, operator, None, operator.output_names), False)


def _encode(
    operator: Operator,
    identity: str | None,
    binary: Sequence[str],
    outputs: Mapping[str, Array],
    receipts: Mapping[str, Receipt],
) -> Answer:
    parameters = receipts_text(receipts) if receipts else {}
    pieces, length = codec.encode(operator.name, identity, outputs, binary, parameters)
    if length is None:
        return Answer(pieces, "application/json")
    return Answer(pieces, "application/octet-stream", {"Inference-Header-Content-Length": str(length)})


class _Buffers(BaseModel):
    """The parameters of every model. Those that name buffers may name several, with commas."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sources: str = Field("", alias="from")
    into: str = ""
    weight: float | None = Field(None, allow_inf_nan=False)
    epoch: int | None = Field(None, ge=0)


_BUFFERS = frozenset(parameters_of(_Buffers))


@cache
def _attribute_model(operator: Operator) -> type[BaseModel]:
    fields: Any = {a.name: (a.type, a.default) for a in operator.attributes}
    return create_model(f"{operator.name}Attributes", __config__=ConfigDict(extra="forbid", strict=True), **fields)


def _attributes(operator: Operator, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], Buffers]:
    """The request's parameters as attributes. A list, which a parameter cannot be, may be a text with commas."""
    if not parameters:
        return {}, NO_BUFFERS
    lists = {a.name for a in operator.attributes if "list" in a.type_name}
    given = {
        name: value.split(",") if name in lists and isinstance(value, str) else value
        for name, value in parameters.items()
        if name not in _IGNORED and name not in _BUFFERS
    }
    try:
        attributes = _attribute_model(operator).model_validate(given).model_dump()
        named = _Buffers.model_validate({name: parameters[name] for name in _BUFFERS & parameters.keys()})
    except ValidationError as invalid:
        known = [*parameters_of(_attribute_model(operator)), *parameters_of(_Buffers)]
        raise invalid_parameter(invalid.errors()[0], "parameter", known) from None
    sources, into = (text.split(",") if text else [] for text in (named.sources, named.into))
    return attributes, buffers_of(operator, sources, into, named.weight, named.epoch)
