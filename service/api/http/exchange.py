"""A request and its answer on a connection.

ASGI hands a body over in small chunks, and each is copied on its way from the socket. Here a body may go straight into
the memory of its tensors, and an answer leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

import httptools

from service.api.http.framing import ChunkedBody, Head, SizedBody, unreadable
from service.api.http.wire import Receiver, Wire, is_slow, plain_socket, receive_now

MAX_JOINED_BYTES = 1 << 16
"""Up to this size an answer is joined: to copy 64 KiB costs less than to write several pieces."""

LARGE_BYTES = 8 << 20
"""A larger answer is written in parts of `TURN_BYTES`, so that it does not hold up other connections."""

TURN_BYTES = 1 << 19
"""The size of a part of a large answer: after each, other connections have their turn."""

PAUSE_SECONDS = 0.003
"""The pause of a large answer after each `TURN_BYTES`, while others are answered: small requests keep their pace."""

BUSY_SECONDS = 0.02
"""How long a large answer makes such pauses after another request was answered: more of them are likely to come."""

TLS_TURN_BYTES = 1 << 17
"""The same with TLS, for each answer that is not joined: of one write, its transport holds any number of bytes."""

CLOSES = (b"Connection", b"close")

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

Pieces: TypeAlias = Sequence[bytes | memoryview]


class Ends(NamedTuple):
    """The two ends of a connection. For a UNIX socket, `path` is that of the server, and the addresses are None."""

    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int] | None
    path: str | None


class Exchange:
    """A request and its answer. It calls `progressed` when a part of the body was taken, or the answer is complete."""

    more_body = True
    """Whether more of the body will come."""
    is_refused = False
    """Whether the connection has refused an unreadable body, so that the application cannot answer any more."""
    written = 0
    """Bytes of the answer's body that were written."""
    is_started = is_complete = is_lost = False
    _receiver: Receiver | None = None

    def __init__(self, wire: Wire, head: Head, ends: Ends, progressed: Callable[[], None]) -> None:
        """Raises `MalformedBody` for a target that is no URL."""
        self._wire, self._progressed = wire, progressed
        self.head, self.ends = head, ends
        self.path, self.query = split(head.url)
        self._is_head = head.method == "HEAD"
        self._expects = b"expect" in head.last and head.version != "1.0" and head.has(b"expect", b"100-continue")
        self._arrival = asyncio.Event()  # set by a part of the body, and by the end
        self.body = bytearray()
        """The part of the body that has come and that the application has not taken."""
        self.keeps_alive = head.keeps_alive
        """Whether the connection serves another request after this one."""

    def add_body(self, body: bytes | memoryview, *, more: bool) -> None:
        """Add a part of the body; without `more` it is the last one."""
        self.body += body
        self.more_body = more
        self._arrival.set()

    def wake(self) -> None:
        """Wake the application that receives: the client has left, or sends no more."""
        self._arrival.set()

    def lose(self) -> None:
        """Note that the client has left."""
        self.is_lost, self._expects = True, False
        self.wake()
        if self._receiver is not None:
            self._receiver.settle(False)

    def _send_continue(self) -> bool:
        """Send `100 Continue` if the client waits for it; return whether it did."""
        waits, self._expects = self._expects and self.more_body, False
        if waits:
            self._wire.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return waits

    async def receive(self) -> bytearray | None:
        """Return the next part of the body; None once the client has left or has its answer."""
        self._send_continue()
        if not (self.is_lost or self.is_complete):
            await self._arrival.wait()
        return None if self.is_lost or self.is_complete else self._take_body()

    async def left(self) -> None:
        """Wait until the client has left or has its answer. The body must have been read."""
        while await self.receive() is not None:
            pass

    async def closed(self) -> None:
        """Wait as `left` does, or until the client has closed its direction."""
        while not self._wire.client_ended and await self.receive() is not None:
            pass

    def _take_body(self) -> bytearray:
        body, self.body = self.body, bytearray()
        self._arrival.clear()
        self._progressed()
        return body

    def body_at_hand(self) -> bytearray | None:
        """Return the whole body if all of it has come, else None. Nothing may have been received before."""
        return None if self.more_body else self._take_body()

    async def receive_into(self, memory: memoryview, patience: float, hold: Callable[[int], None]) -> bool:
        """Receive the whole body into `memory`, which has its length. Return False if the client leaves.

        It calls `hold` with the bytes that have come so far, again and again. Raises what `hold` raises, and
        TimeoutError if nothing comes for `patience` seconds, or if, over a longer time, less comes than
        `MIN_BYTES_PER_SECOND`.
        """
        if self.is_lost:
            return False
        start, self.body = self.body, bytearray()
        self._arrival.clear()
        memory[: len(start)] = start
        rest, socket = memory[len(start) :], plain_socket(self._wire.transport)
        if not self._send_continue() and socket is not None:
            rest = receive_now(socket, rest)
        hold(len(memory) - len(rest))
        if len(rest) and not await self._receive(Receiver(self._wire, rest, len(memory), patience, socket, hold)):
            return False
        self.more_body = False
        return True

    async def _receive(self, receiver: Receiver) -> bool:
        self._receiver = receiver
        self._wire.give_way_to(receiver)
        try:
            return await receiver.done
        finally:
            receiver.stop()
            self._receiver = None
            if not self.is_lost:
                self._wire.give_way_to(self._wire)
            del receiver  # `done` has the exception, whose traceback has this frame

    # ----- the answer -----

    async def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], pieces: Pieces, size: int) -> None:
        """Send the whole answer, of `size` bytes. If it is not joined, wait until all of it has left the process.

        During a large answer other connections have their turn. `headers` have a Content-Length. The connection ends
        after the answer if a header says so, or if the request's body is incomplete: its rest may never come.
        """
        await self._wire.writable.wait()
        if self.is_lost:
            return
        head = head_of(status, (*self._wire.server_state.default_headers, *headers))
        if self.more_body or CLOSES in headers:
            self.keeps_alive = False
        self.is_started, self._expects = True, False
        head_end = b"\r\n" if self.keeps_alive or CLOSES in headers else b"connection: close\r\n\r\n"
        self.written = size = 0 if self._is_head else size
        if size <= MAX_JOINED_BYTES:
            self._wire.transport.write(b"".join((head, head_end, *(pieces if size else ()))))
        else:
            is_whole = size <= LARGE_BYTES and self._wire.transport.can_write_eof()
            self._wire.transport.writelines([head, head_end, *(pieces if is_whole else ())])
            if not is_whole:
                await self._write_by_turns(pieces)
            await self._wire.writable.wait()
        if not self.is_lost:
            self.is_complete = True
            self._arrival.set()
            self._progressed()

    async def _write_by_turns(self, pieces: Pieces) -> None:
        """Write the pieces in parts, as fast as the client reads; abort if that is too slow.

        While others are answered, there is a pause after each part.
        """
        wire, time, state = self._wire, self._wire.loop.time, self._wire.server_state
        most = TURN_BYTES if wire.transport.can_write_eof() else TLS_TURN_BYTES
        began, busy_until, answered, self.written = time(), 0.0, state.total_requests, 0
        for part in _parts(pieces, most):
            if state.total_requests != answered:
                answered, busy_until = state.total_requests, time() + BUSY_SECONDS
            await asyncio.sleep(PAUSE_SECONDS * most / TURN_BYTES if time() < busy_until else 0)
            await wire.writable.wait()
            if is_slow(self.written, time() - began, wire.idle_seconds):
                wire.transport.abort()
                self.lose()
            if self.is_lost:
                return
            wire.transport.writelines(part)
            self.written += sum(map(len, part))


