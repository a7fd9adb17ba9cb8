"""The server's log: a line for each event, for people or, as JSON, for machines. Never a tensor, never a secret."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

import orjson
from starlette.types import Scope

from service.api.http.context import Context, context_of
from service.settings import Settings

TRACE = "gradserve.trace"
"""Where in a request's scope the ids of its trace and its span are, if it has a span."""

LONGEST_ID = 128

TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*")
"""The header that names a trace and a span, by W3C's Trace Context."""

logger = logging.getLogger("gradserve.access")


def config(settings: Settings) -> dict[str, Any]:
    """The configuration of Python's logging: everything to stderr."""
    formatter = {"()": _Json if settings.log_format == "json" else _Text}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": formatter},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "root": {"handlers": ["stderr"], "level": "WARNING"},
        "loggers": {
            name: {"handlers": ["stderr"], "level": settings.log_level.upper(), "propagate": False}
            for name in ("uvicorn", "gradserve", "service")
        },
    }


def identify(context: Context) -> None:
    """Give the request an id: the one that it came with, if that is fit to be logged, or a new one."""
    if context.request_id is None:
        text = context.headers.get(b"x-request-id", b"").decode("latin-1")
        fit = 0 < len(text) <= LONGEST_ID and text.isascii() and text.isprintable()
        context.request_id = text if fit else uuid.uuid4().hex


def log_request(scope: Scope, nanoseconds: int) -> None:
    """One line for a request that has its answer."""
    context = context_of(scope)
    headers = context.headers
    client = scope.get("client")
    given: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": context.status,
        "milliseconds": round(nanoseconds / 1e6, 3),
        "bytes": context.received or int(headers.get(b"content-length", 0)),
        "bytes_sent": context.sent,
        "client": client[0] if client else None,
        "request_id": context.request_id,
    }
    if namespace := context.caller.namespace:
        given["namespace"] = namespace
    if TRACE in scope:
        given["trace_id"], given["span_id"] = scope[TRACE]
    elif parent := TRACEPARENT.fullmatch(headers.get(b"traceparent", b"")):
        given["trace_id"], given["span_id"] = parent[1].decode(), parent[2].decode()
    text = "{method} {path} {status} {milliseconds} ms, {bytes} bytes in, {bytes_sent} out, from {client}, {request_id}"
    text = text.format_map(given)
    logger.info("%s", text.encode("unicode_escape").decode(), extra={"fields": given})


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class _Text(logging.Formatter):
    """A record as a line of text, with its traceback, if any, on lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{_time(record)} {record.levelname}: {super().format(record)}"


class _Json(logging.Formatter):
    """A record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()
