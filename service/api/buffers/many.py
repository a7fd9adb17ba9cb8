"""`/v1/buffers`: requests for many buffers, all or none."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from service.api.buffers import openapi
from service.api.buffers.chosen import (
    INLINE_NAMES_BYTES,
    change_all,
    check_not_empty,
    distinct_names,
    names_with_prefix,
    until_ready,
)
from service.api.buffers.models import (
    MAX_NAMES_BYTES,
    AccumulateManyQuery,
    GradientBodies,
    ManyTakeQuery,
    ManyValueQuery,
    Names,
    NewRulesOfMany,
    PrefixQuery,
    WideQuery,
)
from service.api.buffers.preconditions import refuse_headers
from service.api.buffers.pushes import accumulate_part, adds_of
from service.api.buffers.receipts import answer_outcome, read_values
from service.api.buffers.request import (
    RECORD_FACTOR,
    Received,
    closed_due,
    form_of,
    parse_model,
    parse_models,
    receive,
    receive_no_body,
    reserved,
    submit,
)
from service.api.buffers.routes import READ, WRITE, check_may_read, new_create, new_take
from service.api.buffers.specs import MAX_SPECS_BYTES, NewBuffer, NewBuffers, rules_of
from service.api.http.answer import Answer
from service.api.http.body import is_quick
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import MEDIA_TYPES, check_no_query
from service.api.http.routing import SAFETENSORS_BODY, access, body
from service.buffers.changes import Create, Delete, Zero
from service.buffers.lives import check_life, of_this_life
from service.buffers.perform import Outcome
from service.buffers.record import name_buffer
from service.buffers.rules import SetRules
from service.buffers.steps import names_bytes
from service.errors import GradserveError, Invalid, InvalidParameter, MissingTensor, StepOpen

METADATA_BYTES = 1 << 12
"""Bytes of memory for a new buffer, its record and its metadata, as objects and as text."""

router = APIRouter(prefix="/v1/buffers", tags=["buffers"], responses=openapi.CHANGED_MANY)


@router.post(
    "/create",
    summary="Create many buffers, all or nothing",
    dependencies=[*openapi.MANY, body(NewBuffers)],
    responses=openapi.CREATED_MANY,
)
@access(WRITE, label="buffers")
async def create_many(call: CurrentCall) -> Answer:
    """Buffers of the same specification that exist already are no error. Raises `buffer_exists`, `too_many_buffers`,
    `invalid_parameter` and `store_full`.
    """
    check_no_query(call)
    refuse_headers(call, "If-Match")
    received = await receive(call)
    inline = is_quick(received.body)
    changes = _creates(call, received) if inline else await call.decode_in_pool(received.body, _creates, call, received)
    call.reserve(METADATA_BYTES * len(changes) + RECORD_FACTOR * len(received.body))
    outcome = await submit(call, received, changes)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


def _creates(call: Call, received: Received) -> list[Create]:
    buffers = parse_models(received, "buffers", NewBuffer, MAX_SPECS_BYTES, call.engine.limits)
    changes = []
    for name, new in buffers.items():
        try:
            changes.append(new_create(call, name, new))
        except GradserveError as error:
            name_buffer(error, name, one_of_many=len(buffers) > 1)
            raise
    return changes


@router.post(
    "/accumulate",
    summary="Add gradients to many buffers, all or nothing",
    dependencies=[*openapi.MANY, body(GradientBodies)],
    responses=openapi.STAGED,
    openapi_extra=SAFETENSORS_BODY,
)
@access(WRITE, label="accumulate")
async def accumulate_many(call: CurrentCall, query: Annotated[AccumulateManyQuery, Query()]) -> Answer:
    """A gradient for each buffer, under the buffer's name.

    With `push`, `part` and `parts` the request stages its gradients. The part that completes the push adds those of all
    parts at one moment. A part that is refused drops the push, and its later parts get the same error. Raises what
    `accumulate` raises.
    """
    refuse_headers(call, "If-Match")
    check_may_read(call, query)
    if (query.push, query.part, query.parts) != (None, None, None):
        return await accumulate_part(call, await receive(call, MEDIA_TYPES, changes=False), query)
    received = await receive(call, MEDIA_TYPES)
    changes, form = await adds_of(call, received, query)
    if not changes:
        raise MissingTensor("The body has no tensors; accumulate needs one per buffer, under the buffer's name")
    wanted = None if query.answered is None else form_of(call, received.answers, query, form)
    outcome = await submit(call, received, changes, wanted)
    return await answer_outcome(call, received.answers, outcome, query.encoding or form, single=False)


@router.post(
    "/zero", summary="Discard the sums of many buffers", dependencies=[*openapi.MANY, body(Names, required=False)]
)
@access(WRITE, label="zero")
async def zero_many(call: CurrentCall, query: Annotated[PrefixQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises `unknown_buffer`."""
    refuse_headers(call, "If-Match")
    received = await receive(call)

    async def zero(names: list[str]) -> Outcome:
        return await change_all(call, received, names, lambda name: Zero(name=name), query.prefix, may_fit_none=True)

    outcome = await until_ready(call, received, query.prefix, 0, call.store.record, zero)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


