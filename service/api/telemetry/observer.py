"""The base class of what observes requests: metrics, the access log, traces, statistics."""

from __future__ import annotations

from service.api.http.call import Call


class Observer:
    """Sees every request begin and end, in the event loop. An observer must neither fail nor wait."""

    def began(self, call: Call) -> None:
        """Note that a request has come. Nothing in it is checked yet."""

    def ended(self, call: Call, nanoseconds: int, bug: str | None) -> None:
        """Note that a request has ended after this time. `bug` is the class of an unexpected error."""

    def close(self) -> None:
        """Finish: the server has stopped."""
