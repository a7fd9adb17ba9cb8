"""Turns of small requests and of large gradients, which share the log of the database.

A commit waits until the disks, and those of the standby, have all that was written to the log before. Beside gradients
of 64 MB that is up to eight times as long. So a large gradient is written in pieces, each after a commit.
"""

from __future__ import annotations

import threading
import time

TURN_BYTES = 1 << 18
"""Bytes of a large gradient that are written in a turn: they prolong a commit by a third."""

TURN_SECONDS = 0.02
"""The longest wait for a commit: a large gradient must not wait for a database that is slow."""

RECENT_SECONDS = 0.05
"""How long after a small request the next is expected."""


class Turns:
    """Tells threads that write large gradients when a transaction with small requests has been made."""

    def __init__(self) -> None:
        self._made, self._last = threading.Condition(), 0.0

    def tell(self) -> None:
        """Say that a transaction with small requests has been made."""
        self._last = time.monotonic()
        with self._made:
            self._made.notify_all()

    def wait(self) -> None:
        """Wait for the next such transaction, if there was one just now."""
        if time.monotonic() - self._last < RECENT_SECONDS:
            with self._made:
                self._made.wait(TURN_SECONDS)
