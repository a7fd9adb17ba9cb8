"""The fence: what a client has read is on the synchronous standby before the client has the answer.

A commit stays visible if its wait for the standby is cancelled, or if the primary crashes meanwhile. What is read may
come from such a commit, and a failover would lose it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from service.buffers.postgres.connections import Database
from service.buffers.postgres.failures import MovedError, NoStandbyError, as_client_error
from service.buffers.postgres.outage import Outage
from service.buffers.store import without_traceback


class Fence:
    """Waits for the standby, `seconds` at most, once for all who wait. The first of them asks the database.

    Without a standby it waits for none: reads that wait take the threads of the pool from everybody else.
    """

    def __init__(self, database: Database, outage: Outage, seconds: float) -> None:
        self._database, self._outage, self._seconds = database, outage, seconds
        self._joining, self._crossing = threading.Lock(), threading.Lock()
        self._next: Future[str] | None = None

    def wait(self, server: str) -> None:
        """Return once the standby of the server has all that was committed before the call, if there must be one.

        Raises `MovedError` if another server is the primary by now, and `StoreFailed`.
        """
        if self._database.replicated and self._joined().result() != server:
            raise MovedError("it has failed over")

    def _joined(self) -> Future[str]:
        """Return the next crossing, which begins after the call. Its result is the name of the server."""
        with self._joining:
            if self._next is not None:
                return self._next
            crossing = self._next = Future()
        with self._crossing:
            with self._joining:
                self._next = None
            try:
                crossing.set_result(self._outage.read(self._cross))
            except Exception as error:
                crossing.set_exception(without_traceback(error))
        return crossing

    def _cross(self) -> str:
        with self._database.readers.lend(self._seconds) as connection:
            try:
                return self._database.cross(connection)
            except NoStandbyError as error:
                raise as_client_error(error) from None
