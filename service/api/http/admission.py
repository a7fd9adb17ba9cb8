"""How much the server takes on: beyond it, a request is told at once to come again, before its body is read."""

from __future__ import annotations

import threading

from starlette.types import Scope

from service.api.http.context import Context, context_of
from service.engine import Engine
from service.errors import Busy

SMALL_BYTES = 1 << 16
"""A body up to this size is always taken: it costs less than to refuse it."""


class Admission:
    """Counts the bytes that requests in flight hold, of which there may be `max_bytes` altogether.

    One request may always have as much as it is allowed otherwise, if it is alone. Thread-safe.
    """

    def __init__(self, max_bytes: int, max_waiting: int, largest: int) -> None:
        self._max_bytes, self._max_waiting, self._largest = max_bytes, max_waiting, largest
        self.bytes = 0
        self._lock = threading.Lock()

    def admit(self, context: Context, engine: Engine | None) -> None:
        """Let the request in, until it is released. Raises `Busy`."""
        size = int(context.headers.get(b"content-length", 0))  # the HTTP parser has seen to it that this is a number
        if not SMALL_BYTES < size <= self._largest:  # what is larger is refused for that
            return
        if engine is not None and engine.waiting >= self._max_waiting:
            raise Busy(
                f"{engine.waiting} requests wait for a thread already; the limit is {self._max_waiting}"
                " (GRADSERVE_MAX_WAITING)",
                limit=self._max_waiting,
            )
        self.hold(context, size)

    def hold(self, context: Context, size: int) -> None:
        """Let the request hold `size` bytes more, until it is released. Raises `Busy`."""
        with self._lock:
            if context.released:  # its client has left, and nobody looks at it any more
                return
            if self.bytes > context.held and self.bytes + size > self._max_bytes:
                raise Busy(
                    f"The requests in flight hold {self.bytes} bytes, and this one needs {size} more; the limit is"
                    f" {self._max_bytes} (GRADSERVE_MAX_BYTES_IN_FLIGHT)",
                    limit=self._max_bytes,
                )
            self.bytes += size
            context.held += size

    def give_back(self, context: Context, size: int) -> None:
        """The request does not hold `size` bytes after all."""
        with self._lock:
            if not context.released:
                self.bytes -= size
                context.held -= size

    def release(self, context: Context) -> None:
        """The request has its answer, and holds nothing more."""
        with self._lock:
            self.bytes -= context.held
            context.released = True


def hold(scope: Scope, size: int) -> None:
    """Let the request hold `size` bytes more, of its answer, or of a body that comes in chunks. Raises `Busy`."""
    if size > SMALL_BYTES:
        scope["app"].admission.hold(context_of(scope), size)


def give_back(scope: Scope, size: int) -> None:
    """Undo `hold` of as much."""
    if size > SMALL_BYTES:
        scope["app"].admission.give_back(context_of(scope), size)
