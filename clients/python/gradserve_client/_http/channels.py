"""The ways to the server: directly, through a proxy, or by a transport that the caller gave."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from gradserve_client._http.outcomes import Answer
from gradserve_client._http.requests import Requests
from gradserve_client._http.runner import Channel
from gradserve_client._http.transport import MOST_IDLE, Transport
from gradserve_client.errors import InvalidInput

T = TypeVar("T")

_LIMITS = httpx.Limits(max_keepalive_connections=MOST_IDLE)
"""No limit of connections in use: calls that wait for a step must not delay the call that would close it."""


def channel(requests: Requests, transport: httpx.BaseTransport | None) -> Channel:
    """Return the way to the server. Raises `InvalidInput` if the environment names a proxy that does not work."""
    if transport is None and (proxy := requests.proxy()) is None:
        return Transport(requests.address)
    return HttpxChannel(transport or through(httpx.HTTPTransport, proxy))


def through(transport: Callable[..., T], proxy: str | None, **settings: Any) -> T:
    """Return a transport of httpx's through the proxy, directly for None. Raises `InvalidInput`; see `channel`."""
    try:
        return transport(proxy=proxy, limits=_LIMITS, **settings)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"The proxy of the environment is {proxy!r}: {error}") from error
    except OSError as error:
        raise InvalidInput(f"The certificates of the environment (SSL_CERT_FILE) cannot be read: {error}") from error


class HttpxChannel:
    """Sends by a transport of httpx's."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer; see `Channel`."""
        response = self._transport.handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        body: bytearray | None = None
        try:
            for piece in response.stream:
                body = joined(body, piece)
                if time.monotonic() > until:
                    raise httpx.ReadTimeout("the answer took too long")
        finally:
            response.stream.close()
        return Answer(response.status_code, response.headers, body or bytearray())

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


def joined(body: bytearray | None, piece: bytes) -> bytearray:
    """Append a piece to a body. A body that comes as a single `bytearray` is not copied."""
    if body is None:
        return piece if isinstance(piece, bytearray) else bytearray(piece)
    body += piece
    return body
