"""Services whose processes die at points of a commit, over each store that outlives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import httpx
import pytest

from tests.faults.cluster import wait
from tests.faults.servers import LONG, Client, Server

Kind: TypeAlias = Literal["lmdb", "workers", "postgres"]
KINDS: list[Kind] = ["lmdb", "workers", "postgres"]
"""One process over LMDB, two worker processes over LMDB, two servers over PostgreSQL."""

POINTS: dict[Kind, list[str]] = {
    "lmdb": ["made", "committed", "before commit"],
    "workers": ["committed", "made", "before commit"],
    "postgres": ["made", "committed"],
}
"""The points of a commit of small gradients. Only after `committed` has anything happened."""


class Mortal:
    """A service, one of whose processes dies when a test orders it. Another server of the store may go on."""

    def __init__(self, kind: Kind, server: Server, other: Server | None, order: Path) -> None:
        self.kind, self.server, self.other, self._order = kind, server, other, order
        self._done = order.with_suffix(".done")

    @property
    def points(self) -> list[str]:
        """The points at which a test lets a process die: before the commit and after it, or all, five times."""
        points = POINTS[self.kind]
        return 5 * points if LONG else points[: 2 - (self.kind == "workers")]

    @property
    def closing_points(self) -> list[str]:
        """The points before and after the commit that closes steps which are due."""
        return ["made" if self.kind == "postgres" else "before commit", "committed"]

    def order(self, point: str, number: int = 1) -> None:
        """Let the process die that is the first to reach the point as often as that."""
        self._done.unlink(missing_ok=True)
        self._order.write_text(f"{point}:{number}")

    def withdraw(self) -> bool:
        """Take the order back. Return whether a process has died of it."""
        self._order.unlink(missing_ok=True)
        return self.has_died()

    def has_died(self) -> bool:
        return self._done.exists()

    def await_death(self) -> None:
        wait(self.has_died, "no process dies")
        if self.kind != "workers":
            self.server.ended()

    def revive(self) -> None:
        """Start again what has died. Worker processes are replaced by their parent."""
        if self.kind == "workers":
            wait(self.server.is_ready, "the worker is not replaced")
        else:
            self.server.start()

    @contextmanager
    def dying(self, point: str, number: int = 1) -> Iterator[None]:
        """Let a process die in this context. When the context is left, the service is whole again."""
        self.order(point, number)
        yield
        self.await_death()
        self.revive()

    def loses(self, client: Client, point: str, method: str, path: str, **request: Any) -> None:
        """Send a request that kills a process."""
        with self.dying(point), pytest.raises(httpx.TransportError):
            client.once(method, path, **request)


@contextmanager
def mortal(kind: Kind, place: Path, postgres_url: str) -> Iterator[Mortal]:
    """Start a service with a store of its own."""
    order, own = place / "order", dict[str, Any](module="tests.faults.killing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_TEST_KILL", str(order))
        if kind == "postgres":
            shared: dict[str, Any] = {"store": postgres_url, "postgres_schema": f"s{uuid4().hex}"}
            with Server(place / "mortal", **own, **shared) as server, Server(place / "other", **shared) as other:
                yield Mortal(kind, server, other, order)
        else:
            with Server(place / "store", workers=1 + (kind == "workers"), **own) as server:
                yield Mortal(kind, server, None, order)
