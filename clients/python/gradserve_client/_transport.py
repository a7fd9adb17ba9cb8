"""The way of bytes: a transport for httpx that neither copies them nor holds them twice.

httpx's own transport passes a body through several buffers in pieces of 64 KB: a call with 8 MB out and 4 MB back takes
half as long again. This one sends the arrays' own memory, and receives into the memory that the answer's arrays will
have.
"""

from __future__ import annotations

import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import httpx

JOINED = 1 << 16
"""A body up to this size goes out together with the head."""

ASKED = 1 << 20
"""From this size of a body on the server is asked first whether it wants it: a busy one says no in a few bytes."""

ASK_SECONDS = 1.0
"""How long its word is waited for. Whoever says nothing does not know the question, and is not asked again."""

PIECE = 1 << 20
"""Bytes that are received between two reports of how many have come."""

UNASKED = 417
"""The status by which a server says that it does not want to be asked."""

STATUS = slice(9, 12)
"""Where the status stands in an answer."""

MOST_IDLE = 16
"""Connections that are kept open for later."""


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that was read in one piece."""

    def __init__(self, body: bytearray) -> None:
        self.body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self.body  # type: ignore[misc]  # as good as bytes to whoever joins pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.body  # type: ignore[misc]


class Transport(httpx.BaseTransport):
    """HTTP/1.1 over connections that are kept. Several threads may use it; after a fork, both processes may."""

    received: Callable[[int, int], None] | None = None
    """If given, it is told while an answer comes how many of its bytes have come, and how many it has."""

    def __init__(self, verify: ssl.SSLContext | None = None) -> None:
        self._context = verify
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._asks, self._closed = True, False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and read the whole answer. Raises `httpx.TransportError`."""
        response, body = self._exchange(request)
        if response.status == UNASKED and not self._asks:
            response, body = self._exchange(request)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.getheaders()]
        return httpx.Response(response.status, headers=headers, stream=Body(body))

    def _exchange(self, request: httpx.Request) -> tuple[http.client.HTTPResponse, bytearray]:
        timeout = request.extensions.get("timeout", {})
        connection = self._connection(request.url, timeout.get("connect"))
        answering = False
        try:
            limits = _Limits(timeout.get("read"), request.extensions.get("until"))
            connection.response_class = limits.response  # type: ignore[assignment]
            sent = self._send(connection, request, limits)
            answering = True
            response = connection.getresponse()
            if limits.ended:  # which http.client takes for the end of the head
                raise http.client.RemoteDisconnected("the answer ends within its head")
            body = bytearray() if response.length is None else bytearray(response.length)
            if response.length is None:
                body += response.read()
            elif body and (came := _fill(body, response, self.received)) < len(body):
                raise http.client.RemoteDisconnected(f"the answer ends after {came} of {len(body)} bytes")
            response.close()
        except BaseException as error:
            connection.close()
            _translate(error, answering=answering)
        if response.will_close or not sent:
            connection.close()
        else:
            self._keep(connection)
        return response, body

    def close(self) -> None:
        """Close the connections that are not in use, and each of the others once it is not."""
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for connection in idle:
            connection.close()

    def _connection(self, url: httpx.URL, patience: float | None) -> http.client.HTTPConnection:
        if self._process != os.getpid():  # the parent's connections are still the parent's
            inherited, self._process, self._idle, self._lock = self._idle, os.getpid(), [], threading.Lock()
            for one in inherited:
                one.close()
        port = {"http": 80, "https": 443}.get(url.scheme) if url.port is None else url.port
        while True:
            with self._lock:
                found = [one for one in self._idle if (one.host, one.port) == (url.host, port)]
                if not found:
                    break
                self._idle.remove(found[-1])
            if not _has_ended(found[-1]):
                return found[-1]
            found[-1].close()
        if url.scheme == "https":
            self._context = self._context or _ssl_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(url.host, port, context=self._context)
        elif url.scheme == "http":
            connection = http.client.HTTPConnection(url.host, port)
        else:
            raise httpx.UnsupportedProtocol(f"The URL must begin with http:// or https://, not {url.scheme}:")
        connection.timeout = patience
        try:
            connection.connect()
        except BaseException as error:
            connection.close()
            _translate(error, connecting=f"{url.host}:{port}")
        return connection

    def _send(self, connection: http.client.HTTPConnection, request: httpx.Request, limits: _Limits) -> bool:
        """Send the request; False if the server has answered without its body."""
        target = request.url.raw_path.decode("ascii")
        connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.raw:
            connection.putheader(name.decode("ascii"), value)
        assert isinstance(request.stream, httpx.SyncByteStream)
        sock = connection.sock
        assert sock is not None
        limits.set(sock)
        size = int(request.headers.get("content-length", 0))
        if size <= JOINED:
            connection.endheaders(b"".join(request.stream))
            return True
        if asked := self._asks and size >= ASKED:
            connection.putheader("Expect", "100-continue")
        connection.endheaders()
        if asked and not ((answer := limits.answer(sock, ASK_SECONDS)) or b"").startswith(b"1"):
            self._asks = answer not in (None, b"%d" % UNASKED)
            if answer is not None:
                return False
        try:
            for piece in request.stream:
                rest = memoryview(piece)
                while rest:  # sendall would count the seconds of all of it
                    limits.set(sock)
                    rest = rest[sock.send(rest) :]
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server did not want all of it; perhaps it said why before it closed
        return True

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class _Limits:
    """How long the socket is waited for: each time, and in all, by `time.monotonic`."""

    def __init__(self, silence: float | None, until: float | None) -> None:
        self._silence, self._until = silence, until
        self.ended = False
        """Whether all has been read that comes."""
        self.early = b""
        """What was read of the answer before the request was sent."""

    def set(self, sock: socket.socket) -> None:
        """Bound the socket's next operation."""
        if self._until is None:
            sock.settimeout(self._silence)
            return
        rest = self._until - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        sock.settimeout(rest if self._silence is None else min(rest, self._silence))

    def answer(self, sock: socket.socket, seconds: float) -> bytes | None:
        """The status of what the server says before it has the body; None if it says nothing for so long."""
        try:
            while len(self.early) < STATUS.stop:
                self.set(sock)
                sock.settimeout(min(seconds, sock.gettimeout() or seconds))
                if not (piece := sock.recv(STATUS.stop - len(self.early))):
                    break
                self.early += piece
        except TimeoutError:
            return None
        return self.early[STATUS]

    def response(self, sock: socket.socket, method: str | None = None) -> http.client.HTTPResponse:
        """An answer that is read within the limits, however slowly it comes."""
        response = _Response(sock, method=method)
        response.fp = io.BufferedReader(_Reader(sock, response.fp.detach(), self))
        return response


