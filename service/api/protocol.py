"""uvicorn's HTTP protocol, which can receive a body straight into the application's memory, and answer in one go.

uvicorn hands a body over in small chunks, each copied three times on its way from the socket. Where the body's length
is known, nothing is left to parse: the socket may as well fill the place where the tensors are wanted. And it sends an
answer's head by itself, which costs a system call, and the client two wake-ups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

RECEIVE_INTO = "gradserve.receive_into"
"""The name, among the scope's extensions, of what receives a body: `async (memory, patience) -> bool`."""

BODY_AT_HAND = "gradserve.body_at_hand"
"""The name of what returns the whole body, if all of it has come and none was received: `() -> bytes | None`."""

UNASKED = "gradserve.unasked"
"""The name of what tells whether the client still waits to be asked for the body: `() -> bool`."""

SEND_AT_ONCE = "gradserve.send_at_once"
"""The name, among the scope's extensions, of what sends a whole answer: `async (head, pieces) -> None`."""

LARGE_BYTES, TURN_BYTES = 8 << 20, 1 << 19
"""An answer of more than so many bytes is written in pieces of so many, between which it is the turn of others."""

BUSY_SECONDS = 0.0002
"""How long a turn of the loop takes at least when there is more to do than to send one answer."""

RawHeaders: TypeAlias = Iterable[tuple[bytes, bytes]]
Pieces: TypeAlias = Sequence[bytes | memoryview]


class Protocol(HttpToolsProtocol):
    """Adds the extensions to each request's scope, and closes connections on which a request is long in coming.

    uvicorn closes those that are idle after an answer; here, also those on which nothing came yet, half a head, or a
    part of a body that was refused.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()

    def _expect_request(self) -> None:
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        """The server stops: whoever waits for an epoch is told."""
        waiting = self.config.loaded_app.state.waiting
        waiting.stop()
        super().shutdown()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cycle = self.cycle
        extensions: Any = {
            BODY_AT_HAND: partial(_body_at_hand, cycle),
            RECEIVE_INTO: partial(self._receive_into, cycle),
            SEND_AT_ONCE: partial(self._send_at_once, cycle),
            UNASKED: lambda: cycle.waiting_for_100_continue,
        }
        self.scope["extensions"] = extensions

    async def _send_at_once(self, cycle: RequestResponseCycle, head: RawHeaders, pieces: Pieces) -> None:
        """Send an answer with status 200 in one system call, if the socket takes it, where `cycle.send` needs two.

        `head` must tell the Content-Length.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        if cycle.disconnected:
            return
        lines = [b"%b: %b\r\n" % line for line in (*self.server_state.default_headers, *head)]
        if not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        cycle.response_started = True
        first = b"".join([b"HTTP/1.1 200 OK\r\n", *lines, b"\r\n"])
        if sum(map(len, pieces)) <= LARGE_BYTES:
            self.transport.writelines([first, *pieces])
        else:
            self.transport.write(first)
            for piece in pieces:
                for start in range(0, len(piece), TURN_BYTES):
                    self.transport.write(piece[start : start + TURN_BYTES])
                    await self._let_others_go_first()
                    if cycle.disconnected:
                        return
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    async def _let_others_go_first(self) -> None:
        """Wait until what was written is on its way, and, where others have work to do, 25 times as long as that.

        So a large answer takes little of this thread's time from small requests: 64 MB read without a pause slow down
        small adds by a fifth; with ten times it was four fifths.
        """
        if self.flow.write_paused:
            await self.flow.drain()
        asked = self.loop.time()
        await asyncio.sleep(0)
        turn = self.loop.time() - asked
        if turn > BUSY_SECONDS:
            await asyncio.sleep(24 * turn)

    async def _receive_into(self, cycle: RequestResponseCycle, memory: memoryview, patience: float) -> bool:
        """Fill `memory`, which must be as long as the body, of which nothing was received. False if the client goes.

        Raises TimeoutError after `patience` seconds in which nothing comes; the answer then closes the connection.
        """
        if cycle.waiting_for_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        memory[: len(cycle.body)] = cycle.body
        receiver = _Receiver(self, memory[len(cycle.body) :], patience)
        cycle.body = bytearray()
        cycle.message_event.clear()
        if cycle.disconnected:
            return False
        self._read_by(receiver)
        try:
            if not await receiver.done:
                return False
        except TimeoutError:
            cycle.keep_alive = False
            raise
        finally:
            receiver.stop()
            if not cycle.disconnected:
                self._read_by(self)
        self.parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        cycle.more_body = False
        return True

    def _read_by(self, protocol: asyncio.BaseProtocol) -> None:
        self.flow.pause_reading()  # uvloop asks for the kind of protocol when reading starts
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


def _body_at_hand(cycle: RequestResponseCycle) -> bytes | None:
    if cycle.more_body:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    cycle.message_event.clear()
    return body


class _Receiver(asyncio.BufferedProtocol):
    """Takes the place of `owner` for the time of a body; `done` says at last whether all of it came."""

    def __init__(self, owner: Protocol, memory: memoryview, patience: float) -> None:
        self.owner, self._rest, self._patience = owner, memory, patience
        self.done: asyncio.Future[bool] = owner.loop.create_future()
        self._wait()

    def stop(self) -> None:
        """Measure no more time."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_later(self._patience, self._judge, len(self._rest))

    def _judge(self, missing: int) -> None:
        if len(self._rest) < missing:
            self._wait()
        elif not self.done.done():
            self.done.set_exception(TimeoutError())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        if not len(self._rest) and not self.done.done():
            self.owner.flow.pause_reading()  # what follows is another request
            self.done.set_result(True)

    def eof_received(self) -> None:
        self.owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(False)
        self.owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self.owner.pause_writing()

    def resume_writing(self) -> None:
        self.owner.resume_writing()
