"""Liveness and readiness, as the Open Inference Protocol names them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request

from service.api.work import engine_of

router = APIRouter(prefix="/v2/health", tags=["health"])


@router.get("/live", summary="The process answers")
async def live() -> dict[str, bool]:
    return {"live": True}


@router.get("/ready", summary="Requests are taken")
async def ready(request: Request) -> dict[str, bool]:
    """503 while the server starts or stops."""
    engine_of(request.app.state)
    return {"ready": True}
