"""The ways to the server for the asynchronous client: a cancelled call leaves no connection open."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import anyio
import httpx

from gradserve_client._async.runner import AsyncChannel
from gradserve_client._async.transport import AsyncCalls, AsyncTransport
from gradserve_client._http.channels import joined, through
from gradserve_client._http.outcomes import Answer
from gradserve_client._http.requests import Requests


def channel(requests: Requests, transport: httpx.AsyncBaseTransport | None) -> AsyncChannel:
    """Return the way to the server. Raises `InvalidInput`; see `_http.channels.channel`."""
    if transport is not None:
        return AsyncHttpxChannel(transport)
    proxy = requests.proxy()
    return AsyncTransport(requests.address) if proxy is None else through(AsyncPools, proxy)


class AsyncHttpxChannel:
    """Sends by a transport of httpx's."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer; see `AsyncChannel`."""
        try:
            with anyio.fail_after(max(until - time.monotonic(), 0.001)):
                return await self._exchange(request)
        except TimeoutError:
            raise httpx.ReadTimeout("the answer took too long") from None

    async def _exchange(self, request: httpx.Request) -> Answer:
        response = await self._transport.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        body: bytearray | None = None
        try:
            async for piece in response.stream:
                body = joined(body, piece)
        finally:
            await response.stream.aclose()
        return Answer(response.status_code, response.headers, body or bytearray())

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()


class AsyncPools(AsyncCalls[AsyncHttpxChannel]):
    """HTTP/1.1 through a proxy over keep-alive connections, each in a pool of httpx's of its own.

    In a shared pool, a call that is cancelled between making its connection and using it would leave the connection
    open for ever (https://github.com/encode/httpcore/issues/1093). Here the call closes it together with its pool.
    """

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `httpx.AsyncHTTPTransport`. Raises its errors."""
        super().__init__()
        self._make = partial(httpx.AsyncHTTPTransport, verify=httpx.create_ssl_context(), **settings)
        self._idle.append(AsyncHttpxChannel(self._make()))

    async def _exchange(self, request: httpx.Request, until: float) -> Answer:
        pool = self._idle.pop() if self._idle else AsyncHttpxChannel(self._make())
        try:
            answer = await pool.send(request, until)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end(pool)
            raise
        await self._keep(pool)
        return answer

    async def _end(self, connection: AsyncHttpxChannel) -> None:
        await connection.close()
