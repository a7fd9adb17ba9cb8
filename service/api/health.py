"""Liveness and readiness of the Open Inference Protocol, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse
from typing_extensions import TypedDict

from service.api.http.answer import Answer, JsonAnswer
from service.api.http.call import CurrentCall
from service.api.http.routing import access
from service.api.telemetry.metrics import WAITING, Metrics
from service.buffers.store import Store
from service.buffers.url import path_of
from service.errors import NotReady
from service.host.system import disk_bytes
from service.settings import Settings


class Live(TypedDict):
    """The process answers."""

    live: bool


class Ready(TypedDict):
    """The server takes requests."""

    ready: bool


@contextmanager
def _reading_files() -> Iterator[None]:
    """Raise `NotReady` for an error of the system: it may have no file descriptor free just now."""
    try:
        yield
    except OSError as error:
        raise NotReady(f"The server cannot read its own files just now: {error.strerror}") from None


def _gauges(store: Store, settings: Settings) -> dict[str, float]:
    """Return the metrics of the store and of its disk, by name."""
    buffers, size = store.size()
    known: dict[str, float] = {"buffers": buffers, "store_bytes": size, "store_limit_bytes": settings.store_bytes}
    with suppress(OSError):
        if (path := path_of(settings.store)) is not None:
            known["disk_free_bytes"], known["disk_bytes"] = disk_bytes(path)
    known |= {f"database_{name}": value for name, value in store.measures().items()}
    return {f"gradserve_{name}": value for name, value in known.items()}


def routes(metrics: Metrics) -> APIRouter:
    """Return the endpoints, which report these metrics."""
    router = APIRouter(tags=["health"])

    @router.get("/v2/health/live", summary="Whether the process is alive")
    @access(label="health", open=True)
    async def server_live(call: CurrentCall) -> JsonAnswer[Live]:
        """200 while the process answers at all, also while it starts or stops."""
        return JsonAnswer({"live": True})

    @router.get("/v2/health/ready", summary="Whether the server is ready for requests")
    @access(label="health", open=True)
    async def server_ready(call: CurrentCall) -> JsonAnswer[Ready]:
        """503 while the server starts or stops, while a worker process that died is being replaced, or if the buffer
        store has failed."""
        store = call.store
        with _reading_files():
            metrics.check_workers()
        await call.look_up(1, store.check)
        return JsonAnswer({"ready": True})

    @router.get("/metrics", summary="Metrics in Prometheus' format", response_class=PlainTextResponse)
    @access("admin", label="metrics")
    async def get_metrics(call: CurrentCall) -> Answer:
        """If the server has API keys, the caller needs the scope admin, or to be let in by `GRADSERVE_METRICS_OPEN`."""
        metrics.set(WAITING, call.engine.pool.waiting())
        metrics.gauges = await call.look_up(1, partial(_gauges, call.store, call.settings))
        with _reading_files():
            return Answer([metrics.text()], CONTENT_TYPE_PLAIN_0_0_4)  # every scraper reads it, whatever it asks for

    return router
