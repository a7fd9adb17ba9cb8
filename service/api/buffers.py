"""`/v1/buffers`: named accumulation buffers."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import APIRouter, Query
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from service.api import openapi
from service.api.admission import hold
from service.api.body import Answer, AnswerResponse, coding_of, deflate, inflate, read_body, wanted_coding
from service.api.buffer_models import (
    AccumulateQuery,
    BufferList,
    ListQuery,
    ManyTakeQuery,
    ManyValueQuery,
    ManyZeroQuery,
    Metadata,
    Names,
    NewBuffer,
    TakeQuery,
    ValueQuery,
)
from service.api.changes import (
    answer,
    change,
    etag_after,
    key_of,
    match_of,
    recalled,
    refuse_match,
    replayed,
    store_of,
    tags_of,
)
from service.api.context import caller_of, context_of, engine_of, settings_of
from service.api.negotiation import JSON, check_given_once, media_types
from service.api.problems import invalid_parameter
from service.api.tensors import judge
from service.api.waiting import Waiting, in_pool
from service.api.work import INLINE_BYTES, INLINE_TEXT
from service.buffers.changes import Add, Change, Create, Delete, Outcome, Take, Zero
from service.buffers.store import LONGEST_NAME, Array, Key, Receipt, Record, Spec, check_length, check_name
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import DTYPES, FLOATS, NAMES
from service.engine import Engine
from service.errors import (
    DtypeMismatch,
    GradserveError,
    Invalid,
    MalformedBody,
    MissingTensor,
    NothingToAverage,
    UnknownBuffer,
    UnknownTensor,
    UnsupportedMediaType,
    shown,
)
from service.kernels.accumulate import converted
from service.limits import MAX_RANK

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

MOST_LISTINGS = 10
"""How often the buffers of a prefix are listed anew, where one is deleted before it is reached."""

router = APIRouter(prefix="/v1/buffers", tags=["buffers"])

# ----- one buffer -----


@router.put(
    "/{name}",
    summary="Create a buffer",
    operation_id="create_buffer",
    openapi_extra=openapi.buffer_operation(NewBuffer, Metadata, created=True),
)
async def create(request: Request, name: str) -> Response:
    check_given_once(request)
    _check_no_query(request)
    asked = await _Asked.of(request)
    given = asked.model(NewBuffer)
    dtype = DTYPES[given.dtype]
    spec = Spec(tuple(given.shape), dtype, given.nonfinite, given.quorum, given.keep, given.ttl_seconds)
    refusal = asked.refusal(name, spec)
    if refusal is not None and (len(name) > LONGEST_NAME or len(spec.shape) > MAX_RANK):  # no buffer is like that
        raise refusal
    made = Create(name=check_name(name), match=match_of(request.scope), spec=spec, refusal=refusal)
    outcome = await asked.change([made])
    receipt = dict(outcome.receipts[name])
    status = 201 if receipt.pop("created") else 200
    tag = f'"{receipt["epoch"]}-{receipt["version"]}"'
    return _json(receipt, status, {"ETag": tag, "Location": f"/v1/buffers/{name}", **replayed(outcome)})


@router.get("", summary="Buffers", response_model=BufferList)
async def list_buffers(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    check_given_once(request)
    found = store_of(request.scope).records(query.prefix, query.cursor, query.limit + 1)
    more = len(found) > query.limit
    found = found[: query.limit]
    return _json({"buffers": [one.as_json() for one in found], "next_cursor": found[-1].name if more else None})


@router.get("/{name}", summary="A buffer's metadata", response_model=Metadata)
async def get(request: Request, name: str) -> Response:
    _check_no_query(request)
    record = store_of(request.scope).record(check_name(name))
    if _is_known(request, record.etag):
        return Response(status_code=304, headers={"ETag": record.etag})
    return _json(record.as_json(), headers={"ETag": record.etag})


@router.delete("/{name}", summary="Forget a buffer", status_code=204)
async def delete(request: Request, name: str) -> Response:
    _check_no_query(request)
    asked = await _Asked.of(request)
    asked.check_no_body()
    outcome = await asked.change([Delete(name=check_name(name), match=match_of(request.scope))])
    return Response(status_code=204, headers=replayed(outcome))


@router.get(
    "/{name}/value",
    summary="A buffer's value, or that of an epoch that has closed",
    operation_id="value",
    openapi_extra=openapi.buffer_operation(None, openapi.RECEIPT),
)
async def value(request: Request, name: str, query: Annotated[ValueQuery, Query()]) -> Response:
    check_given_once(request)
    _, answers = media_types(request)
    store, waiting = store_of(request.scope), _waiting(request)

    async def attempt() -> Record:
        record = store.record(check_name(name))
        if query.epoch is not None:
            record.kept(query.epoch)
        return record

    record = await waiting.until(request.receive, query.timeout, attempt)
    tag = record.etag if query.epoch is None else f'"{query.epoch}-{record.kept(query.epoch).version}"'
    if _is_known(request, tag):
        return Response(status_code=304, headers={"ETag": tag, "Vary": "Accept"})
    hold(request.scope, record.spec.nbytes)
    work = partial(_read, request, [name], query, answers, True)
    engine = engine_of(request.scope)
    small = record.spec.nbytes <= (INLINE_TEXT if answers == JSON else INLINE_BYTES)
    return AnswerResponse(work() if small else await in_pool(request.scope, request.receive, engine, work))


@router.post(
    "/{name}/accumulate",
    summary="Add a gradient",
    operation_id="accumulate",
    openapi_extra=openapi.buffer_operation(openapi.GRADIENT, openapi.RECEIPT),
)
async def accumulate(request: Request, name: str, query: Annotated[AccumulateQuery, Query()]) -> Response:
    check_given_once(request)
    return AnswerResponse(await _accumulate(request, name, query))


async def _accumulate(request: Request, name: str, query: AccumulateQuery) -> Answer:
    check_name(name)
    _check_may_read(request, query)
    asked = await _Asked.of(request)
    tensors = await asked.tensors({"gradient"})
    if "gradient" not in tensors:
        raise MissingTensor("accumulate needs the tensor 'gradient'", tensor="gradient")
    outcome = await asked.change([_add(name, tensors["gradient"], query, match_of(request.scope))])
    return await asked.answer(outcome, query.encoding, one=True)


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
            raise invalid_parameter(invalid.errors()[0]) from None
    return await (_accumulate_many(request, query) if path[1] is None else _accumulate(request, path[1], query))


@router.post(
    "/{name}/zero",
    summary="Discard the sum, and begin the next epoch",
    operation_id="zero",
    openapi_extra=openapi.buffer_operation(None, openapi.RECEIPT),
)
async def zero(request: Request, name: str) -> Response:
    _check_no_query(request)
    asked = await _Asked.of(request)
    asked.check_no_body()
    outcome = await asked.change([Zero(name=check_name(name), match=match_of(request.scope))])
    return await asked.respond(outcome, None, one=True)


@router.post(
    "/{name}/take",
    summary="Close the epoch and answer its value",
    operation_id="take",
    openapi_extra=openapi.buffer_operation(None, openapi.RECEIPT),
)
async def take(request: Request, name: str, query: Annotated[TakeQuery, Query()]) -> Response:
    check_given_once(request)
    asked = await _Asked.of(request)
    asked.check_no_body()
    mean = query.reduce == "mean"
    changes = [Take(name=check_name(name), match=match_of(request.scope), min_count=query.min_count, mean=mean)]
    outcome = await asked.take(changes, query.timeout)
    return await asked.respond(outcome, query.encoding, one=True, reduce=query.reduce, dtype=query.dtype)


# ----- many buffers -----


@router.post(
    "/accumulate",
    summary="Add gradients to many buffers, to all or none",
    operation_id="accumulate_many",
    openapi_extra=openapi.buffer_operation(openapi.GRADIENTS, openapi.RECEIPTS),
)
async def accumulate_many(request: Request, query: Annotated[AccumulateQuery, Query()]) -> Response:
    check_given_once(request)
    return AnswerResponse(await _accumulate_many(request, query))


async def _accumulate_many(request: Request, query: AccumulateQuery) -> Answer:
    refuse_match(request.scope)
    _check_may_read(request, query)
    asked = await _Asked.of(request)
    tensors = await asked.tensors(None)
    if not tensors:
        raise MissingTensor("accumulate needs one tensor for each buffer, by its name", tensor="")
    outcome = await asked.change([_add(check_name(name), one, query, None) for name, one in tensors.items()])
    return await asked.answer(outcome, query.encoding, one=False)


@router.post(
    "/zero",
    summary="Discard the sums of many buffers",
    operation_id="zero_many",
    openapi_extra=openapi.buffer_operation(Names, openapi.RECEIPTS),
)
async def zero_many(request: Request, query: Annotated[ManyZeroQuery, Query()]) -> Response:
    check_given_once(request)
    refuse_match(request.scope)
    asked = await _Asked.of(request)
    outcome = await asked.named(query.prefix, lambda names: asked.change([Zero(name=name) for name in names]))
    return await asked.respond(outcome, None, one=False)


@router.post(
    "/take",
    summary="Close the epochs of many buffers and answer their values",
    operation_id="take_many",
    openapi_extra=openapi.buffer_operation(Names, openapi.RECEIPTS),
)
async def take_many(request: Request, query: Annotated[ManyTakeQuery, Query()]) -> Response:
    check_given_once(request)
    refuse_match(request.scope)
    asked = await _Asked.of(request)
    mean = query.reduce == "mean"

    async def take(names: list[str]) -> Outcome:
        changes = [Take(name=name, min_count=query.min_count, mean=mean) for name in names]
        return await asked.take(changes, query.timeout)

    outcome = await asked.named(query.prefix, take)
    return await asked.respond(outcome, query.encoding, one=False, reduce=query.reduce, dtype=query.dtype)


@router.post(
    "/value",
    summary="The values of many buffers at one moment",
    operation_id="value_many",
    openapi_extra=openapi.buffer_operation(Names, openapi.RECEIPTS),
)
async def value_many(request: Request, query: Annotated[ManyValueQuery, Query()]) -> Response:
    check_given_once(request)
    asked = await _Asked.of(request)

    async def attempt(names: list[str]) -> Answer:
        if query.epoch is not None:
            for name in names:
                asked.store.record(name).kept(query.epoch)
        hold(request.scope, sum(asked.store.record(name).spec.nbytes for name in names))
        work = partial(_read, request, names, query, asked.answers, False)
        return await in_pool(request.scope, request.receive, asked.engine, work)

    async def wait(names: list[str]) -> Answer:
        return await _waiting(request).until(request.receive, query.timeout, partial(attempt, names))

    return AnswerResponse(await asked.named(query.prefix, wait))


# ----- what they share -----


class _Asked:
    """A request with its body read, on its way through the store."""

    def __init__(self, request: Request, sent: str, answers: str, body: memoryview) -> None:
        self._request, self._sent, self.answers, self._body = request, sent, answers, body
        self.engine, self.store = engine_of(request.scope), store_of(request.scope)
        self._key: Key | None = key_of(request.scope, body)
        self._form: json_codec.Form = "list"

    @classmethod
    async def of(cls, request: Request) -> _Asked:
        sent, answers = media_types(request)
        coding = coding_of(context_of(request.scope).headers)
        engine = engine_of(request.scope)
        body = await read_body(request.scope, request.receive, engine.buffer)
        if coding is not None:
            limit = settings_of(request.scope).max_inflated_bytes
            body = await in_pool(request.scope, request.receive, engine, partial(inflate, body, coding, limit))
        return cls(request, sent, answers, body)

    def model(self, model: type[M]) -> M:
        """The body as a model. Raises `UnsupportedMediaType`, `MalformedBody` and `InvalidParameter`."""
        if self._sent != JSON:
            raise UnsupportedMediaType(f"Content-Type is {self._sent}, but must be {JSON} here")
        try:
            return model.model_validate_json(bytes(self._body))
        except ValidationError as invalid:
            error = invalid.errors()[0]
            if error["type"] == "json_invalid":
                raise MalformedBody(f"The body is not JSON: {error['msg']}") from None
            if not error["loc"]:
                raise MalformedBody(f"The body is {shown(error['input'])}, but must be an object") from None
            place = ".".join(map(str, error["loc"]))
            raise invalid_parameter({**error, "loc": (place,)}, kind="member") from None

    def check_no_body(self) -> None:
        """Raise `Invalid` for a body where nothing would read it."""
        if len(self._body) > 64 or bytes(self._body).strip() not in (b"", b"{}"):
            raise Invalid("This request has no body; what it may say stands in the query, like ?min_count=3")

    def refusal(self, name: str, spec: Spec) -> GradserveError | None:
        """Why a new buffer must not be like this; one that is there may be, by limits that were higher once."""
        try:
            check_length(name, settings_of(self._request.scope).max_name_length)
            self.engine.limits.check("The buffer", spec.shape, spec.dtype)
        except GradserveError as error:
            return error
        return None

    def names(self, prefix: str | None) -> list[str]:
        """The buffers that the body names, or those that the prefix means: if the request was made before, then."""
        if prefix is None:
            names = self.model(Names).names
            for name in names:
                check_name(name)
            return names
        if len(self._body):
            raise Invalid("Names in the body and prefix are two ways to say one thing; use one of them")
        known = recalled(self.store, self._key)
        return [one.name for one in self.store.records(prefix)] if known is None else [*known.receipts]

    async def named(self, prefix: str | None, work: Callable[[list[str]], Awaitable[R]]) -> R:
        """What `work` returns of the buffers that the body names, or of those that the prefix means when it is done."""
        for _ in range(MOST_LISTINGS if prefix is not None else 0):
            with suppress(UnknownBuffer):  # deleted since they were listed
                return await work(self.names(prefix))
        return await work(self.names(prefix))

    async def tensors(self, known: set[str] | None) -> dict[str, Array]:
        """The tensors in the body, whose names must be `known`, if it is given."""
        work = partial(self._tensors, known)
        small = len(self._body) <= INLINE_TEXT or self._sent != JSON
        return work() if small else await in_pool(self._request.scope, self._request.receive, self.engine, work)

    def _tensors(self, known: set[str] | None) -> dict[str, Array]:
        if self._sent == JSON:
            tensors, self._form = _from_json(self.engine, self._body)
        else:
            tensors = safetensors.decode(self._body, self.engine.limits)
        for name, tensor in tensors.items():
            if known is not None and name not in known:
                raise UnknownTensor(f"{shown(name)} is no tensor of this request; it has gradient", tensor=name)
            if NAMES[tensor.dtype] not in FLOATS.dtypes:
                raise DtypeMismatch(
                    f"{name} is {tensor.dtype}, but must be one of {', '.join(FLOATS.dtypes)}", tensor=name
                )
        return tensors

    async def change(self, changes: Sequence[Change]) -> Outcome:
        began = time.perf_counter_ns()
        try:
            return await change(self.store, changes, self._key)
        finally:
            context_of(self._request.scope).spent["store"] = time.perf_counter_ns() - began

    async def take(self, changes: Sequence[Take], timeout: float) -> Outcome:
        tried = False

        async def attempt() -> Outcome:
            nonlocal tried
            if tried and recalled(self.store, self._key) is None:  # a look is cheaper than a transaction
                for one in changes:
                    one.admit(self.store.record(one.name))
            tried = True
            return await self.change(changes)

        return await _waiting(self._request).until(self._request.receive, timeout, attempt)

    async def respond(self, *args: Any, **keywords: Any) -> Response:
        """What `answer` gives, as FastAPI wants it."""
        return AnswerResponse(await self.answer(*args, **keywords))

    async def answer(
        self,
        outcome: Outcome,
        encoding: json_codec.Form | None,
        *,
        one: bool,
        reduce: str = "sum",
        dtype: str | None = None,
    ) -> Answer:
        """The receipts, and the values that were asked for."""
        headers = replayed(outcome)
        if one:
            (receipt,) = outcome.receipts.values()
            headers["ETag"] = etag_after(receipt)

        def work() -> Answer:
            values = {
                name: _reduced(value, outcome.receipts[name]["weight"], reduce, dtype, name)
                for name, value in outcome.values.items()
            }
            form = encoding or self._form
            return _coded(self._request, answer(outcome.receipts, values, self.answers, form, headers, one=one))

        small = sum(value.nbytes for value in outcome.values.values()) <= INLINE_TEXT
        return work() if small else await in_pool(self._request.scope, self._request.receive, self.engine, work)


def _from_json(engine: Engine, body: memoryview) -> tuple[dict[str, Array], json_codec.Form]:
    document = json_codec.Document(body, engine.limits)
    forms = {name: judge(name, member) for name, member in document.members.items()}
    tensors = {}
    for name, form in forms.items():
        dtype = DTYPES[form.dtype or FLOATS.default]
        if form.base64 is None:
            tensors[name] = document.tensor(name, form.data, dtype, form.shape)
        else:
            tensors[name] = document.base64(name, form.base64, dtype, form.shape or [])
    document.finish()
    return tensors, "base64" if any(form.base64 is not None for form in forms.values()) else "list"


def _check_may_read(request: Request, query: AccumulateQuery) -> None:
    if query.answered is not None:
        caller_of(request.scope).require("buffers:read")


def _add(name: str, gradient: Array, query: AccumulateQuery, match: frozenset[str] | None) -> Add:
    return Add(
        name=name,
        match=match,
        gradient=gradient,
        weight=query.weight,
        do_update=query.do_update,
        overwrite=query.overwrite,
        epoch=query.epoch,
        want_value=query.answered is not None,
    )


def _read(request: Request, names: Sequence[str], query: ValueQuery, answers: str, one: bool) -> Answer:
    snapshots = store_of(request.scope).read(names, query.epoch)
    receipts: dict[str, Receipt] = {snapshot.record.name: snapshot.receipt() for snapshot in snapshots}
    values = {
        snapshot.record.name: _reduced(snapshot.value, snapshot.weight, query.reduce, query.dtype, snapshot.record.name)
        for snapshot in snapshots
    }
    headers = {"ETag": snapshots[0].etag, "Vary": "Accept"} if one else {}
    return _coded(request, answer(receipts, values, answers, query.encoding or "list", headers, one=one))


def _reduced(value: Array, weight: float, reduce: str, dtype: str | None, name: str) -> Array:
    if reduce == "mean" and not weight:
        raise NothingToAverage(f"The weights in {name!r} sum to zero: there is no mean", buffer=name)
    with np.errstate(all="ignore"):
        return converted(value, DTYPES[dtype] if dtype else value.dtype, weight if reduce == "mean" else 1.0)


def _coded(request: Request, plain: Answer) -> Answer:
    coding = wanted_coding(context_of(request.scope).headers)
    if coding is None:
        return plain
    headers = {**plain.headers, "Content-Encoding": coding}
    return Answer(deflate(plain.pieces, coding), plain.media_type, headers)


def _is_known(request: Request, etag: str) -> bool:
    header = request.headers.get("if-none-match")
    if header is None:
        return False
    return bool({one.removeprefix("W/") for one in tags_of("If-None-Match", header)} & {"*", etag})


def _waiting(request: Request) -> Waiting:
    waiting: Waiting = request.app.waiting
    return waiting


def _check_no_query(request: Request) -> None:
    for name in request.query_params:
        raise invalid_parameter({"type": "extra_forbidden", "loc": (name,)})


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(b"".join(json_codec.encode({}, "list", content)), status, headers, JSON)
