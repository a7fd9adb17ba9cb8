"""`/v1/buffers`: named accumulation buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from service.api.buffers import openapi
from service.api.buffers.models import (
    AccumulateQuery,
    BufferList,
    ListQuery,
    ManyTakeQuery,
    ManyValueQuery,
    ManyZeroQuery,
    Metadata,
    Names,
    NewBuffer,
    Receipt,
    Receipts,
    TakeQuery,
    ValueQuery,
)
from service.api.buffers.preconditions import match_of, refuse, store_of, tags_of
from service.api.buffers.receipts import replayed
from service.api.buffers.request import VARY, BufferRequest, none_with, read_values, wait_for
from service.api.buffers.waiting import ANY
from service.api.http.admission import hold
from service.api.http.body import Answer, AnswerResponse
from service.api.http.context import caller_of, engine_of
from service.api.http.negotiation import JSON, check_given_once, media_types
from service.api.http.offload import in_pool
from service.api.http.openapi import MANY, ONE, READING
from service.api.http.problems import invalid_parameter, parameters_of
from service.api.operators.run import INLINE_BYTES, INLINE_TEXT
from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.names import LONGEST_NAME, check_name
from service.buffers.perform import Outcome
from service.buffers.record import Record, Spec
from service.codecs import json as json_codec
from service.dtypes import DTYPES, Array
from service.errors import MissingTensor
from service.limits import MAX_RANK

router = APIRouter(prefix="/v1/buffers", tags=["buffers"])

# ----- one buffer -----


@router.put(
    "/{name}",
    summary="Create a buffer",
    operation_id="create_buffer",
    openapi_extra=openapi.buffer_operation(NewBuffer, Metadata, openapi.CREATING, created=True),
)
async def create(request: Request, name: str) -> Response:
    _check_no_query(request)
    asked = await BufferRequest.of(request)
    given = asked.model(NewBuffer)
    dtype = DTYPES[given.dtype]
    spec = Spec(tuple(given.shape), dtype, given.nonfinite, given.quorum, given.keep, given.ttl_seconds)
    refusal = asked.refusal(name, spec)
    if refusal is not None and (len(name) > LONGEST_NAME or len(spec.shape) > MAX_RANK):  # no buffer is like that
        raise refusal
    match, unless = match_of(request.scope), _tags_not_wanted(request)
    made = Create(name=check_name(name), match=match, unless=unless, spec=spec, refusal=refusal)
    outcome = await asked.change([made])
    receipt = dict(outcome.receipts[name])
    status = 201 if receipt.pop("created") else 200
    tag = f'"{receipt["epoch"]}-{receipt["version"]}"'
    return _json(receipt, status, {"ETag": tag, "Location": f"/v1/buffers/{name}", **replayed(outcome)})


@router.get("", summary="List buffers", response_model=BufferList)
async def list_buffers(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    check_given_once(request)
    refuse(request.scope, "If-Match", "If-None-Match")
    store = store_of(request.scope)

    def work() -> Response:
        found = store.records(query.prefix, query.cursor, query.limit + 1)
        more = len(found) > query.limit
        found = found[: query.limit]
        return _json({"buffers": [one.as_json() for one in found], "next_cursor": found[-1].name if more else None})

    return await in_pool(request.scope, request.receive, engine_of(request.scope), work)


@router.get(
    "/{name}",
    summary="Read a buffer's metadata",
    response_model=Metadata,
    openapi_extra=openapi.METADATA,
)
async def get(request: Request, name: str) -> Response:
    _check_no_query(request)
    refuse(request.scope, "If-Match")
    record = store_of(request.scope).record(check_name(name))
    if _is_known(request, record.etag):
        return Response(status_code=304, headers={"ETag": record.etag})
    return _json(record.as_json(), headers={"ETag": record.etag})


@router.delete("/{name}", summary="Delete a buffer", status_code=204, openapi_extra=openapi.DELETION)
async def delete(request: Request, name: str) -> Response:
    _check_no_query(request)
    asked = await BufferRequest.of(request)
    asked.check_no_body()
    outcome = await asked.change([Delete(name=check_name(name), match=match_of(request.scope))])
    return Response(status_code=204, headers=replayed(outcome))


@router.get(
    "/{name}/value",
    summary="Read a buffer's value, or a closed epoch's",
    operation_id="value",
    openapi_extra=openapi.buffer_operation(None, Receipt, READING),
)
async def value(request: Request, name: str, query: Annotated[ValueQuery, Query()]) -> Response:
    check_given_once(request)
    refuse(request.scope, "If-Match")
    _, answers = media_types(request)
    store = store_of(request.scope)
    check_name(name)

    async def attempt() -> Record:
        record = store.record(name)
        if query.epoch is not None:
            record.kept(query.epoch)
        return record

    record = await wait_for(request, query.timeout, attempt)
    tag = (record if query.epoch is None else record.kept(query.epoch)).etag
    if _is_known(request, tag):
        return Response(status_code=304, headers={"ETag": tag, "Vary": VARY})
    hold(request.scope, record.spec.nbytes)
    work = partial(read_values, request, [name], query, answers, True)
    engine = engine_of(request.scope)
    small = record.spec.nbytes <= (INLINE_TEXT if answers == JSON else INLINE_BYTES)
    return AnswerResponse(work() if small else await in_pool(request.scope, request.receive, engine, work))


@router.post(
    "/{name}/accumulate",
    summary="Add a gradient",
    operation_id="accumulate",
    openapi_extra=openapi.buffer_operation(openapi.GRADIENT, Receipt, ONE),
)
async def accumulate(request: Request, name: str, query: Annotated[AccumulateQuery, Query()]) -> Response:
    raise AssertionError("accumulate_directly answers it")


async def _accumulate(request: Request, name: str, query: AccumulateQuery) -> Answer:
    check_name(name)
    _check_may_read(request, query)
    asked = await BufferRequest.of(request)
    tensors = await asked.tensors({"gradient"})
    if "gradient" not in tensors:
        raise MissingTensor("accumulate needs the tensor 'gradient'", tensor="gradient")
    one = _add(name, "gradient", tensors["gradient"], query, match_of(request.scope))
    return await _answer_adds(asked, [one], query, one=True)


_DEFAULT = AccumulateQuery()
_ACCUMULATE = re.compile(r"/v1/buffers(?:/([^/]+))?/accumulate")


def wants_accumulate(scope: Scope) -> re.Match[str] | None:
    """Whether a request is to add to a buffer; to which, says the group, or, if there is none, its body."""
    return _ACCUMULATE.fullmatch(scope["path"]) if scope["method"] == "POST" else None


async def accumulate_directly(scope: Scope, receive: Receive, path: re.Match[str]) -> Answer:
    """What `accumulate` and `accumulate_many` do, without FastAPI, which takes longer to find them than they take."""
    request = Request(scope, receive)
    query = _DEFAULT
    if scope["query_string"]:
        check_given_once(request)
        try:
            query = AccumulateQuery.model_validate(dict(request.query_params))
        except ValidationError as invalid:
            raise invalid_parameter(invalid.errors()[0], known=parameters_of(AccumulateQuery)) from None
    return await (_accumulate_many(request, query) if path[1] is None else _accumulate(request, path[1], query))


@router.post(
    "/{name}/zero",
    summary="Discard the sum and begin the next epoch",
    operation_id="zero",
    openapi_extra=openapi.buffer_operation(None, Receipt, ONE),
)
async def zero(request: Request, name: str) -> Response:
    _check_no_query(request)
    asked = await BufferRequest.of(request)
    asked.check_no_body()
    outcome = await asked.change([Zero(name=check_name(name), match=match_of(request.scope))])
    return await asked.respond(outcome, None, one=True)


@router.post(
    "/{name}/take",
    summary="Close the epoch and return its value",
    operation_id="take",
    openapi_extra=openapi.buffer_operation(None, Receipt, ONE),
)
async def take(request: Request, name: str, query: Annotated[TakeQuery, Query()]) -> Response:
    check_given_once(request)
    asked = await BufferRequest.of(request)
    asked.check_no_body()
    one = _take(query, check_name(name), match_of(request.scope))
    outcome = await wait_for(request, query.timeout, lambda: asked.change_holding_values([one]), one.match or ANY)
    return await asked.respond(outcome, query.encoding, one=True, reduce=query.reduce, dtype=query.dtype)


# ----- many buffers -----


@router.post(
    "/accumulate",
    summary="Add gradients to many buffers, all or nothing",
    operation_id="accumulate_many",
    openapi_extra=openapi.buffer_operation(openapi.GRADIENTS, Receipts, MANY),
)
async def accumulate_many(request: Request, query: Annotated[AccumulateQuery, Query()]) -> Response:
    raise AssertionError("accumulate_directly answers it")


async def _accumulate_many(request: Request, query: AccumulateQuery) -> Answer:
    refuse(request.scope, "If-Match")
    _check_may_read(request, query)
    asked = await BufferRequest.of(request)
    tensors = await asked.tensors(None)
    if not tensors:
        raise MissingTensor("The body has no tensors; accumulate needs one per buffer, under the buffer's name")
    adds = [_add(check_name(name), name, one, query, None) for name, one in tensors.items()]
    return await _answer_adds(asked, adds, query, one=False)


@router.post(
    "/zero",
    summary="Discard the sums of many buffers",
    operation_id="zero_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, MANY),
)
async def zero_many(request: Request, query: Annotated[ManyZeroQuery, Query()]) -> Response:
    check_given_once(request)
    refuse(request.scope, "If-Match")
    asked = await BufferRequest.of(request)

    async def zero(names: list[str]) -> Outcome:
        return await asked.change([Zero(name=name) for name in names])

    outcome = await asked.named(query.prefix, 0, asked.store.record, zero)
    return await asked.respond(outcome, None, one=False)


@router.post(
    "/take",
    summary="Close the epochs of many buffers and return their values",
    operation_id="take_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, MANY),
)
async def take_many(request: Request, query: Annotated[ManyTakeQuery, Query()]) -> Response:
    check_given_once(request)
    refuse(request.scope, "If-Match")
    asked = await BufferRequest.of(request)

    def look(name: str) -> None:
        _take(query, name).admit(asked.store.record(name))

    async def take(names: list[str]) -> Outcome:
        if not names:
            raise none_with(query.prefix)
        return await asked.change_holding_values([_take(query, name) for name in names])

    outcome = await asked.named(query.prefix, query.timeout, look, take)
    return await asked.respond(outcome, query.encoding, one=False, reduce=query.reduce, dtype=query.dtype)


@router.post(
    "/value",
    summary="Read the values of many buffers at one moment",
    operation_id="value_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, ()),
)
async def value_many(request: Request, query: Annotated[ManyValueQuery, Query()]) -> Response:
    check_given_once(request)
    refuse(request.scope, "If-Match")
    asked = await BufferRequest.of(request, changes=False)

    def look(name: str) -> None:
        record = asked.store.record(name)
        if query.epoch is not None:
            record.kept(query.epoch)

    async def read(names: list[str]) -> Answer:
        if not names:
            raise none_with(query.prefix)
        if query.epoch is not None:
            await asked.look_up(len(names), lambda: [*map(look, names)])
        async with asked.holding_values(names):
            work = partial(read_values, request, names, query, asked.answers, False)
            return await in_pool(request.scope, request.receive, asked.engine, work)

    return AnswerResponse(await asked.named(query.prefix, query.timeout, look, read))


# ----- what both share -----


def _check_may_read(request: Request, query: AccumulateQuery) -> None:
    if query.answered is not None:
        caller_of(request.scope).require("buffers:read")


def _take(query: TakeQuery, name: str, match: frozenset[str] | None = None) -> Take:
    return Take(name=name, match=match, min_count=query.min_count, epoch=query.epoch, mean=query.reduce == "mean")


def _add(name: str, tensor: str, gradient: Array, query: AccumulateQuery, match: frozenset[str] | None) -> Add:
    return Add(
        name=name,
        match=match,
        gradient=gradient,
        tensor=tensor,
        weight=query.weight,
        do_update=query.do_update,
        overwrite=query.overwrite,
        epoch=query.epoch,
        want_value=query.answered is not None,
    )


async def _answer_adds(asked: BufferRequest, adds: list[Add], query: AccumulateQuery, *, one: bool) -> Answer:
    """Add the gradients, and answer the receipts, with the sums if the query asks for them."""
    change = asked.change if query.answered is None else asked.change_holding_values
    return await asked.answer(await change(adds), query.encoding, one=one)


def _is_known(request: Request, etag: str) -> bool:
    return bool(_tags_not_wanted(request) & {"*", etag})


def _tags_not_wanted(request: Request) -> frozenset[str]:
    tags = tags_of(request.scope, "If-None-Match") or ()
    return frozenset(one.removeprefix("W/") for one in tags)


def _check_no_query(request: Request) -> None:
    for name in request.query_params:
        raise invalid_parameter({"type": "extra_forbidden", "loc": (name,)})


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(b"".join(json_codec.encode({}, "list", content)), status, headers, JSON)
