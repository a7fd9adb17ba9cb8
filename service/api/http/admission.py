"""Admission: how many bytes the requests in flight may hold. The server refuses more before it reads a body."""

from __future__ import annotations

import threading
from collections.abc import Callable

from service.engine import Engine
from service.errors import Busy

SMALL_BYTES = 1 << 16
"""A body of up to 64 KiB is always admitted: to read it costs less than to refuse it."""


class Reservation:
    """The bytes that a request holds until it is released."""

    __slots__ = ("bytes", "released")

    def __init__(self) -> None:
        self.bytes = 0
        self.released = False


class Admission:
    """Counts the bytes that requests in flight hold: together at most `max_bytes`.

    A request alone may always hold as much as the other limits allow. `show` gets each new count. Thread-safe.
    """

    def __init__(
        self, max_bytes: int, max_waiting: int, max_body_bytes: int, show: Callable[[int], None] = lambda count: None
    ) -> None:
        self._show = show
        self._max_bytes, self._max_waiting, self._max_body_bytes = max_bytes, max_waiting, max_body_bytes
        self.bytes = 0
        """Bytes of all reservations."""
        self._lock = threading.Lock()

    def admit(self, reservation: Reservation, size: int, engine: Engine | None) -> None:
        """Reserve `size` bytes for a body before it is read. Raises `Busy`."""
        if not SMALL_BYTES < size <= self._max_body_bytes:  # a larger body is refused with 413
            return
        if engine is not None and engine.waiting >= self._max_waiting:
            raise Busy(
                f"{engine.waiting} requests wait for a thread already; the limit is {self._max_waiting}"
                " (GRADSERVE_MAX_WAITING)",
                limit=self._max_waiting,
            )
        self.reserve(reservation, size)

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Let the request hold `size` bytes more. Raises `Busy`."""
        if size <= SMALL_BYTES:
            return
        with self._lock:
            if reservation.released:  # the client has left, but a pool thread still works on its request
                return
            if self.bytes > reservation.bytes and self.bytes + size > self._max_bytes:
                raise Busy(
                    f"The requests in flight hold {self.bytes} bytes, and this one needs {size} more; the limit is"
                    f" {self._max_bytes} (GRADSERVE_MAX_BYTES_IN_FLIGHT)",
                    limit=self._max_bytes,
                )
            self._add(reservation, size)

    def hold(self, reservation: Reservation, size: int) -> None:
        """Note that the request holds `size` bytes more: they are there already, so it is too late to refuse them."""
        if size <= SMALL_BYTES:
            return
        with self._lock:
            if not reservation.released:
                self._add(reservation, size)

    def give_back(self, reservation: Reservation, size: int) -> None:
        """Undo `reserve` of `size` bytes."""
        if size <= SMALL_BYTES:
            return
        with self._lock:
            if not reservation.released:
                self._add(reservation, -size)

    def release(self, reservation: Reservation) -> None:
        """Give back all bytes of a request that has ended."""
        with self._lock:
            reservation.released = True
            if reservation.bytes:
                self._add(reservation, -reservation.bytes)

    def _add(self, reservation: Reservation, size: int) -> None:
        self.bytes += size
        reservation.bytes += size
        self._show(self.bytes)
