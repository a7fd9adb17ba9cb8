"""A request and its answer on a connection: what ASGI calls receive and send, and a faster way to receive.

A server hands a body over in small chunks, each copied on its way from the socket. Here the body may go straight into
the memory where its tensors are wanted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Scope

from service.api.http.answer_head import AnswerHead, head_of
from service.api.http.endings import Wire
from service.api.http.framing import Head
from service.api.http.receiver import Receiver
from service.api.http.sockets import plain_socket, receive_now

EXCHANGE = "gradserve.exchange"
"""The name, among the scope's extensions, of the request's `Exchange`."""

LARGE_BYTES = 8 << 20
"""What follows so many bytes of an answer is written in parts: other connections have their turn between them."""

TURN_BYTES = 1 << 19
"""The size of such a part."""

logger = logging.getLogger("uvicorn.error")


def exchange_of(scope: Scope) -> Exchange | None:
    """Return the exchange of the scope's request; None under another server."""
    exchange: Exchange | None = scope.get("extensions", {}).get(EXCHANGE)
    return exchange


class Exchange:
    """A request and its answer on a connection, which `moved` tells of a body that was taken, or a whole answer."""

    def __init__(self, wire: Wire, head: Head, moved: Callable[[], None]) -> None:
        self._wire, self._moved = wire, moved
        self._is_head = head.method == "HEAD"
        self._expects = head.version != "1.0" and head.has(b"expect", b"100-continue")
        self._came = asyncio.Event()  # a part of the body, or an end
        self._receiver: Receiver | None = None
        self._head: AnswerHead | None = None
        self._left: int | None = None  # bytes of the answer's body that are to be written; None: nobody knows
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

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        """Have the application answer."""
        try:
            await app(scope, self.receive, self.send)
        except (Exception, asyncio.CancelledError) as error:
            logger.error("The application failed", exc_info=error)
        else:
            if not (self.is_complete or self.is_lost):
                logger.error("The application gave no whole answer")
        if self.is_started:
            if not self.is_complete:
                self._wire.end(at_once=True)  # the client sees that the answer is cut
        elif not self.is_lost:
            await self.send({"type": "http.response.start", "status": 500, "headers": [(b"connection", b"close")]})
            await self.send({"type": "http.response.body", "body": b"Internal Server Error"})

    # ----- the request -----

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

    async def send(self, message: Message) -> None:
        """Send a part of the answer; the head leaves with the first part of the body, in one write.

        Raises RuntimeError for a part that does not follow the parts before.
        """
        kind, is_start = message["type"], message["type"] == "http.response.start"
        if self.is_complete or is_start is (self._head is not None):
            raise RuntimeError(f"{kind} is not what comes next in an answer")
        if is_start:
            headers = (*self._wire.server_state.default_headers, *message.get("headers", ()))
            self._head = head_of(message["status"], headers)
            return
        await self._wire.drain()
        if not self.is_lost:
            await self._send_body(message.get("body", b""), message.get("more_body", False))

    async def _send_body(self, body: bytes | memoryview, more: bool) -> None:
        first = b"" if self.is_started else self._begin()
        if self._is_head:
            body = b""
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("The answer has not as many bytes as its Content-Length says")
        self._wire.transport.writelines([first, body[:LARGE_BYTES]])
        self.written += min(len(body), LARGE_BYTES)
        for start in range(LARGE_BYTES, len(body), TURN_BYTES):
            await asyncio.sleep(0)
            await self._wire.drain()
            if self.is_lost:
                return
            self._wire.transport.write(body[start : start + TURN_BYTES])
            self.written += min(TURN_BYTES, len(body) - start)
        if not more:
            self._complete()

    def _begin(self) -> bytes:
        """Return the head. If the request's body has not come, nobody knows whether it will: the answer is the last."""
        assert self._head is not None
        self.is_started, self._left = True, self._head.length
        if self.more_body or self._head.is_last or self._left is None:
            self.keeps_alive = False
        self._expects = False
        return self._head.text + (b"\r\n" if self.keeps_alive else b"connection: close\r\n\r\n")

    def _complete(self) -> None:
        self.is_complete = True
        self._came.set()
        self._moved()
