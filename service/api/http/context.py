"""What is known of a request in flight. It travels in the request's ASGI scope, from the keys to the log."""

from __future__ import annotations

import math

from starlette.types import Scope

from service.api.http.auth import ANYONE, Caller
from service.engine import Engine
from service.errors import InvalidParameter, NotReady, shown
from service.settings import Settings

CONTEXT = "gradserve"
"""Where in a request's scope its context is."""


class Context:
    """One request: what came, who asks, what it holds, and what it has cost so far."""

    __slots__ = ("caller", "headers", "held", "received", "released", "request_id", "sent", "spent", "status")

    def __init__(self, headers: dict[bytes, bytes]) -> None:
        self.headers = headers
        """Its headers, their names in lower case; of those that came twice, the last."""
        self.caller: Caller = ANYONE
        self.request_id: str | None = None
        self.held = 0
        """Bytes of memory that it was admitted with, until it is `released`."""
        self.released = False
        self.status = 0
        """The status of its answer, once it has one."""
        self.received = self.sent = 0
        """Bytes of the body that came, and of the answer's."""
        self.spent: dict[str, int] = {}
        """Nanoseconds by phase."""


def context_of(scope: Scope) -> Context:
    """The context of the request of this scope."""
    context: Context = scope[CONTEXT]
    return context


def caller_of(scope: Scope) -> Caller:
    """Who asks."""
    return context_of(scope).caller


def settings_of(scope: Scope) -> Settings:
    """The server's settings."""
    settings: Settings = scope["app"].settings
    return settings


def patience_of(scope: Scope) -> float:
    """How many seconds the client waits, by its Request-Timeout, but not longer than the server.

    Raises `InvalidParameter`.
    """
    longest = settings_of(scope).request_timeout
    value = context_of(scope).headers.get(b"request-timeout")
    if value is None:
        return longest
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        text = shown(value.decode("latin-1"))
        raise InvalidParameter(
            f"Request-Timeout is {text}, but must be a number of seconds above 0", parameter="Request-Timeout"
        )
    return min(seconds, longest)


def engine_of(scope: Scope) -> Engine:
    """The server's engine. Raises `NotReady` before the start has finished and after the stop has begun."""
    engine: Engine | None = scope["app"].engine
    if engine is None:
        raise NotReady("The server is starting or stopping; try again soon")
    return engine
