"""The connections of the synchronous client: HTTP/1.1 that sends the arrays' own memory, and receives into theirs.

httpx's own transport passes a body through several buffers, in pieces of 64 KB. A call with 32 MB out and 16 MB back
takes 2.7 times as long with it, and 4.7 times the processor.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
from typing import NoReturn

import h11
import httpx

from gradserve_client._http.address import Address
from gradserve_client._http.outcomes import Answer
from gradserve_client._http.wire import Wire

EXPECT_CONTINUE_BYTES = 1 << 20
"""From this size of a body on, the client sends `Expect: 100-continue`: a busy server refuses before the body is sent.
A smaller body is sent at once, without the extra round trip."""

CONTINUE_SECONDS = 1.0
"""Seconds to wait for the 100. A server that is silent does not know the header, and does not get it again."""

EXPECTATION_FAILED = 417
"""The status of a server that refuses the header."""

MOST_IDLE = 16
"""Idle connections that stay open: enough for 16 threads."""

WIDE = socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20
"""The option that lets a UNIX socket hold 1 MB of a request: client and server take turns less often."""

PORTS = {"http": 80, "https": 443}
"""The ports of schemes, by default."""


class Transport:
    """HTTP/1.1 over keep-alive connections to one server.

    Several threads may use it. After a fork, both processes may.
    """

    def __init__(self, address: Address) -> None:
        url = address.url
        self._host, self._port, self._path = url.host, url.port or PORTS[url.scheme], address.socket
        self._is_secure = url.scheme == "https"
        self._context: ssl.SSLContext | None = None
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._expects_continue, self._is_closed = True, False

    def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer, by `until` on `time.monotonic`. Raises `httpx.TransportError`."""
        answer = self._exchange(request, until)
        if answer.status == EXPECTATION_FAILED and not self._expects_continue:
            answer = self._exchange(request, until)
        return answer

    def close(self) -> None:
        """Close the idle connections at once, and each of the others after its call."""
        with self._lock:
            idle, self._idle, self._is_closed = self._idle, [], True
        for sock in idle:
            sock.close()

    def _exchange(self, request: httpx.Request, until: float) -> Answer:
        timeout = request.extensions["timeout"]
        sock = self._take_idle() or self._connect(timeout["connect"])
        try:
            wire = Wire(sock, timeout["read"], until)
            if self._expects_continue and int(request.headers.get("content-length", 0)) >= EXPECT_CONTINUE_BYTES:
                status = wire.send_expecting(request, CONTINUE_SECONDS)
                self._expects_continue = status not in (None, EXPECTATION_FAILED)
            else:
                wire.send(request)
            answer = wire.receive()
        except BaseException as error:
            sock.close()
            raise_as_httpx(error)
        if wire.is_reusable:
            self._keep(sock)
        else:
            sock.close()
        return answer

    def _take_idle(self) -> socket.socket | None:
        if self._process != os.getpid():  # the parent process still uses these connections
            inherited, self._process, self._idle, self._lock = self._idle, os.getpid(), [], threading.Lock()
            for sock in inherited:
                sock.close()
        while True:
            with self._lock:
                if not self._idle:
                    return None
                sock = self._idle.pop()
            if not has_ended(sock):
                return sock
            sock.close()

    def _connect(self, seconds: float) -> socket.socket:
        if self._is_secure and self._context is None:
            self._context = ssl_context()
        address = self._path or f"{self._host}:{self._port}"
        try:
            if self._path is not None:
                return _connect_unix(self._path, seconds)
            sock = socket.create_connection((self._host, self._port), seconds)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._context.wrap_socket(sock, server_hostname=self._host) if self._context else sock
            except BaseException:
                sock.close()
                raise
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"{address} does not answer") from error
        except OSError as error:
            raise httpx.ConnectError(f"{address}: {error}") from error

    def _keep(self, sock: socket.socket) -> None:
        with self._lock:
            if len(self._idle) < MOST_IDLE and not self._is_closed:
                self._idle.append(sock)
                return
        sock.close()


def _connect_unix(path: str, seconds: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        sock.setsockopt(*WIDE)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def has_ended(sock: socket.socket) -> bool:
    """Whether the server has closed an idle connection."""
    try:
        poll = select.poll()
    except AttributeError:  # Windows
        return bool(select.select([sock], [], [], 0)[0])
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def ssl_context() -> ssl.SSLContext:
    """Return what checks the certificates of servers. Raises `httpx.LocalProtocolError`."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:
        raise httpx.LocalProtocolError(
            f"the certificates of the environment (SSL_CERT_FILE) cannot be read: {error}"
        ) from error


def raise_as_httpx(error: BaseException) -> NoReturn:
    """Raise the error as a transport of httpx would."""
    if isinstance(error, TimeoutError):
        raise httpx.ReadTimeout("the server is silent") from error
    if isinstance(error, h11.RemoteProtocolError):
        raise httpx.RemoteProtocolError(str(error)) from error
    if isinstance(error, h11.LocalProtocolError):
        raise httpx.LocalProtocolError(str(error)) from error
    if isinstance(error, OSError):
        raise httpx.ReadError(str(error) or type(error).__name__) from error
    if isinstance(error, (MemoryError, OverflowError)):
        raise httpx.RemoteProtocolError("the answer claims to be larger than the memory") from error
    raise error
