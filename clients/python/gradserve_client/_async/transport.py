"""The connections of the asynchronous client: HTTP/1.1 on streams of anyio's.

httpx's own pool takes twice the time of a small call: it writes the head and each array by itself, in time limits and
locks of its own.
"""

from __future__ import annotations

import ssl
from abc import abstractmethod
from typing import Generic, TypeVar

import anyio
import h11
import httpx
from anyio.abc import ByteStream, SocketAttribute

from gradserve_client._http.address import Address
from gradserve_client._http.outcomes import Answer
from gradserve_client._http.transport import MOST_IDLE, PORTS, WIDE, has_ended, raise_as_httpx, ssl_context
from gradserve_client._http.wire import Exchange, pieces_of, size_of

JOINED_BYTES = 1 << 18
"""A body up to this size is joined to the head: on an event loop, a further write takes longer than the copy."""

READ_BYTES = 1 << 18
"""Bytes of a read at most: what asyncio reads at once."""

T = TypeVar("T")
"""A connection, or a pool of one."""


class AsyncCalls(Generic[T]):
    """The calls on their way, and the idle connections. Closing ends both."""

    def __init__(self) -> None:
        self._idle: list[T] = []
        self._calls: set[anyio.CancelScope] = set()
        self._is_closed = False

    async def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer; see `AsyncChannel`."""
        with anyio.CancelScope() as call:
            self._calls.add(call)
            try:
                return await self._exchange(request, until)
            finally:
                self._calls.discard(call)
        raise httpx.ReadError("the client was closed during the call")

    async def close(self) -> None:
        """Close the connections, and end the calls that use them."""
        self._is_closed = True
        for call in self._calls:
            call.cancel()
        while self._idle:
            await self._end(self._idle.pop())

    async def _keep(self, connection: T) -> None:
        """Keep a connection for the next call, unless there are enough."""
        if self._is_closed or len(self._idle) >= MOST_IDLE:
            await self._end(connection)
        else:
            self._idle.append(connection)

    @abstractmethod
    async def _exchange(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer. After an error or a cancellation its connection is closed."""

    @abstractmethod
    async def _end(self, connection: T) -> None:
        """Close a connection."""


class AsyncTransport(AsyncCalls[ByteStream]):
    """HTTP/1.1 over keep-alive connections to one server."""

    def __init__(self, address: Address) -> None:
        super().__init__()
        url = address.url
        self._host, self._port, self._path = url.host, url.port or PORTS[url.scheme], address.socket
        self._is_secure = url.scheme == "https"
        self._context: ssl.SSLContext | None = None

    async def _exchange(self, request: httpx.Request, until: float) -> Answer:
        timeout = request.extensions["timeout"]
        stream = await self._take_idle() or await self._connect(timeout["connect"])
        try:
            wire = AsyncWire(stream, timeout["read"], until)
            await wire.send(request, timeout["write"])
            answer = await wire.receive()
        except BaseException as error:
            await self._end(stream)
            if isinstance(error, anyio.BrokenResourceError | anyio.ClosedResourceError):
                raise httpx.ReadError(str(error.__cause__ or error) or "the connection broke") from error
            raise_as_httpx(error)
        await (self._keep(stream) if wire.is_reusable else self._end(stream))
        return answer

    async def _end(self, connection: ByteStream) -> None:
        await anyio.aclose_forcefully(connection)

    async def _take_idle(self) -> ByteStream | None:
        while self._idle:
            stream = self._idle.pop()
            if not has_ended(stream.extra(SocketAttribute.raw_socket)):
                return stream
            await self._end(stream)
        return None

    async def _connect(self, seconds: float) -> ByteStream:
        if self._is_secure and self._context is None:
            self._context = ssl_context()
        address = self._path or f"{self._host}:{self._port}"
        try:
            with anyio.fail_after(seconds):
                return await self._connected()
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"{address} does not answer") from error
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise httpx.ConnectError(f"{address}: {error.__cause__ or error}") from error

    async def _connected(self) -> ByteStream:
        if self._path is not None:
            stream = await anyio.connect_unix(self._path)
            stream.extra(SocketAttribute.raw_socket).setsockopt(*WIDE)
            return stream
        if self._context is None:
            return await anyio.connect_tcp(self._host, self._port)
        return await anyio.connect_tcp(
            self._host, self._port, tls=True, ssl_context=self._context, tls_standard_compatible=False
        )


class AsyncWire(Exchange):
    """Sends one request on a stream and reads its answer, as `Wire` does on a socket."""

    def __init__(self, stream: ByteStream, silence: float, until: float) -> None:
        super().__init__(silence, until)
        self._stream = stream

    async def send(self, request: httpx.Request, silence: float) -> None:
        """Send the head and the body."""
        head, size = self._head(request, []), size_of(request)
        try:
            if size <= JOINED_BYTES:
                await self._write(b"".join([head, *pieces_of(request)]), silence)
            else:
                await self._write(head, silence)
                assert isinstance(request.stream, httpx.AsyncByteStream)
                async for piece in request.stream:
                    await self._write(piece, silence)
        except anyio.BrokenResourceError:
            return  # the server did not want the rest; its answer may say why
        self._count_body(size)

    async def receive(self) -> Answer:
        """Read the whole answer."""
        response = await self._next_event()
        while isinstance(response, h11.InformationalResponse):  # such as 103 Early Hints
            response = await self._next_event()
        assert isinstance(response, h11.Response)
        headers = httpx.Headers(list(response.headers))
        return Answer(response.status_code, headers, await self._read_body(headers))

    async def _write(self, data: bytes, silence: float) -> None:
        with anyio.fail_after(self._rest(silence)):
            await self._stream.send(data)

    async def _read(self) -> bytes:
        with anyio.fail_after(self._rest(self._silence)):
            try:
                return await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                self._is_ended = True
                return b""

    async def _next_event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._read())
        assert not isinstance(event, type), f"h11 has paused: {event}"
        return event

    async def _read_body(self, headers: httpx.Headers) -> bytearray:
        if "content-length" in headers and "transfer-encoding" not in headers:
            return await self._read_sized_body(int(headers["content-length"]))
        body = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            body += event.data
        return body

    async def _read_sized_body(self, size: int) -> bytearray:
        """Read the body past h11, which would copy each piece of it."""
        event = self._http.next_event()
        if isinstance(event, h11.EndOfMessage):  # also of a 204 or 304, whatever its size says
            return bytearray()
        body = bytearray(event.data if isinstance(event, h11.Data) else b"")
        while len(body) < size:
            if not (piece := await self._read()):
                raise h11.RemoteProtocolError(f"the answer ends after {len(body)} of {size} bytes")
            body += piece
        self._is_ended |= len(body) > size
        return body[:size] if len(body) > size else body
