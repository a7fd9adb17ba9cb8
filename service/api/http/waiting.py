"""Waiting for an epoch of a buffer: requests sleep until what they wait for may be there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from starlette.types import Receive

from service.api.http.offload import R, while_connected
from service.buffers.store import Store
from service.errors import EpochOpen, GradserveError, NotReady, TooFewGradients

POLL_SECONDS = 0.002
"""How often a process with requests that wait looks whether another process has changed anything."""

AT_ONCE, REST = 100, 4
"""Buffers that are looked at before it is the turn of others, and times as long as all of them took until the next look
at least."""

ANY = frozenset({"*"})
"""Every tag."""


class _Key(NamedTuple):
    """What requests wait for: the next epoch of a buffer, or a count that is not below `least`; or that its tag is none
    of `match`."""

    namespace: str
    name: str
    least: int | None
    match: frozenset[str]


class _State(NamedTuple):
    """What a buffer is to those that wait; `over` if its count is not below theirs, or its tag is none of theirs."""

    id: int
    epoch: int
    over: bool


class _Watched:
    """A state that requests wait for to be over."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.over = asyncio.Event()
        self.requests = 0


class Waiting:
    """Wakes requests that wait for a buffer, whichever process changes it.

    After a commit each buffer is looked at once, however many wait for it, and they are woken only if what they wait
    for may be there: a thousand workers wait for an epoch, and as many gradients come before it closes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watched: dict[_Key, _Watched] = {}
        self._stopping = False
        self._poller: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Let nobody wait any longer: the server stops."""
        self._stopping = True
        self._wake([*self._watched])

    async def until(
        self,
        namespace: str,
        receive: Receive,
        seconds: float,
        attempt: Callable[[], Awaitable[R]],
        match: frozenset[str] = ANY,
    ) -> R:
        """What `attempt` returns; while it raises `EpochOpen` or `TooFewGradients` of a buffer in the namespace, it is
        called again when that may be over, or the tag of the buffer is none of `match`.

        After `seconds` it is called a last time. The body must have been read. Raises `ClientDisconnect` if the client
        goes.
        """
        if seconds <= 0:
            return await attempt()
        return await while_connected(receive, self._attempts(namespace, seconds, attempt, match))

    async def _attempts(
        self, namespace: str, seconds: float, attempt: Callable[[], Awaitable[R]], match: frozenset[str]
    ) -> R:
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return await attempt()
            except (EpochOpen, TooFewGradients) as error:
                about: dict[str, Any] = error.context
            key = _Key(namespace, about["buffer"], about.get("min_count"), match)
            if not await self._change(key, about["epoch"], end):
                return await attempt()  # which says what is missing; a buffer that expires changes nothing, and is gone

    async def _change(self, key: _Key, epoch: int, end: float) -> bool:
        """Wait for an end of the state in which the buffer was, in this epoch. False if there is none by `end`."""
        seen = self._store.generation()
        state = self._state(key)
        if state is None or state.epoch != epoch or state.over:
            await asyncio.sleep(POLL_SECONDS)  # were this to come again and again, others are served
            return True
        watched = self._watched.get(key)
        if watched is None or watched.state != state:
            self._wake([key])
            watched = self._watched[key] = _Watched(state)
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll(seen))
        watched.requests += 1
        try:
            async with asyncio.timeout_at(end):
                while not watched.over.is_set():
                    if self._stopping:
                        raise NotReady("The server is stopping; send the request again")
                    await watched.over.wait()
            return True
        except TimeoutError:
            return False
        finally:
            watched.requests -= 1
            if not watched.requests and self._watched.get(key) is watched:
                del self._watched[key]

    def _state(self, key: _Key) -> _State | None:
        """None where whoever waits is to find out what is wrong."""
        try:
            record = self._store.within(key.namespace).record(key.name)
        except GradserveError:
            return None
        ready = key.least is not None and record.count >= key.least
        return _State(record.id, record.epoch, ready or not key.match & {"*", record.etag})

    def _is_over(self, key: _Key) -> bool:
        return self._state(key) != self._watched[key].state

    async def _poll(self, seen: int) -> None:
        clock, took = asyncio.get_running_loop().time, 0.0
        try:
            while self._watched:
                await asyncio.sleep(max(POLL_SECONDS, REST * took))
                now, took = self._store.generation(), 0.0
                if now == seen:
                    continue
                seen, keys = now, [*self._watched]
                for start in range(0, len(keys), AT_ONCE):
                    began, some = clock(), keys[start : start + AT_ONCE]
                    self._wake([key for key in some if key in self._watched and self._is_over(key)])
                    took += clock() - began
                    await asyncio.sleep(0)  # others are served
        except GradserveError:
            pass  # of which whoever waits is told
        finally:
            self._poller = None
            self._wake([*self._watched])  # were it to fail, whoever waits looks for itself

    def _wake(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if key in self._watched:
                self._watched.pop(key).over.set()
