"""The receiver of a large body: bytes go from the socket straight into the memory of its tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service.api.http.endings import StandIn, Wire, is_slow
from service.api.http.sockets import receive_now
from service.buffers.store import without_traceback
from service.errors import Busy

FAST_BYTES = 1 << 17
"""After a read of this size more bytes are usually on their way, so the receiver polls the socket at once."""


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
