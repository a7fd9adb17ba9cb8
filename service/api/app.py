"""The application: the routes, the errors, and the engine's life."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.types import Message, Receive, Scope, Send

from service.api import buffers, health, logs, open_inference, openapi, ops, problems
from service.api.admission import Admission
from service.api.auth import admit
from service.api.metrics import METRICS_DIRECTORY, STATUS, Metrics, route_of
from service.api.protocol import UNASKED
from service.api.waiting import Waiting
from service.arena import keep_freed_memory
from service.buffers.store import Allocate, Committed, Store, uncounted
from service.buffers.url import open_store
from service.engine import Engine
from service.errors import Busy, Forbidden, StoreFailed, Unauthorized
from service.keys import KeyFile
from service.limits import Limits
from service.settings import Settings


def in_worker() -> FastAPI:
    """The application of a worker process, with the settings of the environment."""
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
        shared = os.environ.get(METRICS_DIRECTORY)
        self.metrics = Metrics(None if shared is None or settings.workers == 1 else Path(shared))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"], metrics, start = self, self.metrics, time.perf_counter()
        metrics.count("gradserve_in_flight", 1)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                scope[STATUS] = message["status"]
                logs.identify(scope, always=message["status"] >= 400)
                more = [(b"x-request-id", scope[logs.REQUEST_ID].encode())] if logs.REQUEST_ID in scope else []
                unasked = scope.get("extensions", {}).get(UNASKED)
                if unasked is not None and unasked():
                    more.append((b"connection", b"close"))  # whether the body comes all the same, nobody can know
                message["headers"] = [*message["headers"], *more]
            await send(message)

        logs.identify(scope, always=self.settings.access_log)
        try:
            admit(scope, self.keys, self.settings.metrics_open)
            self.admission.admit(scope, self.state.engine)
            await self._answer(scope, receive, sending)
        except (Unauthorized, Forbidden, Busy) as error:
            await problems.answer(scope["path"], error)(scope, receive, sending)
        finally:
            scope.get("extensions", {}).clear()  # they lead back to the scope, and only the collector could free both
            self.admission.release(scope)
            metrics.count("gradserve_in_flight", -1)
            metrics.set("gradserve_in_flight_bytes", self.admission.bytes)
            status, seconds = scope.get(STATUS, 0), time.perf_counter() - start
            metrics.count("gradserve_refused", status == Busy.status)
            metrics.answered(route_of(scope["path"], scope["method"]), status, seconds)
            if self.settings.access_log:
                logs.log_request(scope, status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if path := open_inference.wants_inference(scope):
            await open_inference.infer(self.state, scope, receive, send, path)
        elif path := buffers.wants_accumulate(scope):
            await buffers.accumulate_directly(scope, receive, send, path)
        else:
            await super().__call__(scope, receive, send)


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application. Its engine lives from the application's startup to its shutdown."""
    app = Application(
        settings,
        title="gradserve",
        version=version("gradserve"),
        description="The gradient kernels of ONNX Runtime over HTTP, and buffers in which every gradient counts once.",
        lifespan=_lifespan,
    )
    app.state.settings = settings
    app.state.engine = None
    app.state.store = None
    app.state.statistics = {}
    app.include_router(ops.router)
    app.include_router(buffers.router)
    app.include_router(open_inference.router)
    app.include_router(health.router)
    app.add_api_route("/", _index, include_in_schema=False)
    problems.install(app)
    openapi.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    limits = Limits(settings.max_tensor_bytes, settings.max_tensors)
    engine = Engine(threads=settings.threads, limits=limits, reuse_bytes=settings.reuse_bytes)
    store = store_at(settings, engine.empty, app.metrics.committed)
    app.state.waiting = Waiting(store)
    app.state.engine, app.state.store = engine, store
    try:
        yield
    finally:
        app.state.engine = app.state.store = None
        store.close()
        engine.close()


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
        allocate=allocate,
        committed=committed,
    )


async def _index() -> RedirectResponse:
    return RedirectResponse("/docs")
