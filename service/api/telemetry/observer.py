"""What watches requests from outside: metrics, the access log, traces, statistics."""

from __future__ import annotations

from service.api.http.call import Call


class Observer:
    """Sees every request begin and end, in the event loop. It must not fail, and must not wait."""

    def began(self, call: Call) -> None:
        """A request came; nothing of it has been checked."""

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        """The request has its answer after this time. `bug` is the class of an error that nobody foresaw."""

    def close(self) -> None:
        """The server has stopped."""
