"""What both clients are made with, and what they send and read; they differ in how they send it."""

from __future__ import annotations

import numbers
import os
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, Never, TypeVar
from urllib.parse import urlencode

import httpx

from gradserve_client._policy import Call, Echo, Patience, Send
from gradserve_client._transport import MOST_IDLE
from gradserve_client.errors import InvalidInput

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

_PIECE = 1 << 20
"""Bytes that the asynchronous client hands over at once."""

_FOREVER = 1e8
"""Seconds, three years."""

_UNLIMITED = httpx.Limits(max_keepalive_connections=MOST_IDLE)
"""Many calls may wait for an epoch at once; one that would close it must not wait until they are through."""


class Settings:
    """What both clients are made with."""

    def __init__(
        self,
        url: str | None,
        api_key: str | None,
        timeout: float,
        attempt_timeout: float,
        max_retries: int | None,
    ) -> None:
        url = url or os.environ.get("GRADSERVE_URL") or DEFAULT_URL
        try:
            self.url = httpx.URL(url.rstrip("/"))
        except httpx.InvalidURL as error:
            raise InvalidInput(f"The URL is {url!r}: {error}") from error
        if self.url.scheme not in ("http", "https") or not self.url.host:
            raise InvalidInput(f"The URL is {url!r}, but must begin with http:// or https:// and a host")
        if self.url.port is not None and not 0 < self.url.port < 1 << 16:
            raise InvalidInput(f"The URL is {url!r}, but a port is from 1 to {(1 << 16) - 1}")
        if self.url.userinfo:
            raise InvalidInput("The URL has a user or a password, which a gradserve server does not know; see api_key")
        for name, seconds in {"timeout": timeout, "attempt_timeout": attempt_timeout}.items():
            if not (isinstance(seconds, numbers.Real) and seconds > 0):
                raise InvalidInput(f"{name} is {seconds!r}, but must be a number of seconds above 0")
        if not (max_retries is None or (isinstance(max_retries, int) and max_retries >= 0)):
            raise InvalidInput(f"max_retries is {max_retries!r}, but must be None or an integer from 0 up")
        # A socket's clock ends somewhere, too.
        self.patience = Patience(float(min(timeout, _FOREVER)), float(min(attempt_timeout, _FOREVER)), max_retries)
        self.echo = Echo()
        self.closed = False
        api_key = (api_key or os.environ.get("GRADSERVE_API_KEY") or "").strip()  # a file of it ends with a line break
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidInput("The API key has characters that no API key has")  # which ones nobody's log must know
        self.headers = {
            "Host": self.url.netloc.decode("ascii"),
            "User-Agent": f"gradserve-client/{version('gradserve-client')}",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    def check_open(self) -> None:
        """Raise `InvalidInput` if the client is closed."""
        if self.closed:
            raise InvalidInput("The client is closed: make another one")

    def __getstate__(self) -> Never:
        raise TypeError("A client cannot be copied or pickled: make one in each process")

    def request(self, call: Call[Any], request_id: str, send: Send) -> httpx.Request:
        """What is sent for the call."""
        headers = {**self.headers, **call.headers, "X-Request-ID": request_id, "Request-Timeout": f"{send.silence:.3f}"}
        if call.key is not None:
            headers["Idempotency-Key"] = call.key
        size = sum(len(piece) for piece in call.body)
        if size or call.method in ("POST", "PUT"):
            headers["Content-Length"] = str(size)
        query = {**call.query, "timeout": call.poll} if call.wait else call.query
        seconds = min(send.silence, self.patience.attempt_timeout)
        # To connect must end before all else does, or nobody would know that nothing was sent.
        connect = min(seconds, max(0.9 * (send.until - time.monotonic()), 0.001))
        timeouts = {"connect": connect, "write": seconds, "pool": connect, "read": send.silence}
        try:
            target = f"{call.path}?{urlencode(query, doseq=True)}".rstrip("?")
            url = self.url.copy_with(raw_path=self.url.raw_path.partition(b"?")[0].rstrip(b"/") + target.encode())
            return httpx.Request(
                call.method,
                url,
                headers=headers,
                stream=_Pieces(call.body),
                extensions={"timeout": timeouts, "until": send.until},
            )
        except (UnicodeEncodeError, httpx.InvalidURL) as error:
            raise InvalidInput(f"The request cannot be sent: {error}") from error

    def proxy(self) -> str | None:
        """The proxy that the environment names for the server."""
        if urllib.request.proxy_bypass(self.url.host):
            return None
        proxy = urllib.request.getproxies().get(self.url.scheme)
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def through(transport: Callable[..., T], proxy: str | None) -> T:
    """An httpx transport, by the proxy that the environment names. Raises `InvalidInput` if there is no such way, or
    the certificates that the environment names cannot be read."""
    try:
        return transport(proxy=proxy, limits=_UNLIMITED)
    except (ImportError, ValueError) as error:
        raise InvalidInput(f"The proxy of the environment is {proxy!r}: {error}") from error
    except OSError as error:
        raise InvalidInput(f"The certificates of the environment (SSL_CERT_FILE) cannot be read: {error}") from error


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, which can be sent any number of times."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces  # type: ignore[misc]  # a view is as good as bytes to a socket

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _PIECE):
                yield view[start : start + _PIECE]  # type: ignore[misc]


def joined(body: bytearray | None, piece: bytes) -> bytearray:
    """The body so far and what came: a body that comes whole, in memory of its own, is not copied."""
    if body is None:
        return piece if isinstance(piece, bytearray) else bytearray(piece)
    body += piece
    return body
