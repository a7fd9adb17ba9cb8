"""The end of a connection: after its last answer it discards what the client still sends for a while, then closes.

A client that still sends when the server closes gets a reset, and often loses the answer on its way.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any, ClassVar, Protocol, cast

MIN_BYTES_PER_SECOND = 1 << 14
"""The lowest average rate of a body or an answer that takes long: a slower client holds memory too long."""


def is_slow(count: int, seconds: float, patience: float) -> bool:
    """Return whether `count` bytes in `seconds` are less than `MIN_BYTES_PER_SECOND`, after `patience` seconds."""
    return count < MIN_BYTES_PER_SECOND * (seconds - patience)


class ServerState(Protocol):
    """The state that uvicorn's server shares with its connections."""

    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    total_requests: int
    default_headers: list[tuple[bytes, bytes]]


class Wire(asyncio.Protocol):
    """The part of a connection that faces the transport: backpressure, timeouts and the end.

    A connection has one timer for all its life: a new timer for each request takes longer than to parse its head.
    """

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, server_state: ServerState, idle_seconds: float) -> None:
        self.loop, self.server_state, self.idle_seconds = loop, server_state, idle_seconds
        self.due = loop.time() + idle_seconds
        """The loop's time when the connection closes unless a whole head has come."""
        self.is_paused = self.is_ending = False
        self.has_asked = False
        """Whether the head of a request has come."""
        self.client_ended = False
        """Whether the client has closed its direction. It sends no more, but may still read."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent = 0  # the size of the write buffer at the last check
        self._filled_at, self._filled = 0.0, 0  # when the client fell behind, and the size of the write buffer then

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(1)  # so `drain` waits until all bytes have left the process
        self.server_state.connections.add(self)
        self._timer = self.loop.call_at(self.due, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self._timer.cancel()
        self._writable.set()

    def _check_progress(self) -> None:
        """Close an idle connection; abort a connection whose client reads nothing of its answer, or too slowly."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        slow = is_slow(self._filled - unsent, now - self._filled_at, self.idle_seconds)
        if not self._writable.is_set() and (slow or unsent == self._unsent):
            self.transport.abort()
        elif now >= self.due:
            self.end(at_once=True)
        self._unsent, later = unsent, now + self.idle_seconds
        self._timer = self.loop.call_at(min(self.due, later) if now < self.due else later, self._check_progress)

    def pause_writing(self) -> None:
        self._filled_at, self._filled = self.loop.time(), self.transport.get_write_buffer_size()
        self._writable.clear()

    def resume_writing(self) -> None:
        self._unsent = 0  # the client reads
        self._writable.set()

    async def drain(self) -> None:
        """Wait until the write buffer is empty, or the connection lost."""
        if not self._writable.is_set():
            await self._writable.wait()

    def pause_reading(self, paused: bool) -> None:
        """Leave incoming bytes in the socket, or read on."""
        if not self.transport.is_closing():
            self.is_paused = paused
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    def give_way_to(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass incoming bytes to `protocol`, which may be this one."""
        self.pause_reading(True)  # uvloop reads the type of the protocol only when reading starts
        self.transport.set_protocol(protocol)
        self.pause_reading(False)

    def end(self, *, at_once: bool = False) -> None:
        """Close the connection once its last answer has left; `at_once`, only if no client waits for an answer.

        TLS cannot close one direction: there the transport discards incoming bytes until the client closes.
        """
        if self.is_ending or self.transport.is_closing():
            return
        self.is_ending, self.due = True, math.inf
        self.give_way_to(Ending(self))
        if at_once or self.client_ended or not self.transport.can_write_eof():
            self.transport.close()
        else:
            with suppress(OSError):  # the client has closed it
                self.transport.write_eof()


class StandIn(asyncio.BaseProtocol):
    """Receives in place of `owner`, and passes it every other event of the transport."""

    def __init__(self, owner: Wire) -> None:
        self.owner = owner

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self.owner.pause_writing()

    def resume_writing(self) -> None:
        self.owner.resume_writing()


class Ending(StandIn, asyncio.Protocol):
    """Discards incoming bytes after the last answer, until the client closes the connection."""

    max_bytes: ClassVar[int] = 1 << 30
    """Bytes to discard before the connection is aborted: what requests in flight may hold by default."""

    max_seconds: ClassVar[float] = 5.0
    """Seconds to discard after the answer has left this process: at 1 Gb/s half of `max_bytes` come in them."""

    def __init__(self, owner: Wire) -> None:
        super().__init__(owner)
        self._discarded = 0
        self._wait()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_later(self.max_seconds, self._abort)

    def _abort(self) -> None:
        """Abort the connection, unless an answer is still leaving: then `owner` checks that the client reads."""
        if self.owner.transport.get_write_buffer_size():
            self._wait()
        else:
            self.owner.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._discarded += len(data)
        if self._discarded > self.max_bytes:
            self.owner.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
