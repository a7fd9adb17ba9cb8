"""The server's log: a line for each event, for people or, as JSON, for machines. Never a tensor, never a secret."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import orjson
from starlette.types import Scope

from service.api.auth import caller_of
from service.settings import Settings

REQUEST_ID = "gradserve.request_id"
"""Where in a request's scope its id is."""

LONGEST_ID = 128

logger = logging.getLogger("gradserve.access")


def config(settings: Settings) -> dict[str, Any]:
    """The configuration of Python's logging: everything to stderr."""
    formatter = {"()": _Json} if settings.log_format == "json" else {"format": "%(levelname)s:     %(message)s"}
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


def identify(scope: Scope, *, always: bool) -> None:
    """Give the request the id that it came with, or, if it must have one, a new one."""
    if REQUEST_ID in scope:
        return
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if 0 < len(text) <= LONGEST_ID and text.isascii() and text.isprintable():
                scope[REQUEST_ID] = text
                return
    if always:
        scope[REQUEST_ID] = uuid.uuid4().hex


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """One line for a request that has its answer."""
    headers = dict(scope["headers"])
    client = scope.get("client")
    given: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "milliseconds": round(seconds * 1000, 3),
        "bytes": int(headers.get(b"content-length", 0)),
        "client": client[0] if client else None,
        "request_id": scope.get(REQUEST_ID),
    }
    if namespace := caller_of(scope).namespace:
        given["namespace"] = namespace
    if (parent := headers.get(b"traceparent", b"").decode("latin-1").split("-")) and len(parent) == 4:
        given["trace_id"], given["span_id"] = parent[1], parent[2]
    text = "{method} {path} {status} {milliseconds} ms, {bytes} bytes, from {client}, {request_id}".format_map(given)
    logger.info("%s", text.encode("unicode_escape").decode(), extra={"fields": given})


class _Json(logging.Formatter):
    """A record as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        now = time.gmtime(record.created)
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', now)}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()
