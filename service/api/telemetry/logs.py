"""The server's log: a line of text or JSON for each event. It never holds a tensor or a secret."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import orjson

from service.api.http.call import Call
from service.api.telemetry.metrics import Observer
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull
from service.settings import Settings

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
"""The header that names a trace and a span, by W3C's Trace Context."""

_LINE = "{method} {path} {status} {milliseconds} ms, {bytes} bytes in, {bytes_sent} out, from {client}, {request_id}"

STORE_SECONDS = 60.0
"""Seconds between two lines about the same fault of the store: each of thousands of requests a second meets it."""

logger = logging.getLogger("gradserve.access")

store_logger = logging.getLogger("gradserve.store")


def config(settings: Settings) -> dict[str, Any]:
    """Return the configuration of Python's logging: everything goes to stderr."""
    formatter = {"()": _Json if settings.log_format == "json" else _Text}
    level = settings.log_level.upper()
    # uvicorn's lines of its start and its end say less than the two of `server`
    uvicorn = "WARNING" if level == "INFO" else level
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            name: {"handlers": ["stderr"], "level": lowest, "propagate": False}
            for name, lowest in {"uvicorn": uvicorn, "gradserve": level, "service": level}.items()
        },
    }


class AccessLog(Observer):
    """Logs one line for each request."""

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        fields: dict[str, Any] = {
            "method": call.method,
            "path": call.path,
            "status": call.status,
            "milliseconds": round(nanoseconds / 1e6, 3),
            "bytes": call.received or int(call.headers.get(b"content-length", 0)),
            "bytes_sent": call.sent,
            "client": _client(call),
            "request_id": call.identify(),
        }
        if namespace := call.caller.namespace:
            fields["namespace"] = namespace
        if call.trace is not None:
            fields["trace_id"], fields["span_id"] = call.trace
        elif parent := TRACEPARENT.fullmatch(call.joined(b"traceparent")):
            fields["trace_id"], fields["span_id"] = parent[1], parent[2]
        text = _LINE.format_map(fields)
        logger.info("%s", text.encode("unicode_escape").decode(), extra={"fields": fields})


class StoreLog:
    """Logs that the store is full, damaged or cannot be used, now and then for each code of error."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def note(self, error: GradserveError) -> None:
        """Log a line if this is a fault of the store whose last line is long ago."""
        now = time.monotonic()
        if isinstance(error, (BufferCorrupt, StoreFailed, StoreFull)) and now >= self._next.get(error.code, 0.0):
            self._next[error.code] = now + STORE_SECONDS
            store_logger.warning("Requests get %s (%s): %s", error.status, error.code, error.detail)


def _client(call: Call) -> str | None:
    """Return the client's address, or the UNIX socket that it used."""
    path, client = call.ends.path, call.ends.client
    if path is not None:
        return f"unix:{path}"
    return None if client is None else client[0]


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class _Text(logging.Formatter):
    """Formats a record as a line of text, and a traceback on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname}: {super().format(record)}"


class _Json(logging.Formatter):
    """Formats a record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()
