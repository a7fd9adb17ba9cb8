"""An outage of the database: its reads fail together, and leave the threads of the pool to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from service.buffers.postgres.failures import BusyError, MovedError, NoStandbyError, away, is_transient, retried

R = TypeVar("R")

AWAY_SECONDS = 2.0
"""How long reads wait for a database that is away, counted for all from its first failure. Clients retry after that.

A read that waits has a thread of the pool. So kernels wait at most this long, once in an outage.
"""

SCOUT_SECONDS = 0.1
"""After that, how long a read waits for another one that asks whether the database is back."""


class Outage:
    """What the reads of a store know of an outage. Each waits `seconds` for a database that answers slowly."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._scout = threading.Lock()

    def read(self, work: Callable[[], R]) -> R:
        """Return what `work` reads, tried again after transient errors. In an outage, one read tries for all, once.

        Raises `StoreFailed`, and what `work` raises.
        """
        if not self._is_long():
            return self._tried(work)
        if not self._scout.acquire(timeout=SCOUT_SECONDS):
            raise away()
        try:
            return self._tried(work)
        finally:
            self._scout.release()

    def _is_long(self) -> bool:
        since = self._since
        return since is not None and time.monotonic() > since + AWAY_SECONDS

    def _tried(self, work: Callable[[], R]) -> R:
        def attempt() -> R:
            began = time.monotonic()
            try:
                found = work()
            except Exception as error:
                if is_transient(error) and not isinstance(error, (BusyError, MovedError, NoStandbyError)):
                    self._since = self._since or began
                raise
            self._since = None
            return found

        return retried(attempt, self._is_long, seconds=self._seconds)
