"""uvicorn's HTTP protocol, which can receive a body straight into the application's memory, and answer in one go.

uvicorn hands a body over in small chunks, each copied three times on its way from the socket. Where the body's length
is known, nothing is left to parse: the socket may as well fill the place where the tensors are wanted. And it sends an
answer's head by itself, which costs a system call, and the client two wake-ups.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import select
import sys
import termios
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

EXCHANGE = "gradserve.exchange"
"""The name, among the scope's extensions, of the request's `Exchange`."""

LARGE_BYTES, TURN_BYTES = 8 << 20, 1 << 19
"""An answer of more than so many bytes is written in pieces of so many, between which it is the turn of others."""

LONGEST_HEAD = 1 << 16
"""A head, or whatever else is no body, of more bytes than that is refused, give or take a piece."""

FAST_BYTES, LOOKS, LEAST_BYTES, MOST_AT_ONCE = 1 << 17, 40, 1 << 14, 1 << 21
"""Behind a head, or so many bytes of a body that came at once, more are on their way. They are looked for so many times
before the receiver goes to sleep, which takes longer, and again if at least so many came meanwhile; but after that many
bytes it is the turn of others."""

LEAST_RATE = 1 << 14
"""Bytes a second, on the average, that a body must come at if it takes longer than a request may be silent."""

MOST_QUEUED, PIECE_BYTES = 16, 1 << 14
"""Requests behind the one that runs that are read, so that it is noticed when their client leaves; and bytes that are
parsed at a time, as so many may be hundreds of requests, unless they are known to be a body's. What follows is kept as
it came."""

LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 22
"""How long, and how much, is read after the last answer: a client that still sends when its connection is closed is
told of that, and not of what it was answered."""

GOODBYE_SECONDS = 1.0
"""How long a TLS client is waited for to say goodbye, which one that is idle does not."""

BUSY_SECONDS, PAUSE_SECONDS = 0.02, 0.003
"""How long after an answer to another request a large one makes way for more, and how long between two pieces."""

Pieces: TypeAlias = Sequence[bytes | memoryview]


class Protocol(HttpToolsProtocol):
    """Adds an `Exchange` to each request's scope, and closes connections on which a request is long in coming.

    uvicorn closes those that are idle after an answer; here, also those on which nothing came yet, half a head, or a
    part of a body that was refused, and those whose client has stopped reading its answer. One timer serves a
    connection for all its life: uvicorn's, new for each request, takes longer than to parse a request's head.

    It stands in for the transport where uvicorn sends an answer, as it closes a connection in its own way.
    """

    flow: _Flow

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow = _Flow(transport)  # type: ignore[arg-type]
        self._due = self.loop.time() + self.timeout_keep_alive
        self._timer = self.loop.call_at(self._due, self._judge)
        self._unsent = 0  # bytes of answers, when they were last looked at
        self._unheeded = 0  # bytes that came since a head was complete, or a part of a body came
        self._ended = False  # whether what comes is thrown away
        self._spare = math.inf  # how many bytes of that, before the connection is broken off
        self._stopping = False  # whether the server stops
        self._ending: asyncio.TimerHandle | None = None  # what closes it at last
        self._kept = b""  # what came while the flow was full
        self._left = sys.maxsize  # bytes of the last answer that the client did not have yet, when they were looked at
        self.receiving: asyncio.Future[bool] | None = None
        """What waits for a body that is received elsewhere."""
        self._running: RequestResponseCycle | None = None  # `cycle` may be of a request that waits for its turn

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()
        if self._ending is not None:
            self._ending.cancel()
        if self.receiving is not None and not self.receiving.done():  # TLS had this call in its queue before
            self.receiving.set_result(False)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.cycle = self._running = None  # type: ignore[assignment]  # which lead back here
        for waiting, _ in self.pipeline:
            waiting.scope["extensions"].clear()  # where its `Exchange` is, which leads back to it
        self.pipeline.clear()

    def _judge(self) -> None:
        now, unsent = self.loop.time(), _unsent(self.transport)
        if (unsent and unsent == self._unsent) or (self.flow.read_paused and _has_left(self.transport)):
            self.transport.abort()
        self._unsent = unsent
        if now >= self._due and not (self._ended or self.transport.is_closing()):
            self._close()  # which waits for what is unsent
        later = now + self.timeout_keep_alive
        self._timer = self.loop.call_at(min(self._due, later) if now < self._due else later, self._judge)

    def resume_writing(self) -> None:
        self._unsent = 0  # the client reads
        super().resume_writing()

    def write(self, data: bytes) -> None:
        """Send a part of an answer."""
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Whether the connection is closed."""
        return self.transport.is_closing()

    def close(self) -> None:
        """Close the connection after its last answer, but first read what the client still sends.

        Else it would be told of a broken connection before it reads the answer. With TLS, its goodbye is waited for.
        """
        running = self._running
        if running is not None and running.response_complete and running.more_body and not self._ended:
            self._half_close()
        elif self.transport.can_write_eof() and not self._stopping:
            self._linger()
        else:
            self._close()

    def _half_close(self) -> None:
        """Send no more. Where the server stops, what comes is read for a moment only."""
        if self.transport.can_write_eof() and not self.transport.is_closing():  # never with TLS
            with suppress(OSError):  # the client has broken it off
                self.transport.write_eof()
        if self._stopping:
            self._end_after(LINGER_SECONDS, self._close)

    def _linger(self) -> None:
        """Send no more, and throw away what comes for a moment."""
        self.end()
        self._spare = LINGER_BYTES
        self._half_close()
        self.flow.full = False
        self.flow.resume_reading()
        self._end_after(LINGER_SECONDS, self._part)

    def _close(self) -> None:
        self.transport.close()
        if not self.transport.can_write_eof():  # with TLS
            self._end_after(GOODBYE_SECONDS, self._part)

    def _part(self) -> None:
        """Break the connection off, which the client has not closed, but not while it still reads the last answer."""
        now, left = self.loop.time(), self.transport.get_write_buffer_size() + _unacknowledged(self.transport)
        if left < self._left:
            self._left, self._due = left, now + self.timeout_keep_alive
        if left and now < self._due:
            self._end_after(GOODBYE_SECONDS, self._part)
        else:
            self.transport.abort()

    def _end_after(self, seconds: float, end: Callable[[], None]) -> None:
        """Call `end` unless the client goes before."""
        if self._ending is not None:
            self._ending.cancel()
        self._ending = self.loop.call_later(seconds, end)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            self._spare -= len(data)
            if self._spare < 0:
                self.transport.abort()
        else:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Parse `data`, or keep it until fewer requests wait."""
        start = 0
        while start < len(data):
            if self.flow.full:
                self._kept += data[start:]
                break
            end = start + self._piece()
            self._parse(data[start:end])
            start = end

    def _piece(self) -> int:
        """How many bytes to parse."""
        cycle, missing = self.cycle, 0
        if cycle is not None and cycle.more_body and not cycle.response_complete:
            lengths = (int(value) for name, value in cycle.scope["headers"] if name == b"content-length")
            missing = next(lengths, 0) - len(cycle.body)
        return max(PIECE_BYTES, missing)

    def _parse(self, data: bytes) -> None:
        self._unheeded += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(f"The request is no HTTP that this server reads: {_reason(error)[:200]}")
        else:
            if self._unheeded > LONGEST_HEAD:
                self._refuse(f"The head of this request has more than {LONGEST_HEAD} bytes.")

    def _stay(self, rest: bytes) -> None:
        """Serve a request that asks for another protocol as if it had not, and end the connection after it.

        The parser leaves all that follows the head, `rest`, to that protocol; but the body is this request's.
        """
        if self._ended:  # behind that request
            return
        self.cycle.keep_alive = False
        headers = self.scope["headers"]
        framing = [b"%b: %b\r\n" % one for one in headers if one[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(_LastBody(self))
        self._parse(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(framing), rest))

    def _refuse(self, message: str) -> None:
        """End the connection because of what came, after the answers to the requests before it."""
        cycle = self.cycle
        if self._ended or self.transport.is_closing():  # behind the last request
            return
        if cycle is None or (cycle.response_complete and not cycle.more_body):  # where a request was to begin
            self._answer_and_end(message)
        elif cycle.response_started or not cycle.more_body:  # the request of which will be answered, or was
            self.logger.warning(message)
            cycle.keep_alive = False
            self.end()
            if cycle.response_complete:
                self._linger()
        elif self.pipeline:  # in the body of one that waits for its turn
            cycle.keep_alive = False
            cycle.scope["extensions"].clear()
            self.pipeline[0] = cycle, self._unreadable(message)
            self.end()
        else:
            cycle.scope["extensions"][EXCHANGE].is_refused = True  # type: ignore[attr-defined]
            self._answer_and_end(message)
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()

    def _unreadable(self, message: str) -> Any:
        answer: Any = self.config.loaded_app.unreadable(message)
        self.logger.warning("%s It is answered as %s.", message, answer.fields["X-Request-ID"])
        return answer

    def _answer_and_end(self, message: str) -> None:
        answer = self._unreadable(message)
        lines = [b"%b: %b\r\n" % line for line in (*self.server_state.default_headers, *answer.raw_headers)]
        self.transport.write(b"".join([b"HTTP/1.1 400 Bad Request\r\n", *lines, b"\r\n", *answer.pieces]))
        self._linger()

    def end(self) -> None:
        """Throw away what comes from now on."""
        self._ended = True

    def on_message_begin(self) -> None:
        self._unheeded = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._unheeded = 0
        super().on_body(body)
        if self.cycle.response_complete:  # it is thrown away
            self._due = min(self._due + len(body) / LEAST_RATE, self.loop.time() + self.timeout_keep_alive)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser has not looked for a body
            return
        cycle = self.cycle
        cycle.more_body = False
        cycle.message_event.set()
        if not self.parser.should_keep_alive():  # as a trailer may say: the parser reads no more
            cycle.keep_alive = False
        if cycle.response_complete and not cycle.keep_alive:
            self._linger()
        elif cycle.response_complete:
            self._due = self.loop.time() + self.timeout_keep_alive

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if not (self._ended or self.transport.is_closing()):
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.pipeline and self._running is not None and self._running.keep_alive:
            self._running, app = self.pipeline.pop()
            super()._start_asgi_task(self._running, app)
        else:
            self._due = self.loop.time() + self.timeout_keep_alive
        if len(self.pipeline) <= MOST_QUEUED:
            kept, self._kept, self.flow.full = self._kept, b"", False
            self._read(kept)
            self.flow.resume_reading()

    def shutdown(self) -> None:
        """The server stops: whoever waits for an epoch is told."""
        self.config.loaded_app.stop_waiting()
        self._stopping = True
        if self.cycle is not None:
            self.cycle.keep_alive = False
        if self.cycle is None or self.cycle.response_complete:
            self.close()

    def on_headers_complete(self) -> None:
        if not self.url.startswith(b"/"):
            self.url = _with_path(self.url)
        super().on_headers_complete()
        cycle = self.cycle
        self.headers = []  # where trailers go: they are no headers, which nobody may smuggle in behind a body
        self._due, self._unheeded = math.inf, 0
        if not self.pipeline:
            self._running = cycle
        elif len(self.pipeline) <= MOST_QUEUED:
            self.flow.resume_reading()
        else:
            self.flow.full = True
        if self.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False
        cycle.transport = self  # type: ignore[assignment]
        self.scope["extensions"] = {EXCHANGE: Exchange(self, cycle)}  # type: ignore[dict-item]

    def read_by(self, protocol: asyncio.BaseProtocol) -> None:
        """Let what comes go to `protocol`."""
        self.flow.pause_reading()  # uvloop asks for the kind of protocol when reading starts
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()


class _Flow(FlowControl):
    """Reads no more while it is full, whoever else wants to."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


