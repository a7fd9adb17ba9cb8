"""A request as one object, which every step from its head to its answer takes."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary

from fastapi import Depends

from service.api.http.admission import Admission, Reservation
from service.api.http.exchange import Exchange
from service.api.http.offload import INLINE_LOOKUPS, in_pool, while_connected
from service.api.http.waiting import ANY, Waiting
from service.buffers.changes import Change
from service.buffers.graph_changes import HiddenChange
from service.buffers.perform import Outcome, Wide
from service.buffers.perform import Request as StoreRequest
from service.buffers.pushes import Part
from service.buffers.record import Key
from service.buffers.store import Store
from service.codecs import json as json_codec
from service.engine.cache import Cache
from service.engine.engine import Engine
from service.errors import Forbidden, GraphTooSlow, InvalidParameter, NotReady, TensorTooLarge, shown
from service.host.shared_memory import Regions
from service.keys import SCOPES
from service.settings import Settings

R = TypeVar("R")

MAX_REQUEST_ID_CHARACTERS = 128
"""A longer X-Request-ID of a client is ignored: it would fill the log."""

ALONE_TENSORS = 4
"""Largest tensors that a request may hold while it is alone: two inputs, an output, and its copy in the answer."""


class Caller(NamedTuple):
    """The namespace that the sender of a request sees, its scopes there, and the name of its key."""

    namespace: str
    scopes: frozenset[str]
    name: str = "anonymous"

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the caller has this scope."""
        if scope not in self.scopes:
            problem = f"This API key has {', '.join(sorted(self.scopes))}, but the request needs {scope}"
            raise Forbidden(problem, scope=scope)


GRAPHS = "graphs"
"""The name that all graphs share where operators are counted: there may be many graphs."""

ANYONE = Caller("", frozenset(SCOPES))
"""Every caller of a server without API keys."""


