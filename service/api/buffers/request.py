"""A request of `/v1/buffers`: its body, its gradients, and the changes that it makes."""

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
"""Elements of the lists in a body of names or rules: to read more would hold up all requests for long."""

MAX_EMPTY_BYTES = 64
"""A longer body is not looked at to find that it says nothing."""


class Received(NamedTuple):
    """The body of a request, with the media types of the request and of its answer, and its idempotency key."""

    body: memoryview
    sent: str
    answers: str
    key: Key | None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return len(self.body) <= MAX_EMPTY_BYTES and bytes(self.body).strip() in (b"", b"{}")


async def receive(call: Call, *, changes: bool = True) -> Received:
    """Read the body. A request that `changes` nothing has no key."""
    # The answer to a DELETE has no body, so no type either.
    sent, answers = (JSON, JSON) if call.method == "DELETE" else media_types(call)
    if call.method != "PUT":
        refuse_headers(call, "If-None-Match")
    body = await call.body()
    return Received(body, sent, answers, key_of(call, body) if changes else None)


def check_no_body(received: Received) -> None:
    """Raise `Invalid` for a body where nothing would read it."""
    if not received.is_empty:
        raise Invalid("This request takes no body; its parameters go in the query, like ?min_count=3")


def parse_model(received: Received, model: type[M]) -> M:
    """The body as a model. Raises `UnsupportedMediaType`, `MalformedBody` and `InvalidParameter`."""
    if received.sent != JSON:
        raise UnsupportedMediaType(f"Content-Type is {received.sent}, but must be {JSON} here")
    text, members = bytes(received.body), parameters_of(model)
    if text.count(b",") > MAX_LIST_ELEMENTS:  # to find that out by parsing would take long
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
    # What is unknown comes first: it may be what is missing, misspelt.
    error = next((error for error in errors if error["type"] == "extra_forbidden"), errors[0])
    if error["type"] == "json_invalid":
        return MalformedBody(f"The body is not JSON: {error['msg']}")
    if not error["loc"]:
        return MalformedBody(f"The body is {shown(error['input'])}, but must be an object")
    place = ".".join(map(str, error["loc"]))
    return invalid_parameter({**error, "loc": (place,)}, "member", members)


async def gradients(call: Call, received: Received) -> tuple[dict[str, Array], json_codec.Encoding]:
    """The tensors in the body, and the form of tensors in the answer unless the query sets another."""
    is_json = received.sent == JSON
    text_bytes = len(received.body) if is_json else int.from_bytes(received.body[:8], "little")  # the file's header
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
    """Raise `UnknownTensor` for a tensor of another name than `gradient`."""
    for name in tensors:
        if name != "gradient":
            raise UnknownTensor(f"{shown(name)} is unknown: this request takes the tensor gradient", tensor=name)


async def submit(call: Call, received: Received, changes: Sequence[Change], *, with_values: bool = False) -> Outcome:
    """Make the changes, once for the idempotency key. The answer to a request `with_values` holds memory for them."""
    if not with_values:
        return await call.submit(changes, received.key)
    async with values_reserved(call, [change.name for change in changes]):
        return await call.submit(changes, received.key)


@asynccontextmanager
async def values_reserved(call: Call, names: Collection[str]) -> AsyncIterator[None]:
    """Reserve memory for the values of those buffers that exist, from now on. Raises `Busy`.

    A request that fails may wait for long before its next attempt: until then it holds nothing.
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
            continue  # the change, or the read, raises it
    return total
