"""The closer thread: it closes the epochs whose deadlines are over, by the database's clock."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from service.buffers.perform import Outcome, Request
from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Statement, double
from service.buffers.rules import CloseIfDue

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""The longest pause between looks: the server that has set a deadline may be gone when it ends."""

MOST_DUE = 256
"""Epochs that the closer closes in one round: a batch of the writer."""

PATIENCE_SECONDS = 10.0
"""How long a look waits for the database."""

_FIRST = Statement(
    f"""
    select namespace, name, due - coalesce($1::double precision, extract(epoch from clock_timestamp()))
    from buffers where due is not null order by due limit {MOST_DUE}
    """,
    double,
)


class Closer:
    """The closer thread. It begins at once, and ends with `close`. `submit` takes a request of a namespace."""

    def __init__(
        self,
        database: Database,
        submit: Callable[[Request, str], Future[Outcome]],
        clock: Callable[[], float] | None,
    ) -> None:
        self._database, self._submit, self._clock = database, submit, clock
        self._next, self._closed, self._changed = 0.0, False, threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gradserve-closer", daemon=True)
        self._thread.start()

    def expect(self, seconds: float) -> None:
        """Look whether an epoch is due in this many seconds, or before."""
        with self._changed:
            if (at := time.monotonic() + seconds) < self._next:
                self._next = at
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._waited():
            try:
                self.expect(self._round())
            except Exception as error:  # the thread outlives what it cannot do
                logger.warning("The store's closer goes on later: %s", " ".join(str(error).split()))

    def _waited(self) -> bool:
        """Wait until an epoch may be due. Return False if the store is closed."""
        with self._changed:
            while not self._closed and (seconds := self._next - time.monotonic()) > 0:
                self._changed.wait(seconds)
            self._next = time.monotonic() + LOOK_SECONDS
            return not self._closed

    def _round(self) -> float:
        """Close the epochs that are due. Return in how many seconds the next is due; infinity if none is."""
        now = None if self._clock is None else self._clock()
        rows, _ = self._database.ask(_FIRST(now), PATIENCE_SECONDS)
        due = [(namespace, name) for namespace, name, seconds in rows if seconds <= 0]
        made = [self._submit(Request([CloseIfDue(name=name)]), namespace) for namespace, name in due]
        for future in made:
            future.result()
        return 0.0 if len(due) == MOST_DUE else min((row[2] for row in rows if row[2] > 0), default=math.inf)
