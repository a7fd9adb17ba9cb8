"""Admission: how many bytes and threads requests in flight may hold, and how much of that a namespace may hold."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from starlette.requests import ClientDisconnect

from service.engine.engine import Engine
from service.errors import Busy

SMALL_BYTES = 1 << 16
"""A body of up to 64 KiB is always admitted: to read it costs less than to refuse it."""

STEP_BYTES = 1 << 18
"""Bytes of a body that are reserved at once as they come: few enough to waste, and a step takes a microsecond."""

PROMISE_SECONDS = 1.0
"""Seconds without a step after which nothing is kept free for the rest of a body: its client may never send it."""


class Reservation:
    """The bytes that a request of a namespace holds until it is released."""

    namespace = ""
    bytes = 0
    promised = 0
    """Bytes of its body that have not come, while the namespace keeps room for them."""
    reserved = 0.0
    """When it reserved bytes last."""
    admitted = released = False


class Admission:
    """Counts the bytes that requests in flight hold: together at most `max_bytes`, and a namespace at most its share.

    A request that is alone in its namespace may always hold as much as the other limits allow; above the share it takes
    nothing from the others. Thread-safe. It calls `changed` with the bytes of all requests whenever they change.
    """

    def __init__(
        self,
        max_bytes: int,
        max_waiting: int,
        max_body_bytes: int,
        is_shared: Callable[[], bool] = lambda: False,
        changed: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._max_bytes, self._max_waiting, self._max_body_bytes = max_bytes, max_waiting, max_body_bytes
        self._is_shared, self._changed = is_shared, changed
        self.bytes = 0
        """Bytes of all reservations."""
        self._held: Counter[str] = Counter()  # these bytes by namespace
        self._promised: Counter[str] = Counter()
        self._bodies: set[Reservation] = set()  # those that may have bytes promised
        self._lock = threading.Lock()

    def admit(self, reservation: Reservation, size: int, engine: Engine | None) -> None:
        """Admit a large body of `size` bytes before it is read; it is reserved as it comes. Raises `Busy`.

        Its own namespace keeps room for the rest of the body while it comes, so that few are refused halfway. Without
        that, 24 clients of 64 MB that share 1 GB send 3 to 12 times as many bytes in vain.
        """
        if size > self._max_body_bytes:  # it is refused with 413
            return
        if engine is not None:
            self.admit_to_pool(reservation, engine)
        with self._lock:
            self._check_room(reservation, size)
            reservation.reserved = time.monotonic()
            self._bodies.add(reservation)
            self._promise(reservation, size)

    def admit_to_pool(self, reservation: Reservation, engine: Engine) -> None:
        """Admit a request before it waits for a thread for the first time. Raises `Busy`."""
        if reservation.admitted:
            return
        waiting = engine.pool.waiting(reservation.namespace)
        if waiting >= self._max_waiting:
            raise Busy(
                f"{waiting} requests of this namespace wait for a thread already; the limit is {self._max_waiting}"
                " (GRADSERVE_MAX_WAITING)",
                limit=self._max_waiting,
            )
        reservation.admitted = True

    def reserve(self, reservation: Reservation, size: int) -> None:
        """Let the request hold `size` bytes more. Raises `Busy`.

        Raises `ClientDisconnect` if the request has ended: the client has left, or the server stops. That ends the work
        of a pool thread for it.
        """
        with self._lock:
            if reservation.released:
                raise ClientDisconnect
            if size <= SMALL_BYTES:
                return
            self._check_room(reservation, size)
            reservation.reserved = time.monotonic()
            self._promise(reservation, -min(size, reservation.promised))
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
            if reservation.reserved or reservation.bytes:
                self._bodies.discard(reservation)
                self._promise(reservation, -reservation.promised)
                self._add(reservation, -reservation.bytes)

    def _check_room(self, reservation: Reservation, size: int) -> None:
        """Raise `Busy` unless the request may hold `size` bytes more."""
        if self._fault(reservation, size) is not None:
            self._break_promises()
            if (fault := self._fault(reservation, size)) is not None:
                raise fault

    def _fault(self, reservation: Reservation, size: int) -> Busy | None:
        namespace, most = reservation.namespace, self._max_bytes
        share = most // 2 if self._is_shared() else most
        own = self._held[namespace] + self._promised[namespace] - reservation.promised
        others = sum([min(held, share) for name, held in self._held.items() if name != namespace])
        if own > reservation.bytes and own + size > share:
            holders, held, limit = "of this namespace", own, share
        elif own + others > reservation.bytes and own + others + size > most:
            holders, held, limit = "in flight", own + others, most
        else:
            return None
        half = "half of " if limit < most else ""
        return Busy(
            f"The requests {holders} hold {held} bytes, and this one needs {size} more; the limit is {limit}"
            f" ({half}GRADSERVE_MAX_BYTES_IN_FLIGHT)",
            limit=limit,
        )

    def _break_promises(self) -> None:
        """Keep no more room for bodies that have stopped coming."""
        since = time.monotonic() - PROMISE_SECONDS
        for body in [body for body in self._bodies if body.reserved <= since]:
            self._promise(body, -body.promised)
            self._bodies.discard(body)

    def _promise(self, reservation: Reservation, size: int) -> None:
        if size:
            reservation.promised += size
            self._promised[reservation.namespace] += size

    def _add(self, reservation: Reservation, size: int) -> None:
        if size:
            self.bytes += size
            reservation.bytes += size
            self._held[reservation.namespace] += size
            self._changed(self.bytes)
