"""Work for a request in the thread pool, which ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from service.api.http.context import patience_of
from service.engine import Engine
from service.errors import Expired

R = TypeVar("R")


async def in_pool(scope: Scope, receive: Receive, engine: Engine, work: Callable[[], R]) -> R:
    """What `work` returns, called in the engine's pool. The body must have been read.

    If the client goes before the work starts, or its patience ends, the work is dropped. Raises `ClientDisconnect` and
    `Expired`.
    """
    seconds, expired = patience_of(scope), list[bool]()
    future = engine.submit(work)
    timer = asyncio.get_running_loop().call_later(seconds, lambda future: expired.append(future.cancel()), future)
    try:
        return await while_connected(receive, asyncio.wrap_future(future))
    except asyncio.CancelledError:
        if any(expired):
            raise Expired(
                f"No thread was free for {seconds:g} seconds (Request-Timeout, or GRADSERVE_REQUEST_TIMEOUT), so the"
                " request was not started",
                limit=seconds,
            ) from None
        raise
    finally:
        timer.cancel()
        del future  # it has the exception, whose traceback has this frame: only the collector could free the body


async def in_pool_after_change(receive: Receive, engine: Engine, work: Callable[[], R]) -> R:
    """The same for a request that has changed a buffer: it does not expire, as one that does is sent again."""
    return await while_connected(receive, asyncio.wrap_future(engine.submit(work)))


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """What `work` returns. The body must have been read. Raises `ClientDisconnect` if the client goes."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(receive))
    leaving.add_done_callback(partial(_cancel, working))
    try:
        return await working
    except asyncio.CancelledError:
        if leaving.done():
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()
        del work, working, leaving  # as above


def _cancel(working: asyncio.Future[Any], _: object) -> None:
    working.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
