"""Liveness and readiness of the Open Inference Protocol, the limits of requests, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field, create_model
from starlette.responses import PlainTextResponse

from service.api.buffers.models import MAX_LISTED_BUFFERS, MAX_NAMED_BUFFERS, MAX_WAIT_SECONDS
from service.api.http.answer import Answer, json_answer
from service.api.http.call import CurrentCall
from service.api.http.openapi import MAX_KEY_CHARACTERS
from service.api.http.routing import access
from service.api.telemetry.metrics import Metrics
from service.api.telemetry.workers import Workers
from service.buffers.store import Store
from service.codecs.json import MAX_ELEMENTS, MAX_LISTS, MAX_MEMBERS
from service.errors import NotReady
from service.settings import Settings

SETTINGS = (
    "max_body_bytes",
    "max_inflated_bytes",
    "max_tensor_bytes",
    "max_tensors",
    "max_dimensions",
    "max_name_length",
    "max_buffers",
    "max_bytes_in_flight",
    "max_waiting",
    "store_bytes",
    "request_timeout",
    "idempotency_seconds",
)
"""The settings that are limits."""

CONSTANTS: dict[str, tuple[int | float, str]] = {
    "max_idempotency_key_length": (MAX_KEY_CHARACTERS, "Characters in an Idempotency-Key, at most."),
    "max_wait_seconds": (MAX_WAIT_SECONDS, "Seconds that a request may wait for an epoch, at most."),
    "max_listed": (MAX_LISTED_BUFFERS, "Buffers on one page of a list, at most."),
    "max_names": (MAX_NAMED_BUFFERS, "Buffers that one request may name, at most."),
    "max_json_elements": (
        MAX_ELEMENTS,
        "Elements in the lists of a JSON body, at most; send more as base64 or safetensors.",
    ),
    "max_json_lists": (MAX_LISTS, "Lists in a JSON body, at most, with the lists in lists."),
    "max_json_members": (MAX_MEMBERS, "Members of a JSON object, at most; each may be a tensor."),
}
"""The limits without a setting."""


def _described() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in SETTINGS:
        setting = Settings.model_fields[name]
        fields[name] = (setting.annotation, Field(description=f"{setting.description} (GRADSERVE_{name.upper()})"))
    for name, (value, meaning) in CONSTANTS.items():
        fields[name] = (type(value), Field(description=meaning))
    model: type[BaseModel] = create_model("Limits", **fields)
    return model


class Live(BaseModel):
    """The process answers."""

    live: bool


class Ready(BaseModel):
    """The server takes requests."""

    ready: bool


@contextmanager
def _reading_files() -> Iterator[None]:
    """Raise `NotReady` for an error of the system: it may have no file descriptor free just now."""
    try:
        yield
    except OSError as error:
        raise NotReady(f"The server cannot read its own files just now: {error.strerror}") from None


def _gauges(store: Store, limit: int) -> dict[str, float]:
    """Return the metrics that the store knows, by name."""
    buffers, size = store.size()
    known: dict[str, float] = {"buffers": buffers, "store_bytes": size, "store_limit_bytes": limit}
    known |= {f"database_{name}": value for name, value in store.measures().items()}
    return {f"gradserve_{name}": value for name, value in known.items()}


def limits_of(settings: Settings) -> dict[str, Any]:
    """Return all limits by name."""
    constants = {name: value for name, (value, _) in CONSTANTS.items()}
    return {name: getattr(settings, name) for name in SETTINGS} | constants


def routes(metrics: Metrics, workers: Workers) -> APIRouter:
    """Return the endpoints, which report these metrics and workers."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/v2/health/live",
        summary="Whether the process is alive",
        operation_id="server_live",
        response_model=Live,
    )
    @access(label="health", open=True)
    async def live(call: CurrentCall) -> Answer:
        """200 while the process answers at all, also while it starts or stops."""
        return json_answer({"live": True})

    @router.get(
        "/v2/health/ready",
        summary="Whether the server is ready for requests",
        operation_id="server_ready",
        response_model=Ready,
    )
    @access(label="health", open=True)
    async def ready(call: CurrentCall) -> Answer:
        """503 while the server starts or stops, while a worker process that died is being replaced, or if the buffer
        store has failed."""
        store = call.store
        with _reading_files():
            workers.check()
        await call.look_up(1, store.check)
        return json_answer({"ready": True})

    @router.get("/v1/limits", summary="The limits of requests", operation_id="get_limits", response_model=_described())
    @access()
    async def limits(call: CurrentCall) -> Answer:
        """Each limit has the name of its setting, or, without a setting, of the thing that it limits."""
        return json_answer(limits_of(call.settings))

    @router.get(
        "/metrics",
        summary="Metrics in Prometheus' format",
        operation_id="get_metrics",
        response_class=PlainTextResponse,
    )
    @access("admin", label="metrics")
    async def prometheus(call: CurrentCall) -> Answer:
        """If the server has API keys, the caller needs the scope admin, or to be let in by `GRADSERVE_METRICS_OPEN`."""
        metrics.set("gradserve_waiting", call.engine.waiting)
        metrics.gauges = await call.look_up(1, partial(_gauges, call.store, call.settings.store_bytes))
        with _reading_files():
            return Answer([metrics.text()], CONTENT_TYPE_LATEST)

    return router
