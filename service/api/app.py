"""The application: it finds the endpoint of a request, admits the request, and sends the answer or the error."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI
from starlette.requests import ClientDisconnect

from service.api import openapi
from service.api.buffers.chosen import name_like
from service.api.dashboard.history import History
from service.api.http.admission import SMALL_BYTES, Admission
from service.api.http.answer import Answer
from service.api.http.auth import authorize, known_hosts
from service.api.http.call import Call, Services
from service.api.http.exchange import Exchange
from service.api.http.negotiation import PATCH_TYPES
from service.api.http.problems import CLIENT_GONE, answer_bug, answer_error
from service.api.http.routing import UNKNOWN, Endpoint, Table
from service.api.http.waiting import Waiting
from service.api.operators import rest
from service.api.telemetry.logs import StoreLog
from service.api.telemetry.metrics import GRAPH_CACHE_BYTES, IN_FLIGHT_BYTES, Metrics, Observer
from service.buffers.store import Allocate, Committed, Store, uncounted
from service.buffers.url import open_store
from service.engine.cache import Cache
from service.engine.engine import Engine
from service.errors import GradserveError, MalformedBody, MethodNotAllowed, NotFound, NotReady, StoreFailed, shown
from service.host.shared_memory import Regions
from service.keys import KeyFile
from service.limits import Limits
from service.settings import Settings

logger = logging.getLogger("gradserve")

_ORIGIN = re.compile(rb"^[a-z]+://[^/?]*", re.IGNORECASE)
"""What stands before the path of an absolute URL."""

METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
"""The methods in the order of `Allow`."""


class Application(FastAPI):
    """Serves the endpoints of the routers. FastAPI declares and describes the endpoints; the table dispatches."""

    def __init__(
        self,
        settings: Settings,
        routers: Sequence[APIRouter],
        observers: Sequence[Observer],
        metrics: Metrics,
        history: History,
        regions: Regions | None = None,
    ) -> None:
        super().__init__(
            title="gradserve",
            version=version("gradserve"),
            description="The gradient kernels of ONNX Runtime over HTTP, and buffers that count each gradient once.",
            lifespan=_lifespan,
            openapi_url=None,  # `static.py` serves it
        )
        self.metrics, self.history, self.observers, self.store_log = metrics, history, observers, StoreLog()
        self.table = Table(routers)
        self._keys = keys = None if settings.keys is None else KeyFile(settings.keys)
        self._hosts = known_hosts(settings)
        admission = Admission(
            settings.max_bytes_in_flight,
            settings.max_waiting,
            settings.max_body_bytes,
            is_shared=lambda: keys is not None and keys.have_several_namespaces,
            changed=partial(metrics.set, IN_FLIGHT_BYTES),
        )
        cache = Cache(settings.graph_cache_bytes, partial(metrics.set, GRAPH_CACHE_BYTES))
        self.services = Services(settings, admission, cache, regions=regions)
        self._routers = routers

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document. This takes seconds."""
        return openapi.document_of(self, [*self._routers, rest.declared()])

    async def serve(self, exchange: Exchange) -> None:
        """Answer a request. ASGI only starts and ends the application."""
        call = Call(exchange, self.services)
        endpoint = self._find(call)
        for observer in self.observers:
            observer.began(call)
        bug: Exception | None = None
        try:
            answer = await self._answer(call, endpoint)
        except asyncio.CancelledError:  # GRADSERVE_DRAIN_TIMEOUT has passed
            answer = answer_error(call.path, _stopped())
        except ClientDisconnect:
            answer, call.status = None, CLIENT_GONE
        except Exception as error:
            bug, answer = error, answer_bug(call.path)
        try:
            if answer is not None:
                await answer.reply(call)
            if bug is not None:
                raise bug  # for the server to log
        finally:
            self._end(call, bug)
            bug = None  # its traceback has this frame

    def _find(self, call: Call) -> Endpoint | None:
        match = self.table.find("GET" if call.method == "HEAD" else call.method, call.path)
        if match is None:
            call.route = next((endpoint.path for endpoint in self.table.methods(call.path).values()), None)
            return None
        endpoint, call.parameters = match
        call.route, call.label = endpoint.path, endpoint.access.label
        return endpoint

    async def _answer(self, call: Call, endpoint: Endpoint | None) -> Answer:
        """Return the answer of the endpoint, or the answer of an error on the way."""
        try:
            self._admit(call, endpoint)
            if endpoint is None:
                return self._nothing(call)
            call.operator = endpoint.access.operator
            answer = await endpoint.answer(call)
            if answer.size > SMALL_BYTES:
                self._hold(call, endpoint, answer)
            return answer
        except GradserveError as error:
            await name_like(call, error)
            if call.graph is not None:
                error.context["graph"] = call.graph
            elif call.operator is not None:
                error.context["op"] = call.operator
            self.store_log.note(error)
            return answer_error(call.path, error)

    def _admit(self, call: Call, endpoint: Endpoint | None) -> None:
        """Check the head of the request before its body is read. Raises the error to answer."""
        settings, services = call.settings, self.services
        if settings.access_log or b"x-request-id" in call.headers:
            call.identify()
        if b"request-timeout" in call.headers:
            call.patience_seconds  # noqa: B018 - raises for an invalid value, even if nothing waits
        access = UNKNOWN if endpoint is None else endpoint.access
        call.caller = authorize(call, access, self._keys, self._hosts)
        call.reservation.namespace = call.caller.namespace
        if call.method not in ("GET", "HEAD") and b"content-length" in call.headers:  # nobody reads the body of a GET
            size = int(call.headers[b"content-length"])  # the HTTP parser accepts only a number
            if size > SMALL_BYTES:
                services.admission.admit(call.reservation, size, services.engine)

    def _hold(self, call: Call, endpoint: Endpoint, answer: Answer) -> None:
        """Hold the bytes of the answer until the client has it. Raises `Busy` for a GET, which can be sent again.

        The answers that need no API key are small, or the same bytes for all clients. The metrics have some 80 KB, and
        a busy server needs them most.
        """
        more = answer.size - call.reservation.bytes
        if call.method != "HEAD" and not endpoint.access.open:
            admission, refuses = self.services.admission, call.method == "GET" and endpoint.access.label != "metrics"
            (admission.reserve if refuses else admission.hold)(call.reservation, more)

    def _nothing(self, call: Call) -> Answer:
        """Return the answer without an endpoint: 404, or of a path with other methods those, with 405 or to OPTIONS."""
        methods = {*METHODS} if (call.method, call.path) == ("OPTIONS", "*") else {*self.table.methods(call.path)}
        if not methods:
            detail = f"There is nothing at {shown(call.path)}; /docs lists all paths"
            if near := self.table.like(call.path):
                detail += f". Did you mean {' or '.join(near)}?"
            if call.path.startswith("/v1/buffers/"):
                detail += ". A buffer's name has no slash"
            return answer_error(call.path, NotFound(detail))
        if "GET" in methods:
            methods.add("HEAD")
        allowed = ", ".join(method for method in METHODS if method in methods)
        if call.method == "OPTIONS":
            patches = {"Accept-Patch": ", ".join(PATCH_TYPES)} if "PATCH" in methods else {}
            return Answer(fields={"Allow": allowed, **patches}, status=204)
        error = MethodNotAllowed(f"{call.path} does not allow {call.method}; it allows {allowed}")
        return answer_error(call.path, error, {"Allow": allowed})

    def _end(self, call: Call, bug: Exception | None) -> None:
        """Release the request's bytes, and call the observers."""
        exchange = call.exchange
        self.services.admission.release(call.reservation)
        if exchange.is_refused:
            call.status, call.code = MalformedBody.status, MalformedBody.code
        elif exchange.is_lost and not exchange.is_complete:  # before it had the whole answer
            call.status, call.code = CLIENT_GONE, None
        spent = time.perf_counter_ns() - call.started
        for observer in self.observers:
            observer.ended(call, spent, None if bug is None else type(bug).__qualname__)

    def unreadable(self, error: MalformedBody, url: bytes) -> Answer:
        """Return the answer to an unreadable request for `url`, as far as that was read."""
        fields = {"Connection": "close", "X-Request-ID": uuid.uuid4().hex}
        path = _ORIGIN.sub(b"", url).partition(b"?")[0].decode("latin-1")
        return answer_error(path, error, fields)

    def stop_waiting(self) -> None:
        """Answer the requests that wait for a step: the server stops."""
        if self.services.waiting is not None:
            self.services.waiting.stop()