def exchange_of(scope: Scope) -> Exchange | None:
    """The request of this scope, and its answer; None under another server."""
    exchange: Exchange | None = scope.get("extensions", {}).get(EXCHANGE)
    return exchange


class Exchange:
    """A request and its answer on a connection."""

    __slots__ = ("_cycle", "_protocol", "is_refused")

    def __init__(self, protocol: Protocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self.is_refused = False
        """Whether the client was told that its body cannot be read, whatever the answer is."""

    def is_unasked(self) -> bool:
        """Whether the client still waits to be asked for the body."""
        return self._cycle.waiting_for_100_continue and self._cycle.more_body

    def is_unheard(self) -> bool:
        """Whether the client was gone before it had the whole answer."""
        return self._cycle.disconnected and not self._cycle.response_complete

    def body_at_hand(self) -> bytes | None:
        """The whole body, if all of it has come and none was received."""
        cycle = self._cycle
        if cycle.more_body:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        return body

    async def receive_into(self, memory: memoryview, patience: float) -> bool:
        """Fill `memory`, which must be as long as the body, of which nothing was received. False if the client goes.

        Raises TimeoutError after `patience` seconds in which nothing comes, or, over a longer time, less than
        `LEAST_RATE`; the answer then closes the connection.
        """
        protocol, cycle = self._protocol, self._cycle
        begun, cycle.body = cycle.body, bytearray()
        memory[: len(begun)] = begun
        cycle.message_event.clear()
        if cycle.disconnected:
            return False
        rest, socket = memory[len(begun) :], _plain_socket(protocol)
        if cycle.waiting_for_100_continue:
            protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        elif socket is not None:
            rest = _received(socket, rest)
        if len(rest) and not await self._receive(_Receiver(protocol, rest, len(memory), patience, socket)):
            return False
        protocol.parser = httptools.HttpRequestParser(protocol)  # the old one still waits for the body
        protocol.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        cycle.more_body = False
        return True

    async def _receive(self, receiver: _Receiver) -> bool:
        protocol, cycle = self._protocol, self._cycle
        protocol.receiving = receiver.done
        protocol.read_by(receiver)
        try:
            return await receiver.done
        except TimeoutError:
            cycle.keep_alive = False
            raise
        finally:
            receiver.stop()
            protocol.receiving = None
            if not cycle.disconnected:
                protocol.read_by(protocol)
            del receiver  # `done` has the exception, whose traceback has this frame

    async def send_at_once(self, status: int, head: str, pieces: Pieces, size: int) -> int:
        """Send an answer with status 200 in one system call, if the socket takes it, where `cycle.send` needs two.

        `head` has a line for each header, ended by CRLF, the Content-Length, which is `size`, among them. Returns how
        many bytes of the body have gone: fewer, if the client has.
        """
        protocol, cycle = self._protocol, self._cycle
        if protocol.flow.write_paused:
            await protocol.flow.drain()
        if cycle.disconnected:
            return 0
        lines = [b"%b: %b\r\n" % line for line in protocol.server_state.default_headers]
        if self.is_unasked():  # whether the body comes all the same, nobody can know
            cycle.keep_alive = False
        if "onnection: close" in head:
            cycle.keep_alive = False
        end = "\r\n" if cycle.keep_alive or "onnection: close" in head else "connection: close\r\n\r\n"
        end = "\r\n" if cycle.keep_alive or "onnection: close" in head else "connection: close\r\n\r\n"
        _ = "\r\n" if cycle.keep_alive else "connection: close\r\n\r\n"
        cycle.response_started = True
        first = b"".join([STATUS_LINE[status], *lines, (head + end).encode("latin-1")])
        if size <= LARGE_BYTES:
            protocol.transport.writelines([first, *pieces])
        else:
            protocol.transport.write(first)
            written = await self._write_by_turns(pieces)
            if cycle.disconnected:
                return written
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            protocol.close()
        cycle.on_response()
        return size

    async def _write_by_turns(self, pieces: Pieces) -> int:
        """Write as fast as the client reads, but with pauses while this process answers other requests.

        Where there are none, 64 MB take the time that the socket takes; read again and again beside eight clients that
        add 4 KB, they slow these down by a tenth.
        """
        protocol, state, busy_until = self._protocol, self._protocol.server_state, 0.0
        answered, written, turn = state.total_requests, 0, TURN_BYTES
        for piece in pieces:
            for start in range(0, len(piece), TURN_BYTES):
                part = piece[start : start + TURN_BYTES]
                protocol.transport.write(part)
                written += len(part)
                if written < turn:
                    continue
                turn = written + TURN_BYTES
                if protocol.flow.write_paused:
                    await protocol.flow.drain()
                await asyncio.sleep(0)
                now = protocol.loop.time()
                if state.total_requests != answered:
                    answered, busy_until = state.total_requests, now + BUSY_SECONDS
                if now < busy_until:
                    await asyncio.sleep(PAUSE_SECONDS)
                if self._cycle.disconnected:
                    return written
        return written


class _LastBody:
    """What a parser tells of a body, for the connection's last request."""

    def __init__(self, owner: Protocol) -> None:
        self._owner, self._over = owner, False

    def on_body(self, body: bytes) -> None:
        if not self._over:
            self._owner.on_body(body)

    def on_message_complete(self) -> None:
        if not self._over:
            self._over = True
            self._owner.on_message_complete()
            self._owner.end()


class _Receiver(asyncio.BufferedProtocol):
    """Takes the place of `owner` for the time of a body of `size` bytes, of which the last go into `memory`.

    `done` says at last whether all of it came.
    """

    def __init__(self, owner: Protocol, memory: memoryview, size: int, patience: float, socket: int | None) -> None:
        self.owner, self._rest, self._patience, self._socket = owner, memory, patience, socket
        self.done: asyncio.Future[bool] = owner.loop.create_future()
        self._began = self._last = owner.loop.time()
        self._size = size
        self._wait()

    def stop(self) -> None:
        """Measure no more time."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = self.owner.loop.call_at(self._last + self._patience, self._judge)

    def _judge(self) -> None:
        now, came = self.owner.loop.time(), self._size - len(self._rest)
        if now < self._last + self._patience and came >= LEAST_RATE * (now - self._began - self._patience):
            self._wait()
        elif not self.done.done():
            self.done.set_exception(TimeoutError())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest, self._last = self._rest[nbytes:], self.owner.loop.time()
        if nbytes >= FAST_BYTES and self._socket is not None:
            self._rest = _received(self._socket, self._rest)
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


def _reason(error: httptools.HttpParserError) -> str:
    """What the parser, or one of the methods that it calls, did not like."""
    return str(error.__context__ if isinstance(error.__context__, httptools.HttpParserError) else error)


def _unsent(transport: asyncio.WriteTransport) -> int:
    """Bytes of answers that the kernel has not taken yet; while there are any, with those that it has not sent."""
    held = transport.get_write_buffer_size()
    return held + _unacknowledged(transport) if held else 0


def _unacknowledged(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel keeps until the client has them."""
    with suppress(OSError, ValueError):  # where the kernel does not tell, or the socket is closed
        return int.from_bytes(fcntl.ioctl(_socket(transport), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0


def _has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether the client has closed its connection, though what it sent before may not be read yet."""
    poll = select.poll()
    with suppress(ValueError):  # the socket is closed
        poll.register(_socket(transport), select.POLLRDHUP)
    return bool(poll.poll(0))


def _socket(transport: asyncio.BaseTransport) -> int:
    """The socket's number; -1: it is closed."""
    socket = transport.get_extra_info("socket")  # None with TLS, from when it is lost until that is told
    return -1 if socket is None else socket.fileno()


def _with_path(url: bytes) -> bytes:
    """A URL whose path may be empty, which means `/`. Only where it names its host can it be."""
    parsed = httptools.parse_url(url)
    if parsed.path is not None:
        return url
    return b"/" if parsed.query is None else b"/?" + parsed.query


def _plain_socket(protocol: Protocol) -> int | None:
    """The socket's number, unless what comes through it must be deciphered."""
    return _socket(protocol.transport) if protocol.transport.get_extra_info("ssl_object") is None else None


def _received(socket: int, rest: memoryview) -> memoryview:
    """Fill `rest` with what comes in the next moments: what is left of it then."""
    enough, looks = len(rest) - MOST_AT_ONCE, 0
    while len(rest) > max(enough, 0) and looks < LOOKS:
        try:
            count = os.readv(socket, [rest])
        except BlockingIOError:
            looks += 1
        except OSError:
            break  # the loop meets it too, and ends the connection
        else:
            if not count:
                break  # as it does this
            rest, looks = rest[count:], 0 if count >= LEAST_BYTES else looks + 1
    return rest
