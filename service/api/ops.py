"""`/v1/ops`: the operators, each with an endpoint made from its declaration."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from service.api import openapi
from service.api.body import Answer, AnswerResponse
from service.api.tensors import judge
from service.api.work import INLINE_BYTES, INLINE_TEXT, Job, respond
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import DTYPES
from service.engine import Engine
from service.errors import GradserveError, InvalidParameter, NotAcceptable, UnknownOperator, UnsupportedMediaType, shown
from service.kernels import OPERATORS, Operator, Tensor
from service.kernels._op import Array

router = APIRouter(tags=["operators"])

JSON = "application/json"
MEDIA_TYPES = (JSON, safetensors.MEDIA_TYPE)


class TensorInfo(BaseModel):
    """An input or output of an operator."""

    name: str
    dtypes: list[str]
    default_dtype: str = Field(description="What a JSON list without a dtype has.")
    type_variable: str | None = Field(description="Tensors of the same type variable share a dtype.")
    optional: bool


class AttributeInfo(BaseModel):
    """An attribute of an operator, a query parameter."""

    name: str
    type: str
    default: Any


class OperatorInfo(BaseModel):
    """What an operator computes, takes and gives."""

    name: str
    formula: str
    description: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    attributes: list[AttributeInfo]
    example: dict[str, Any] = Field(description="A request and its answer.")


class OperatorList(BaseModel):
    """All operators."""

    operators: list[OperatorInfo]


@cache
def describe(operator: Operator) -> OperatorInfo:
    """The operator's declaration, for users."""

    def tensor(one: Tensor) -> TensorInfo:
        return TensorInfo(
            name=one.name,
            dtypes=list(one.kind.dtypes),
            default_dtype=one.kind.default,
            type_variable=one.variable,
            optional=one.optional,
        )

    return OperatorInfo(
        name=operator.name,
        formula=operator.formula,
        description=operator.description,
        inputs=[tensor(one) for one in operator.inputs],
        outputs=[tensor(one) for one in operator.outputs],
        attributes=[AttributeInfo(name=a.name, type=a.type_name, default=a.default) for a in operator.attributes],
        example={"request": dict(operator.example), "answer": openapi.example_answer(operator)},
    )


@router.get("/v1/ops", summary="All operators")
async def list_operators() -> OperatorList:
    return OperatorList(operators=[describe(operator) for operator in OPERATORS.values()])


@router.get("/v1/ops/{op}", summary="One operator")
async def get_operator(op: str) -> OperatorInfo:
    return describe(find(op))


