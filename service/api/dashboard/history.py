"""The samples of the last hour, which every process keeps, and their stream of server-sent events.

The process samples always, so that a page that opens has a history to show.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from service.api.dashboard.sample import StoreState, sample_of
from service.api.telemetry.metrics import Metrics
from service.buffers.store import Store
from service.engine.engine import Engine
from service.errors import Busy

logger = logging.getLogger(__name__)

STEP_SECONDS = 2
"""Seconds between samples: a chart that moves, for a thousandth of a processor."""

KEPT_SAMPLES = 1800
"""Samples that a process keeps, an hour: they take 1 to 3 MB."""

STORE_REST_FACTOR = 100
"""A look at the store's size rests a hundred times as long as it took: a large store is asked less often."""

DATABASE_REST_SECONDS = 10
"""The least rest between looks at a database: each process of each replica asks it."""

MAX_STREAMS = 100
"""Streams of a process: a sample leaves on all of them in about two milliseconds, and each holds a connection."""

HEARTBEAT_SECONDS = 10
"""Seconds without a sample after which a stream sends a comment: proxies cut off connections that are silent longer."""

STREAM_SECONDS = 3600
"""Seconds after which a stream ends, and its client asks again: a key that was removed reads on no longer."""


class History:
    """The samples of all worker processes, as this process sees them. Only the event loop uses it."""

    def __init__(self, metrics: Metrics, store_limit_bytes: int) -> None:
        self._metrics, self._store = metrics, StoreState(store_limit_bytes)
        self.samples: deque[bytes] = deque(maxlen=KEPT_SAMPLES)
        """The samples as JSON, oldest first."""
        self.made = 0
        """How many samples there have been."""
        self.streams = 0
        """Streams of events that are open."""
        self._news, self._stopped = asyncio.Event(), asyncio.Event()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """End the streams, and take no more samples: the server stops."""
        self._stopped.set()
        self._news.set()

    async def news(self) -> None:
        """Wait for the next sample, or for the end."""
        if not self.is_stopped:
            await self._news.wait()

    @asynccontextmanager
    async def recording(self, engine: Engine, store: Store) -> AsyncIterator[None]:
        """Take samples meanwhile. On leaving, nothing reads the store any more."""
        tasks = [asyncio.create_task(self._take_samples(engine)), asyncio.create_task(self._watch(store))]
        try:
            yield
        finally:
            self.stop()
            await asyncio.gather(*tasks)

    async def _take_samples(self, engine: Engine) -> None:
        before, began = None, 0.0
        while not self.is_stopped:
            self._metrics.set("gradserve_waiting", engine.waiting)
            with suppress(OSError):  # no file descriptor may be free just now
                after, ended, at = await asyncio.to_thread(self._metrics.totals), time.monotonic(), time.time()
                if before is not None:
                    sample = sample_of(before, after, ended - began, at, self._store)
                    self._add(sample.model_dump_json().encode())
                before, began = after, ended
            now = time.monotonic()
            await self._rest((round(now / STEP_SECONDS) + 1) * STEP_SECONDS - now)  # all processes at the same moments

    def count_sent(self, size: int) -> None:
        """Count bytes of a stream."""
        self._metrics.add("gradserve_sent_bytes", size)

    def _add(self, sample: bytes) -> None:
        self.samples.append(sample)
        self.made += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _watch(self, store: Store) -> None:
        """Look at the store's size now and then."""
        least = DATABASE_REST_SECONDS if store.blocks else STEP_SECONDS
        while not self.is_stopped:
            began = time.monotonic()
            try:
                buffers, size, database = await asyncio.to_thread(_look, store)
                self._store = self._store._replace(buffers=buffers, bytes=size, database=database)
            except Exception as error:  # requests meet it, too; the samples go on with what was known
                logger.debug("The history cannot ask the store for its size: %s", error)
            await self._rest(max(least, STORE_REST_FACTOR * (time.monotonic() - began)))

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()


def _look(store: Store) -> tuple[int, int, dict[str, float]]:
    return *store.size(), store.measures()


class Events:
    """The pieces of a stream: each new sample as an event. A client that reads slowly misses samples.

    Raises `Busy` if `MAX_STREAMS` are open. `aclose` makes room for another.
    """

    def __init__(self, history: History) -> None:
        if history.streams >= MAX_STREAMS:
            raise Busy(f"{MAX_STREAMS} streams of events are open already; this process has no more", limit=MAX_STREAMS)
        history.streams += 1
        self._history, self._is_open, self._has_begun = history, True, False
        self._seen, self._end = history.made, time.monotonic() + STREAM_SECONDS

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> bytes:
        piece = await self._next()
        self._history.count_sent(len(piece))
        return piece

    async def _next(self) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            return b": a sample follows every %d seconds\n\n" % STEP_SECONDS  # a proxy passes on the head with it
        history = self._history
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                while self._seen == history.made and not history.is_stopped:
                    await history.news()
        if history.is_stopped or time.monotonic() > self._end:
            raise StopAsyncIteration
        if self._seen == history.made:
            return b":\n\n"
        self._seen = history.made
        return b"event: sample\ndata: %b\n\n" % history.samples[-1]

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            self._history.streams -= 1
