"""How much the server takes on: beyond it, a request is told at once to come again, before its body is read."""

from __future__ import annotations

from starlette.types import Scope

from service.engine import Engine
from service.errors import Busy

SMALL_BYTES = 1 << 16
"""A body up to this size is always taken: it costs less than to refuse it."""

_HELD = "gradserve.held"
"""Where in a request's scope the bytes are that it holds."""


class Admission:
    """Counts the bytes that requests in flight hold, of which there may be `max_bytes` altogether.

    One request may always have as much as it is allowed otherwise, if it is alone. Used by the event loop only.
    """

    def __init__(self, max_bytes: int, max_waiting: int, largest: int) -> None:
        self._max_bytes, self._max_waiting, self._largest = max_bytes, max_waiting, largest
        self.bytes = 0

    def admit(self, scope: Scope, engine: Engine | None) -> None:
        """Let the request in, until it is released. Raises `Busy`."""
        size = _announced(scope)
        if not SMALL_BYTES < size <= self._largest:  # what is larger is refused for that
            return
        if engine is not None and engine.waiting >= self._max_waiting:
            raise Busy(
                f"{engine.waiting} requests wait to be computed already; the limit is {self._max_waiting}"
                " (GRADSERVE_MAX_WAITING)",
                limit=self._max_waiting,
            )
        self.hold(scope, size)

    def hold(self, scope: Scope, size: int) -> None:
        """Let the request hold `size` bytes more, until it is released. Raises `Busy`."""
        if self.bytes and self.bytes + size > self._max_bytes:
            raise Busy(
                f"The requests in flight hold {self.bytes} bytes, and this one needs {size} more; the limit is"
                f" {self._max_bytes} (GRADSERVE_MAX_BYTES_IN_FLIGHT)",
                limit=self._max_bytes,
            )
        self.bytes += size
        scope[_HELD] = scope.get(_HELD, 0) + size

    def release(self, scope: Scope) -> None:
        """The request has its answer, and holds nothing more."""
        self.bytes -= scope.get(_HELD, 0)


def hold(scope: Scope, size: int) -> None:
    """Let the request hold `size` bytes more, of its answer, or of a body that comes in chunks. Raises `Busy`."""
    if size > SMALL_BYTES:
        scope["app"].admission.hold(scope, size)


def _announced(scope: Scope) -> int:
    """The bytes that the body will have, as far as that is known."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
    return 0
