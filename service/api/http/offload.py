"""Work for a request: in the event loop or in the thread pool. Work that waits is dropped if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from service.api.http.exchange import Exchange
from service.engine.engine import Engine
from service.errors import Expired

R = TypeVar("R")

INLINE_TEXT_BYTES = 1 << 16
"""Text up to this size is read, and tensors of this size are written as text, in the event loop.

The way to the pool and back takes about as long: 0.2 ms. Lists of lists take up to 4 ms.
"""

INLINE_BYTES = 3 << 20
"""The event loop computes tensors up to this size: the way to the pool and back takes as long."""

INLINE_HALF_BYTES = 1 << 19
"""The same for 16-bit floats, which are converted on the way: 3 MB of float16 take 2.1 ms, of float32 0.16."""

ALONE_BYTES = 9 << 20
"""INLINE_BYTES while no other large request is in flight: a request of 8 MB then takes a fifth longer in the pool."""

INLINE_LOOKUPS = 256
"""Buffers that the event loop looks up itself: more take longer than the way to the pool."""


async def in_pool(
    engine: Engine, exchange: Exchange, namespace: str, work: Callable[[], R], patience_seconds: float | None
) -> R:
    """Call `work` in the engine's pool, in the namespace's turn, and return its result. The body must have been read.

    `work` is dropped if the client leaves or `patience_seconds` pass before it starts. After a change of a buffer they
    are None: a client would send an expired request again. Raises `ClientDisconnect` and `Expired`.
    """
    future, expired = engine.pool.submit(work, namespace), list[bool]()
    timer = None
    if patience_seconds is not None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(patience_seconds, lambda future: expired.append(future.cancel()), future)
    try:
        return await while_connected(exchange.left, asyncio.wrap_future(future))
    except asyncio.CancelledError:
        if any(expired):
            raise Expired(
                f"No thread was free for {patience_seconds:g} seconds (Request-Timeout, or GRADSERVE_REQUEST_TIMEOUT),"
                " so the request was not started",
                limit=patience_seconds,
            ) from None
        raise
    finally:
        if timer is not None:
            timer.cancel()
        del future  # its traceback holds this frame: a cycle that only the garbage collector would free


async def while_connected(left: Callable[[], Coroutine[Any, Any, None]], work: Awaitable[R]) -> R:
    """Return the result of `work`. Raises `ClientDisconnect` if the client has `left` before: then `left` returns."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left())
    leaving.add_done_callback(partial(_cancel, working))
    try:
        return await working
    except asyncio.CancelledError:
        if leaving.done():
            raise ClientDisconnect from None
        raise
    finally:
        leaving.cancel()
        del work, working, leaving  # break the same cycle


def _cancel(working: asyncio.Future[Any], _: object) -> None:
    working.cancel()
