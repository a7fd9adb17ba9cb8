"""A client's connection: it runs the application for one request at a time. uvicorn's `http=` takes it.

Bytes behind a request stay unparsed until that request is answered. Up to a limit the connection still reads them,
because only a connection that reads sees its client leave.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Coroutine
from functools import partial
from ssl import SSLContext
from typing import Any

import uvicorn
import uvloop

from service.api.http.descriptors import close_longest_idle, max_connections
from service.api.http.exchange import CLOSES, Ends, Exchange, body_of, head_of
from service.api.http.framing import ChunkedBody, HeadReader, Incoming, SizedBody
from service.api.http.wire import ServerState, Wire, widen
from service.errors import MalformedBody

MAX_WAITING_BYTES = 1 << 16
"""Bytes that may wait for the application before the connection stops reading. uvicorn has the same limit."""

TURN_STEPS = 4
"""Steps of the parser, of up to `TURN_CHUNKS` chunks each, before other connections have their turn."""

HANDSHAKE_SECONDS = 10.0
"""Seconds for a TLS handshake, which takes two round trips. The connection counts like any other meanwhile."""

ONE_WAY_SECONDS = 1.0
"""Seconds for an answer to begin after its client has closed its own direction. Nearly all such clients have left, and
their kernels and graphs would run for nobody."""

logger = logging.getLogger("uvicorn.error")


class Connection(Wire):
    """Parses requests from the bytes of a client, and runs one at a time."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Take uvicorn's arguments; the application in `config` must have `serve`, `unreadable` and `stop_waiting`."""
        super().__init__(_loop or asyncio.get_running_loop(), server_state, config.timeout_keep_alive)
        self._app: Any = config.loaded_app
        self._tls = config.ssl
        self._shakes_hands = False
        self._incoming = Incoming()
        self._is_due = False  # whether the loop's next turn goes on with the bytes at hand
        self._reader: HeadReader | None = None  # while a head is incomplete
        self._url = b""  # the target of the running request
        self._exchange: Exchange | None = None  # while a request runs
        self._body: SizedBody | ChunkedBody = SizedBody(0)  # of that request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        name = transport.get_extra_info("sockname")
        is_unix = isinstance(name, str)
        if is_unix:
            widen(transport)
        self._ends = Ends(
            "http" if is_unix or self._tls is None else "https",
            _address(transport.get_extra_info("peername")),
            _address(name),
            name if is_unix else None,
        )
        connections = self.server_state.connections
        if len(connections) > max_connections():
            connections.difference_update(close_longest_idle(connections))
        if not is_unix and self._tls is not None and not self.transport.is_closing():
            self._begin_handshake(self._tls)

    def _begin_handshake(self, tls: SSLContext) -> None:
        """Give the transport to TLS at once: bytes of the handshake may be there already."""
        self._shakes_hands = True
        self.transport.set_write_buffer_limits()  # the usual ones; those of a `Wire` are for the transport of TLS
        handshake = self.loop.start_tls(
            self.transport, self, tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        handshake.send(None).add_done_callback(partial(self._end_handshake, handshake))

    def _end_handshake(self, handshake: Coroutine[Any, Any, asyncio.Transport | None], _: object) -> None:
        transport = None
        try:
            handshake.send(None)
        except StopIteration as done:
            transport = done.value
        except OSError as error:  # the client speaks no TLS, or not this one
            logger.debug("No TLS handshake: %s", error)
            error.__traceback__ = None  # its frames hold the future, which has the error: a cycle
        self._shakes_hands = False
        if transport is None or transport.is_closing():
            self.connection_lost(None)
            return
        transport.set_write_buffer_limits(1)
        self.transport, self.due = transport, self.loop.time() + self.idle_seconds

    def data_received(self, data: bytes) -> None:
        self._incoming.add(data)
        self._advance()

    def eof_received(self) -> bool:
        """Keep the connection while a complete request runs: the client may have closed only its own direction.

        TLS cannot close one direction.
        """
        exchange = self._exchange
        if exchange is None or exchange.more_body or not self.transport.can_write_eof():
            return False
        self.client_ended = True
        exchange.wake()
        self.loop.call_later(ONE_WAY_SECONDS, self._give_up)
        return True

    def _give_up(self) -> None:
        """End the connection of a client that has probably left, unless the answer has begun."""
        if self._exchange is not None and not self._exchange.is_started:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.lose()
        self._exchange = self._reader = None  # breaks a reference cycle
        self._incoming = Incoming()  # a turn may be due

    def end(self, *, at_once: bool = False) -> None:
        """End as every `Wire` does; before the end of a TLS handshake, at once."""
        if self._shakes_hands:
            self.transport.abort()
        else:
            super().end(at_once=at_once)

    def shutdown(self) -> None:
        """Take no more requests: the server stops. Answer now what waits for a step."""
        self._app.stop_waiting()
        if self._exchange is None:
            self.end(at_once=True)
        else:
            self._exchange.keeps_alive = False

    def _advance(self) -> None:
        """Parse the bytes at hand, up to the end of the running request, by turns of `TURN_STEPS`."""
        incoming, self._is_due = self._incoming, False
        try:
            for _ in range(TURN_STEPS):
                size, exchange = incoming.size, self._exchange
                if not size or self.is_ending:
                    break
                if exchange is None:
                    self._take_head()
                elif exchange.more_body:
                    self._take_body(exchange)
                if incoming.size == size:
                    break
            else:
                self._is_due = True
                self.loop.call_soon(self._advance)
        except MalformedBody as error:
            self._refuse(error)
        if self.client_ended and (self._exchange is None or self._exchange.more_body):
            self.end(at_once=True)  # what is incomplete stays so
        else:
            self._balance()

    def _balance(self) -> None:
        """Stop reading if too many bytes wait, or if a turn is due, else read on."""
        waiting = self._incoming.size
        if self._exchange is not None:
            waiting += len(self._exchange.body)
        if (self._is_due or waiting > MAX_WAITING_BYTES) is not self.is_paused:
            self.pause_reading(not self.is_paused)

    def _take_head(self) -> None:
        """Take a head, and create the task of its request. `_advance` adds the body at hand before the task runs."""
        self._reader = self._reader or HeadReader()
        head = self._reader.take(self._incoming)
        if head is None:
            return
        self._reader, self._url, self.due, self.has_asked = None, head.url, math.inf, True
        self._body = body_of(head)
        self._exchange = exchange = Exchange(self, head, self._ends, self._progressed)
        if self._body.is_complete:
            exchange.add_body(b"", more=False)
        tasks = self.server_state.tasks
        task = self.loop.create_task(self._run(exchange))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _take_body(self, exchange: Exchange) -> None:
        piece = self._body.take(self._incoming)
        if piece or self._body.is_complete:
            exchange.add_body(piece, more=not self._body.is_complete)

    async def _run(self, exchange: Exchange) -> None:
        """Run the application. If it fails, answer 500, or cut off an answer that has begun."""
        try:
            await self._app.serve(exchange)
        except (Exception, asyncio.CancelledError) as error:
            logger.error("The application failed", exc_info=error)
        else:
            if not (exchange.is_complete or exchange.is_lost or self.client_ended):
                logger.error("The application gave no whole answer")
        if exchange.is_complete:
            return
        if exchange.is_started or self.client_ended:  # a wait is given up once its client sends no more
            self.end(at_once=True)
        else:
            await exchange.answer(500, [CLOSES, (b"content-length", b"0")], (), 0)

    def _progressed(self) -> None:
        """Go on after the application has taken a part of the body, or has answered."""
        exchange = self._exchange
        if exchange is None or not exchange.is_complete:
            if self.is_paused:
                self._balance()
            return
        self.server_state.total_requests += 1
        self._exchange, self._url, self.due = None, b"", self.loop.time() + self.idle_seconds
        if not exchange.keeps_alive:
            self.end()
        elif (self._incoming.size or self.is_paused or self.client_ended) and not self.transport.is_closing():
            self._advance()

    def _refuse(self, error: MalformedBody) -> None:
        """Answer that the request is not readable, unless its answer has begun; then end the connection."""
        exchange = self._exchange
        if exchange is not None and exchange.is_started:
            logger.warning(error.detail)
            self._body = SizedBody(sys.maxsize)  # discard all that follows; the answer goes on, and is the last
            return
        answer = self._app.unreadable(error, self._url if self._reader is None else self._reader.url)
        identity = answer.fields["X-Request-ID"]
        logger.warning("%s. The request id of its answer is %s.", error.detail.rstrip("."), identity)
        head = head_of(answer.status_code, (*self.server_state.default_headers, *answer.raw_headers))
        self.transport.writelines([head, b"\r\n", *answer.pieces])
        if exchange is not None:
            exchange.is_refused = True
            exchange.lose()
        self.end()


def _address(name: Any) -> tuple[str, int] | None:
    """Return the host and the port of a TCP socket's name; else None."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


class Loop(uvloop.Loop):
    """An event loop that leaves TLS to the connections: `Connection` counts them from the moment they are accepted."""

    async def create_server(self, *given: Any, ssl: Any = None, **more: Any) -> Any:
        """Listen as asyncio's loops do, but without TLS."""
        return await super().create_server(*given, **more)
