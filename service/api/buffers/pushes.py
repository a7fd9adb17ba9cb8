"""Pushes in parts: requests that stage gradients, and the list of what they have staged."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from service.api.buffers.gradients import gradients, sort_rows
from service.api.buffers.models import MAX_LISTED_BUFFERS, AccumulateManyQuery
from service.api.buffers.preconditions import fingerprint_of
from service.api.buffers.receipts import answer_outcome, replayed
from service.api.buffers.request import Received, submit
from service.api.buffers.routes import READ, WRITE, new_add
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.call import Call, CurrentCall
from service.api.http.offload import INLINE_BYTES, INLINE_LOOKUPS
from service.api.http.routing import access
from service.buffers.changes import Add, Change
from service.buffers.names import check_name
from service.buffers.parts import Forget, Refused
from service.buffers.pushes import Part
from service.buffers.store import Store
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.errors import GradserveError, InvalidParameter

MOST_NAMED = 100
"""Buffers of a push that the list names: the names of all may take megabytes."""

DROPPING = (404, 409, 412, 422)
"""The statuses of a part that is wrong, whenever it comes: it drops its push. Others are of the moment, or of HTTP."""


class PushesQuery(BaseModel):
    """Which pushes are listed."""

    prefix: str = Field("", description="Only pushes with a buffer whose name begins with this.")
    limit: int = Field(100, ge=1, le=MAX_LISTED_BUFFERS, description="Pushes in the list, at most.")


class PushQuery(BaseModel):
    """Which push is forgotten."""

    push: str = Field(min_length=1, max_length=255, pattern="^[!-~]+$", description="The id of the push.")


class ForgottenPush(TypedDict):
    """A push that was forgotten."""

    push: str
    forgotten: Annotated[list[int], Field(description="The numbers of the staged parts that it had, now free.")]


class StagedPush(TypedDict):
    """A push that is not complete."""

    push: str
    parts: int
    staged: Annotated[list[int], Field(description="The numbers of the parts that have come.")]
    bytes: Annotated[int, Field(description="Bytes of the staged gradients.")]
    count: Annotated[int, Field(description="The number of buffers with a staged gradient.")]
    buffers: Annotated[list[str], Field(description="The names of up to 100 of them.")]
    weight: float
    step: int | None
    contributor: str | None
    began_at: Annotated[float, Field(description="When the first part came, in seconds since 1970.")]
    expires_at: Annotated[float, Field(description="When the push is forgotten unless it is complete.")]
    refused: Annotated[str | None, Field(description="The code of the error that dropped the push.")]


class PushList(TypedDict):
    """Pushes that are not complete, the oldest first."""

    pushes: list[StagedPush]


router = APIRouter(prefix="/v1/pushes", tags=["buffers"])


@router.get("", summary="List the pushes that are not complete", response_model=PushList)
@access(READ, label="buffers")
async def list_pushes(call: CurrentCall, query: Annotated[PushesQuery, Query()]) -> Answer:
    """The pushes that have staged a gradient for a buffer with the prefix, the oldest first."""
    return await call.offload(False, _listed, call.store, query)


def _listed(store: Store, query: PushesQuery) -> Answer:
    pushes = [push.as_json(name) for name, push in store.pushes(query.prefix, query.limit)]
    for push in pushes:
        push["count"] = len(push["buffers"])
        push["buffers"] = push["buffers"][:MOST_NAMED]
    return JsonAnswer({"pushes": pushes})


@router.delete("", summary="Forget a push that is not complete", response_model=ForgottenPush)
@access(WRITE, label="accumulate")
async def forget_push(call: CurrentCall, query: Annotated[PushQuery, Query()]) -> Answer:
    """Free what the push has staged, or forget why it was refused: its id is new again. A complete push stays."""
    part = Part(query.push, 0, 1, call.caller.namespace, b"", 0.0)
    outcome = await call.submit([Forget()], None, part=part)
    return JsonAnswer({"push": query.push, "forgotten": outcome.staged})


async def adds_of(call: Call, received: Received, query: AccumulateManyQuery) -> tuple[list[Add], json_codec.Encoding]:
    """Return the adds of the gradients in the body, and the default form of tensors in the answer."""
    tensors, form = await gradients(call, received)

    def adds() -> list[Add]:
        return [new_add(check_name(name), name, tensor, query, None) for name, tensor in tensors.items()]

    changes = await call.offload(len(tensors) <= INLINE_LOOKUPS, adds)
    await sort_rows(call, changes)
    return changes, form


async def accumulate_part(call: Call, received: Received, query: AccumulateManyQuery) -> Answer:
    """Stage a part, or complete its push. An error of the part drops the push."""
    place = _place(query)
    mark = await call.offload(len(received.body) <= INLINE_BYTES, fingerprint_of, call, received.body)
    common = (query.weight, query.step, query.contributor)
    namespace, seconds = call.caller.namespace, call.settings.push_seconds
    part = Part(*place, namespace, mark, seconds, *common, most=call.engine.limits.max_tensors)
    changes: list[Change] = []
    form: json_codec.Encoding = "list"
    try:
        adds, form = await adds_of(call, received, query)
        changes += adds
    except GradserveError as error:
        if error.status not in DROPPING:
            raise
        changes = [Refused(error)]
    outcome = await submit(call, received, changes, part=part)
    if outcome.staged is None:
        return await answer_outcome(call, received.answers, outcome, query.encoding or form, single=False)
    staged = {"push": part.push, "parts": part.parts, "staged": outcome.staged}
    fields = replayed(outcome)
    if received.answers == JSON:
        return JsonAnswer(staged, 202, fields)
    body = safetensors.encode({}, {name: orjson.dumps(value).decode() for name, value in staged.items()})
    return Answer(body, received.answers, fields, status=202)


def _place(query: AccumulateManyQuery) -> tuple[str, int, int]:
    """Return the id of the push, the part and the number of parts. Raises `InvalidParameter`.

    A query must say all three, and nothing that a part cannot have.
    """
    push, part, parts = query.push, query.part, query.parts
    if push is None or part is None or parts is None:
        missing = next(name for name in ("push", "part", "parts") if getattr(query, name) is None)
        problem = f"{missing} is missing: a part of a push needs push, part and parts"
        raise InvalidParameter(problem, parameter=missing)
    if part > parts:
        problem = f"part is {part}, but parts is {parts}: count the parts from 0 or from 1"
        raise InvalidParameter(problem, parameter="part")
    wrong = {"do_update": not query.do_update, "overwrite": query.overwrite, "return": query.answered is not None}
    for name in (name for name, given in wrong.items() if given):
        raise InvalidParameter(f"{name} cannot be used with push, whose parts are added together", parameter=name)
    return push, part, parts
