"""Ports of the loopback interface for servers that a test starts, kills and starts again."""

from __future__ import annotations

import secrets
import socket

PORTS = range(20_000, 30_000)
"""Ports that Linux gives to no socket that asks for any: by default it begins at 32768."""


def free_port() -> int:
    """Return a port that nothing uses, and that no test gets again while this process lives.

    A UDP socket of the same number is the mark: servers listen on TCP, so it is in nobody's way.
    """
    while True:
        port, mark = secrets.choice(PORTS), socket.socket(type=socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            mark.close()
        else:
            mark.detach()  # its descriptor stays open
            return port