class _Response(http.client.HTTPResponse):
    """An answer before which others may come that say that it is on its way, such as 103."""

    def begin(self) -> None:
        super().begin()
        while self.status in range(102, 200):
            self.headers = self.msg = None  # type: ignore[assignment]  # which is how it is known to be read
            super().begin()


class _Reader(io.RawIOBase):
    """A socket's file, each of whose reads is bounded."""

    def __init__(self, sock: socket.socket, file: io.RawIOBase, limits: _Limits) -> None:
        self._sock, self._file, self._limits = sock, file, limits

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int | None:
        if early := self._limits.early[: len(memory)]:
            memory[: len(early)] = early
            self._limits.early = self._limits.early[len(early) :]
            return len(early)
        self._limits.set(self._sock)
        count = self._file.readinto(memory)
        self._limits.ended = count == 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _fill(body: bytearray, response: http.client.HTTPResponse, received: Callable[[int, int], None] | None) -> int:
    """Receive the body, or as much as comes: so many bytes."""
    if received is None:
        return response.readinto(body)
    view, filled = memoryview(body), 0
    while filled < len(body) and (count := response.readinto(view[filled : filled + PIECE])):
        filled += count
        received(filled, len(body))
    return filled


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed a connection on which nothing is awaited."""
    assert connection.sock is not None
    try:
        poll = select.poll()
    except AttributeError:  # Windows
        return bool(select.select([connection.sock], [], [], 0)[0])
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _ssl_context() -> ssl.SSLContext:
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise httpx.LocalProtocolError(
            f"the certificates of the environment (SSL_CERT_FILE) cannot be read: {error}"
        ) from error


def _translate(error: BaseException, connecting: str | None = None, *, answering: bool = False) -> NoReturn:
    """Raise the error as httpx's transports would."""
    if isinstance(error, TimeoutError):
        if connecting:
            raise httpx.ConnectTimeout(f"{connecting} does not answer") from error
        raise httpx.ReadTimeout("the server is silent") from error
    if isinstance(error, http.client.HTTPException):
        raise httpx.RemoteProtocolError(str(error) or type(error).__name__) from error
    if isinstance(error, OSError):
        if connecting:
            raise httpx.ConnectError(f"{connecting}: {error}") from error
        raise httpx.ReadError(str(error) or type(error).__name__) from error
    if isinstance(error, (MemoryError, OverflowError)):
        raise httpx.RemoteProtocolError("the answer says that it is longer than there is memory for") from error
    if isinstance(error, ValueError) and answering:  # of http.client, for lengths that are none
        raise httpx.RemoteProtocolError(str(error)) from error
    if isinstance(error, ValueError):  # for what must not stand in a request
        raise httpx.LocalProtocolError(str(error)) from error
    raise error