def _parts(pieces: Pieces, most: int) -> Iterator[list[bytes | memoryview]]:
    """Yield the pieces in parts of up to `most` bytes."""
    part, room = list[bytes | memoryview](), most
    for piece in pieces:
        for start in range(0, len(piece), most):
            cut = piece if len(piece) <= most else memoryview(piece)[start : start + most]
            if len(cut) > room:
                yield part
                part, room = [], most
            part.append(cut)
            room -= len(cut)
    yield part


def head_of(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of an answer, without the blank line at its end.

    Raises RuntimeError for a header with a line break: it would become two headers.
    """
    lines = [b"%b: %b\r\n" % header for header in headers]
    head = b"".join([_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, *lines])
    if not head.count(b"\n") == head.count(b"\r") == len(headers) + 1:
        raise RuntimeError(f"A header of the answer has a line break: {head!r}")
    return head


def body_of(head: Head) -> SizedBody | ChunkedBody:
    """Return the parser of the body behind this head."""
    if b"transfer-encoding" in head.last:
        return ChunkedBody()  # the parser refuses other codings than chunked as the last
    return SizedBody(int(head.last.get(b"content-length", 0)))  # the parser refuses a second length


def split(url: bytes) -> tuple[bytes, bytes]:
    """Return the path and the query of a request's target. Raises `MalformedBody`."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError as error:
        raise unreadable(error) from None
    return parsed.path or b"/", parsed.query or b""
