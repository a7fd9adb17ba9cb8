"""Liveness and readiness, as the Open Inference Protocol names them, the limits of requests, and metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field, create_model
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from service.api.buffer_models import LONGEST_WAIT, MOST_LISTED, MOST_NAMES
from service.api.changes import LONGEST_KEY, store_of
from service.api.context import engine_of, settings_of
from service.api.metrics import Metrics
from service.codecs.json import MAX_ELEMENTS, MAX_MEMBERS
from service.settings import Settings

router = APIRouter(tags=["health"])


@router.get("/v2/health/live", summary="The process answers")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/v2/health/ready", summary="Requests are taken")
async def ready(request: Request) -> dict[str, bool]:
    """503 while the server starts or stops, while a worker process that died is being replaced, and where the store of
    the buffers has failed."""
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
    "max_idempotency_key_length": (LONGEST_KEY, "Most characters in an Idempotency-Key."),
    "max_wait_seconds": (LONGEST_WAIT, "Longest time that a request may wait for an epoch, in seconds."),
    "max_listed": (MOST_LISTED, "Most buffers on a page of a list."),
    "max_names": (MOST_NAMES, "Most buffers that a request names."),
    "max_json_elements": (
        MAX_ELEMENTS,
        "Most elements of the lists in a JSON body; more go as base64 or safetensors.",
    ),
    "max_json_members": (MAX_MEMBERS, "Most members of an object in JSON, of which each may be a tensor."),
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


@router.get("/v1/limits", summary="What a request may be at most", response_model=_described())
async def limits(request: Request) -> dict[str, int | float]:
    """Each by the name of its setting, or, where there is none, of what it bounds."""
    settings = settings_of(request.scope)
    constants = {name: value for name, (value, _) in CONSTANTS.items()}
    return {name: getattr(settings, name) for name in SETTINGS} | constants


@router.get("/metrics", summary="What the server does, in Prometheus' format", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """With API keys, only for a key with the scope admin, and for whom `GRADSERVE_METRICS_OPEN` says."""
    kept: Metrics = request.app.metrics
    kept.set("gradserve_waiting", engine_of(request.scope).waiting)
    settings = settings_of(request.scope)
    kept.store = (*store_of(request.scope).size(), settings.store_bytes)
    return Response(kept.text(), media_type=CONTENT_TYPE_LATEST)
