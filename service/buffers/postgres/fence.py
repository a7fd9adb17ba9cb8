"""The fence: what a client has read is on the synchronous standby before the client has the answer.

A commit stays visible if its wait for the standby is cancelled, or if the primary crashes meanwhile. An epoch that has
just closed may come from such a commit, and a failover would lose it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from service.buffers.postgres.connections import Database, MovedError, retried


class Fence:
    """Waits for the standby, once for all who wait."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradserve-fence")
        self._lock = threading.Lock()
        self._next: Future[str] | None = None
        self._crossed = ("", 0.0)
        """The server, and a time: its standby has everything that was committed before."""

    def wait(self, server: str, time: float) -> None:
        """Return once the standby of the server has all that was committed before `time`, in seconds since 1970.

        If that is in the future, before the call. Raises `MovedError` if another server is the primary by now, and
        `StoreFailed`.
        """
        crossed, until = self._crossed
        if crossed == server and time <= until:
            return
        with self._lock:
            if self._next is None:
                self._next = self._pool.submit(retried, self._cross)
            crossing = self._next
        if crossing.result() != server:
            raise MovedError("it has failed over")

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _cross(self) -> str:
        with self._lock:
            self._next = None
        with self._database.idle() as connection:
            self._crossed = self._database.cross(connection)
        return self._crossed[0]
