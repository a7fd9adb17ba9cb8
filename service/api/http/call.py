"""One request: made at the door, and handed on to whatever needs to know about it."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from starlette.types import Receive, Scope, Send

from service.api.http.admission import Admission, Reservation
from service.api.http.body import Limits, check_transfer_coding, coding_of, inflate, read_body
from service.api.http.caller import ANYONE, Caller
from service.api.http.exchange import EXCHANGE, Exchange
from service.api.http.offload import INLINE_LOOKUPS, in_pool
from service.api.http.waiting import ANY, Waiting
from service.buffers.changes import Change
from service.buffers.perform import Outcome
from service.buffers.perform import Request as StoreRequest
from service.buffers.record import Key
from service.buffers.store import Store
from service.engine import Engine
from service.errors import InvalidParameter, NotReady, shown
from service.settings import Settings

R = TypeVar("R")

MAX_REQUEST_ID_CHARACTERS = 128
"""A longer X-Request-ID of a client is not used: it would fill the log."""


@dataclass
class Services:
    """What a process serves requests with. The engine, the store and `waiting` are there from startup to shutdown."""

    settings: Settings
    admission: Admission
    engine: Engine | None = None
    store: Store | None = None
    waiting: Waiting | None = None


class Call:
    """One request: what came, who sent it, what it holds, and what it has cost so far."""

    __slots__ = (
        "_scope",
        "_services",
        "caller",
        "exchange",
        "headers",
        "label",
        "method",
        "operator",
        "parameters",
        "path",
        "receive",
        "received",
        "request_id",
        "reservation",
        "route",
        "send",
        "sent",
        "settings",
        "spent",
        "started",
        "status",
        "trace",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, services: Services) -> None:
        self._scope, self.receive, self.send = scope, receive, send
        self._services, self.settings = services, services.settings
        self.started = time.perf_counter_ns()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        """By name, in lower case; of a header that came twice, the last line."""
        self.exchange: Exchange | None = scope.get("extensions", {}).get(EXCHANGE)
        """The request and its answer on the connection; None under another server."""
        self.caller: Caller = ANYONE
        self.route: str | None = None
        """The path as the documentation has it, with the names of its parameters."""
        self.label = "other"
        """How metrics count it: one of the few words that endpoints declare."""
        self.parameters: Mapping[str, str] = {}
        """The values of the parameters in the path."""
        self.operator: str | None = None
        """The operator that the request runs, once the body is about to be read."""
        self.reservation = Reservation()
        self.request_id: str | None = None
        self.trace: tuple[str, str] | None = None
        """The ids of its trace and its span, if it has a span."""
        self.status = 0
        """The status of the answer, once there is an answer."""
        self.received = 0
        """Bytes of the body."""
        self.sent = 0
        """Bytes of the answer's body."""
        self.spent: dict[str, int] = {}
        """Nanoseconds by phase."""

    # ----- what came -----

    def lines(self, header: bytes) -> list[bytes]:
        """The values of all lines of a header, whose name is in lower case."""
        return [value for name, value in self._scope["headers"] if name == header]

    @property
    def query_string(self) -> bytes:
        """The query, as it came."""
        query: bytes = self._scope["query_string"]
        return query

    @property
    def address(self) -> tuple[str, int] | None:
        """The client's host and port; None for a Unix socket."""
        client: tuple[str, int] | None = self._scope.get("client")
        return client

    @property
    def connection(self) -> Mapping[str, Any]:
        """The connection in ASGI's terms: `scheme`, `http_version`, `server`."""
        return self._scope

    async def body(self, head: int = 0) -> memoryview:
        """Read the whole body, and inflate it. If it is large, the byte at `head` is aligned for NumPy.

        Raises `BodyTooLarge`, `RequestTimeout`, `MalformedBody`, `UnsupportedMediaType`, `Busy` and `ClientDisconnect`.
        """
        coding, settings = coding_of(self.headers), self.settings
        if b"transfer-encoding" in self.headers:
            check_transfer_coding(self.lines(b"transfer-encoding"))
        began = time.perf_counter_ns()
        limits = Limits(settings.max_body_bytes, settings.request_timeout)
        allocate = self.engine.buffer
        body = await read_body(self.exchange, self.receive, self.headers, limits, allocate, self.reserve, head)
        self.spent["read"] = time.perf_counter_ns() - began
        self.received = len(body)
        if coding is not None:
            body = await self.offload(False, inflate, body, coding, settings.max_inflated_bytes)
            self.reserve(len(body))
        return body

    # ----- what serves it -----

    @property
    def engine(self) -> Engine:
        """The engine. Raises `NotReady` before the startup has finished and after the shutdown has begun."""
        return _there(self._services.engine)

    @property
    def store(self) -> Store:
        """The store as the caller sees it. Raises `NotReady` like `engine`."""
        return _there(self._services.store).within(self.caller.namespace)

    @property
    def waiting(self) -> Waiting:
        """What wakes requests that wait for a buffer. Raises `NotReady` like `engine`."""
        return _there(self._services.waiting)

    @property
    def is_alone(self) -> bool:
        """Whether no other large request is in flight."""
        return self._services.admission.bytes == self.reservation.bytes

    @property
    def patience_seconds(self) -> float:
        """How long the client waits: its Request-Timeout, up to the server's own. Raises `InvalidParameter`."""
        longest = self.settings.request_timeout
        value = self.headers.get(b"request-timeout")
        if value is None:
            return longest
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            text = shown(value.decode("latin-1"))
            raise InvalidParameter(
                f"Request-Timeout is {text}, but must be a number of seconds above 0", parameter="Request-Timeout"
            )
        return min(seconds, longest)

    # ----- what it holds and has done -----

    def reserve(self, size: int) -> None:
        """Let the request hold `size` bytes more, until it has its answer. Raises `Busy`."""
        self._services.admission.reserve(self.reservation, size)

    def give_back(self, size: int) -> None:
        """Undo `reserve` of `size` bytes."""
        self._services.admission.give_back(self.reservation, size)

    async def offload(
        self, inline: bool, work: Callable[..., R], *arguments: Any, phase: str | None = None, changed: bool = False
    ) -> R:
        """Call `work` with the arguments: here if `inline`, else in the pool. The body must have been read.

        Its time counts as the `phase`. A request that has `changed` a buffer does not expire. Raises `Expired` and
        `ClientDisconnect`.
        """
        asked = time.perf_counter_ns()
        if inline:
            result = work(*arguments)
            if phase is not None:
                self.spent[phase] = time.perf_counter_ns() - asked
            return result
        timed = partial(self._timed, asked, phase, work, arguments)
        return await in_pool(self.engine, self.receive, timed, None if changed else self.patience_seconds)

    def _timed(self, asked: int, phase: str | None, work: Callable[..., R], arguments: tuple[Any, ...]) -> R:
        began = time.perf_counter_ns()
        result = work(*arguments)
        if phase is not None:
            self.spent[phase] = time.perf_counter_ns() - began
            self.spent["queue"] = self.spent.get("queue", 0) + began - asked
        return result

    async def submit(self, changes: Sequence[Change], key: Key | None, sources: Sequence[str] = ()) -> Outcome:
        """Let the store make the changes, which were computed from `sources`. Raises what `Store.submit` does."""
        began = time.perf_counter_ns()
        try:
            return await asyncio.wrap_future(self.store.submit(StoreRequest(changes, key, sources)))
        finally:
            self.spent["store"] = time.perf_counter_ns() - began

    async def look_up(self, count: int, work: Callable[..., R], *arguments: Any) -> R:
        """Call `work`, which looks up `count` buffers or keys in the store: here where that is quick, else in the pool.

        Raises what `work` raises, `Expired` and `ClientDisconnect`.
        """
        inline = count <= INLINE_LOOKUPS and not self.store.blocks
        return await self.offload(inline, work, *arguments)

    async def wait_for(self, seconds: float, attempt: Callable[[], Awaitable[R]], match: frozenset[str] = ANY) -> R:
        """Return what `attempt` does, once other requests have done what it waits for: see `Waiting.until`."""
        return await self.waiting.until(self.caller.namespace, self.receive, seconds, attempt, match)

    def identify(self) -> str:
        """The request's id: its X-Request-ID if that is fit to be logged, or a new one."""
        if self.request_id is None:
            text = self.headers.get(b"x-request-id", b"").decode("latin-1")
            fit = 0 < len(text) <= MAX_REQUEST_ID_CHARACTERS and text.isascii() and text.isprintable()
            self.request_id = text if fit else uuid.uuid4().hex
        return self.request_id


def _there(service: R | None) -> R:
    if service is None:
        raise NotReady("The server is starting or stopping; try again soon")
    return service


def _declared() -> Call:
    """FastAPI reads the parameter `call` from an endpoint's signature; the table of routes passes it."""
    raise NotImplementedError


CurrentCall = Annotated[Call, Depends(_declared)]
"""The request, as the parameter `call` of an endpoint."""
