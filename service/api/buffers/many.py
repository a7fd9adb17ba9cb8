"""`/v1/buffers`: requests for many buffers, all or none."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query

from service.api.buffers import openapi
from service.api.buffers.gradients import gradients, sort_rows
from service.api.buffers.models import (
    MAX_NAMES_BYTES,
    AccumulateQuery,
    CreatedBuffers,
    GradientBodies,
    ManyTakeQuery,
    ManyValueQuery,
    ManyZeroQuery,
    Names,
    Receipts,
)
from service.api.buffers.preconditions import recalled, refuse_headers
from service.api.buffers.receipts import answer_outcome, read_values
from service.api.buffers.request import (
    Received,
    form_of,
    parse_model,
    parse_models,
    receive,
    submit,
    values_reserved,
)
from service.api.buffers.routes import READ, WRITE, check_may_read, new_add, new_create, new_take
from service.api.buffers.rules import closed_due
from service.api.buffers.specs import MAX_SPECS_BYTES, NewBuffer, NewBuffers
from service.api.http.answer import Answer
from service.api.http.call import Call, CurrentCall
from service.api.http.costs import decode_json
from service.api.http.negotiation import check_no_query, wanted_coding
from service.api.http.offload import INLINE_LOOKUPS
from service.api.http.openapi import MANY
from service.api.http.routing import access
from service.buffers.changes import Add, Create, Zero
from service.buffers.names import check_name
from service.buffers.perform import Outcome
from service.buffers.record import name_buffer
from service.errors import EpochOpen, GradserveError, Invalid, MissingTensor, UnknownBuffer, shown

R = TypeVar("R")

INLINE_NAMES_BYTES = 1 << 12
"""Bytes of names that the event loop reads itself: at most a thousand names, which take a millisecond."""

MAX_LISTINGS = 10
"""Listings of the buffers of a prefix before a request fails because a listed buffer was deleted meanwhile."""

METADATA_BYTES = 1 << 12
"""Bytes of memory for a new buffer, its record and its metadata, as objects and as text."""

router = APIRouter(prefix="/v1/buffers", tags=["buffers"])


@router.post(
    "/create",
    summary="Create many buffers, all or nothing",
    operation_id="create_many",
    openapi_extra=openapi.buffer_operation(NewBuffers, CreatedBuffers, MANY),
)
@access(WRITE, label="buffers")
async def create_many(call: CurrentCall) -> Answer:
    """Buffers of the same specification that exist already are no error. Raises `buffer_exists`, `too_many_buffers`,
    `invalid_parameter` and `store_full`.
    """
    check_no_query(call)
    refuse_headers(call, "If-Match")
    received = await receive(call)
    changes = await decode_json(call, received.body, received.body, _creates, call, received)
    call.reserve(METADATA_BYTES * len(changes))
    outcome = await submit(call, received, changes)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


def _creates(call: Call, received: Received) -> list[Create]:
    limits = call.engine.limits
    buffers = parse_models(received, "buffers", NewBuffer, MAX_SPECS_BYTES, limits)
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
    operation_id="accumulate_many",
    openapi_extra=openapi.buffer_operation(GradientBodies, Receipts, MANY),
)
@access(WRITE, label="accumulate")
async def accumulate_many(call: CurrentCall, query: Annotated[AccumulateQuery, Query()]) -> Answer:
    """A gradient for each buffer, under the buffer's name. Raises what `accumulate` raises."""
    refuse_headers(call, "If-Match")
    check_may_read(call, query)
    received = await receive(call)
    tensors, form = await gradients(call, received)
    if not tensors:
        raise MissingTensor("The body has no tensors; accumulate needs one per buffer, under the buffer's name")

    def adds() -> list[Add]:
        return [new_add(check_name(name), name, tensor, query, None) for name, tensor in tensors.items()]

    changes = await call.offload(len(tensors) <= INLINE_LOOKUPS, adds)
    await sort_rows(call, changes)
    wanted = None if query.answered is None else form_of(call, received, query, form)
    outcome = await submit(call, received, changes, wanted)
    return await answer_outcome(call, received.answers, outcome, query.encoding or form, single=False)


