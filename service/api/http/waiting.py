"""Waiting for a step of a buffer: a request sleeps until its next attempt may succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, NamedTuple

from service.api.http.offload import R, while_connected
from service.buffers.names import BufferName
from service.buffers.record import Record
from service.buffers.store import Store
from service.errors import GradserveError, NotReady, StepOpen, TooFewGradients

POLL_SECONDS = 0.002
"""Seconds between looks for changes by other processes, while requests wait: a delay that no client notices."""

TURN_BUFFERS = 100
"""Buffers to look at before other tasks have their turn. A store that blocks is asked for all at once."""

REST_FACTOR = 4
"""The poller rests four times as long as its last look at all buffers took: it uses a fifth of the time."""

ANY = frozenset({"*"})
"""A `match` that every tag fits."""


class _Key(NamedTuple):
    """The end of a wait: the next step of a buffer, a count of at least `least`, or a tag that `match` lacks."""

    namespace: str
    name: str
    least: int | None
    match: frozenset[str]

    @property
    def full_name(self) -> BufferName:
        return BufferName(self.namespace, self.name)


class _State(NamedTuple):
    """The state of a buffer. It is `over` if the count is reached, or if `match` lacks the tag."""

    id: int
    step: int
    over: bool


class _Watched:
    """A state that requests wait to see end."""

    def __init__(self, state: _State) -> None:
        self.state = state
        self.over = asyncio.Event()
        self.requests = 0


class Waiting:
    """Wakes requests that wait for a buffer, whichever process changes it.

    After a commit the poller looks at each buffer once, however many requests wait for it. It wakes them only if their
    next attempt may succeed. A thousand workers may wait for a step that needs a thousand gradients.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watched: dict[_Key, _Watched] = {}
        self._stopping = False
        self._poller: asyncio.Task[None] | None = None
        self._seen = 0
        """The generation of the store at the poller's last look."""

    def stop(self) -> None:
        """Wake all requests: the server stops."""
        self._stopping = True
        self._wake([*self._watched])

    async def until(
        self,
        namespace: str,
        closed: Callable[[], Coroutine[Any, Any, None]],
        seconds: float,
        attempt: Callable[[], Awaitable[R]],
        match: frozenset[str] = ANY,
    ) -> R:
        """Return the result of `attempt`. While it raises `StepOpen` or `TooFewGradients`, wait and call it again.

        A wait ends when the attempt may succeed, or when the buffer's tag is not in `match` any more. After `seconds`
        the last attempt follows. Raises `ClientDisconnect` if the client has `closed` its direction during a wait; an
        attempt goes on.
        """
        if seconds <= 0:
            return await attempt()
        end = asyncio.get_running_loop().time() + seconds
        while True:
            try:
                return await attempt()
            except (StepOpen, TooFewGradients) as error:
                context: dict[str, Any] = error.context
            key = _Key(namespace, context["buffer"], context.get("min_count"), match)
            if not await while_connected(closed, self._change(key, context["step"], end)):
                return await attempt()  # it raises what is missing; a buffer can also expire without a change

    async def _change(self, key: _Key, step: int, end: float) -> bool:
        """Wait until the buffer leaves its state in this step. Return False if it has not by `end`."""
        seen = await self._look(self._store.generation)
        state = (await self._look(self._states, [key]))[key]
        if state is None or state.step != step or state.over:
            await asyncio.sleep(POLL_SECONDS)  # other tasks have their turn
            return True
        watched = self._watched.get(key)
        if watched is None or watched.state != state:
            self._wake([key])
            watched = self._watched[key] = _Watched(state)
        if self._poller is None:
            self._seen, self._poller = seen, asyncio.create_task(self._poll())
        self._seen = min(self._seen, seen)  # the poller may have seen a change later than this state
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

    def _states(self, keys: Collection[_Key]) -> dict[_Key, _State | None]:
        """Return the states, None for a buffer that cannot be read: the next attempt raises the reason."""
        found = self._store.look({key.full_name for key in keys})
        return {key: _state(key, found.get(key.full_name)) for key in keys}

    async def _look(self, work: Callable[..., R], *arguments: Any) -> R:
        """Call `work`, which reads the store: in a thread if the store blocks."""
        return await asyncio.to_thread(work, *arguments) if self._store.blocks else work(*arguments)

    async def _poll(self) -> None:
        clock, took = asyncio.get_running_loop().time, 0.0
        try:
            while self._watched:
                await asyncio.sleep(max(POLL_SECONDS, REST_FACTOR * took))
                generation, took = await self._look(self._store.generation), 0.0
                if generation == self._seen:
                    continue
                self._seen, keys = generation, [*self._watched]
                turn = len(keys) if self._store.blocks else TURN_BUFFERS
                for start in range(0, len(keys), turn):
                    began = clock()
                    states = await self._look(self._states, keys[start : start + turn])
                    self._wake(
                        [key for key in states if key in self._watched and states[key] != self._watched[key].state]
                    )
                    took += clock() - began
                    await asyncio.sleep(0)  # other tasks have their turn
        except GradserveError:
            pass  # each waiting request meets the error itself
        finally:
            self._poller = None
            self._wake([*self._watched])  # if the poller has failed, each request looks for itself

    def _wake(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if key in self._watched:
                self._watched.pop(key).over.set()


def _state(key: _Key, record: Record | None) -> _State | None:
    if record is None:
        return None
    ready = key.least is not None and record.count >= key.least
    return _State(record.id, record.step, ready or not key.match & record.tags)
