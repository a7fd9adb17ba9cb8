"""The sender of a request: a namespace, and the scopes of an API key."""

from __future__ import annotations

from typing import NamedTuple

from service.errors import Forbidden
from service.keys import SCOPES


class Caller(NamedTuple):
    """The namespace that the sender of a request sees, its scopes there, and the name of its key."""

    namespace: str
    scopes: frozenset[str]
    name: str = "anonymous"

    def require(self, scope: str) -> None:
        """Raise `Forbidden` unless the caller has this scope."""
        if scope not in self.scopes:
            raise Forbidden(
                f"This API key has {', '.join(sorted(self.scopes))}, but the request needs {scope}",
                scope=scope,
            )


ANYONE = Caller("", frozenset(SCOPES))
"""Every caller of a server without API keys."""
