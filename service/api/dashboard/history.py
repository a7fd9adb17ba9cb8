"""The samples of the last hour, which every process keeps.

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
from service.api.telemetry.metrics import WAITING, Metrics
from service.buffers.store import Store
from service.engine.engine import Engine

logger = logging.getLogger(__name__)

STEP_SECONDS = 2
"""Seconds between samples: a chart that moves, for a thousandth of a processor."""

KEPT_SAMPLES = 1800
"""Samples that a process keeps, an hour: they take 1 to 3 MB."""

STORE_REST_FACTOR = 100
"""A look at the store's size rests a hundred times as long as it took: a large store is asked less often."""

DATABASE_REST_SECONDS = 10
"""The least rest between looks at a database: each process of each replica asks it."""


class History:
    """The samples of all worker processes, as this process sees them. Only the event loop uses it."""

    def __init__(self, metrics: Metrics, store_limit_bytes: int) -> None:
        self._metrics, self._store = metrics, StoreState(store_limit_bytes)
        self._samples: deque[tuple[float, bytes]] = deque(maxlen=KEPT_SAMPLES)
        self._stopped = asyncio.Event()

    def since(self, at: float) -> list[bytes]:
        """Return the samples of later steps as JSON, oldest first. Times are in seconds since 1970.

        Processes take the sample of one step within moments, so one soon after `at` may be of the same step.
        """
        return [sample for ended, sample in self._samples if ended - at > STEP_SECONDS / 2]

    @asynccontextmanager
    async def recording(self, engine: Engine, store: Store) -> AsyncIterator[None]:
        """Take samples meanwhile. On leaving, nothing reads the store any more."""
        tasks = [asyncio.create_task(self._take_samples(engine)), asyncio.create_task(self._watch(store))]
        try:
            yield
        finally:
            self._stopped.set()
            await asyncio.gather(*tasks)

    async def _take_samples(self, engine: Engine) -> None:
        before, began = None, 0.0
        while not self._stopped.is_set():
            self._metrics.set(WAITING, engine.pool.waiting())
            with suppress(OSError):  # no file descriptor may be free just now
                after, ended, at = await asyncio.to_thread(self._metrics.totals), time.monotonic(), time.time()
                if before is not None:
                    sample = sample_of(before, after, ended - began, at, self._store)
                    self._samples.append((at, sample.model_dump_json().encode()))
                before, began = after, ended
            now = time.monotonic()
            await self._rest((round(now / STEP_SECONDS) + 1) * STEP_SECONDS - now)  # all processes at the same moments

    async def _watch(self, store: Store) -> None:
        """Look at the store's size now and then."""
        least = DATABASE_REST_SECONDS if store.blocks else STEP_SECONDS
        while not self._stopped.is_set():
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
