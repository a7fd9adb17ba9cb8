"""How a connection ends: after its last answer, what still comes is discarded for a while, and it is closed.

A client that still sends when its connection is closed gets a reset, and often loses the answer that was on its way.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any, ClassVar, Protocol, cast


class ServerState(Protocol):
    """What uvicorn's server shares with its connections."""

    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    total_requests: int
    default_headers: list[tuple[bytes, bytes]]


class Wire(asyncio.Protocol):
    """The side of a connection that faces the transport: backpressure, silence, and the end.

    One timer serves a connection for all its life: a new one for each request takes longer than to parse its head.
    """

    transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop, server_state: ServerState, idle_seconds: float) -> None:
        self.loop, self.server_state, self.idle_seconds = loop, server_state, idle_seconds
        self.due = loop.time() + idle_seconds
        """When the connection is closed, unless a whole head comes before."""
        self.is_paused = self.is_ending = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent = 0  # bytes that the socket had not taken when they were last looked at

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server_state.connections.add(self)
        self._timer = self.loop.call_at(self.due, self._judge)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self._timer.cancel()
        self._writable.set()

    def _judge(self) -> None:
        """Close the connection on which no request comes; break off one whose client reads nothing of an answer."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if unsent and unsent == self._unsent:
            self.transport.abort()
        elif now >= self.due:
            self.end(at_once=True)
        self._unsent, later = unsent, now + self.idle_seconds
        self._timer = self.loop.call_at(min(self.due, later) if now < self.due else later, self._judge)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._unsent = 0  # the client reads
        self._writable.set()

    async def drain(self) -> None:
        """Wait until the client has read enough of what was written."""
        if not self._writable.is_set():
            await self._writable.wait()

    def pause_reading(self, paused: bool) -> None:
        """Let what comes wait in the socket, or read on."""
        if not self.transport.is_closing():
            self.is_paused = paused
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    def give_way_to(self, protocol: asyncio.BaseProtocol) -> None:
        """Let what comes go to `protocol`, which may be this one."""
        self.pause_reading(True)  # uvloop looks for the kind of protocol when reading starts
        self.transport.set_protocol(protocol)
        self.pause_reading(False)

    def end(self, *, at_once: bool = False) -> None:
        """Close the connection after what is written. Only if nobody waits for an answer may that be `at_once`.

        With TLS nothing can be half closed: the transport discards what comes until the client says goodbye.
        """
        if self.is_ending or self.transport.is_closing():
            return
        self.is_ending, self.due = True, math.inf
        self.give_way_to(Ending(self))
        if at_once or not self.transport.can_write_eof():
            self.transport.close()
        else:
            with suppress(OSError):  # the client has broken it off
                self.transport.write_eof()


class StandIn(asyncio.BaseProtocol):
    """Takes what comes in the place of `owner`, which still hears of all else."""

    def __init__(self, owner: Wire) -> None:
        self.owner = owner

    def connection_lost(self, exc: Exception | None) -> None:
        self.owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self.owner.pause_writing()

    def resume_writing(self) -> None:
        self.owner.resume_writing()


class Ending(StandIn, asyncio.Protocol):
    """Discards what comes behind the last answer, until the client closes the connection."""

    most_bytes: ClassVar[int] = 1 << 30
    """Bytes that are discarded: as many as requests in flight may hold by default."""

    most_seconds: ClassVar[float] = 5.0
    """Seconds for which they are, from when the answer has left this process: half as many bytes come at 1 Gb/s."""

    def __init__(self, owner: Wire) -> None:
        super().__init__(owner)
        self._came = 0
        self._wait()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_later(self.most_seconds, self._part)

    def _part(self) -> None:
        """Break the connection off, but not while the client reads an answer: its owner judges whether it does."""
        if self.owner.transport.get_write_buffer_size():
            self._wait()
        else:
            self.owner.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._came += len(data)
        if self._came > self.most_bytes:
            self.owner.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
