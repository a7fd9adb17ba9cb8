"""Changes by other servers: each notifies the others after its commits, and requests that wait look again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psycopg
from psycopg import sql

from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.statements import BACKEND, COMMIT, NOTIFY, SNAPSHOT
from service.errors import StoreFailed

QUIET_SECONDS = 0.25
"""Without a notification the watcher asks after this time: a notification can be lost, and poolers pass none on."""

COALESCE_SECONDS = 0.01
"""The pause between notifications: each takes as much of the processor as an add, at each server."""

PAUSE_SECONDS = 0.2
"""The pause before a lost connection is opened again."""

CLOSING_SECONDS = 1.0
"""How long `close` waits for each thread: a silent database would hold it for 30 seconds, or for 40 as it connects."""


class Watcher:
    """Counts the changes of the store, by this process and by others. `tell` says that this process made some."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.generation = 0
        """A number that grows when the store may have changed."""
        self._closed = False
        self._told = threading.Event()
        self._own: set[int] = set()
        """The backends from which this process notifies."""
        self._threads = [
            threading.Thread(target=self._keep, args=(work,), name="gradserve-watcher", daemon=True)
            for work in (self._listen, self._notify)
        ]
        for thread in self._threads:
            thread.start()

    def tell(self) -> None:
        """Count a change by this process, and notify the other processes soon."""
        self.generation += 1
        self._told.set()

    def close(self) -> None:
        """End the threads. One that waits for a silent database ends by itself: it has nothing to finish."""
        self._closed = True
        self._told.set()
        for thread in self._threads:
            thread.join(CLOSING_SECONDS)

    def _keep(self, work: Callable[[Connection], None]) -> None:
        """Do the work on a connection, and on a new connection whenever that is lost."""
        while not self._closed:
            try:
                with self._database.connect() as connection:
                    work(connection)
            except (psycopg.Error, StoreFailed):
                time.sleep(PAUSE_SECONDS)

    def _listen(self, connection: Connection) -> None:
        ((pid,),) = connection.ask(BACKEND())
        if pid == connection.info.backend_pid:  # else a pooler is between, which would pass notes on to others
            connection.execute(sql.SQL("listen {}").format(sql.Identifier(self._database.schema)))
        self.generation += 1  # anything may have changed while there was no connection
        seen = _snapshot(connection)
        while not self._closed:
            told = [note for note in connection.notifies(timeout=QUIET_SECONDS, stop_after=1)]
            if told:
                self.generation += any(note.pid not in self._own for note in told)
                continue  # the next quiet time tells whether there was more: a server may die before it notifies
            before, seen = seen, _snapshot(connection)
            self.generation += seen != before

    def _notify(self, connection: Connection) -> None:
        self._own = {connection.info.backend_pid}
        while not self._closed:
            self._told.wait()
            self._told.clear()
            connection.exchange([*self._database.beginning(durable=False), NOTIFY(self._database.schema), COMMIT()])
            time.sleep(COALESCE_SECONDS)


def _snapshot(connection: Connection) -> str:
    """Return a text that differs once a transaction has been committed."""
    text: str = connection.ask(SNAPSHOT())[0][0]
    return text
