"""The deadlines of open steps: the writer closes the steps that are due, by the database's clock."""

from __future__ import annotations

import math
import time

from service.buffers.perform import Request
from service.buffers.postgres.batch import Submission
from service.buffers.postgres.connections import Database
from service.buffers.postgres.exchange import Connection
from service.buffers.postgres.statements import DUE
from service.buffers.rules import CloseIfDue

LOOK_SECONDS = 0.5
"""The longest pause between looks: the server that has set a deadline may be gone when it ends."""


class Deadlines:
    """Knows when the writer has to look for steps that are due."""

    def __init__(self, database: Database) -> None:
        self._database, self._next = database, 0.0

    @property
    def pause(self) -> float:
        """The seconds until the next look."""
        return max(0.0, self._next - time.monotonic())

    def expect(self, seconds: float) -> None:
        """Look in this many seconds, or before."""
        self._next = min(self._next, time.monotonic() + seconds)

    def begin(self) -> None:
        """Put off the next look, also if this one fails: a database that is away is not asked without a pause."""
        self._next = time.monotonic() + LOOK_SECONDS

    def due(self, connection: Connection) -> list[Submission]:
        """Return a request for each step that is due, and expect the next deadline."""
        rows = self._database.read(connection, DUE(self._database.clock()))
        self.expect(min((seconds for _, _, seconds in rows if seconds > 0), default=math.inf))
        due = [(namespace, name) for namespace, name, seconds in rows if seconds <= 0]
        return [Submission(Request([CloseIfDue(name=name)]), namespace) for namespace, name in due]
