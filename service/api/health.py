"""Liveness and readiness, as the Open Inference Protocol names them, the limits of requests, and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field, create_model
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from service.api.buffers.models import LONGEST_WAIT, MOST_LISTED, MOST_NAMES
from service.api.buffers.preconditions import store_of
from service.api.http.context import engine_of, settings_of
from service.api.http.openapi import LONGEST_KEY
from service.api.telemetry.metrics import Metrics
from service.codecs.json import MOST_ELEMENTS, MOST_MEMBERS
from service.settings import Settings

router = APIRouter(tags=["health"])


@router.get("/v2/health/live", summary="Whether the process is alive")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/v2/health/ready", summary="Whether the server is ready for requests")
async def ready(request: Request) -> dict[str, bool]:
    """503 while the server starts or stops, while a worker process that died is being replaced, or if the buffer store
    has failed."""
    engine_of(request.scope)
    request.app.workers.check()
    store_of(request.scope).generation()
    return {"ready": True}


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
    "max_idempotency_key_length": (LONGEST_KEY, "Characters in an Idempotency-Key, at most."),
    "max_wait_seconds": (LONGEST_WAIT, "Seconds that a request may wait for an epoch, at most."),
    "max_listed": (MOST_LISTED, "Buffers on one page of a list, at most."),
    "max_names": (MOST_NAMES, "Buffers that one request may name, at most."),
    "max_json_elements": (
        MOST_ELEMENTS,
        "Elements in the lists of a JSON body, at most; send more as base64 or safetensors.",
    ),
    "max_json_members": (MOST_MEMBERS, "Members of a JSON object, at most; each may be a tensor."),
}
"""The limits that no setting changes."""


def _described() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in SETTINGS:
        setting = Settings.model_fields[name]
        fields[name] = (setting.annotation, Field(description=f"{setting.description} (GRADSERVE_{name.upper()})"))
    for name, (value, meaning) in CONSTANTS.items():
        fields[name] = (type(value), Field(description=meaning))
    model: type[BaseModel] = create_model("Limits", **fields)
    return model


@router.get("/v1/limits", summary="The limits of requests", response_model=_described())
async def limits(request: Request) -> dict[str, int | float]:
    """Each limit has the name of its setting, or, without a setting, of the thing that it limits."""
    settings = settings_of(request.scope)
    constants = {name: value for name, (value, _) in CONSTANTS.items()}
    return {name: getattr(settings, name) for name in SETTINGS} | constants


@router.get("/metrics", summary="Metrics in Prometheus' format", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """If the server has API keys, the caller needs the scope admin, or to be let in by `GRADSERVE_METRICS_OPEN`."""
    kept: Metrics = request.app.metrics
    kept.set("gradserve_waiting", engine_of(request.scope).waiting)
    settings = settings_of(request.scope)
    kept.store = (*store_of(request.scope).size(), settings.store_bytes)
    return Response(kept.text(), media_type=CONTENT_TYPE_LATEST)