@router.post(
    "/zero",
    summary="Discard the sums of many buffers",
    operation_id="zero_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, MANY),
)
@access(WRITE, label="zero")
async def zero_many(call: CurrentCall, query: Annotated[ManyZeroQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises `unknown_buffer`."""
    refuse_headers(call, "If-Match")
    received = await receive(call)

    async def zero(names: list[str]) -> Outcome:
        changes = await call.offload(len(names) <= INLINE_LOOKUPS, lambda: [Zero(name=name) for name in names])
        return await submit(call, received, changes)

    outcome = await for_buffers(call, received, query.prefix, 0, call.store.record, zero)
    return await answer_outcome(call, received.answers, outcome, "list", single=False)


@router.post(
    "/take",
    summary="Close the epochs of many buffers and return their values",
    operation_id="take_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, MANY),
)
@access(WRITE, READ, label="take")
async def take_many(call: CurrentCall, query: Annotated[ManyTakeQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises what `take` raises."""
    refuse_headers(call, "If-Match")
    received = await receive(call)

    def look(name: str) -> None:
        new_take(query, name).admit(call.store.record(name))

    async def take(names: list[str]) -> Outcome:
        check_some(names, query.prefix)
        changes = await call.offload(len(names) <= INLINE_LOOKUPS, lambda: [new_take(query, name) for name in names])
        return await submit(call, received, changes, form_of(call, received, query, "list"))

    outcome = await for_buffers(call, received, query.prefix, query.timeout, look, take)
    form, reduce, dtype = query.encoding or "list", query.reduce, query.dtype
    return await answer_outcome(call, received.answers, outcome, form, single=False, reduce=reduce, dtype=dtype)


@router.post(
    "/value",
    summary="Read the values of many buffers at one moment",
    operation_id="value_many",
    openapi_extra=openapi.buffer_operation(Names, Receipts, ()),
)
@access(READ, label="value")
async def value_many(call: CurrentCall, query: Annotated[ManyValueQuery, Query()]) -> Answer:
    """Names in the body, or a prefix in the query. Raises what `value` raises."""
    refuse_headers(call, "If-Match")
    received = await receive(call, changes=False)
    coding = wanted_coding(call)

    def look(name: str) -> None:
        record = call.store.record(name)
        if query.epoch is not None:
            record.closed_epoch(query.epoch)

    async def read(names: list[str]) -> Answer:
        check_some(names, query.prefix)
        if query.epoch is not None:
            try:
                await call.look_up(len(names), lambda: [*map(look, names)])
            except EpochOpen:
                if not await closed_due(call, names):
                    raise
        async with values_reserved(call, names, form_of(call, received, query, "list")):
            return await call.offload(False, read_values, call.store, names, query, received.answers, coding, False)

    return await for_buffers(call, received, query.prefix, query.timeout, look, read)


def check_some(names: Sequence[object], prefix: str | None) -> None:
    """Raise `UnknownBuffer` if the prefix fits no buffer."""
    if not names:
        raise UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix or '')}")


async def for_buffers(
    call: Call,
    received: Received,
    prefix: str | None,
    timeout: float,
    look: Callable[[str], object],
    work: Callable[[list[str]], Awaitable[R]],
) -> R:
    """Return the result of `work` for the buffers in the body, or for the buffers with the prefix; wait if it must.

    `look` raises for one buffer what `work` would raise for it, at less cost.
    """
    names = await names_of(call, received, prefix)
    unready = deque[str]()  # of the last attempt; while the first is not ready, `look` skips the others
    tried = False

    def look_at_unready() -> None:
        while unready:
            try:
                look(unready[0])
            except UnknownBuffer:
                if prefix is None:
                    raise
            unready.popleft()

    async def attempt() -> R:
        nonlocal tried
        if tried and await call.look_up(1, recalled, call.store, received.key) is None:
            await call.look_up(len(unready), look_at_unready)
        tried = True
        attempts = 1 if prefix is None else MAX_LISTINGS
        while True:
            unready.clear()
            unready.extend(names if prefix is None else await _listed(call, received, prefix))
            try:
                return await work([*unready])
            except UnknownBuffer:  # a buffer of the prefix was deleted after the listing
                attempts -= 1
                if not (attempts and unready):
                    raise

    return await call.wait_for(timeout, attempt)


async def names_of(call: Call, received: Received, prefix: str | None) -> list[str]:
    """Return the names in the body. Raises `Invalid` unless the request has either names or a prefix."""
    if prefix is None and received.is_empty:
        raise Invalid('No buffers are named: send {"names": [...]} in the body, or ?prefix= in the query')
    if prefix is None:
        inline = len(received.body) <= INLINE_NAMES_BYTES
        return await call.offload(inline, lambda: _different(parse_model(received, Names, MAX_NAMES_BYTES).names))
    if not received.is_empty:
        raise Invalid("The request has both names in its body and prefix in its query; send only one")
    return []


def _different(names: list[str]) -> list[str]:
    """Return the names. Raises `InvalidParameter`, and `Invalid` for a repeated name."""
    for name, count in Counter(names).items():
        check_name(name)
        if count > 1:
            raise Invalid(f"{shown(name)} is named {count} times, but a request may name each buffer once")
    return names


async def _listed(call: Call, received: Received, prefix: str) -> list[str]:
    """Return the buffers with the prefix; for a repeated request, the buffers of the original."""
    known = await call.look_up(1, recalled, call.store, received.key)
    if known is not None:
        return [*known.receipts]
    records = await call.look_up(1, lambda: call.store.records(prefix, limit=INLINE_LOOKUPS + 1, strict=True))
    if len(records) > INLINE_LOOKUPS:
        records = await call.offload(False, lambda: call.store.records(prefix, strict=True))
    return [record.name for record in records]
