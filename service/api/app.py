"""The application: the routes, the errors, and the engine's life."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.responses import RedirectResponse

from service.api import health, openapi, ops, problems
from service.engine import Engine
from service.limits import Limits
from service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application. Its engine lives from the application's startup to its shutdown."""
    app = FastAPI(
        title="gradserve",
        version=version("gradserve"),
        description="The gradient kernels of ONNX Runtime, over HTTP.",
        lifespan=_lifespan,
    )
    app.state.settings = settings
    app.state.engine = None
    app.include_router(ops.router)
    app.include_router(health.router)
    app.add_api_route("/", _index, include_in_schema=False)
    problems.install(app)
    openapi.install(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    engine = Engine(
        threads=settings.threads, limits=Limits(settings.max_tensor_bytes), reuse_bytes=settings.reuse_bytes
    )
    app.state.engine = engine
    try:
        yield
    finally:
        app.state.engine = None
        engine.close()


async def _index() -> RedirectResponse:
    return RedirectResponse("/docs")