def _stopped() -> NotReady:
    return NotReady(
        "The server stopped (GRADSERVE_DRAIN_TIMEOUT) before this request ended. Send it again; if it"
        " changes a buffer, with the same Idempotency-Key, or it may count twice"
    )


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    services, settings = app.services, app.services.settings
    limits = Limits(settings.max_tensor_bytes, settings.max_tensors, settings.max_dimensions)
    engine = Engine(threads=settings.threads, limits=limits, reuse_bytes=settings.reuse_bytes)
    store = store_at(settings, engine.empty, app.metrics.committed)
    services.engine, services.store, services.waiting = engine, store, Waiting(store)
    try:
        async with app.history.recording(engine, store):
            with app.metrics.serving():
                yield
    finally:
        services.engine = services.store = None
        if running := engine.pool.begun:
            logger.warning("Requests that threads work on are given up: %d", running)
        engine.pool.close()  # first: work in its pool may read the store
        store.close()
        if services.regions is not None:
            services.regions.close()
        for observer in app.observers:
            observer.close()


def store_at(settings: Settings, allocate: Allocate = np.empty, committed: Committed = uncounted) -> Store:
    """Open the store of the settings. Raises `StoreFailed`."""
    if settings.workers > 1 and settings.store == "memory:":
        raise StoreFailed(
            f"GRADSERVE_STORE is memory:, which one process holds, but GRADSERVE_WORKERS is {settings.workers}; use"
            " lmdb:PATH, which workers share"
        )
    return open_store(
        settings.store,
        max_bytes=settings.store_bytes,
        key_seconds=settings.idempotency_seconds,
        max_buffers=settings.max_buffers,
        max_graphs=settings.max_graphs,
        allocate=allocate,
        committed=committed,
        schema=settings.postgres_schema,
        replicated=settings.durability == "replicated",
    )
