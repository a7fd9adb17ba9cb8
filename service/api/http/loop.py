"""The event loop of a server with TLS and a UNIX socket."""

from __future__ import annotations

import socket
from typing import Any

import uvloop


class Loop(uvloop.Loop):
    """An event loop that uses TLS on TCP only. uvicorn has one TLS context for all sockets."""

    async def create_server(self, *given: Any, sock: socket.socket | None = None, ssl: Any = None, **more: Any) -> Any:
        """Listen as asyncio's loops do, but on a UNIX socket without TLS."""
        if sock is not None and sock.family == socket.AF_UNIX:
            ssl = None
        return await super().create_server(*given, sock=sock, ssl=ssl, **more)
