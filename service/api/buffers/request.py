"""A request of `/v1/buffers`: its body read, its changes made, and what it is answered."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from service.api.buffers.models import Names, ValueQuery
from service.api.buffers.preconditions import change, key_of, recalled, refuse, store_of
from service.api.buffers.receipts import answer, etag_after, replayed
from service.api.buffers.waiting import ANY, Waiting
from service.api.http.admission import give_back, hold
from service.api.http.body import Answer, AnswerResponse, coding_of, inflate, read_body, wanted_coding
from service.api.http.context import caller_of, context_of, engine_of, settings_of
from service.api.http.negotiation import JSON, media_types
from service.api.http.offload import in_pool, in_pool_after_change
from service.api.http.problems import invalid_parameter, parameters_of
from service.api.http.tensor_forms import form_of_answer, judge, tensor_of
from service.api.operators.run import INLINE_TEXT
from service.buffers.changes import Change
from service.buffers.names import check_length, check_name
from service.buffers.perform import Outcome
from service.buffers.record import Key, Receipt, Spec
from service.codecs import json as json_codec
from service.codecs import safetensors
from service.dtypes import DTYPES, FLOATS, NAMES, Array
from service.engine import Engine
from service.errors import (
    BufferCorrupt,
    DtypeMismatch,
    GradserveError,
    Invalid,
    MalformedBody,
    NothingToAverage,
    UnknownBuffer,
    UnknownTensor,
    UnsupportedMediaType,
    shown,
)
from service.kernels.accumulate import converted

M = TypeVar("M", bound=BaseModel)
R = TypeVar("R")

VARY = "Accept, Accept-Encoding"
"""What an answer with values depends on besides its path."""

MOST_NAMED = 1 << 21
"""Elements of lists in a body that says how, or which: to read more would hold up all requests for long."""

FEW = 256
"""Buffers that are looked at in the event loop. More take longer than the way to a thread."""

MOST_LISTINGS = 10
"""How often the buffers of a prefix are listed anew, where one is deleted before it is reached."""


class BufferRequest:
    """A request with its body read, on its way through the store."""

    def __init__(self, request: Request, sent: str, answers: str, body: memoryview, key: Key | None) -> None:
        self._request, self._sent, self.answers, self._body, self._key = request, sent, answers, body, key
        self.engine, self.store = engine_of(request.scope), store_of(request.scope)
        self._form: json_codec.Form = "list"

    @classmethod
    async def of(cls, request: Request, *, changes: bool = True) -> BufferRequest:
        """Read the body, and inflate it where it is compressed. Only who `changes` something has a key."""
        # Of a DELETE, nothing is answered that could be of one type or another.
        sent, answers = (JSON, JSON) if request.method == "DELETE" else media_types(request)
        if request.method != "PUT":
            refuse(request.scope, "If-None-Match")
        coding = coding_of(context_of(request.scope).headers)
        engine = engine_of(request.scope)
        body = await read_body(request.scope, request.receive, engine.buffer)
        if coding is not None:
            limit = settings_of(request.scope).max_inflated_bytes
            body = await in_pool(request.scope, request.receive, engine, partial(inflate, body, coding, limit))
            hold(request.scope, len(body))
        return cls(request, sent, answers, body, key_of(request.scope, body) if changes else None)

    def model(self, model: type[M]) -> M:
        """The body as a model. Raises `UnsupportedMediaType`, `MalformedBody` and `InvalidParameter`."""
        if self._sent != JSON:
            raise UnsupportedMediaType(f"Content-Type is {self._sent}, but must be {JSON} here")
        text = bytes(self._body)
        if text.count(b",") > MOST_NAMED:  # which would take long to find out otherwise
            raise Invalid(f"The lists in the body have more than {MOST_NAMED} elements, the limit")
        members = parameters_of(model)
        if not self._body:
            raise MalformedBody(
                f"The body is empty, so not JSON; it must be an object with the members {', '.join(members)}"
            )
        try:
            made = model.model_validate_json(text)
            dict(json_codec.members_of(json_codec.parse(self._body), "The body"))  # of two, pydantic takes the last
            return made
        except ValidationError as invalid:
            errors = invalid.errors()
            # What is unknown first: it may be what is missing, but for a slip.
            error = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
            if error["type"] == "json_invalid":
                raise MalformedBody(f"The body is not JSON: {error['msg']}") from None
            if not error["loc"]:
                raise MalformedBody(f"The body is {shown(error['input'])}, but must be an object") from None
            place = ".".join(map(str, error["loc"]))
            raise invalid_parameter({**error, "loc": (place,)}, "member", members) from None

    def check_no_body(self) -> None:
        """Raise `Invalid` for a body where nothing would read it."""
        if not self._says_nothing():
            raise Invalid("This request takes no body; its parameters go in the query, like ?min_count=3")

    def _says_nothing(self) -> bool:
        return len(self._body) <= 64 and bytes(self._body).strip() in (b"", b"{}")

    def refusal(self, name: str, spec: Spec) -> GradserveError | None:
        """Why a new buffer must not be like this; one that is there may be, by limits that were higher once."""
        try:
            check_length(name, settings_of(self._request.scope).max_name_length)
            self.engine.limits.check(None, spec.shape, spec.dtype, label="The buffer")
        except GradserveError as error:
            return error
        return None

    async def named(
        self,
        prefix: str | None,
        timeout: float,
        look: Callable[[str], object],
        work: Callable[[list[str]], Awaitable[R]],
    ) -> R:
        """What `work` returns of the buffers that the body names, or of those that the prefix means when it is done.

        `look` raises for one of them what `work` would for it, and costs less.
        """
        if prefix is None:
            if self._says_nothing():
                raise Invalid('No buffers are named: send {"names": [...]} in the body, or ?prefix= in the query')
            count = bytes(self._body).count(b",") + 1
            names = await self.look_up(count, lambda: _different(self.model(Names).names))
            self._body = memoryview(b"")  # to wait may take long
        elif not self._says_nothing():
            raise Invalid("The request has both names in its body and prefix in its query; send only one")
        else:
            names = []

        listed = deque[str]()  # the last time, but for those that were ready since: while one is not, it does for all
        tried = False

        def look_at_listed() -> None:
            while listed:
                try:
                    look(listed[0])
                except UnknownBuffer:
                    if prefix is None:
                        raise
                listed.popleft()

        async def attempt() -> R:
            nonlocal tried
            if tried and recalled(self.store, self._key) is None:
                await self.look_up(len(listed), look_at_listed)
            tried = True
            left = 1 if prefix is None else MOST_LISTINGS
            while True:
                listed.clear()
                listed.extend(names if prefix is None else await self._listed(prefix))
                try:
                    return await work([*listed])
                except UnknownBuffer:  # of a prefix, deleted since it was listed
                    left -= 1
                    if not (left and listed):
                        raise

        return await wait_for(self._request, timeout, attempt)

    async def _listed(self, prefix: str) -> list[str]:
        """The buffers with the prefix: if the request was made before, those of then."""
        known = recalled(self.store, self._key)
        if known is not None:
            return [*known.receipts]
        found = self.store.records(prefix, limit=FEW + 1, strict=True)
        if len(found) > FEW:
            found = await self.look_up(len(found), partial(self.store.records, prefix, strict=True))
        return [one.name for one in found]

    async def look_up(self, count: int, work: Callable[[], R]) -> R:
        """What `work` returns, which looks at so many buffers: in the pool, where they are more than a few."""
        if count <= FEW:
            return work()
        return await in_pool(self._request.scope, self._request.receive, self.engine, work)

    async def tensors(self, known: set[str] | None) -> dict[str, Array]:
        """The tensors in the body, whose names must be `known`, if it is given."""
        work = partial(self._tensors, known)
        text = len(self._body) if self._sent == JSON else int.from_bytes(self._body[:8], "little")  # the file's header
        if text <= INLINE_TEXT:
            return work()
        return await in_pool(self._request.scope, self._request.receive, self.engine, work)

    def _tensors(self, known: set[str] | None) -> dict[str, Array]:
        if self._sent == JSON:
            tensors, self._form = _from_json(self.engine, self._body)
        else:
            tensors = safetensors.decode(self._body, self.engine.limits)
        for name, tensor in tensors.items():
            if known is not None and name not in known:
                raise UnknownTensor(f"{shown(name)} is unknown: this request takes the tensor gradient", tensor=name)
            if NAMES[tensor.dtype] not in FLOATS.dtypes:
                raise DtypeMismatch(
                    f"{name} is {tensor.dtype}, but must be one of {', '.join(FLOATS.dtypes)}", tensor=name
                )
        return tensors

    async def change(self, changes: Sequence[Change]) -> Outcome:
        """Make the changes, once for its idempotency key."""
        began = time.perf_counter_ns()
        try:
            return await change(self.store, changes, self._key)
        finally:
            context_of(self._request.scope).spent["store"] = time.perf_counter_ns() - began

    @asynccontextmanager
    async def holding_values(self, names: Collection[str]) -> AsyncIterator[None]:
        """The request holds the values of the buffers, of those that are there, from now on. Raises `Busy`.

        If what is done with them fails, it may wait for long, and be tried again: until then it holds none.
        """
        size = await self.look_up(len(names), lambda: sum(map(self._size_of, names)))
        hold(self._request.scope, size)
        try:
            yield
        except GradserveError:
            give_back(self._request.scope, size)
            raise

    def _size_of(self, name: str) -> int:
        try:
            return self.store.record(name).spec.nbytes
        except (UnknownBuffer, BufferCorrupt):
            return 0  # whoever changes or reads it is told

    async def change_holding_values(self, changes: Sequence[Change]) -> Outcome:
        """Make the changes, whose answer has the values."""
        async with self.holding_values([one.name for one in changes]):
            return await self.change(changes)

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
            whole = answer(outcome.receipts, values, self.answers, form, headers, one=one)
            return whole.coded(wanted_coding(context_of(self._request.scope).headers))

        small = sum(value.nbytes for value in outcome.values.values()) <= INLINE_TEXT and len(outcome.receipts) <= FEW
        return work() if small else await in_pool_after_change(self._request.receive, self.engine, work)


def _different(names: list[str]) -> list[str]:
    """The names. Raises `InvalidParameter`, and `Invalid` for one that stands there twice."""
    for name, count in Counter(names).items():
        check_name(name)
        if count > 1:
            raise Invalid(f"{shown(name)} is named {count} times, but a request may name each buffer once")
    return names


def _from_json(engine: Engine, body: memoryview) -> tuple[dict[str, Array], json_codec.Form]:
    document = json_codec.Document(body, engine.limits)
    forms = {name: judge(name, member) for name, member in document.members.items()}
    tensors = {name: tensor_of(document, name, form, FLOATS.default) for name, form in forms.items()}
    document.finish()
    return tensors, form_of_answer(forms.values())


def none_with(prefix: str | None) -> UnknownBuffer:
    """What is said where a prefix means no buffer, and something of one is wanted."""
    return UnknownBuffer(f"There is no buffer whose name begins with {shown(prefix or '')}")


def read_values(request: Request, names: Sequence[str], query: ValueQuery, answers: str, one: bool) -> Answer:
    """The values of buffers at one moment, with their receipts; with `one`, of a single buffer, with its tag."""
    snapshots = store_of(request.scope).read(names, query.epoch)
    receipts: dict[str, Receipt] = {snapshot.record.name: snapshot.receipt() for snapshot in snapshots}
    values = {
        snapshot.record.name: _reduced(snapshot.value, snapshot.weight, query.reduce, query.dtype, snapshot.record.name)
        for snapshot in snapshots
    }
    headers = {"ETag": snapshots[0].etag, "Vary": VARY} if one else {}
    whole = answer(receipts, values, answers, query.encoding or "list", headers, one=one)
    return whole.coded(wanted_coding(context_of(request.scope).headers))


def _reduced(value: Array, weight: float, reduce: str, dtype: str | None, name: str) -> Array:
    if reduce == "mean" and not weight:
        raise NothingToAverage(f"The weights in {name!r} sum to zero: there is no mean", buffer=name)
    with np.errstate(all="ignore"):
        return converted(value, DTYPES[dtype] if dtype else value.dtype, weight if reduce == "mean" else 1.0)


async def wait_for(
    request: Request, seconds: float, attempt: Callable[[], Awaitable[R]], match: frozenset[str] = ANY
) -> R:
    """What `attempt` returns, once others have done what it waits for, as `Waiting.until` has it."""
    waiting: Waiting = request.app.waiting
    return await waiting.until(caller_of(request.scope).namespace, request.receive, seconds, attempt, match)
