"""Who sends a request: a namespace, and the scopes of an API key."""

from __future__ import annotations

from typing import NamedTuple

from service.errors import Forbidden
from service.keys import SCOPES


class Caller(NamedTuple):
    """The sender of a request: the namespace that it sees, and what it may do there."""

    namespace: str
    scopes: frozenset[str]

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the caller has this scope."""
        if scope not in self.scopes:
            raise Forbidden(
                f"This API key has {', '.join(sorted(self.scopes))}, but the request needs {scope}",
                scope=scope,
            )


ANYONE = Caller("", frozenset(SCOPES))
"""The caller of a server without API keys."""
