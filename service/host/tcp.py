"""TCP sockets to listen on: one for each address of a host."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from service.errors import shown


class AddressInvalid(Exception):
    """The server cannot listen at this address, or make its socket at this path."""


def addresses(host: str, port: int) -> list[Any]:
    """Return what `socket.getaddrinfo` makes of the host; the empty host has all addresses. Raises `AddressInvalid`."""
    try:
        return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise AddressInvalid(
            f"GRADSERVE_HOST is {shown(host)}, but must be an IP address or a host name, without port and without"
            " brackets"
        ) from None


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Yield a socket bound to each address of the host. Raises `AddressInvalid`, and OSError for an address in use."""
    with ExitStack() as stack:
        sockets = []
        for family, kind, protocol, _, address in dict.fromkeys(addresses(host, port)):
            try:
                listener = stack.enter_context(socket.socket(family, kind, protocol))
            except OSError:
                continue  # this machine lacks the family, such as IPv6
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _bind(listener, address)
            sockets.append(listener)
        yield sockets


def _bind(listener: socket.socket, address: tuple[Any, ...]) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"Cannot listen on {address[0]}, port {address[1]} (GRADSERVE_HOST, GRADSERVE_PORT): {error.strerror}"
        ) from None
