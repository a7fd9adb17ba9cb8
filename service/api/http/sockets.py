"""The socket below a transport: it is read directly while a large body is on its way."""

from __future__ import annotations

import asyncio
import os

LOOKS = 40
"""How often `receive_now` looks for bytes in vain before the loop goes to sleep, which takes longer."""

LEAST_BYTES = 1 << 14
"""If at least so many bytes come at once, it begins to count its looks again."""

MOST_BYTES = 1 << 21
"""After so many bytes it is the turn of other connections."""


def plain_socket(transport: asyncio.Transport) -> int | None:
    """Return the socket's number; None if it is closed, or with TLS, which must decipher what comes."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return None  # another connection may have the number of a closed one
    number: int = transport.get_extra_info("socket").fileno()
    return number


def receive_now(socket: int, rest: memoryview) -> memoryview:
    """Fill `rest` with what comes in the next moments; return what is left of it then."""
    enough, looks = max(len(rest) - MOST_BYTES, 0), 0
    while len(rest) > enough and looks < LOOKS:
        try:
            count = os.readv(socket, [rest])
        except BlockingIOError:
            looks += 1
            continue
        except OSError:
            break  # the loop meets it too, and ends the connection
        if not count:
            break  # as it does this
        rest, looks = rest[count:], 0 if count >= LEAST_BYTES else looks + 1
    return rest