@dataclass
class Services:
    """The services of a process. The engine, the store and `waiting` exist from startup to shutdown.

    `regions` is None without shared memory.
    """

    settings: Settings
    admission: Admission
    cache: Cache
    planning: WeakValueDictionary[Hashable, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """The locks of graphs that are being planned."""
    engine: Engine | None = None
    store: Store | None = None
    waiting: Waiting | None = None
    regions: Regions | None = None


class Call:
    """A request: its head, its caller, the bytes that it holds, and its time by phase."""

    caller: Caller = ANYONE
    route: str | None = None
    """The path of the endpoint, with the names of its parameters."""
    label = "other"
    """The value of the label `route` in metrics, as the endpoint declares it."""
    parameters: Mapping[str, str] = {}
    """The values of the parameters in the path."""
    operator: str | None = None
    """The operator that the request runs, set before its query and its body are read; of a graph, GRAPHS."""
    graph: str | None = None
    """The name of the graph that the request runs."""
    request_id: str | None = None
    trace: tuple[str, str] | None = None
    """The ids of the trace and the span, if the request has a span."""
    status = 0
    """The status of the answer, once there is an answer."""
    code: str | None = None
    """The code of the error that the answer tells."""
    deadline = math.inf
    """When the client waits no longer, by `time.monotonic`, once `start_clock` was called."""
    received = 0
    """Bytes of the body."""
    sent = 0
    """Bytes of the answer's body."""

    def __init__(self, exchange: Exchange, services: Services) -> None:
        self.exchange, self.head, self.ends = exchange, exchange.head, exchange.ends
        self._services, self.settings, self.regions = services, services.settings, services.regions
        self.cache, self.planning = services.cache, services.planning
        self.started = time.perf_counter_ns()
        self.method = exchange.head.method
        path = exchange.path.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.headers = exchange.head.last
        """Headers by name, in lower case. Of a header with several lines, the last line."""
        self.query_string = exchange.query
        """The query in its encoded form."""
        self.reservation = Reservation()
        if services.engine is not None:
            self.engine = services.engine
        self.spent: dict[str, int] = {}
        """Nanoseconds by phase."""

    # ----- the request -----

    def joined(self, header: bytes) -> str:
        """Return the values of all lines of a header as one list (RFC 9110, 5.3)."""
        return b", ".join(self.head.values(header)).decode("latin-1")

    # ----- the services -----

    @cached_property
    def engine(self) -> Engine:
        """The engine. Raises `NotReady` before the end of the startup and after the begin of the shutdown."""
        return _there(self._services.engine)

    @cached_property
    def store(self) -> Store:
        """The store of the caller's namespace. Raises `NotReady` like `engine`."""
        return _there(self._services.store).within(self.caller.namespace)

    @property
    def is_alone(self) -> bool:
        """Whether no other large request is in flight."""
        return self._services.admission.bytes == self.reservation.bytes

    @property
    def patience_seconds(self) -> float:
        """Seconds that the client waits: its Request-Timeout, up to the server's. Raises `InvalidParameter`."""
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
            problem = f"Request-Timeout is {text}, but must be a number of seconds above 0"
            raise InvalidParameter(problem, parameter="Request-Timeout")
        return min(seconds, longest)

    # ----- the work -----

    def start_clock(self) -> None:
        """Let the time begin after which the client waits no longer, neither for a thread nor for a graph."""
        self.deadline = time.monotonic() + self.patience_seconds

    def reserve_in_time(self, size: int) -> None:
        """`reserve` for a stranger's model. Raises `GraphTooSlow`, too, once the client waits no longer."""
        if time.monotonic() > self.deadline:
            problem = f"The graph was planned or run for {self.patience_seconds:g} seconds (Request-Timeout, or"
            raise GraphTooSlow(f"{problem} GRADSERVE_REQUEST_TIMEOUT) without an end, so it was given up")
        self.reserve(size)

    def reserve(self, size: int) -> None:
        """Let the request hold `size` bytes more until it has its answer. Raises `Busy` and `TensorTooLarge`."""
        most = max(self.settings.max_bytes_in_flight, ALONE_TENSORS * self.settings.max_tensor_bytes)
        if self.reservation.bytes + size > most:
            raise TensorTooLarge(
                f"The request holds {self.reservation.bytes} bytes and needs {size} more, but may hold {most}: the"
                f" larger of GRADSERVE_MAX_BYTES_IN_FLIGHT and {ALONE_TENSORS} times GRADSERVE_MAX_TENSOR_BYTES",
                limit=most,
            )
        self._services.admission.reserve(self.reservation, size)

    def give_back(self, size: int) -> None:
        """Undo `reserve` of `size` bytes."""
        self._services.admission.give_back(self.reservation, size)

    async def offload(self, inline: bool, work: Callable[..., R], *arguments: Any, changed: bool = False) -> R:
        """Call `work` in the event loop if `inline`, else in the pool. The body must have been read.

        A request that has `changed` a buffer does not expire. Raises `Busy`, `Expired` and `ClientDisconnect`.
        """
        if inline:
            return work(*arguments)
        if not changed:
            self._services.admission.admit_to_pool(self.reservation, self.engine)
        timed = partial(self._started, time.perf_counter_ns(), work, arguments)
        patience = None if changed else max(0.0, min(self.patience_seconds, self.deadline - time.monotonic()))
        return await in_pool(self.engine, self.exchange, self.caller.namespace, timed, patience)

    def _started(self, submitted: int, work: Callable[..., R], arguments: tuple[Any, ...]) -> R:
        self.spent["queue"] = self.spent.get("queue", 0) + time.perf_counter_ns() - submitted
        return work(*arguments)

    async def decode_in_pool(self, text: memoryview, decoder: Callable[..., R], *arguments: Any) -> R:
        """Call the decoder of a body whose JSON is `text` in the pool, which reserves memory first. Raises `Busy`."""

        def decode() -> R:
            self.reserve(json_codec.parsed_bytes(text))
            return decoder(*arguments)

        return await self.offload(False, decode)

    async def submit(
        self,
        changes: Sequence[Change],
        key: Key | None,
        sources: Sequence[str] = (),
        wide: Wide | None = None,
        part: Part | None = None,
        *,
        answer: bytes = b"",
        by_prefix: bool = False,
        hidden: HiddenChange | None = None,
    ) -> Outcome:
        """Make the changes, which were computed from `sources`, in the store. Raises what `Store.submit` does.

        Many changes are dropped if the client leaves before the store begins with them: then `ClientDisconnect`.
        """
        began = time.perf_counter_ns()
        try:
            request = StoreRequest(changes, key, sources, wide, part, answer, by_prefix, hidden)
            if len(changes) <= INLINE_LOOKUPS:
                return await asyncio.wrap_future(self.store.submit(request))
            return await while_connected(self.exchange.left, asyncio.wrap_future(self.store.submit(request)))
        finally:
            self.spent["store"] = time.perf_counter_ns() - began

    async def look_up(self, count: int, work: Callable[..., R], *arguments: Any) -> R:
        """Call `work`, which looks up `count` buffers or keys: in the event loop if that is quick, else in the pool.

        Raises what `work` raises, `Expired` and `ClientDisconnect`.
        """
        inline = count <= INLINE_LOOKUPS and not self.store.blocks
        return await self.offload(inline, work, *arguments)

    async def wait_for(self, seconds: float, attempt: Callable[[], Awaitable[R]], match: frozenset[str] = ANY) -> R:
        """Return the result of `attempt`, repeated while it waits for other requests, as `Waiting.until` does."""
        waiting = _there(self._services.waiting)
        return await waiting.until(self.caller.namespace, self.exchange.closed, seconds, attempt, match)

    def identify(self) -> str:
        """Return the request's id: its X-Request-ID if the log can hold it, else a new id."""
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
    """Declare the parameter `call` of endpoints to FastAPI. The table of routes passes the argument."""
    raise NotImplementedError


CurrentCall = Annotated[Call, Depends(_declared)]
"""The request, as the parameter `call` of an endpoint."""
