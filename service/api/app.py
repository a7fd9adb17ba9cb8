"""The application: the routes, the errors, and the engine's life."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Never

import numpy as np
from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service.api import buffers, docs, health, logs, open_inference, openapi, ops, problems
from service.api.admission import Admission
from service.api.auth import authorize
from service.api.context import CONTEXT, Context, patience_of
from service.api.http.exchange import Exchange, exchange_of
from service.api.metrics import METRICS_DIRECTORY, Metrics, route_of
from service.api.statistics import Statistics
from service.api.waiting import Waiting
from service.api.workers import Workers, stop_without_parent
from service.arena import keep_freed_memory
from service.buffers.names import check_name
from service.buffers.store import Allocate, Committed, Store, uncounted
from service.buffers.url import open_store
from service.engine import Engine
from service.errors import GradserveError, MalformedBody, NotFound, NotReady, StoreFailed, shown
from service.keys import KeyFile
from service.limits import Limits
from service.settings import Settings


def in_worker() -> FastAPI:
    """The application of a worker process, with the settings of the environment."""
    stop_without_parent()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # a terminal tells all; the parent sees to it
        signal.signal(number, signal.SIG_IGN)
    settings = Settings()
    keep_freed_memory(settings.reuse_bytes)
    return create_app(settings)


class Application(FastAPI):
    """FastAPI, behind the keys and counted; past it the two hottest kinds of requests go straight to their handlers."""

    def __init__(self, settings: Settings, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.settings = settings
        self.keys = None if settings.keys is None else KeyFile(settings.keys)
        self.admission = Admission(settings.max_bytes_in_flight, settings.max_waiting, settings.max_body_bytes)
        directory = os.environ.get(METRICS_DIRECTORY) if settings.workers > 1 else None
        shared = None if directory is None else Path(directory)
        self.metrics = Metrics(shared)
        self.workers = Workers(settings.workers, shared)
        self.engine: Engine | None = None
        self.store: Store | None = None
        self.waiting: Waiting | None = None
        self.statistics: dict[str, Statistics] = {}
        """By namespace."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        start = time.perf_counter_ns()
        context = scope[CONTEXT] = Context(dict(scope["headers"]))
        scope["app"] = self
        asked, exchange = scope, exchange_of(scope)
        if asked["method"] == "HEAD":
            asked.get("extensions", {}).clear()  # the usual way to send leaves the body out
            scope = {**asked, "method": "GET"}
        self.metrics.began()
        sending = _noting(exchange, context, send)
        try:
            self._admit(scope, context)
            await self._answer(scope, receive, sending)
        except GradserveError as error:
            await problems.answer(scope["path"], error)(scope, receive, sending)
        except asyncio.CancelledError:  # GRADSERVE_DRAIN_TIMEOUT is over
            if not context.status:
                late = NotReady(
                    "The server stopped (GRADSERVE_DRAIN_TIMEOUT) before it knew what came of this. Send it again; what"
                    " changes a buffer with the same Idempotency-Key, or it may count twice"
                )
                await problems.answer(scope["path"], late)(scope, receive, sending)
        finally:
            scope.get("extensions", {}).clear()  # they lead back to the scope, and only the collector could free both
            self.admission.release(context)
            if asked["method"] == "HEAD":
                context.sent = 0
            if exchange is not None and exchange.is_refused:
                context.status = MalformedBody.status
            elif exchange is not None and exchange.is_unheard():
                context.status = problems.GONE
            spent = time.perf_counter_ns() - start
            self.metrics.answered(route_of(scope["path"], scope["method"]), context, spent, self.admission.bytes)
            if self.settings.access_log:
                logs.log_request(asked, spent)

    def unreadable(self, message: str) -> Response:
        """The answer to what is no request: in the form of `/v1`, as nobody knows its path."""
        context = Context({})
        logs.identify(context)
        headers = {"Connection": "close", "X-Request-ID": str(context.request_id)}
        return problems.answer("", MalformedBody(message), headers)

    def _admit(self, scope: Scope, context: Context) -> None:
        """Look at a request's head, before its body is read. Raises what is to be answered where it is refused."""
        if self.settings.access_log or b"x-request-id" in context.headers:
            logs.identify(context)
        if "\n" in scope["path"]:
            _refuse_line_break(scope["path"])
        if b"request-timeout" in context.headers:
            patience_of(scope)  # so that a mistake in it is told whether anything waits or not
        context.caller = authorize(scope, context.headers, self.keys, self.settings.metrics_open)
        if scope["method"] != "GET":  # whose body nobody reads
            self.admission.admit(context, self.engine)
        if context.held:
            self.metrics.set("gradserve_in_flight_bytes", self.admission.bytes)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if path := open_inference.wants_inference(scope):
            work = open_inference.infer(scope, receive, path)
        elif path := buffers.wants_accumulate(scope):
            work = buffers.accumulate_directly(scope, receive, path)
        else:
            await super().__call__(scope, receive, send)
            return
        await problems.answering(scope, receive, send, work)


