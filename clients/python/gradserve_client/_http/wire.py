"""A request and its answer on a socket. h11 writes and parses the heads; large bodies are not copied."""

from __future__ import annotations

import socket
import time

import h11
import httpx

from gradserve_client._http.outcomes import Answer

JOINED_BYTES = 1 << 16
"""A body up to this size is joined to the head, so that a small call takes a single write."""

READ_BYTES = 1 << 13
"""Bytes of a read that may hold a head. Small answers take a single read, and little of a large body is copied."""

LONGEST_HEAD_BYTES = 1 << 16
"""Bytes of an answer's head at most. Servers and proxies send a few hundred."""


class Exchange:
    """One request and its answer, within time limits, on a connection that a subclass reads and writes."""

    def __init__(self, silence: float, until: float) -> None:
        self._silence, self._until = silence, until
        self._http = h11.Connection(h11.CLIENT, LONGEST_HEAD_BYTES)
        self._is_ended = False

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can take another request after this one."""
        return self._http.our_state is h11.DONE and not self._is_ended and not self._http.trailing_data[0]

    def _head(self, request: httpx.Request, more: list[tuple[bytes, bytes]]) -> bytes:
        headers = [*request.headers.raw, *more]
        head = self._http.send(h11.Request(method=request.method, target=request.url.raw_path, headers=headers))
        assert head is not None
        return head

    def _count_body(self, size: int) -> None:
        """Tell h11 the size of the body that was sent, as h11 recommends for sendfile."""
        as_long = range(size)  # h11 asks for the length alone
        self._http.send_with_data_passthrough(h11.Data(data=as_long))  # type: ignore[arg-type]
        self._http.send(h11.EndOfMessage())

    def _rest(self, silence: float) -> float:
        """Return the seconds that the next wait may take. Raises `TimeoutError` if there are none."""
        rest = self._until - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        return min(rest, silence)


class Wire(Exchange):
    """Sends one request on a socket and reads its answer, within time limits.

    `silence` bounds each wait for the socket, in seconds. `until` bounds all of them, by `time.monotonic`.
    The methods raise `TimeoutError`, `OSError`, `h11.ProtocolError` and, for an answer of a huge size, `MemoryError`
    and `OverflowError`.
    """

    def __init__(self, sock: socket.socket, silence: float, until: float) -> None:
        super().__init__(silence, until)
        self._sock = sock
        self._early: h11.Response | None = None

    def send(self, request: httpx.Request) -> None:
        """Send the head and the body."""
        head = self._head(request, [])
        if (size := size_of(request)) <= JOINED_BYTES:
            self._write(b"".join([head, *pieces_of(request)]))
            self._count_body(size)
        else:
            self._write(head)
            self._write_body(request)

    def send_expecting(self, request: httpx.Request, seconds: float) -> int | None:
        """Send the head with `Expect: 100-continue`, and the body after a 100 or after some seconds of silence.

        Returns the status of the server's first answer, None if it was silent.
        """
        self._write(self._head(request, [(b"Expect", b"100-continue")]))
        try:
            event = self._next_event(seconds)
        except TimeoutError:
            self._write_body(request)
            return None
        if isinstance(event, h11.Response):
            self._early = event
            return event.status_code
        assert isinstance(event, h11.InformationalResponse)
        self._write_body(request)
        return event.status_code

    def receive(self) -> Answer:
        """Read the whole answer."""
        response = self._early or self._next_event()
        while isinstance(response, h11.InformationalResponse):  # such as 103 Early Hints
            response = self._next_event()
        assert isinstance(response, h11.Response)
        headers = httpx.Headers(list(response.headers))
        return Answer(response.status_code, headers, self._read_body(headers))

    def _write_body(self, request: httpx.Request) -> None:
        try:
            for piece in pieces_of(request):
                self._write(piece)
        except (BrokenPipeError, ConnectionResetError):
            return  # the server did not want the rest; its answer may say why
        self._count_body(size_of(request))

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:  # sendall would apply the time limit to the whole body
            self._sock.settimeout(self._rest(self._silence))
            rest = rest[self._sock.send(rest) :]

    def _next_event(self, silence: float | None = None) -> h11.Event:
        """Return the next part of the answer, after silences of some seconds at most."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._sock.settimeout(self._rest(silence or self._silence))
            piece = self._sock.recv(READ_BYTES)
            self._is_ended = not piece
            self._http.receive_data(piece)
        assert not isinstance(event, type), f"h11 has paused: {event}"
        return event

    def _read_body(self, headers: httpx.Headers) -> bytearray:
        if "content-length" in headers and "transfer-encoding" not in headers:
            return self._read_sized_body(int(headers["content-length"]))
        body = bytearray()
        while isinstance(event := self._next_event(), h11.Data):
            body += event.data
        return body

    def _read_sized_body(self, size: int) -> bytearray:
        """Read the body into memory that its arrays can use."""
        body, count = bytearray(size), 0
        view = memoryview(body)
        event = self._http.next_event()
        if isinstance(event, h11.EndOfMessage):  # also of a 204 or 304, whatever its size says
            return bytearray()
        if isinstance(event, h11.Data):
            count = len(event.data)
            view[:count] = event.data
        while count < size:
            self._sock.settimeout(self._rest(self._silence))
            if not (received := self._sock.recv_into(view[count:])):
                raise h11.RemoteProtocolError(f"the answer ends after {count} of {size} bytes")
            count += received
        return body


def size_of(request: httpx.Request) -> int:
    """Return the bytes of a request's body."""
    return int(request.headers.get("content-length", 0))


def pieces_of(request: httpx.Request) -> httpx.SyncByteStream:
    """Return a request's body."""
    assert isinstance(request.stream, httpx.SyncByteStream)
    return request.stream
