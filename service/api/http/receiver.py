"""A body is received straight into the memory where its tensors are wanted."""

from __future__ import annotations

import asyncio

from service.api.http.endings import StandIn, Wire
from service.api.http.sockets import receive_now

FAST_BYTES = 1 << 17
"""If so many bytes of a body come at once, more are on their way, and the receiver looks for them at once."""

LEAST_RATE = 1 << 14
"""Bytes a second, on the average, that a body must come at if it takes longer than a request may be silent."""


class Receiver(StandIn, asyncio.BufferedProtocol):
    """Receives the last bytes of a body of `size` bytes into `memory`; if it has the plain socket, at once too.

    `done` becomes True once all have come and False if the client goes. It raises TimeoutError if nothing comes for
    `patience` seconds, or, over a longer time, less than `LEAST_RATE`.
    """

    def __init__(self, owner: Wire, memory: memoryview, size: int, patience: float, socket: int | None) -> None:
        super().__init__(owner)
        self._rest, self._size, self._patience, self._socket = memory, size, patience, socket
        self.done: asyncio.Future[bool] = owner.loop.create_future()
        self._began = self._last = owner.loop.time()
        self._wait()

    def settle(self, done: bool) -> None:
        """Set the result, unless there is one."""
        if not self.done.done():
            self.done.set_result(done)

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
            self._rest = receive_now(self._socket, self._rest)
        if not len(self._rest):
            self.owner.transport.pause_reading()  # what follows is another request
            self.settle(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle(False)
        super().connection_lost(exc)
