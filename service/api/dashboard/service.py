"""The endpoints of the service view: the caller, the server with its settings, and how fast it is."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from service.api.dashboard.history import STEP_SECONDS, History
from service.api.dashboard.limits import CONSTANTS
from service.api.dashboard.sample import Sample
from service.api.http.answer import JsonAnswer, written
from service.api.http.call import CurrentCall
from service.api.http.routing import access
from service.buffers.store import Store
from service.buffers.url import without_password
from service.settings import Settings


class CallerAnswer(TypedDict):
    """The sender of the request, as its API key names it."""

    name: Annotated[str, Field(description="The name of the key; anonymous without keys.")]
    namespace: Annotated[str, Field(description="The namespace of the buffers that the caller sees.")]
    scopes: list[str]
    keys: Annotated[bool, Field(description="Whether the server has API keys.")]


class Setting(TypedDict):
    """A setting or a limit in force."""

    value: str | int | float | bool | None
    meaning: str


class StoreAnswer(TypedDict):
    """The store and its size."""

    url: Annotated[str, Field(description="The setting GRADSERVE_STORE, without a password.")]
    bytes: Annotated[int, Field(description="Bytes in use.")]
    limit_bytes: Annotated[int, Field(description="Bytes that the store may hold, at most.")]
    buffers: Annotated[int, Field(description="Buffers of all namespaces.")]


class Service(TypedDict):
    """The server, its store, and its settings."""

    name: str
    version: str
    started_at: Annotated[float, Field(description="Seconds since 1970.")]
    python: str
    workers: Annotated[int, Field(description="Processes that share the port.")]
    replicas: Annotated[
        int | None, Field(description="Servers over the same database; null if no other machine has the store.")
    ]
    store: StoreAnswer
    settings: Annotated[dict[str, Setting], Field(description="The settings in force, by their variables.")]
    limits: Annotated[dict[str, Setting], Field(description="The limits of requests that have no setting.")]


class HistoryQuery(BaseModel):
    """The query of the history."""

    since: float = Field(0.0, allow_inf_nan=False, description="The `at` of the last sample that the caller has.")


class HistoryAnswer(TypedDict):
    """The samples of the last hour."""

    step_seconds: int
    samples: Annotated[list[Sample], Field(description="Oldest first.")]


def routes(history: History, started_at: float) -> APIRouter:
    """Return the endpoints of the service view, over this history."""
    router = APIRouter(tags=["service"])

    @router.get("/v1/caller", summary="The caller, as the server sees it")
    @access()
    async def get_caller(call: CurrentCall) -> JsonAnswer[CallerAnswer]:
        """Any valid key may ask."""
        namespace, scopes, name = call.caller
        has_keys = call.settings.keys is not None
        return JsonAnswer({"name": name, "namespace": namespace, "scopes": sorted(scopes), "keys": has_keys})

    @router.get("/v1/service", summary="The server and its settings")
    @access("admin")
    async def get_service(call: CurrentCall) -> JsonAnswer[Service]:
        """Passwords are never shown."""
        settings = call.settings
        buffers, size, replicas = await call.look_up(1, _look, call.store)
        return JsonAnswer(
            {
                "name": "gradserve",
                "version": version("gradserve"),
                "started_at": started_at,
                "python": platform.python_version(),
                "workers": settings.workers,
                "replicas": replicas,
                "store": {
                    "url": without_password(settings.store),
                    "bytes": size,
                    "limit_bytes": settings.store_bytes,
                    "buffers": buffers,
                },
                "settings": _in_force(settings),
                "limits": {name: {"value": value, "meaning": meaning} for name, (value, meaning) in CONSTANTS.items()},
            }
        )

    @router.get("/v1/service/history", summary="The last hour in samples")
    @access("admin")
    async def service_history(call: CurrentCall, query: Annotated[HistoryQuery, Query()]) -> JsonAnswer[HistoryAnswer]:
        """A sample has the numbers of all worker processes. Each process keeps its own history. With `since`, the
        answer has the samples of later steps."""
        samples = [written(text, Sample) for text in history.since(query.since)]
        return JsonAnswer({"step_seconds": STEP_SECONDS, "samples": samples})

    return router


def _look(store: Store) -> tuple[int, int, int | None]:
    return *store.size(), store.replicas()


def _in_force(settings: Settings) -> dict[str, Setting]:
    """Return the settings by their variables."""
    values = settings.model_dump(mode="json") | {"store": without_password(settings.store)}
    return {
        f"GRADSERVE_{name.upper()}": {"value": values[name], "meaning": field.description or ""}
        for name, field in Settings.model_fields.items()
    }