def find(name: str) -> Operator:
    """The operator called `name`. Raises `UnknownOperator`, which suggests the nearest name."""
    if name in OPERATORS:
        return OPERATORS[name]
    near = difflib.get_close_matches(name, OPERATORS, 1, 0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UnknownOperator(f"There is no operator {shown(name)}.{hint} GET /v1/ops lists all", op=name)


class EndpointQuery(BaseModel):
    """The query parameters that every operator's endpoint has."""

    model_config = ConfigDict(extra="forbid")

    encoding: json_codec.Form | None = Field(
        None, description="How the answer writes its tensors; by default in base64 if the request does, else as lists."
    )


def query_model(operator: Operator) -> type[EndpointQuery]:
    """The query parameters of the operator's endpoint, its attributes included."""
    fields: Any = {a.name: (a.type, a.default) for a in operator.attributes}
    if len(operator.outputs) > 1:
        description = (
            "The outputs to answer, separated by commas; by default all. What is not asked for is not computed."
        )
        fields["outputs"] = (str | None, Field(None, description=description))
    return create_model(f"{operator.name}Query", __base__=EndpointQuery, **fields)


def wanted_outputs(operator: Operator, outputs: str | None) -> list[str] | None:
    """The names in the query parameter `outputs`. Raises `InvalidParameter`."""
    if outputs is None:
        return None
    known, names = [output.name for output in operator.outputs], outputs.split(",")
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise InvalidParameter(
            f"outputs is {shown(outputs)}, but must name some of {','.join(known)}, each once", parameter="outputs"
        )
    return names


def decode_json(operator: Operator, query: EndpointQuery, answers: str, engine: Engine, body: memoryview) -> Job:
    """What a JSON body asks for, to be answered in the media type `answers`."""
    document = json_codec.Document(body, engine.limits)
    engine.check_names(operator, document.members.keys())
    forms = {name: judge(name, value) for name, value in document.members.items()}
    tensors = {}
    for one in operator.inputs:
        form = forms.get(one.name)
        if form is None:
            continue
        dtype = DTYPES[form.dtype or one.kind.default]
        if form.base64 is None:
            tensors[one.name] = document.tensor(one.name, form.data, dtype, form.shape)
        else:
            tensors[one.name] = document.base64(one.name, form.base64, dtype, form.shape or [])
    document.finish()
    in_base64 = any(form.base64 is not None for form in forms.values())
    return _job(operator, query, answers, tensors, "base64" if in_base64 else "list")


def decode_safetensors(operator: Operator, query: EndpointQuery, answers: str, engine: Engine, body: memoryview) -> Job:
    """What a safetensors body asks for, to be answered in the media type `answers`."""
    return _job(operator, query, answers, safetensors.decode(body, engine.limits), "base64")


def _job(
    operator: Operator, query: EndpointQuery, answers: str, tensors: dict[str, Array], form: json_codec.Form
) -> Job:
    def encode(outputs: Mapping[str, Array]) -> Answer:
        if answers == safetensors.MEDIA_TYPE:
            return Answer(safetensors.encode(outputs), answers)
        return Answer(json_codec.encode(outputs, query.encoding or form), answers)

    attributes = query.model_dump(exclude={"encoding", "outputs"})
    return Job(tensors, attributes, wanted_outputs(operator, getattr(query, "outputs", None)), encode)


def _add_endpoint(operator: Operator) -> None:
    async def run(request, query):  # type: ignore[no-untyped-def]
        try:
            sent, answers = _check_types(request)
            _check_given_once(request, operator)
        except GradserveError as error:
            error.context["op"] = operator.name
            raise
        decode = decode_json if sent == JSON else decode_safetensors
        decoded = partial(decode, operator, query, answers)
        inline = INLINE_TEXT if sent == JSON else INLINE_BYTES
        return AnswerResponse(
            await respond(request.app.state, request.scope, request.receive, operator, decoded, inline=inline)
        )

    run.__annotations__ = {
        "request": Request,
        "query": Annotated[query_model(operator), Query()],
        "return": Response,
    }
    router.add_api_route(
        f"/v1/ops/{operator.name}",
        run,
        methods=["POST"],
        name=operator.name,
        operation_id=operator.name,
        summary=operator.formula,
        description=operator.description,
        openapi_extra=openapi.operation(operator),
    )


for _operator in OPERATORS.values():
    _add_endpoint(_operator)


@router.post("/v1/ops/{op}", include_in_schema=False)
async def run_unknown(op: str) -> Response:
    find(op)
    raise AssertionError("an operator without an endpoint")


def _check_types(request: Request) -> tuple[str, str]:
    """The media types of the request and of its answer, which is the same unless `Accept` asks for another."""
    header = request.headers.get("content-type", JSON)
    sent = header.partition(";")[0].strip().lower()
    if sent not in MEDIA_TYPES:
        raise UnsupportedMediaType(f"Content-Type is {shown(header)}, but must be one of {', '.join(MEDIA_TYPES)}")
    accepted = request.headers.get("accept", "*/*")
    ranges = {one.partition(";")[0].strip().lower() for one in accepted.split(",")}
    named = [one for one in (sent, *MEDIA_TYPES) if one in ranges]
    if not named and not ranges & {"application/*", "*/*", ""}:
        raise NotAcceptable(f"Accept is {shown(accepted)}, but the answer is one of {', '.join(MEDIA_TYPES)}")
    return sent, named[0] if named else sent


def _check_given_once(request: Request, operator: Operator) -> None:
    lists = [a.name for a in operator.attributes if "list" in a.type_name]
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if count > 1 and name not in lists:
            raise InvalidParameter(f"{shown(name)} is given {count} times", parameter=name)
