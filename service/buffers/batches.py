"""The requests that wait for a writer thread, and the choice of those that share the next transaction.

While several namespaces send requests, they have their turns, a transaction is small, and a namespace rests after a
transaction that took long. Then a small request of the others waits for little more than one large request.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Generic, Protocol, TypeVar

from service.engine.fair_queue import FairQueue

MOST_SHARED_BYTES = 1 << 22
"""The work of a transaction while several namespaces send requests: about 5 ms, as long as a slow sync."""

TURN_BYTES = 1 << 21
"""What a transaction writes meanwhile of a request that several may make: a small request waits for it."""

COST_OF_BUFFER = 1 << 15
"""The bytes that are written in the time that it takes to find a buffer and to store its record."""

REST_FACTOR = 4
"""It rests four times as long: a request of the others seldom meets its next one."""


class Queued(Protocol):
    """A request of a namespace."""

    @property
    def namespace(self) -> str: ...


Q = TypeVar("Q", bound=Queued)


class Batches(Generic[Q]):
    """The requests that wait. Any thread may add one; only the writer thread takes them.

    A transaction has `most` requests at most. `work_of` returns the work of a request as bytes. A namespace alone may
    fill a transaction with `most_bytes` of them. It rests after a transaction of more than `long_seconds`.
    """

    def __init__(self, work_of: Callable[[Q], int], *, most: int, most_bytes: int, long_seconds: float) -> None:
        self._work_of, self._most, self._most_bytes, self._long_seconds = work_of, most, most_bytes, long_seconds
        self._queue: FairQueue[Q] = FairQueue()
        self._rests: dict[str, float] = {}  # when the rests of namespaces end
        self._work: dict[str, int] = {}  # of the last batch, by namespace
        self._closed, self._changed = False, threading.Condition()

    @property
    def are_empty(self) -> bool:
        """Whether no request waits, and more may come."""
        return not (self._queue or self._closed)

    def put(self, request: Q) -> bool:
        """Add a request. Return False if the store is closed."""
        with self._changed:
            if not self._closed:
                self._queue.put(request.namespace, request)
                self._changed.notify()
            return not self._closed

    def close(self) -> bool:
        """Take no more requests. Return False if this was done before."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.notify()
        return was_open

    def take(self, patience: float) -> list[Q] | None:
        """Return the next batch, none if no request comes within `patience` seconds, None at the end after `close`."""
        with self._changed:
            batch = self._batch()
            if not (batch or self._closed):
                now = time.monotonic()
                self._changed.wait(min([patience, *(end - now for end in self._rests.values())]))
                batch = self._batch()
            return None if self._closed and not batch else batch

    def _batch(self) -> list[Q]:
        """Take all requests, or, in turns of several namespaces, up to `MOST_SHARED_BYTES` of work."""
        batch: list[Q] = []
        resting, most_bytes = self._resting(), MOST_SHARED_BYTES if self._queue.is_shared() else self._most_bytes
        self._work, left = {}, most_bytes

        def fits(request: Q) -> bool:
            nonlocal left
            left -= (work := self._work_of(request))
            if batch and left < 0:
                return False
            self._work[request.namespace] = self._work.get(request.namespace, 0) + work
            return True

        while len(batch) < self._most and (request := self._queue.take(resting, fits=fits)) is not None:
            batch.append(request)
        return batch

    def most_now(self) -> int:
        """Return what a transaction may write now of a request that several may make."""
        with self._changed:
            if self._queue.is_shared() and not self._closed:
                return TURN_BYTES
        return sys.maxsize

    def _resting(self) -> Collection[str]:
        """Return the namespaces that rest: none if one is alone, or if all requests must be finished."""
        if self._rests:
            now = time.monotonic()
            self._rests = {namespace: end for namespace, end in self._rests.items() if end > now}
        return self._rests if self._rests and self._queue.is_shared() and not self._closed else ()

    def charge(self, seconds: float) -> None:
        """Charge the last batch to its namespaces. A namespace rests if its part took long."""
        total, now = sum(self._work.values()), time.monotonic()
        with self._changed:
            for namespace, part in self._work.items():
                taken = seconds * part / total
                self._queue.charge(namespace, taken)
                if taken > self._long_seconds:
                    self._rests[namespace] = now + REST_FACTOR * taken
