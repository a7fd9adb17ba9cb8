"""The requests of a client: the server's URL, the API key, and the form of each request."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import urlencode

import httpx

from gradserve_client._http.address import parsed
from gradserve_client._http.policy import Call, Send
from gradserve_client._http.words import DEFAULT_URL
from gradserve_client.errors import InvalidInput

_ASYNC_PIECE_BYTES = 1 << 20
"""Bytes that the asynchronous client sends at once, so that the event loop runs other tasks in between."""


class Requests:
    """Builds the requests for a server. Raises `InvalidInput` for a URL or an API key that is malformed."""

    def __init__(self, url: str | None, api_key: str | None) -> None:
        self.address = parsed(url or os.environ.get("GRADSERVE_URL") or DEFAULT_URL)
        self.is_closed = False
        api_key = (api_key or os.environ.get("GRADSERVE_API_KEY") or "").strip()  # a file ends with a line break
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidInput("The API key has characters that API keys never have")  # kept secret: logs keep errors
        self._headers = {
            "Host": self.address.url.netloc.decode("ascii"),
            "User-Agent": f"gradserve-client/{version('gradserve-client')}",
            **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        }

    @property
    def place(self) -> str:
        """The server's address for people: a URL without a query, which may hold secrets."""
        text = self.address.text
        return text if self.address.socket else text.partition("?")[0].partition("#")[0]

    def check_open(self) -> None:
        """Raise `InvalidInput` if the client is closed."""
        if self.is_closed:
            raise InvalidInput("The client is closed: create a new one")

    def request(self, call: Call[Any], request_id: str, send: Send) -> httpx.Request:
        """Return the request for an attempt of the call."""
        headers = {**self._headers, **call.headers, "X-Request-ID": request_id, "Request-Timeout": f"{send.read:.3f}"}
        if call.key is not None:
            headers["Idempotency-Key"] = call.key
        size = sum(len(piece) for piece in call.body)
        if size or call.method in ("POST", "PUT"):
            headers["Content-Length"] = str(size)
        query = {**call.query, "timeout": call.poll} if call.wait else call.query
        timeouts = {"connect": send.connect, "write": send.write, "pool": send.connect, "read": send.read}
        try:
            target = f"{call.path}?{urlencode(query, doseq=True)}".rstrip("?")
            base = self.address.url
            url = base.copy_with(raw_path=base.raw_path.partition(b"?")[0].rstrip(b"/") + target.encode())
            extensions = {"timeout": timeouts}
            return httpx.Request(call.method, url, headers=headers, stream=_Pieces(call.body), extensions=extensions)
        except (UnicodeEncodeError, httpx.InvalidURL) as error:
            raise InvalidInput(f"The request cannot be sent: {error}") from error

    def proxy(self) -> str | None:
        """Return the URL of the proxy that the environment names for the server."""
        url, socket, _ = self.address
        if socket or urllib.request.proxy_bypass(url.host):
            return None
        proxy = urllib.request.getproxies().get(url.scheme)
        return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, which can be sent any number of times."""

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces  # type: ignore[misc]  # sockets take a view as well as bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _ASYNC_PIECE_BYTES):
                yield view[start : start + _ASYNC_PIECE_BYTES]  # type: ignore[misc]
