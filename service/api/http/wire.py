"""The transport's side of a connection: backpressure, timeouts, large bodies, and the end.

A large body goes from the socket straight into the memory of its tensors. After the last answer the connection discards
what the client still sends for a while, then closes: a client that still sends when the server closes gets a reset, and
often loses the answer on its way.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol, cast

from service.buffers.store import without_traceback
from service.errors import Busy

MIN_BYTES_PER_SECOND = 1 << 14
"""The lowest average rate of a body or an answer that takes long: a slower client holds memory too long."""

FAST_BYTES = 1 << 17
"""After a read of this size more bytes are usually on their way, so the receiver polls the socket at once."""

MAX_POLLS = 40
"""Empty polls before `receive_now` returns: 40 of them take less time than the event loop needs to wake."""

PROGRESS_BYTES = 1 << 14
"""A read of at least this size resets the count of empty polls."""

READ_TURN_BYTES = 1 << 21
"""Bytes after which `receive_now` returns, so that other connections have their turn."""

UNIX_BUFFER_BYTES = 1 << 20
"""Bytes of an answer that a UNIX socket may hold, if the system allows. The usual 208 KB are no faster than TCP, and
beyond 1 MB nothing is gained.
"""


def widen(transport: asyncio.BaseTransport) -> None:
    """Let a UNIX socket hold more bytes than by default: server and client then take turns less often."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)


def plain_socket(transport: asyncio.Transport) -> int | None:
    """Return the descriptor of the socket; None if it is closed, or if TLS must decrypt its bytes."""
    if transport.is_closing() or transport.get_extra_info("ssl_object") is not None:
        return None  # the descriptor of a closed socket may belong to another connection by now
    descriptor: int = transport.get_extra_info("socket").fileno()
    return descriptor


def receive_now(descriptor: int, rest: memoryview) -> memoryview:
    """Fill `rest` with the bytes that come in the next moments; return the part that is not filled."""
    min_rest, polls = max(len(rest) - READ_TURN_BYTES, 0), 0
    while len(rest) > min_rest and polls < MAX_POLLS:
        try:
            count = os.readv(descriptor, [rest])
        except BlockingIOError:
            polls += 1
            continue
        except OSError:
            break  # the event loop meets the error too, and ends the connection
        if not count:
            break  # the client has closed; the event loop sees it too
        rest, polls = rest[count:], 0 if count >= PROGRESS_BYTES else polls + 1
    return rest


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
        """The loop's time when the connection closes unless a whole head has come; infinite while a request runs."""
        self.is_paused = self.is_ending = False
        self.has_asked = False
        """Whether the head of a request has come."""
        self.client_ended = False
        """Whether the client has closed its direction. It sends no more, but may still read."""
        self.writable = asyncio.Event()
        """Set while the write buffer is empty, and once the connection is lost."""
        self.writable.set()
        self._unsent = 0  # the size of the write buffer at the last check
        self._filled_at, self._filled = 0.0, 0  # when the client fell behind, and the size of the write buffer then

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(1)  # so `writable` is set once all bytes have left the process
        self.server_state.connections.add(self)
        self._timer = self.loop.call_at(self.due, self._check_progress)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self._timer.cancel()
        self.writable.set()

    def _check_progress(self) -> None:
        """Close an idle connection; abort a connection whose client reads nothing of its answer, or too slowly."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        slow = is_slow(self._filled - unsent, now - self._filled_at, self.idle_seconds)
        if not self.writable.is_set() and (slow or unsent == self._unsent):
            self.transport.abort()
        elif now >= self.due:
            self.end(at_once=True)
        self._unsent, later = unsent, now + self.idle_seconds
        self._timer = self.loop.call_at(min(self.due, later) if now < self.due else later, self._check_progress)

    def pause_writing(self) -> None:
        self._filled_at, self._filled = self.loop.time(), self.transport.get_write_buffer_size()
        self.writable.clear()

    @property
    def unread_since(self) -> float:
        """The loop's time when the client fell behind; infinite if it has read all that was written."""
        return math.inf if self.writable.is_set() else self._filled_at

    def resume_writing(self) -> None:
        self._unsent = 0  # the client reads
        self.writable.set()

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
        self.is_ending, self.due = True, self.loop.time() + Ending.max_seconds
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


class Receiver(StandIn, asyncio.BufferedProtocol):
    """Receives the rest of a body of `size` bytes into `memory`, and polls the plain `socket` if it has one.

    `done` becomes True once the body is complete, and False if the client leaves. It raises TimeoutError if nothing
    comes for `patience` seconds, or if, over a longer time, less comes than `MIN_BYTES_PER_SECOND`. It raises the
    `Busy` of `hold`, which takes the bytes that have come so far.
    """

    def __init__(
        self,
        owner: Wire,
        memory: memoryview,
        size: int,
        patience: float,
        socket: int | None,
        hold: Callable[[int], None],
    ) -> None:
        super().__init__(owner)
        self._rest, self._size, self._patience, self._socket, self._hold = memory, size, patience, socket, hold
        self.done: asyncio.Future[bool] = owner.loop.create_future()
        self._start = self._last = owner.loop.time()
        self._wait()

    def settle(self, done: bool) -> None:
        """Set the result unless `done` has a result."""
        if not self.done.done():
            self.done.set_result(done)

    def stop(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_at(self._last + self._patience, self._check_progress)

    def _check_progress(self) -> None:
        now, received = self.owner.loop.time(), self._size - len(self._rest)
        slow = is_slow(received, now - self._start, self._patience)
        if now < self._last + self._patience and not slow:
            self._wait()
        elif not self.done.done():
            self.done.set_exception(TimeoutError())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest, self._last = self._rest[nbytes:], self.owner.loop.time()
        if nbytes >= FAST_BYTES and self._socket is not None:
            self._rest = receive_now(self._socket, self._rest)
        try:
            self._hold(self._size - len(self._rest))
        except Busy as busy:
            self.owner.transport.pause_reading()
            if not self.done.done():
                self.done.set_exception(without_traceback(busy))
            return
        if not len(self._rest):
            self.owner.transport.pause_reading()  # what follows belongs to the next request
            self.settle(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle(False)
        super().connection_lost(exc)


def unread_bytes(transport: asyncio.BaseTransport) -> int:
    """Return how many bytes the kernel has that the peer has not; 0 if the system does not say.

    While it has any, a transport with TLS may hide up to 64 KB more.
    """
    with suppress(OSError):
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return int.from_bytes(found, sys.byteorder)
    return 0


class Ending(StandIn, asyncio.Protocol):
    """Discards incoming bytes after the last answer, until the client closes the connection."""

    max_bytes: ClassVar[int] = 1 << 30
    """Bytes to discard before the connection is aborted: what requests in flight may hold by default."""

    max_seconds: ClassVar[float] = 5.0
    """Seconds to discard after the answer has left this process, and again while the client reads the rest of it."""

    def __init__(self, owner: Wire) -> None:
        super().__init__(owner)
        self._discarded, self._unread = 0, math.inf
        self._wait()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_later(self.max_seconds, self._abort)

    def _abort(self) -> None:
        """Abort the connection, unless the client still reads. While an answer leaves, `owner` checks that."""
        before, self._unread = self._unread, unread_bytes(self.owner.transport)
        reads = self._unread and before - self._unread >= MIN_BYTES_PER_SECOND * self.max_seconds
        if self.owner.transport.get_write_buffer_size() or reads:
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
