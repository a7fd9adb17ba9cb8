"""The socket below a transport, read directly while a large body is on its way."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from typing import Any

MAX_POLLS = 40
"""Empty polls before `receive_now` returns: 40 of them take less time than the event loop needs to wake."""

PROGRESS_BYTES = 1 << 14
"""A read of at least this size resets the count of empty polls."""

TURN_BYTES = 1 << 21
"""Bytes after which `receive_now` returns, so that other connections have their turn."""

UNIX_BUFFER_BYTES = 1 << 20
"""Bytes of an answer that a UNIX socket may hold, if the system allows. The usual 208 KB are no faster than TCP, and
beyond 1 MB nothing is gained.
"""


def unix_path(connection: Mapping[str, Any]) -> str | None:
    """Return the path of the UNIX socket that an ASGI connection came over; None for TCP."""
    path, port = connection.get("server") or (None, 0)
    return path if port is None else None


def widen(transport: asyncio.BaseTransport) -> None:
    """Let a UNIX socket hold more bytes than by default: server and client then take turns less often."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


def plain_socket(transport: asyncio.Transport) -> int | None:
    """Return the descriptor of the socket; None if it is closed, or if TLS must decrypt its bytes."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return None  # the descriptor of a closed socket may belong to another connection by now
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor


def receive_now(descriptor: int, rest: memoryview) -> memoryview:
    """Fill `rest` with the bytes that come in the next moments; return the part that is not filled."""
    min_rest, polls = max(len(rest) - TURN_BYTES, 0), 0
    while len(rest) > min_rest and polls < MAX_POLLS:
        try:
            count = os.readv(descriptor, [rest])
        except BlockingIOError:
            polls += 1
            continue
        except OSError:
            break  # the event loop meets the error too, and ends the connection
        if not count:
            break  # the client has closed; the event loop sees it too
        rest, polls = rest[count:], 0 if count >= PROGRESS_BYTES else polls + 1
    return rest
