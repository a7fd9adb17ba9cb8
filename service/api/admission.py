"""How much the server takes on: beyond it, a request is told at once to come again, before its body is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

from service.engine import Engine
from service.errors import Busy

SMALL_BYTES = 1 << 16
"""A body up to this size is always taken: it costs less than to refuse it."""

_TICKET = "gradserve.ticket"


class Admission:
    """Counts the bytes of the requests in flight, of which there may be `max_bytes` altogether.

    One request may always have as much as it is allowed otherwise, if it is alone. Used by the event loop only.
    """

    def __init__(self, max_bytes: int, max_waiting: int, largest: int) -> None:
        self._max_bytes, self._max_waiting, self._largest = max_bytes, max_waiting, largest
        self.bytes = 0
        self.refused = 0

    @contextmanager
    def admitted(self, scope: Scope, engine: Engine | None) -> Iterator[None]:
        """Let the request in for the time of the block. Raises `Busy`."""
        ticket = scope[_TICKET] = Ticket(self)
        size = _announced(scope)
        if SMALL_BYTES < size <= self._largest:  # what is larger is refused for that
            if engine is not None and engine.waiting >= self._max_waiting:
                self.refused += 1
                raise Busy(
                    f"{engine.waiting} requests wait to be computed already; the limit is {self._max_waiting}"
                    " (GRADSERVE_MAX_WAITING)",
                    limit=self._max_waiting,
                )
            ticket.take(size)
        try:
            yield
        finally:
            self.bytes -= ticket.size

    def take(self, size: int) -> None:
        """Raise `Busy` if so many bytes more are too many."""
        if self.bytes and self.bytes + size > self._max_bytes:
            self.refused += 1
            raise Busy(
                f"The requests in flight hold {self.bytes} bytes, and this one needs {size} more; the limit is"
                f" {self._max_bytes} (GRADSERVE_MAX_BYTES_IN_FLIGHT)",
                limit=self._max_bytes,
            )
        self.bytes += size


class Ticket:
    """What a request in flight holds."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self.size = admission, 0

    def take(self, size: int) -> None:
        """Hold so many bytes more, until the request has its answer. Raises `Busy`."""
        self._admission.take(size)
        self.size += size


def hold(scope: Scope, size: int) -> None:
    """Let the request hold `size` bytes more, of its answer, or of a body that comes in chunks. Raises `Busy`."""
    if size > SMALL_BYTES and _TICKET in scope:
        scope[_TICKET].take(size)


def _announced(scope: Scope) -> int:
    """The bytes that the body will have, as far as that is known."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return 0
