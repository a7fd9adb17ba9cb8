"""OpenTelemetry: a span for each request. It is imported only with `GRADSERVE_TRACING`, and needs the extra `otel`.

FastAPI's telemetry and OpenTelemetry's ASGI middleware do not fit. Both read the status in `send`, which our answers
bypass, and neither knows the phases.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode

from service.api.http.call import Call
from service.api.telemetry.metrics import Observer

FLUSH_SECONDS = 5.0
"""Seconds that a slow collector of spans may delay the shutdown."""

_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})


class Tracer(Observer):
    """Sends a span of each request to OTEL_EXPORTER_OTLP_ENDPOINT."""

    def __init__(self) -> None:
        named = Resource.create({"service.name": "gradserve", "process.pid": os.getpid()})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("gradserve", version("gradserve"))
        self._spans: dict[Call, Span] = {}

    def began(self, call: Call) -> None:
        headers = _joined(call.head.headers)
        attributes = _attributes(call, headers)
        name = " ".join(str(attributes[key]) for key in ("http.request.method", "http.route") if key in attributes)
        span = self._spans[call] = self._tracer.start_span(
            name.replace("_OTHER", "HTTP"), extract(headers), SpanKind.SERVER, attributes=attributes
        )
        ids = span.get_span_context()
        if ids.is_valid:
            call.trace = f"{ids.trace_id:032x}", f"{ids.span_id:016x}"

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        span = self._spans.pop(call)
        if call.status:
            span.set_attribute("http.response.status_code", call.status)
        if bug is not None or call.status >= 500:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", bug or str(call.status))  # the text of the error could hold a secret
        span.set_attribute("http.request.body.size", call.received)
        span.set_attribute("http.response.body.size", call.sent)
        for phase, spent in call.spent.items():
            span.set_attribute(f"gradserve.{phase}_seconds", spent / 1e9)
        span.end()

    def close(self) -> None:
        """Send the last spans, for at most FLUSH_SECONDS."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(FLUSH_SECONDS)


def _joined(lines: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers by name. Several lines are one list, as W3C's recommendation wants it of tracestate.

    Two lines of traceparent are then no valid one: the span begins a new trace.
    """
    headers = dict[str, str]()
    for name, value in ((name.decode("latin-1"), value.decode("latin-1")) for name, value in lines):
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _attributes(call: Call, headers: dict[str, str]) -> dict[str, str | int]:
    method = call.method if call.method in _METHODS else "_OTHER"
    attributes: dict[str, str | int] = {
        "http.request.method": method,
        "url.scheme": call.ends.scheme,
        "url.path": call.path,
        "network.protocol.version": call.head.version,
    }
    if method == "_OTHER":
        attributes["http.request.method_original"] = call.method
    if call.route is not None:
        attributes["http.route"] = call.route
    _, client, server, path = call.ends
    if client is not None:
        attributes["client.address"] = attributes["network.peer.address"] = client[0]
        attributes["network.peer.port"] = client[1]
    if path is not None:
        attributes["network.transport"], attributes["server.address"] = "unix", path
    elif server is not None:
        attributes["server.address"], attributes["server.port"] = server
    if "user-agent" in headers:
        attributes["user_agent.original"] = headers["user-agent"]
    return attributes
