"""The fence: what a client has read is on the synchronous standby before the client has the answer.

A commit is visible a moment before its own client has the answer, and stays visible if the wait for the standby is
cancelled. A replayed key, and an epoch that has just closed, may come from such a commit. A failover would lose it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from service.buffers.postgres.batch import FENCE, NOW
from service.buffers.postgres.connections import Database, retried


class Fence:
    """Waits for the standby, once for all who wait."""

    def __init__(self, database: Database, clock: Callable[[], float] | None) -> None:
        self._database, self._clock = database, clock
        self.crossed = 0.0
        """The standby has everything that was committed before this time, in seconds since 1970."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradserve-fence")
        self._lock = threading.Lock()
        self._next: Future[None] | None = None

    def wait(self) -> None:
        """Return once the standby has all that was committed before the call. Raises `StoreFailed`."""
        if not self._database.replicated:
            return
        with self._lock:
            if self._next is None:
                self._next = self._pool.submit(retried, self._cross)
            crossing = self._next
        crossing.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _cross(self) -> None:
        with self._lock:
            self._next = None
        with self._database.transaction() as connection:
            self._database.check_standby(connection)
            began = connection.execute(NOW).fetchall()[0][0] if self._clock is None else self._clock()
            connection.execute(FENCE)
        self.crossed = began
