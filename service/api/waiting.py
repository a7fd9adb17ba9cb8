"""Waiting on behalf of a request: for work in the pool, for a change in the store, and never for a client who left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from service.api.context import context_of, settings_of
from service.buffers.store import Store
from service.engine import Engine
from service.errors import EpochOpen, Expired, InvalidParameter, NotReady, TooFewGradients, shown

R = TypeVar("R")

POLL_SECONDS = 0.002
"""How often a process with requests that wait looks whether another process has changed anything."""


async def in_pool(scope: Scope, receive: Receive, engine: Engine, work: Callable[[], R]) -> R:
    """What `work` returns, called in the engine's pool. The body must have been read.

    If the client goes before the work starts, or its patience ends, the work is dropped. Raises `ClientDisconnect` and
    `Expired`.
    """
    seconds, expired = _patience(scope), list[bool]()
    future = engine.submit(work)
    timer = asyncio.get_running_loop().call_later(seconds, lambda future: expired.append(future.cancel()), future)
    try:
        return await while_connected(receive, asyncio.wrap_future(future))
    except asyncio.CancelledError:
        if any(expired):
            raise Expired(
                f"No thread was free for {seconds:g} seconds (Request-Timeout, or GRADSERVE_REQUEST_TIMEOUT), and the"
                " request was not begun",
                limit=seconds,
            ) from None
        raise
    finally:
        timer.cancel()
        del future  # it has the exception, whose traceback has this frame: only the collector could free the body


async def in_pool_after_change(receive: Receive, engine: Engine, work: Callable[[], R]) -> R:
    """The same for a request that has changed a buffer: it does not expire, as one that does is sent again."""
    return await while_connected(receive, asyncio.wrap_future(engine.submit(work)))


def _patience(scope: Scope) -> float:
    """How many seconds the client waits, by its Request-Timeout, but not longer than the server. Raises
    `InvalidParameter`."""
    longest = settings_of(scope).request_timeout
    value = context_of(scope).headers.get(b"request-timeout")
    if value is None:
        return longest
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        text = shown(value.decode("latin-1"))
        raise InvalidParameter(
            f"Request-Timeout is {text}, but must be a number of seconds", parameter="Request-Timeout"
        )
    return min(seconds, longest)


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


class Waiting:
    """Wakes requests that wait for a change in the store, whichever process makes it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = asyncio.Event()
        self._waiters = 0
        self._stopping = False
        self._poller: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Let nobody wait any longer: the server stops."""
        self._stopping = True
        self._wake()

    async def until(self, receive: Receive, seconds: float, attempt: Callable[[], Awaitable[R]]) -> R:
        """What `attempt` returns, called again after each change while it raises `EpochOpen` or `TooFewGradients`.

        After `seconds` it is called a last time. The body must have been read. Raises `ClientDisconnect` if the client
        goes.
        """
        if seconds <= 0:
            return await attempt()
        return await while_connected(receive, self._attempts(seconds, attempt))

    async def _attempts(self, seconds: float, attempt: Callable[[], Awaitable[R]]) -> R:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            seen = self._store.generation()
            try:
                return await attempt()
            except (EpochOpen, TooFewGradients):
                pass
            if not await self._change(seen, end):
                return await attempt()  # a buffer that has expired changes nothing, and is gone

    async def _change(self, seen: int, end: float) -> bool:
        """Wait for a generation other than `seen`. False if none comes by `end`."""
        self._waiters += 1
        try:
            if self._poller is None:
                self._poller = asyncio.create_task(self._poll(seen))
            async with asyncio.timeout_at(end):
                while self._store.generation() == seen:
                    if self._stopping:
                        raise NotReady("The server is stopping; ask again for what was waited for")
                    await self._changed.wait()
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters -= 1

    async def _poll(self, seen: int) -> None:
        try:
            while self._waiters:
                await asyncio.sleep(POLL_SECONDS)
                if self._store.generation() != seen:
                    seen = self._store.generation()
                    self._wake()
        finally:
            self._poller = None
            self._wake()  # were it to fail, whoever waits looks for itself

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
