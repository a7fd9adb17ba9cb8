"""The socket below a transport, read directly while a large body is on its way."""

from __future__ import annotations

import asyncio
import os

MAX_POLLS = 40
"""Empty polls before `receive_now` returns: 40 of them take less time than the event loop needs to wake."""

PROGRESS_BYTES = 1 << 14
"""A read of at least this size resets the count of empty polls."""

TURN_BYTES = 1 << 21
"""Bytes after which `receive_now` returns, so that other connections have their turn."""


def plain_socket(transport: asyncio.Transport) -> int | None:
    """Return the descriptor of the socket; None if it is closed, or if TLS must decrypt its bytes."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return None  # the descriptor of a closed socket may belong to another connection by now
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor


def receive_now(socket: int, rest: memoryview) -> memoryview:
    """Fill `rest` with the bytes that come in the next moments; return the part that is not filled."""
    min_rest, polls = max(len(rest) - TURN_BYTES, 0), 0
    while len(rest) > min_rest and polls < MAX_POLLS:
        try:
            count = os.readv(socket, [rest])
        except BlockingIOError:
            polls += 1
            continue
        except OSError:
            break  # the event loop meets the error too, and ends the connection
        if not count:
            break  # the client has closed; the event loop sees it too
        rest, polls = rest[count:], 0 if count >= PROGRESS_BYTES else polls + 1
    return rest
