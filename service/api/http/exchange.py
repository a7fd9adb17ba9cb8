"""A request and its answer on a connection: what ASGI calls receive, and two faster ways.

A server hands a body over in small chunks, each copied on its way from the socket. Here the body may go straight into
the memory where its tensors are wanted. And an answer leaves in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from starlette.types import Message

from service.api.http.answer_head import head_of
from service.api.http.endings import Wire
from service.api.http.framing import Head
from service.api.http.receiver import Receiver
from service.api.http.sockets import plain_socket, receive_now

EXCHANGE = "gradserve.exchange"
"""The name, among the scope's extensions, of the request's `Exchange`."""

JOINED_BYTES = 1 << 16
"""Up to this size an answer costs less in one piece."""

LARGE_BYTES = 8 << 20
"""A larger answer is written in parts, and other connections have their turn between them."""

TURN_BYTES = 1 << 19
"""The size of such a part."""

CLOSES = (b"connection", b"close")

Pieces: TypeAlias = Sequence[bytes | memoryview]


class Exchange:
    """A request and its answer on a connection, which `moved` tells of a body that was taken, or a whole answer."""

    def __init__(self, wire: Wire, head: Head, moved: Callable[[], None]) -> None:
        self._wire, self._moved = wire, moved
        self._is_head = head.method == "HEAD"
        self._expects = head.version != "1.0" and head.has(b"expect", b"100-continue")
        self._came = asyncio.Event()  # a part of the body, or an end
        self._receiver: Receiver | None = None
        self.body = bytearray()
        """What came of the request's body and nobody took."""
        self.more_body = True
        """Whether more of it is to come."""
        self.keeps_alive = head.keeps_alive
        """Whether the connection is good for another request."""
        self.is_refused = False
        """Whether the client was answered that its body cannot be read, whatever the application says."""
        self.written = 0
        """Bytes of the answer's body that have gone."""
        self.is_started = self.is_complete = self.is_lost = False

    def add_body(self, body: bytes | memoryview, *, more: bool) -> None:
        """Take a part of the body; without `more`, the last one."""
        self.body += body
        self.more_body = more
        self._came.set()

    def lose(self) -> None:
        """Note that the client has gone."""
        self.is_lost, self._expects = True, False
        self._came.set()
        if self._receiver is not None:
            self._receiver.settle(False)

    def is_unasked(self) -> bool:
        """Return whether the client still waits to be asked for the body."""
        return self._expects and self.more_body

    def is_unheard(self) -> bool:
        """Return whether the client was gone before it had the whole answer."""
        return self.is_lost and not self.is_complete

    def _ask(self) -> bool:
        """Ask for the body if the client waits for that; return whether it does."""
        asks, self._expects = self.is_unasked(), False
        if asks:
            self._wire.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return asks

    async def receive(self) -> Message:
        """Return the next part of the body; or, once the client has gone or has its answer, that it has."""
        self._ask()
        if not (self.is_lost or self.is_complete):
            await self._came.wait()
        if self.is_lost or self.is_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._take_body(), "more_body": self.more_body}

    def _take_body(self) -> bytearray:
        body, self.body = self.body, bytearray()
        self._came.clear()
        self._moved()
        return body

    def body_at_hand(self) -> bytearray | None:
        """Return the whole body, if all of it has come and none was received."""
        return None if self.more_body else self._take_body()

    async def receive_into(self, memory: memoryview, patience: float) -> bool:
        """Fill `memory`, which must be as long as the body, of which nothing was received. False if the client goes.

        Raises TimeoutError after `patience` seconds in which nothing comes, or, over a longer time, less than
        `LEAST_RATE`.
        """
        if self.is_lost:
            return False
        begun, self.body = self.body, bytearray()
        self._came.clear()
        memory[: len(begun)] = begun
        rest, socket = memory[len(begun) :], plain_socket(self._wire.transport)
        if not self._ask() and socket is not None:
            rest = receive_now(socket, rest)
        if len(rest) and not await self._receive(Receiver(self._wire, rest, len(memory), patience, socket)):
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

    async def answer(self, status: int, headers: Sequence[tuple[bytes, bytes]], pieces: Pieces) -> None:
        """Send the whole answer. Its head and the first pieces leave in one write; other connections have their turn
        during a large answer.

        `headers` has the Content-Length, with names in lower case. It is the connection's last answer if they say so,
        or if the request's body has not come: nobody knows whether it will.
        """
        await self._wire.drain()
        if self.is_lost:
            return
        head = head_of(status, (*self._wire.server_state.default_headers, *headers))
        if self.more_body or CLOSES in headers:
            self.keeps_alive = False
        end = b"\r\n" if self.keeps_alive or CLOSES in headers else b"connection: close\r\n\r\n"
        self.is_started, self._expects = True, False
        self.written = size = 0 if self._is_head else sum(map(len, pieces))
        if size <= JOINED_BYTES:
            self._wire.transport.write(b"".join((head, end, *(pieces if size else ()))))
        elif size <= LARGE_BYTES:
            self._wire.transport.writelines([head, end, *pieces])
        else:
            self._wire.transport.writelines([head, end])
            await self._write_by_turns(pieces)
        if not self.is_lost:
            self.is_complete = True
            self._came.set()
            self._moved()

    async def _write_by_turns(self, pieces: Pieces) -> None:
        """Write as fast as the client reads."""
        self.written = 0
        for piece in pieces:
            for start in range(0, len(piece), TURN_BYTES):
                await asyncio.sleep(0)
                await self._wire.drain()
                if self.is_lost:
                    return
                part = piece[start : start + TURN_BYTES]
                self._wire.transport.write(part)
                self.written += len(part)