def _noting(exchange: Exchange | None, context: Context, send: Send) -> Send:
    """`send`, with the headers that every answer has, which notes the answer's status and size."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            context.status = message["status"]
            if context.status >= 400:
                logs.identify(context)
            more = [] if context.request_id is None else [(b"x-request-id", context.request_id.encode())]
            if exchange is not None and exchange.is_unasked():
                more.append((b"connection", b"close"))  # whether the body comes all the same, nobody can know
            message["headers"] = [*message["headers"], *more]
        else:
            context.sent += len(message.get("body", b""))
        await send(message)

    return sending


def _refuse_line_break(path: str) -> Never:
    """Raise `InvalidParameter` or `NotFound`: a route overlooks a line break at its end, the scopes of keys do not."""
    if path.startswith("/v1/buffers/"):
        check_name(path.split("/")[3])
    raise NotFound(f"There is nothing at {shown(path)}")


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application. Its engine lives from the application's startup to its shutdown."""
    kind = Application
    if settings.tracing:
        from service.api.tracing import TracedApplication as kind  # it needs the extra otel
    app = kind(
        settings,
        title="gradserve",
        version=version("gradserve"),
        description="The gradient kernels of ONNX Runtime over HTTP, and buffers in which every gradient counts once.",
        lifespan=_lifespan,
        docs_url=None,  # FastAPI's pages would take scripts from other hosts
        redoc_url=None,
        redirect_slashes=False,  # it would lead from https: to http:, behind a proxy
    )
    app.include_router(ops.router)
    app.include_router(buffers.router)
    app.include_router(open_inference.router)
    app.include_router(health.router)
    docs.install(app)
    problems.install(app)
    openapi.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    settings = app.settings
    limits = Limits(settings.max_tensor_bytes, settings.max_tensors, settings.max_dimensions)
    engine = Engine(threads=settings.threads, limits=limits, reuse_bytes=settings.reuse_bytes)
    store = store_at(settings, engine.empty, app.metrics.committed)
    app.waiting = Waiting(store)
    app.engine, app.store = engine, store
    try:
        with app.workers.serving():
            yield
    finally:
        app.engine = app.store = None
        engine.close()  # first, for what runs in it may read the store
        store.close()


def store_at(settings: Settings, allocate: Allocate = np.empty, committed: Committed = uncounted) -> Store:
    """The store of the settings. Raises `StoreFailed`."""
    if settings.workers > 1 and settings.store == "memory:":
        raise StoreFailed(
            f"GRADSERVE_STORE=memory: is one process's own, but GRADSERVE_WORKERS is {settings.workers}; use lmdb:PATH,"
            " which workers share"
        )
    return open_store(
        settings.store,
        max_bytes=settings.store_bytes,
        key_seconds=settings.idempotency_seconds,
        max_buffers=settings.max_buffers,
        allocate=allocate,
        committed=committed,
    )
