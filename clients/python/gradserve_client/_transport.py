"""The way of bytes: a transport for httpx that neither copies them nor holds them twice.

httpx's own transport passes a body through several buffers in pieces of 64 KB: a call with 8 MB out and 4 MB back takes
half as long again. This one sends the arrays' own memory, and receives into the memory that the answer's arrays will
have.
"""

from __future__ import annotations

import http.client
import os
import select
import ssl
import threading
from collections.abc import Iterator
from typing import NoReturn

import httpx

JOINED = 1 << 16
"""A body up to this size goes out together with the head."""

MOST_IDLE = 16
"""Connections that are kept open for later."""


class Body(httpx.SyncByteStream):
    """A body that was read in one piece."""

    def __init__(self, body: bytearray) -> None:
        self.body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self.body  # type: ignore[misc]  # as good as bytes to whoever joins pieces


class Transport(httpx.BaseTransport):
    """HTTP/1.1 over connections that are kept. Several threads may use it; after a fork, both processes may."""

    def __init__(self, verify: ssl.SSLContext | None = None) -> None:
        self._context = verify
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and read the whole answer. Raises `httpx.TransportError`."""
        timeout = request.extensions.get("timeout", {})
        connection = self._connection(request.url, timeout.get("connect"))
        try:
            assert connection.sock is not None
            connection.sock.settimeout(timeout.get("read"))
            _send(connection, request)
            response = connection.getresponse()
            body = bytearray() if response.length is None else bytearray(response.length)
            if response.length is None:
                body += response.read()
            elif body and response.readinto(body) < len(body):
                raise http.client.IncompleteRead(b"")
            response.close()
        except BaseException as error:
            connection.close()
            _translate(error)
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return httpx.Response(response.status, headers=response.getheaders(), stream=Body(body))

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self, url: httpx.URL, patience: float | None) -> http.client.HTTPConnection:
        if self._process != os.getpid():  # the parent's connections are still the parent's
            self._process, self._idle, self._lock = os.getpid(), [], threading.Lock()
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
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
            self._context = self._context or httpx.create_ssl_context()
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

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _send(connection: http.client.HTTPConnection, request: httpx.Request) -> None:
    target = request.url.raw_path.decode("ascii")
    connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in request.headers.raw:
        connection.putheader(name.decode("ascii"), value)
    assert isinstance(request.stream, httpx.SyncByteStream)
    size = int(request.headers.get("content-length", 0))
    if size <= JOINED:
        connection.endheaders(b"".join(request.stream))
        return
    connection.endheaders()
    try:
        for piece in request.stream:
            connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server did not want all of it; perhaps it said why before it closed


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Whether the server has closed a connection on which nothing is awaited."""
    assert connection.sock is not None
    try:
        poll = select.poll()
    except AttributeError:  # Windows
        return bool(select.select([connection.sock], [], [], 0)[0])
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _translate(error: BaseException, connecting: str | None = None) -> NoReturn:
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
    if isinstance(error, ValueError):  # of http.client, for what must not stand in a request
        raise httpx.LocalProtocolError(str(error)) from error
    raise error
