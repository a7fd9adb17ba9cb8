"""Connections for those that await: none is left behind by a call that is cut short."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import httpx

from gradserve_client._requests import joined
from gradserve_client._transport import MOST_IDLE, Body


class AsyncTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over connections that are kept, each in a pool of httpx's of its own.

    With a shared pool, a call that is cancelled between the making of its connection and its use leaves it open, and in
    the pool, for good (https://github.com/encode/httpcore/issues/1093). Here it is closed together with its pool.
    """

    def __init__(self, **settings: Any) -> None:
        """With the settings of `httpx.AsyncHTTPTransport`, and its errors."""
        self._made = partial(httpx.AsyncHTTPTransport, verify=httpx.create_ssl_context(), **settings)
        self._idle = [self._made()]
        self._calls: set[anyio.CancelScope] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and read the whole answer. Raises `httpx.TransportError`."""
        connection = self._idle.pop() if self._idle else self._made()
        with anyio.CancelScope() as call:
            self._calls.add(call)
            try:
                response = await connection.handle_async_request(request)
                assert isinstance(response.stream, httpx.AsyncByteStream)
                body: bytearray | None = None
                async for piece in response.stream:
                    body = joined(body, piece)
                await response.stream.aclose()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await connection.aclose()
                raise
            finally:
                self._calls.discard(call)
            if self._closed or len(self._idle) >= MOST_IDLE:
                await connection.aclose()
            else:
                self._idle.append(connection)
            response.stream = Body(body or bytearray())
            return response
        raise httpx.ReadError("the client was closed meanwhile")

    async def aclose(self) -> None:
        """Close the connections, and end the calls that use them."""
        self._closed = True
        for call in self._calls:
            call.cancel()
        while self._idle:
            await self._idle.pop().aclose()
