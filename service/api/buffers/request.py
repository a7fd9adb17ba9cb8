"""A request of `/v1/buffers`: its body, its gradients and its changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from service.api.buffers.models import AccumulateQuery, TakeQuery, ValueQuery
from service.api.buffers.preconditions import key_of, refuse_headers
from service.api.http.answer import JSON, AnswerForm
from service.api.http.body import read_body
from service.api.http.call import Call
from service.api.http.negotiation import invalid_parameter, media_types, parameters_of, wanted_coding
from service.api.http.offload import INLINE_BYTES
from service.buffers.changes import Change
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, check_records
from service.buffers.pushes import Part
from service.buffers.record import Key, Record
from service.buffers.rules import CloseIfDue
from service.buffers.store import Store
from service.codecs import json as json_codec
from service.errors import BodyTooLarge, GradserveError, Invalid, InvalidParameter, MalformedBody
from service.limits import Limits

M = TypeVar("M", bound=BaseModel)

MAX_LIST_ELEMENTS = 1 << 17
"""Elements of the lists in a body without tensors: more than names that a request may have. Each becomes an object."""

MAX_EMPTY_BYTES = 64
"""Bytes of a body that can count as empty: a longer body is not searched for blanks."""

MAX_SPEC_ELEMENTS = 1 << 20
"""Members and elements of a body that describes many buffers: 64 for each of 16,384. Each becomes an object."""

RECEIPT_BYTES = 1 << 10
"""Bytes of memory for a change and its receipt, as objects and as text."""

MOST_CLOSED = 1000
"""Steps that one transaction closes before a read: others wait for it."""

RECORD_FACTOR = 16
"""A record takes as many times its bytes in the store as memory: as objects, with its receipt, and as text."""


class Received(NamedTuple):
    """The body of a request, the media types of the body and of the answer, and the idempotency key."""

    body: memoryview
    sent: str
    answers: str
    key: Key | None
    changes: bool = True
    """Whether the request changes buffers, so that their number has a limit."""

    @property
    def is_empty(self) -> bool:
        """Whether the body is blank or an empty object."""
        return len(self.body) <= MAX_EMPTY_BYTES and json_codec.without_mark(self.body).strip() in (b"", b"{}")


async def receive(call: Call, takes: Sequence[str] = (JSON,), *, changes: bool = True) -> Received:
    """Read the body, of a media type that the endpoint `takes`. A request without `changes` has no key."""
    # The answer to a DELETE of one buffer has no body and no media type.
    sent, answers = (JSON, JSON) if call.method == "DELETE" and call.parameters else media_types(call, takes)
    if call.method != "PUT":
        refuse_headers(call, "If-None-Match")
    body = await read_body(call)
    # The key has a hash of the body: 3 MB take half a millisecond.
    key = await call.offload(len(body) <= INLINE_BYTES, key_of, call, body) if changes else None
    return Received(body, sent, answers, key, changes)


async def receive_no_body(call: Call) -> Received:
    """Receive a request without a body. Raises `Invalid` if it has one, which nothing would read."""
    received = await receive(call)
    if not received.is_empty:
        raise Invalid("This request takes no body; its parameters go in the query, like ?min_count=3")
    return received


def parse_model(received: Received, model: type[M], max_bytes: int) -> M:
    """Return the body, of at most `max_bytes`, as a model.

    Raises `BodyTooLarge`, `MalformedBody`, `UnknownParameter` and `InvalidParameter`.
    """
    text, members = _text(received, max_bytes, MAX_LIST_ELEMENTS, parameters_of(model)), parameters_of(model)
    _known_members(json_codec.parse(json_codec.Text(text)), members)
    try:
        return model.model_validate_json(text)
    except ValidationError as invalid:
        raise _complaint(invalid, members) from None


def parse_models(received: Received, member: str, model: type[M], max_bytes: int, limits: Limits) -> dict[str, M]:
    """Return the models by name in the only `member` of the body. `limits` bounds their number.

    Raises what `parse_model` raises, and `TooManyTensors`.
    """
    text, members = _text(received, max_bytes, MAX_SPEC_ELEMENTS, [member]), parameters_of(model)
    body = _known_members(json_codec.parse_pairs(text), [member])
    if not body.get(member):
        raise invalid_parameter({"type": "missing", "loc": (member,)}, "member")
    limits.check_count(len(body[member]))
    models = {}
    for name, value in json_codec.members_of(body[member], member):
        place = f"{member}.{name}"
        fields = _known_members(value, members, place)
        plain = {each: dict(one) if isinstance(one, json_codec.Pairs) else one for each, one in fields.items()}
        try:
            models[name] = model.model_validate(plain)
        except ValidationError as invalid:
            raise _complaint(invalid, members, place) from None
    return models


def _text(received: Received, max_bytes: int, max_elements: int, members: Collection[str]) -> bytes:
    """Return the body if it can be JSON with these members, within the limits."""
    size = len(received.body)
    if size > max_bytes:
        raise BodyTooLarge(f"The body has {size} bytes; this request takes {max_bytes}, the limit", limit=max_bytes)
    if not size:
        raise MalformedBody(
            f"The body is empty, so not JSON; it must be an object with the members {', '.join(members)}"
        )
    text = json_codec.without_mark(received.body)
    if text.count(b",") + text.count(b"[") > max_elements:  # 8 million empty lists took seconds
        raise Invalid(f"The body has more than {max_elements} elements and lists, the limit")
    return text


def _known_members(value: Any, known: Collection[str], title: str = "") -> dict[str, Any]:
    """Return the members of an object, the body by default. Raise unless all are `known` and come once.

    pydantic takes the last of two members with one name, and makes an error of each unknown member.
    """
    members = {}
    for name, member in json_codec.members_of(value, title or "The body"):
        if name not in known:
            place = f"{title}.{name}".lstrip(".")
            raise invalid_parameter({"type": "extra_forbidden", "loc": (place,)}, "member", known)
        members[name] = member
    return members


def _complaint(invalid: ValidationError, members: Collection[str], title: str = "") -> GradserveError:
    error = invalid.errors(include_url=False, include_context=False)[0]
    if error["type"] == "json_invalid":
        return MalformedBody(f"The body is not JSON: {error['msg']}")
    place = ".".join(map(str, (*filter(None, [title]), *error["loc"])))
    return invalid_parameter({**error, "loc": (place,)}, "member", members)


def form_of(
    call: Call, answers: str, query: AccumulateQuery | ValueQuery | TakeQuery, default: json_codec.Encoding = "list"
) -> AnswerForm:
    """Return the form of values in an answer of the media type `answers`; `default` is how JSON writes them."""
    encoding = query.encoding or default
    is_coded = encoding == "int8"
    written: json_codec.Encoding | None = None if answers != JSON else "base64" if encoding == "int8" else encoding
    coding = wanted_coding(call, written)
    if isinstance(query, AccumulateQuery):
        return AnswerForm(written, coding)
    if is_coded and query.dtype is not None:
        problem = "encoding=int8 answers codes and their float32 scales, so it goes without dtype"
        raise InvalidParameter(problem, parameter="dtype")
    return AnswerForm(written, coding, "float32" if is_coded else query.dtype, query.reduce == "mean", is_coded)


async def submit(
    call: Call, received: Received, changes: Sequence[Change], form: AnswerForm | None = None, part: Part | None = None
) -> Outcome:
    """Make the changes, once for the idempotency key. With a `form`, reserve memory for values in the answer."""
    if form is None:
        call.reserve(RECEIPT_BYTES * len(changes))
        return await call.submit(changes, received.key, part=part)
    async with reserved(call, [change.name for change in changes], form):
        return await call.submit(changes, received.key)


@asynccontextmanager
async def reserved(
    call: Call, names: Sequence[str], form: AnswerForm | None = None, growth: int | None = None
) -> AsyncIterator[None]:
    """Reserve memory for the records of these buffers, and for their values in an answer, until the request ends.

    A new change of them all adds `growth` bytes to each record. A failed attempt gives the memory back: the request may
    wait for long before the next attempt. Raises `Busy`, `TensorTooLarge` and, for a change, `TooManyTensors`.
    """
    held = call.reservation.bytes
    try:
        records = (growth or 0) * len(names)
        if len(names) > 1:
            records += await call.look_up(len(names), call.store.record_bytes, names)
        if growth is not None:
            check_records(records)
        call.reserve(RECEIPT_BYTES * len(names) + RECORD_FACTOR * records)
        if form is not None:
            call.reserve(await call.look_up(len(names), _value_bytes, call.store, names, form))
        yield
    except GradserveError:
        call.give_back(call.reservation.bytes - held)
        raise


def _value_bytes(store: Store, names: Sequence[str], form: AnswerForm) -> int:
    specs = [record.spec for record in store.look([BufferName(store.namespace, name) for name in names]).values()]
    return sum([spec.nbytes + form.extra_bytes(spec.shape, spec.dtype) for spec in specs])


async def read_after_closing_due(call: Call, name: str) -> Record:
    """Return the buffer. A step whose deadline is over is closed before."""
    record = await call.look_up(1, call.store.record, name)
    if record.due is not None and await closed_due(call, [name]):
        record = await call.look_up(1, call.store.record, name)
    return record


async def closed_due(call: Call, names: Sequence[str]) -> bool:
    """Close the steps whose deadlines are over. Return whether there were any."""

    def due() -> list[str]:
        found = call.store.look([BufferName(call.store.namespace, name) for name in names]).values()
        dues = {record.name: record.due for record in found if record.due is not None}
        now = call.store.now() if dues else 0.0
        return [name for name, due in dues.items() if due <= now]

    over = await call.look_up(len(names), due)
    for start in range(0, len(over), MOST_CLOSED):
        await call.submit([CloseIfDue(name=name) for name in over[start : start + MOST_CLOSED]], None)
    return bool(over)
