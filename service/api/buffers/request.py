"""A request of `/v1/buffers`: its body, its gradients and its changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from service.api.buffers.preconditions import key_of, refuse_headers
from service.api.http.answer import JSON
from service.api.http.call import Call
from service.api.http.negotiation import invalid_parameter, media_types, parameters_of
from service.api.http.offload import INLINE_TEXT_BYTES
from service.api.http.tensor_forms import form_of_answer, parse_form, tensor_of
from service.buffers.changes import Change
from service.buffers.perform import Outcome
from service.buffers.record import Key
from service.buffers.store import Store
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import FLOATS, NAMES, Array
from service.errors import (
    BufferCorrupt,
    DtypeMismatch,
    GradserveError,
    Invalid,
    MalformedBody,
    UnknownBuffer,
    UnknownTensor,
    UnsupportedMediaType,
    shown,
)
from service.limits import Limits

M = TypeVar("M", bound=BaseModel)

MAX_LIST_ELEMENTS = 1 << 21
"""Elements of the lists in a body of names or rules: the event loop parses it, and more would take too long."""

MAX_EMPTY_BYTES = 64
"""Bytes of a body that can count as empty: a longer body is not searched for blanks."""


class Received(NamedTuple):
    """The body of a request, the media types of the body and of the answer, and the idempotency key."""

    body: memoryview
    sent: str
    answers: str
    key: Key | None

    @property
    def is_empty(self) -> bool:
        """Whether the body is blank or an empty object."""
        return len(self.body) <= MAX_EMPTY_BYTES and bytes(self.body).strip() in (b"", b"{}")


async def receive(call: Call, *, changes: bool = True) -> Received:
    """Read the body. A request without `changes` has no key."""
    # The answer to a DELETE has no body and no media type.
    sent, answers = (JSON, JSON) if call.method == "DELETE" else media_types(call)
    if call.method != "PUT":
        refuse_headers(call, "If-None-Match")
    body = await call.body()
    return Received(body, sent, answers, key_of(call, body) if changes else None)


def check_no_body(received: Received) -> None:
    """Raise `Invalid` if the request has a body, which nothing would read."""
    if not received.is_empty:
        raise Invalid("This request takes no body; its parameters go in the query, like ?min_count=3")


def parse_model(received: Received, model: type[M]) -> M:
    """Return the body as a model. Raises `UnsupportedMediaType`, `MalformedBody` and `InvalidParameter`."""
    if received.sent != JSON:
        raise UnsupportedMediaType(f"Content-Type is {received.sent}, but must be {JSON} here", {"Accept": JSON})
    text, members = bytes(received.body), parameters_of(model)
    if text.count(b",") > MAX_LIST_ELEMENTS:  # to parse them would take long
        raise Invalid(f"The lists in the body have more than {MAX_LIST_ELEMENTS} elements, the limit")
    if not text:
        raise MalformedBody(
            f"The body is empty, so not JSON; it must be an object with the members {', '.join(members)}"
        )
    try:
        parsed = model.model_validate_json(text)
        # pydantic takes the last of two members with one name; this refuses them.
        dict(json_codec.members_of(json_codec.parse(received.body), "The body"))
        return parsed
    except ValidationError as invalid:
        raise _complaint(invalid, members) from None


def _complaint(invalid: ValidationError, members: Sequence[str]) -> GradserveError:
    errors = invalid.errors()
    # An unknown member comes first: it may be a misspelt member that is missing.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if error["type"] == "json_invalid":
        return MalformedBody(f"The body is not JSON: {error['msg']}")
    if not error["loc"]:
        return MalformedBody(f"The body is {shown(error['input'])}, but must be an object")
    place = ".".join(map(str, error["loc"]))
    return invalid_parameter({**error, "loc": (place,)}, "member", members)


async def gradients(call: Call, received: Received) -> tuple[dict[str, Array], json_codec.Encoding]:
    """Return the tensors in the body, and the default form of tensors in the answer."""
    is_json = received.sent == JSON
    text_bytes = len(received.body) if is_json else int.from_bytes(received.body[:8], "little")  # the header
    inline = text_bytes <= INLINE_TEXT_BYTES
    return await call.offload(inline, _gradients, received.body, is_json, call.engine.limits)


def _gradients(body: memoryview, is_json: bool, limits: Limits) -> tuple[dict[str, Array], json_codec.Encoding]:
    tensors, form = _from_json(body, limits) if is_json else (safetensors.decode(body, limits), "list")
    for name, tensor in tensors.items():
        if NAMES[tensor.dtype] not in FLOATS.dtypes:
            raise DtypeMismatch(f"{name} is {tensor.dtype}, but must be one of {', '.join(FLOATS.dtypes)}", tensor=name)
    return tensors, form


def _from_json(body: memoryview, limits: Limits) -> tuple[dict[str, Array], json_codec.Encoding]:
    document = json_codec.Document(body, limits)
    forms = {name: parse_form(name, member) for name, member in document.members.items()}
    tensors = {name: tensor_of(document, name, form, FLOATS.default) for name, form in forms.items()}
    document.finish()
    return tensors, form_of_answer(forms.values())


def check_gradient(tensors: Collection[str]) -> None:
    """Raise `UnknownTensor` for a tensor with another name than `gradient`."""
    for name in tensors:
        if name != "gradient":
            raise UnknownTensor(f"{shown(name)} is unknown: this request takes the tensor gradient", tensor=name)


async def submit(call: Call, received: Received, changes: Sequence[Change], *, with_values: bool = False) -> Outcome:
    """Make the changes, once for the idempotency key. `with_values` reserves memory for values in the answer."""
    if not with_values:
        return await call.submit(changes, received.key)
    async with values_reserved(call, [change.name for change in changes]):
        return await call.submit(changes, received.key)


@asynccontextmanager
async def values_reserved(call: Call, names: Collection[str]) -> AsyncIterator[None]:
    """Reserve memory for the values of these buffers until the request ends. Raises `Busy`.

    A failed attempt gives the memory back: the request may wait for long before the next attempt.
    """
    size = await call.look_up(len(names), _nbytes, call.store, names)
    call.reserve(size)
    try:
        yield
    except GradserveError:
        call.give_back(size)
        raise


def _nbytes(store: Store, names: Collection[str]) -> int:
    total = 0
    for name in names:
        try:
            total += store.record(name).spec.nbytes
        except (UnknownBuffer, BufferCorrupt):
            continue  # the change or the read raises the error
    return total
