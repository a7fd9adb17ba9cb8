"""An outage of the database: its reads fail together, and leave the threads of the pool to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from service.buffers.postgres.failures import BusyError, MovedError, NoStandbyError, away, is_transient, retried

R = TypeVar("R")

AWAY_SECONDS = 1.8
"""How long reads wait for a database that is away, counted for all from its first failure. Clients retry after that.

A silence is noticed up to 0.2 seconds later. That makes 2.

A read that waits has a thread of the pool. So kernels wait at most this long, once in an outage.
"""

SCOUT_SECONDS = 0.1
"""After that, how long reads wait for the thread that asks whether the database is back, from when it began."""


class Outage:
    """What the reads of a store know of an outage. Each waits `seconds` for a database that answers slowly.

    In an outage, a thread of its own calls `look` for all: a network that is silent would hold the read.
    """

    def __init__(self, seconds: float, look: Callable[[], object]) -> None:
        self._seconds, self._look = seconds, look
        self._since: float | None = None
        self._lock, self._scout, self._began = threading.Lock(), threading.Thread(), 0.0

    def read(self, work: Callable[[], R]) -> R:
        """Return what `work` reads, tried again after transient errors. Raises `StoreFailed`, and what it raises."""

        def checked() -> R:
            self.check()
            return work()

        return self._tried(checked)

    def check(self) -> None:
        """Raise `StoreFailed` in a long outage, unless the database is back."""
        if not self._is_long():
            return
        with self._lock:
            if not self._scout.is_alive():
                self._scout = threading.Thread(target=self._ask, name="gradserve-scout", daemon=True)
                self._scout.start()
                self._began = time.monotonic()
            scout, rest = self._scout, self._began + SCOUT_SECONDS - time.monotonic()
        scout.join(max(0.0, rest))
        if self._is_long():
            raise away()

    def _ask(self) -> None:
        with suppress(Exception):
            self._tried(self._look)

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
