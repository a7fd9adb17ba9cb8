"""`/v1/ops`: the operators, each with an endpoint made from its declaration."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field, create_model
from starlette.requests import Request
from starlette.responses import Response

from service.api.buffers.receipts import receipts_text
from service.api.http.body import Answer, AnswerResponse
from service.api.http.negotiation import JSON, check_given_once, media_types
from service.api.http.tensor_forms import form_of_answer, judge, tensor_of
from service.api.operators import openapi
from service.api.operators.run import NO_BUFFERS, Buffers, Job, header_of, respond, text_of
from service.buffers.names import check_name
from service.buffers.record import Receipt
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import FLOATS, Array
from service.engine import Engine, check_names
from service.errors import DtypeMismatch, GradserveError, InvalidParameter, UnknownOperator, shown
from service.kernels import OPERATORS, Operator, Tensor

router = APIRouter(tags=["operators"])


class TensorInfo(BaseModel):
    """An input or output of an operator."""

    name: str
    dtypes: list[str]
    default_dtype: str = Field(description="The dtype of a JSON list that names none.")
    type_variable: str | None = Field(description="Tensors of the same type variable share a dtype.")
    optional: bool


class AttributeInfo(BaseModel):
    """An attribute of an operator, a query parameter."""

    name: str
    type: str
    default: Any


class OperatorInfo(BaseModel):
    """An operator: its formula, inputs, outputs and attributes."""

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


@router.get("/v1/ops", summary="List the operators")
async def list_operators() -> OperatorList:
    return OperatorList(operators=[describe(operator) for operator in OPERATORS.values()])


@router.get("/v1/ops/{op}", summary="Describe an operator")
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
        None, description="How a JSON answer writes tensors; by default in base64 if the request does, else as lists."
    )
    sources: list[str] = Field(
        [], alias="from", description="`X:acts.1`: take the input X from the buffer acts.1. May repeat."
    )
    into: list[str] = Field(
        [],
        description="`dW:gru.W`: add the output dW to the buffer gru.W, and return a receipt instead. May repeat.",
    )
    weight: float | None = Field(
        None, allow_inf_nan=False, description="With `into`: the weight of each added gradient; by default 1."
    )
    epoch: int | None = Field(None, ge=0, description="With `into`: the epoch that the buffers must be in.")


def query_model(operator: Operator) -> type[EndpointQuery]:
    """The query parameters of the operator's endpoint, its attributes included."""
    fields: Any = {a.name: (a.type, a.default) for a in operator.attributes}
    if len(operator.outputs) > 1:
        description = "The outputs to return, separated by commas; by default all."
        if operator.takes_wanted:
            description += " Other outputs are not computed."
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


def buffers_of(
    operator: Operator, sources: Sequence[str], into: Sequence[str], weight: float | None, epoch: int | None
) -> Buffers:
    """The buffers of a request, given as `tensor:buffer`. Raises `InvalidParameter` and `DtypeMismatch`."""
    if not into and not (weight is None and epoch is None):
        name = "epoch" if weight is None else "weight"
        raise InvalidParameter(f"{name} is only for outputs that into= adds to a buffer", parameter=name)
    if not (sources or into):
        return NO_BUFFERS
    taken = _named("from", sources, [one.name for one in operator.inputs])
    added = _named("into", into, operator.output_names)
    for output in operator.outputs:
        if output.name in added and output.kind.dtypes != FLOATS.dtypes:
            raise DtypeMismatch(
                f"{output.name} is {' or '.join(output.kind.dtypes)}, but a buffer holds floats", tensor=output.name
            )
    if len(set(added.values())) < len(added):
        raise InvalidParameter("into names a buffer twice, but a request may change each once", parameter="into")
    return Buffers(taken, added, 1.0 if weight is None else weight, epoch)


def _named(parameter: str, given: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Tensor -> buffer, of texts like `dW:gru.W`; the tensors are some of `known`, each once."""
    pairs: dict[str, str] = {}
    for one in given:
        name, _, buffer = one.partition(":")
        if name not in known or not buffer:
            raise InvalidParameter(
                f"{parameter} is {shown(one)}, but must be one of {', '.join(known)}, followed by a colon"
                " and a buffer's name",
                parameter=parameter,
            )
        if name in pairs:
            raise InvalidParameter(f"{parameter} has {name} twice", parameter=parameter)
        pairs[name] = check_name(buffer)
    return pairs


def decode_json(operator: Operator, query: EndpointQuery, answers: str, engine: Engine, body: memoryview) -> Job:
    """What a JSON body asks for, to be answered in the media type `answers`."""
    # Where all is in buffers, there is nothing to send.
    document = json_codec.Document(body if len(body) or not query.sources else b"{}", engine.limits)
    buffers = _buffers(operator, query)
    check_names(operator, {**document.members, **buffers.sources})
    forms = {name: judge(name, value) for name, value in document.members.items()}
    tensors = {
        one.name: tensor_of(document, one.name, forms[one.name], one.kind.default)
        for one in operator.inputs
        if one.name in forms
    }
    document.finish()
    return _job(operator, query, answers, tensors, form_of_answer(forms.values()), buffers)


def decode_safetensors(operator: Operator, query: EndpointQuery, answers: str, engine: Engine, body: memoryview) -> Job:
    """What a safetensors body asks for, to be answered in the media type `answers`."""
    tensors = safetensors.decode(body, engine.limits) if len(body) or not query.sources else {}
    return _job(operator, query, answers, tensors, "base64", _buffers(operator, query))


def _buffers(operator: Operator, query: EndpointQuery) -> Buffers:
    return buffers_of(operator, query.sources, query.into, query.weight, query.epoch)


def _job(
    operator: Operator,
    query: EndpointQuery,
    answers: str,
    tensors: dict[str, Array],
    form: json_codec.Form,
    buffers: Buffers,
) -> Job:
    def encode(outputs: Mapping[str, Array], receipts: Mapping[str, Receipt]) -> Answer:
        if answers == safetensors.MEDIA_TYPE:
            return Answer(safetensors.encode(outputs, receipts_text(receipts) if receipts else None), answers)
        return Answer(json_codec.encode(outputs, query.encoding or form, receipts), answers)

    attributes = query.model_dump(exclude=_NOT_ATTRIBUTES)
    wanted = wanted_outputs(operator, getattr(query, "outputs", None))
    return Job(tensors, attributes, wanted, encode, answers == JSON, buffers)


_NOT_ATTRIBUTES = {*EndpointQuery.model_fields, "outputs"}


def _add_endpoint(operator: Operator) -> None:
    lists = ["from", "into", *(a.name for a in operator.attributes if "list" in a.type_name)]

    async def run(request, query):  # type: ignore[no-untyped-def]
        try:
            sent, answers = media_types(request)
            check_given_once(request, lists)
        except GradserveError as error:
            error.context["op"] = operator.name
            raise
        decode = decode_json if sent == JSON else decode_safetensors
        decoded = partial(decode, operator, query, answers)
        text = text_of if sent == JSON else header_of
        return AnswerResponse(await respond(request.scope, request.receive, operator, decoded, text=text))

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
