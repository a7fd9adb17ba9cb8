"""OpenTelemetry: a span for each request, with the extra `otel` and `GRADSERVE_TRACING`; else nobody imports this.

FastAPI's own telemetry and OpenTelemetry's middleware for ASGI do not fit: answers pass by `send`, where both look for
the status. And neither knows the phases.
"""

from __future__ import annotations

import os
import threading
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from service.api.http.call import Call
from service.api.telemetry.observer import Observer

FLUSH_SECONDS = 5.0
"""How long the shutdown may wait for the collector of the spans."""

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})


class Tracer(Observer):
    """Sends a span of each request to where OTEL_EXPORTER_OTLP_ENDPOINT says."""

    def __init__(self) -> None:
        named = Resource.create({"service.name": "gradserve", "process.pid": os.getpid()})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("gradserve", version("gradserve"))
        self._spans: dict[Call, Span] = {}

    def began(self, call: Call) -> None:
        """Start the span of the request."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in call.headers.items()}
        attributes = _attributes(call, headers)
        name = " ".join(str(attributes[key]) for key in ("http.request.method", "http.route") if key in attributes)
        span = self._spans[call] = self._tracer.start_span(
            name.replace("_OTHER", "HTTP"), extract(headers), SpanKind.SERVER, attributes=attributes
        )
        ids = span.get_span_context()
        if ids.is_valid:
            call.trace = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        """End the span of the request."""
        span = self._spans.pop(call)
        if call.status:
            span.set_attribute("http.response.status_code", call.status)
        if bug is not None or call.status >= 500:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", bug or str(call.status))  # not the error's text, which could hold anything
        span.set_attribute("http.request.body.size", call.received)
        span.set_attribute("http.response.body.size", call.sent)
        for phase, spent in call.spent.items():
            span.set_attribute(f"gradserve.{phase}_seconds", spent / 1e9)
        span.end()

    def close(self) -> None:
        """Send what is left, but let a slow collector not hold up the shutdown."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


def _attributes(call: Call, headers: dict[str, str]) -> dict[str, str | int]:
    method = call.method if call.method in _METHODS else "_OTHER"
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "url.scheme": call.connection["scheme"],
        "url.path": call.path,
        "network.protocol.version": call.connection["http_version"],
    }
    if method == "_OTHER":
        attributes["http.request.method_original"] = call.method
    if call.route is not None:
        attributes["http.route"] = call.route
    if call.address is not None:
        attributes["client.address"] = attributes["network.peer.address"] = call.address[0]
        attributes["network.peer.port"] = call.address[1]
    if (server := call.connection.get("server")) is not None:
        attributes["server.address"], attributes["server.port"] = server[0], server[1]
    if "user-agent" in headers:
        attributes["user_agent.original"] = headers["user-agent"]
    return attributes
