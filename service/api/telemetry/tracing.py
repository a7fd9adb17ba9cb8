"""OpenTelemetry: a span for each request, with the extra `otel` and `GRADSERVE_TRACING`; else nobody imports this.

FastAPI's own telemetry and OpenTelemetry's middleware for ASGI do not fit: the hottest requests pass by FastAPI, and
their answers by `send`, where both look for the status. And neither knows the phases.
"""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from service.api.app import Application
from service.api.http.context import CONTEXT, Context
from service.api.operators.open_inference import wants_inference
from service.api.telemetry.logs import TRACE
from service.settings import Settings

FLUSH_SECONDS = 5.0
"""How long the end of the server may wait for whoever collects the spans."""

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})


class TracedApplication(Application):
    """The application, which sends a span of each request to where OTEL_EXPORTER_OTLP_ENDPOINT says."""

    def __init__(self, settings: Settings, **keywords: Any) -> None:
        lifespan = keywords.pop("lifespan")
        super().__init__(settings, lifespan=lambda app: self._exporting(lifespan(app)), **keywords)
        self._known = [route for route in self.routes if isinstance(route, Route)]
        named = Resource.create({"service.name": "gradserve", "process.pid": os.getpid()})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._tracer = self._provider.get_tracer("gradserve", version("gradserve"))

    def include_router(self, router: APIRouter, *arguments: Any, **keywords: Any) -> None:
        super().include_router(router, *arguments, **keywords)
        self._known += [route for route in router.routes if isinstance(route, Route)]

    @asynccontextmanager
    async def _exporting(self, lifespan: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        async with lifespan:
            yield
        last = threading.Thread(target=self._provider.shutdown, daemon=True)  # which can take as long as it likes
        last.start()
        last.join(FLUSH_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = self._asked(scope, headers)
        name = " ".join(str(attributes[key]) for key in ("http.request.method", "http.route") if key in attributes)
        span = self._tracer.start_span(
            name.replace("_OTHER", "HTTP"), extract(headers), SpanKind.SERVER, attributes=attributes
        )
        ids = span.get_span_context()
        if ids.is_valid:
            scope[TRACE] = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"
        bug = None
        try:
            await super().__call__(scope, receive, send)
        except Exception as error:
            bug = type(error).__qualname__  # its text could hold anything
            raise
        finally:
            _answered(span, scope[CONTEXT], bug)
            span.end()

    def _asked(self, scope: Scope, headers: dict[str, str]) -> dict[str, str | int]:
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            "url.path": scope["path"],
            "network.protocol.version": scope["http_version"],
        }
        if method == "_OTHER":
            attributes["http.request.method_original"] = scope["method"]
        if (route := self._route(scope)) is not None:
            attributes["http.route"] = route
        if (client := scope.get("client")) is not None:
            attributes["client.address"] = attributes["network.peer.address"] = client[0]
            attributes["network.peer.port"] = client[1]
        if (server := scope.get("server")) is not None:
            attributes["server.address"], attributes["server.port"] = server[0], server[1]
        if "user-agent" in headers:
            attributes["user_agent.original"] = headers["user-agent"]
        return attributes

    def _route(self, scope: Scope) -> str | None:
        """The path as the documentation has it, with the names of its parameters in place of their values."""
        if (path := wants_inference(scope)) is not None:
            return "/v2/models/{op}/infer" if path[2] is None else "/v2/models/{op}/versions/{version}/infer"
        partly = None  # the path, but not the method
        for route in self._known:
            match, _ = route.matches(scope)
            if match is Match.FULL:
                return route.path
            if match is Match.PARTIAL and partly is None:
                partly = route.path
        return partly


def _answered(span: Span, context: Context, bug: str | None) -> None:
    if context.status:
        span.set_attribute("http.response.status_code", context.status)
    if bug is not None or context.status >= 500:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", bug or str(context.status))
    span.set_attribute("http.request.body.size", context.received)
    span.set_attribute("http.response.body.size", context.sent)
    for phase, nanoseconds in context.spent.items():
        span.set_attribute(f"gradserve.{phase}_seconds", nanoseconds / 1e9)
