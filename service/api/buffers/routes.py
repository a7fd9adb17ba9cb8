"""`/v1/buffers`: named accumulation buffers, one at a time."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from service.api.buffers import openapi
from service.api.buffers.gradients import gradients, only_gradient, sort_rows
from service.api.buffers.models import (
    MAX_LISTED_BYTES,
    AccumulateQuery,
    BufferList,
    GradientBody,
    ListQuery,
    Metadata,
    MetadataQuery,
    TakeQuery,
    ValueQuery,
)
from service.api.buffers.preconditions import formed, known_tag, match_of, refuse_headers, states_not_wanted
from service.api.buffers.receipt_models import Receipt
from service.api.buffers.receipts import VARY, answer_outcome, read_values, replayed
from service.api.buffers.request import form_of, parse_model, read_after_closing_due, receive, receive_no_body, submit
from service.api.buffers.specs import MAX_RULES_BYTES, NewBuffer, NewRules, rules_of
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import MEDIA_TYPES, check_no_query, media_types
from service.api.http.offload import INLINE_BYTES, INLINE_TEXT_BYTES
from service.api.http.routing import SAFETENSORS_BODY, access, body
from service.api.http.waiting import ANY
from service.buffers.changes import Add, Create, Delete, Take, Zero
from service.buffers.gradients import Sent
from service.buffers.lives import check_life, of_this_life
from service.buffers.names import MAX_NAME_CHARACTERS, check_length, check_name
from service.buffers.record import Record, Spec
from service.buffers.rules import SetRules, check_names, new_spec
from service.buffers.steps import check_contributor
from service.buffers.store import Store
from service.errors import GradserveError
from service.limits import MAX_RANK

READ, WRITE = "buffers:read", "buffers:write"

router = APIRouter(prefix="/v1/buffers", tags=["buffers"])


@router.put(
    "/{name}",
    summary="Create a buffer",
    dependencies=[*openapi.CREATING, body(NewBuffer)],
    responses=openapi.CREATED_ONE,
)
@access(WRITE, label="buffers")
async def create_buffer(call: CurrentCall, name: str) -> Answer:
    """A buffer of the same specification that exists already is no error: the status is 200, not 201. Raises
    `buffer_exists` for another specification, `too_many_buffers`, `invalid_parameter` and `store_full`.
    """
    check_no_query(call)
    received = await receive(call)
    change = new_create(call, name, parse_model(received, NewBuffer, MAX_RULES_BYTES))
    change.match, change.unless = match_of(call), states_not_wanted(call)
    outcome = await submit(call, received, [change])
    receipt = dict(outcome.receipts[name])
    status = 201 if receipt.pop("created") else 200
    tag = f'"{receipt["step"]}-{receipt["version"]}"'
    return JsonAnswer(receipt, status, {"ETag": tag, "Location": f"./{name}", **replayed(outcome)})


def refusal_of(call: Call, name: str, spec: Spec) -> GradserveError | None:
    """Return why no new buffer may be like this. A buffer that exists may: the limits can have been higher."""
    try:
        check_length(name, call.settings.max_name_length)
        call.engine.limits.check(None, spec.shape, spec.dtype, label="The buffer")
        check_names(spec)
    except GradserveError as error:
        return error
    return None


@router.get("", summary="List buffers", response_model=BufferList)
@access(READ, label="buffers")
async def list_buffers(call: CurrentCall, query: Annotated[ListQuery, Query()]) -> Answer:
    """In the order of their names, a page at a time."""
    refuse_headers(call, "If-Match", "If-None-Match")
    return await call.offload(False, _listed, call.store, query)


def _listed(store: Store, query: ListQuery) -> Answer:
    records = store.records(query.prefix, query.cursor, query.limit + 1, MAX_LISTED_BYTES)
    more = len(records) > query.limit or sum([record.packed_bytes for record in records]) > MAX_LISTED_BYTES
    records = records[:-1] if more and len(records) > 1 else records
    cursor = records[-1].name if more else None
    return JsonAnswer({"buffers": [record.as_json() for record in records], "next_cursor": cursor})


@router.get(
    "/{name}",
    summary="Read a buffer's metadata, or a closed step's receipt",
    response_model=Metadata | Receipt,
    dependencies=openapi.READING,
    responses=openapi.METADATA,
)
@access(READ, label="buffers")
async def get_buffer(call: CurrentCall, name: str, query: Annotated[MetadataQuery, Query()]) -> Answer:
    """With `step`, the receipt of this closed step; with `timeout`, once it is closed. Raises `unknown_buffer`,
    `step_open` and `step_gone`.
    """
    refuse_headers(call, "If-Match")
    step = query.step
    await call.wait_for(query.timeout, partial(_when_closed, call, check_name(name), step))
    (record,) = await call.look_up(1, call.store.durable, [name], step)
    closed, body = None, record.as_json
    if step is not None:
        closed = record.closed_step(step)
        body = partial(record.receipt, updated=False, of=closed)
    fields = {"ETag": record.tag_of(closed or record)}
    if known_tag(call, fields["ETag"]):
        return Answer(status=304, fields=fields)
    return JsonAnswer(body(), fields=fields)


async def _when_closed(call: Call, name: str, step: int | None, life: str | None = None) -> Record:
    """Return the buffer. Raises `RunReplaced`, and `StepOpen` and `StepGone` for a step that cannot be read."""
    with of_this_life(life):
        record = await read_after_closing_due(call, name)
    if life is not None:
        check_life(record, life)
    if step is not None:
        record.closed_step(step)
    return record


@router.patch(
    "/{name}",
    summary="Change a buffer's rules",
    dependencies=[*openapi.ONE, body(NewRules)],
    responses=openapi.CHANGED_RULES,
    openapi_extra=openapi.merge_patch(NewRules),
)
@access(WRITE, label="buffers")
async def set_rules(call: CurrentCall, name: str) -> Answer:
    """Rules that are absent stay as they are; null ends a rule. Raises `unknown_buffer` and `invalid_parameter`."""
    check_no_query(call)
    received = await receive(call)
    rules = rules_of(parse_model(received, NewRules, MAX_RULES_BYTES))
    outcome = await submit(call, received, [SetRules(name=check_name(name), match=match_of(call), rules=rules)])
    receipt = outcome.receipts[name]
    return JsonAnswer(receipt, fields={"ETag": f'"{receipt["step"]}-{receipt["version"]}"', **replayed(outcome)})


@router.delete(
    "/{name}", summary="Delete a buffer", status_code=204, dependencies=openapi.ONE, responses=openapi.DELETED
)
@access(WRITE, label="buffers")
async def delete_buffer(call: CurrentCall, name: str) -> Answer:
    """The value and all closed steps go, too. Raises `unknown_buffer`."""
    check_no_query(call)
    received = await receive_no_body(call)
    outcome = await submit(call, received, [Delete(name=check_name(name), match=match_of(call))])
    return Answer(status=204, fields=replayed(outcome))


@router.get(
    "/{name}/value",
    summary="Read a buffer's value, or a closed step's",
    dependencies=openapi.READING,
    responses=openapi.READ_ONE,
)
@access(READ, label="value")
async def value(call: CurrentCall, name: str, query: Annotated[ValueQuery, Query()]) -> Answer:
    """The running sum or, with `step`, the value of a closed step. Raises `unknown_buffer`, `step_open`,
    `step_gone` and `nothing_to_average`.
    """
    refuse_headers(call, "If-Match")
    _, answers = media_types(call)
    check_name(name)
    record = await call.wait_for(query.timeout, partial(_when_closed, call, name, query.step, query.life))
    if b"if-none-match" in call.headers:
        (record,) = await call.look_up(1, call.store.durable, [name], query.step)
    tag = record.tag_of(record if query.step is None else record.closed_step(query.step))
    form, size = form_of(call, answers, query), record.spec.nbytes
    known = known_tag(call, formed(tag, answers, query.encoding), form.coding)
    if known is not None:
        return Answer(status=304, fields={"ETag": known, "Vary": VARY})
    call.reserve(size + form.extra_bytes(record.spec.shape, record.spec.dtype))
    inline = size <= (INLINE_TEXT_BYTES if answers == JSON else INLINE_BYTES) and not call.store.blocks
    return await call.offload(inline, read_values, call.store, [name], query, answers, form.coding, True)


@router.post(
    "/{name}/accumulate",
    summary="Add a gradient",
    dependencies=[*openapi.ONE, body(GradientBody)],
    responses=openapi.CHANGED_ONE,
    openapi_extra=SAFETENSORS_BODY,
)
@access(WRITE, label="accumulate")
async def accumulate(call: CurrentCall, name: str, query: Annotated[AccumulateQuery, Query()]) -> Answer:
    """The gradient is a tensor that broadcasts into the buffer's shape, rows that are added to those of `indices`, or
    codes of 8 bits and their scales. With an `Idempotency-Key`, a request counts once, however often it is sent.
    Raises `unknown_buffer`, `shape_mismatch`, `dtype_mismatch`, `index_out_of_range`, `stale_step`,
    `duplicate_contributor`, `nonfinite_gradient` and `norm_too_large`.
    """
    check_name(name)
    check_may_read(call, query)
    received = await receive(call, MEDIA_TYPES)
    tensors, form = await gradients(call, received)
    change = new_add(name, "gradient", only_gradient(tensors), query, match_of(call))
    await sort_rows(call, [change])
    wanted = None if query.answered is None else form_of(call, received.answers, query, form)
    outcome = await submit(call, received, [change], wanted)
    return await answer_outcome(call, received.answers, outcome, query.encoding or form, single=True)


@router.post(
    "/{name}/zero",
    summary="Discard the sum and begin the next step",
    dependencies=openapi.ONE,
    responses=openapi.CHANGED_ONE,
)
@access(WRITE, label="zero")
async def zero(call: CurrentCall, name: str) -> Answer:
    """The step ends without a value that can be read. Raises `unknown_buffer`."""
    check_no_query(call)
    received = await receive_no_body(call)
    outcome = await submit(call, received, [Zero(name=check_name(name), match=match_of(call))])
    return await answer_outcome(call, received.answers, outcome, "list", single=True)


@router.post(
    "/{name}/take",
    summary="Close the step and return its value",
    dependencies=openapi.ONE,
    responses=openapi.CHANGED_ONE,
)
@access(WRITE, READ, label="take")
async def take(call: CurrentCall, name: str, query: Annotated[TakeQuery, Query()]) -> Answer:
    """The next step begins at zero. With `timeout`, the request waits until `min_count` gradients are in. Raises
    `unknown_buffer`, `too_few_gradients`, `stale_step` and `nothing_to_average`.
    """
    received = await receive_no_body(call)
    change = new_take(query, check_name(name), match_of(call))
    wanted = form_of(call, received.answers, query) if query.answered == "value" else None
    outcome = await call.wait_for(query.timeout, lambda: submit(call, received, [change], wanted), change.match or ANY)
    form, reduce, dtype = query.encoding or "list", query.reduce, query.dtype
    return await answer_outcome(call, received.answers, outcome, form, single=True, reduce=reduce, dtype=dtype)


# ----- shared with the endpoints of many buffers -----


def check_may_read(call: Call, query: AccumulateQuery) -> None:
    """Raise `Forbidden` if the caller asks for the sum but may not read it."""
    if query.answered is not None:
        call.caller.require(READ)


def new_create(call: Call, name: str, new: BaseModel) -> Create:
    """Return the change that creates a buffer. Raises for what no buffer can be."""
    spec = new_spec(vars(new))
    refusal = refusal_of(call, name, spec)
    if refusal is not None and (len(name) > MAX_NAME_CHARACTERS or len(spec.shape) > MAX_RANK):
        raise refusal
    return Create(name=check_name(name), life=spec.life, spec=spec, refusal=refusal)


def new_take(query: TakeQuery, name: str, match: frozenset[str] | None = None) -> Take:
    return Take(
        name=name,
        match=match,
        min_count=query.min_count,
        step=query.step,
        life=query.life,
        mean=query.reduce == "mean",
        want_value=query.answered == "value",
    )


def new_add(name: str, tensor: str, gradient: Sent, query: AccumulateQuery, match: frozenset[str] | None) -> Add:
    """Return the change that adds the gradient, which the request calls `tensor`."""
    return Add(
        name=name,
        match=match,
        gradient=gradient,
        tensor=tensor,
        weight=query.weight,
        do_update=query.do_update,
        overwrite=query.overwrite,
        step=query.step,
        life=query.life,
        want_value=query.answered is not None,
        contributor=None if query.contributor is None else check_contributor(query.contributor),
    )
