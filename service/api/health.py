"""Liveness and readiness, as the Open Inference Protocol names them, and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from service.api.changes import store_of
from service.api.work import engine_of, metrics_of

router = APIRouter(tags=["health"])


@router.get("/v2/health/live", summary="The process answers")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/v2/health/ready", summary="Requests are taken")
async def ready(request: Request) -> dict[str, bool]:
    """503 while the server starts or stops."""
    engine_of(request.app.state)
    return {"ready": True}


@router.get("/metrics", summary="What the server does, in Prometheus' format", response_class=Response)
async def metrics(request: Request) -> Response:
    """With API keys, only for a key with the scope admin, and for whom `GRADSERVE_METRICS_OPEN` says."""
    kept = metrics_of(request.scope)
    kept.set("gradserve_waiting", engine_of(request.app.state).waiting)
    kept.store = store_of(request.scope).size()
    return Response(kept.text(), media_type=CONTENT_TYPE_LATEST)
