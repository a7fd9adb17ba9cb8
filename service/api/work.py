"""Waiting for the pool, and not computing for a client that has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from service.engine import Engine
from service.errors import NotReady

R = TypeVar("R")


def engine_of(request: Request) -> Engine:
    """The server's engine. Raises `NotReady` before the start has finished and after the stop has begun."""
    engine: Engine | None = getattr(request.app.state, "engine", None)
    if engine is None:
        raise NotReady("The server is starting or stopping; try again soon")
    return engine


async def in_pool(request: Request, work: Callable[[], R]) -> R:
    """What `work` returns, called in the engine's pool. The body of `request` must have been read.

    If the client goes before the work starts, the work is dropped. Raises `ClientDisconnect` if the client goes.
    """
    working = asyncio.wrap_future(engine_of(request).submit(work))
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        either: set[asyncio.Future[Any]] = {working, leaving}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
