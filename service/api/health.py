"""Liveness and readiness, as the Open Inference Protocol names them, and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from service.api.buffer_models import LONGEST_WAIT, MOST_LISTED
from service.api.changes import LONGEST_KEY, store_of
from service.api.work import engine_of, metrics_of
from service.buffers.store import LONGEST_NAME
from service.limits import MAX_RANK
from service.settings import Settings

router = APIRouter(tags=["health"])


@router.get("/v2/health/live", summary="The process answers")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/v2/health/ready", summary="Requests are taken")
async def ready(request: Request) -> dict[str, bool]:
    """503 while the server starts or stops."""
    engine_of(request.app.state)
    return {"ready": True}


@router.get("/v1/limits", summary="What a request may be at most")
async def limits(request: Request) -> dict[str, int | float]:
    """Each by the name of its setting, or, where there is none, of what it bounds."""
    settings: Settings = request.app.state.settings
    return {
        **{name: getattr(settings, name) for name in _LIMITS},
        "max_dimensions": MAX_RANK,
        "max_name_length": LONGEST_NAME,
        "max_idempotency_key_length": LONGEST_KEY,
        "max_wait_seconds": LONGEST_WAIT,
        "max_listed": MOST_LISTED,
    }


_LIMITS = (
    "max_body_bytes",
    "max_inflated_bytes",
    "max_tensor_bytes",
    "max_tensors",
    "max_bytes_in_flight",
    "max_waiting",
    "store_bytes",
    "request_timeout",
    "idempotency_seconds",
)


@router.get("/metrics", summary="What the server does, in Prometheus' format", response_class=Response)
async def metrics(request: Request) -> Response:
    """With API keys, only for a key with the scope admin, and for whom `GRADSERVE_METRICS_OPEN` says."""
    kept = metrics_of(request.scope)
    kept.set("gradserve_waiting", engine_of(request.app.state).waiting)
    settings: Settings = request.app.state.settings
    kept.store = (*store_of(request.scope).size(), settings.store_bytes)
    return Response(kept.text(), media_type=CONTENT_TYPE_LATEST)
