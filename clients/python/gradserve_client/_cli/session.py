"""The options of every command."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradserve_client._cli.server import Server


@dataclass(frozen=True)
class Session:
    """The options of every command."""

    url: str | None
    api_key: str | None = field(repr=False)
    timeout: float
    as_json: bool

    def server(self) -> contextlib.closing[Server]:
        """Return the server, to be closed after a `with`."""
        from gradserve_client._cli.server import Server

        return contextlib.closing(Server(self.url, self.api_key, self.timeout))