@router.post(
    "/take",
    summary="Close the steps of many buffers and return their values",
    dependencies=[*openapi.MANY, body(Names, required=False)],
)
@access(WRITE, READ, label="take")
async def take_many(call: CurrentCall, query: Annotated[ManyTakeQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises what `take` raises."""
    refuse_headers(call, "If-Match")
    received = await receive(call)

    def look(name: str) -> None:
        new_take(query, name).admit(call.store.record(name))

    async def take(names: list[str]) -> Outcome:
        check_not_empty(names, query.prefix)
        wanted = form_of(call, received.answers, query) if query.answered == "value" else None
        return await change_all(call, received, names, partial(new_take, query), query.prefix, wanted)

    outcome = await until_ready(call, received, query.prefix, query.timeout, look, take)
    form, reduce, dtype = query.encoding or "list", query.reduce, query.dtype
    return await answer_outcome(call, received.answers, outcome, form, single=False, reduce=reduce, dtype=dtype)


@router.post(
    "/value",
    summary="Read the values of many buffers at one moment",
    dependencies=[body(Names, required=False)],
    responses=openapi.READ_MANY,
)
@access(READ, label="value")
async def value_many(call: CurrentCall, query: Annotated[ManyValueQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises what `value` raises."""
    refuse_headers(call, "If-Match")
    received = await receive(call, changes=False)
    form = form_of(call, received.answers, query)

    def look(name: str) -> None:
        with of_this_life(query.life):
            record = call.store.record(name)
        if query.life is not None:
            check_life(record, query.life)
        if query.step is not None:
            record.closed_step(query.step)

    async def read(names: list[str]) -> Answer:
        check_not_empty(names, query.prefix)
        async with reserved(call, names, form):
            if query.step is not None:
                try:
                    await call.look_up(len(names), lambda: [*map(look, names)])
                except StepOpen:
                    if not await closed_due(call, names):
                        raise
            return await call.offload(
                False, read_values, call.store, names, query, received.answers, form.coding, False
            )

    return await until_ready(call, received, query.prefix, query.timeout, look, read)


@router.delete("", summary="Delete all buffers with a prefix", dependencies=openapi.MANY)
@access(WRITE, label="buffers")
async def delete_many(call: CurrentCall, query: Annotated[WideQuery, Query()]) -> Answer:
    """All or none go, with their closed steps; without a buffer this succeeds. Raises `invalid_parameter`."""
    prefix = _wide_prefix(query)
    refuse_headers(call, "If-Match")
    received = await receive_no_body(call)

    names = await names_with_prefix(call, received, prefix)
    outcome = await change_all(call, received, names, lambda name: Delete(name=name), prefix, may_fit_none=True)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


@router.patch(
    "",
    summary="Change the rules of many buffers, all or nothing",
    dependencies=[*openapi.MANY, body(NewRulesOfMany)],
    openapi_extra=openapi.merge_patch(NewRulesOfMany),
)
@access(WRITE, label="buffers")
async def set_rules_many(call: CurrentCall, query: Annotated[WideQuery, Query()]) -> Answer:
    """Rules that are absent stay as they are; null ends a rule. Raises `unknown_buffer` and `invalid_parameter`."""
    refuse_headers(call, "If-Match")
    received = await receive(call)
    inline = len(received.body) <= INLINE_NAMES_BYTES
    new = await call.offload(inline, parse_model, received, NewRulesOfMany, MAX_NAMES_BYTES)
    rules = rules_of(new)

    def change(name: str) -> SetRules:
        return SetRules(name=name, rules=rules, want_metadata=False)

    prefix = None
    if new.names is None:
        prefix = _wide_prefix(query)
        names = await names_with_prefix(call, received, prefix)
    elif query.prefix or query.all:
        raise Invalid("The request has both names in its body and prefix or all in its query; send only one")
    else:
        names = await call.offload(inline, distinct_names, new.names)
    growth = names_bytes(rules.get("contributors") or ())
    outcome = await change_all(call, received, names, change, prefix, growth=growth)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


def _wide_prefix(query: WideQuery) -> str:
    """Return the prefix. Raises `InvalidParameter` if it is empty, as an unset variable of a script leaves it."""
    if query.prefix and query.all:
        problem = f"The request has both prefix={query.prefix} and all=true; send only one"
        raise InvalidParameter(problem, parameter="all")
    if not (query.prefix or query.all):
        raise InvalidParameter(
            "prefix is missing or empty, so the request would change all buffers; if it must, send all=true instead",
            parameter="prefix",
        )
    return query.prefix
