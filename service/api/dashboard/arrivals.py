"""Adds per minute, by buffer and contributor, as this process took them."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from service.buffers.changes import Add, Change, Delete
from service.buffers.perform import Outcome

MINUTES = 60
"""Minutes that are shown: an hour, as the rest of the page shows."""

MAX_SERIES = 1 << 15
"""Series of all buffers together: 2,000 parameters of 16 workers. Each takes 600 bytes, 20 MB in all."""

MAX_CONTRIBUTORS = 1000
"""Series of one buffer: an epoch takes no more contributors."""


class _Series:
    """The adds of a contributor to a buffer in the `MINUTES` up to `minute`."""

    __slots__ = ("counts", "minute")

    def __init__(self, minute: int) -> None:
        self.counts, self.minute = array("L", bytes(MINUTES * array("L").itemsize)), minute

    def advance(self, minute: int) -> None:
        """Move to a later minute."""
        for passed in range(max(self.minute + 1, minute - MINUTES + 1), minute + 1):
            self.counts[passed % MINUTES] = 0
        self.minute = minute

    def until(self, minute: int) -> list[int]:
        """Return the counts of the minutes up to this one, oldest first."""
        first, last = self.minute - MINUTES, self.minute
        shown = range(minute - MINUTES + 1, minute + 1)
        return [self.counts[each % MINUTES] if first < each <= last else 0 for each in shown]


class Arrivals:
    """The series of all buffers. Only the event loop counts; every thread may read.

    If there are too many, the buffer whose last add is the oldest loses its series.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._size = clock, 0
        self._buffers: OrderedDict[tuple[str, str], dict[str | None, _Series]] = OrderedDict()

    def count(self, namespace: str, changes: Sequence[Change], outcome: Outcome) -> None:
        """Count the adds of a request that is durable. A replay does not count again. A deleted buffer has no adds."""
        if outcome.replayed:
            return
        minute, receipts, buffers = int(self._clock()) // 60, outcome.receipts, self._buffers
        for change in changes:
            name = (namespace, change.name)
            if isinstance(change, Add):
                if not receipts[change.name]["updated"]:
                    continue
                series = buffers.get(name, _NONE).get(change.contributor)
                if series is None:
                    series = self._begin(name, change.contributor, minute)
                elif series.minute < minute:
                    series.advance(minute)
                series.counts[minute % MINUTES] += 1
                buffers.move_to_end(name)
            elif isinstance(change, Delete):
                self._size -= len(buffers.pop(name, ()))

    def _begin(self, name: tuple[str, str], contributor: str | None, minute: int) -> _Series:
        """Make room for a series, and return it."""
        own = self._buffers.setdefault(name, {})
        self._buffers.move_to_end(name)
        if len(own) == MAX_CONTRIBUTORS:
            del own[next(iter(own))]
            self._size -= 1
        own[contributor] = series = _Series(minute)
        self._size += 1
        while self._size > MAX_SERIES:
            self._size -= len(self._buffers.popitem(last=False)[1])
        return series

    def of(self, namespace: str, name: str) -> dict[str, Any]:
        """Return the adds to a buffer by contributor as the statistics show them. The last minute still runs."""
        minute = int(self._clock()) // 60
        series = [*self._buffers.get((namespace, name), _NONE).items()]  # at once: the event loop may add one
        shown = {contributor or "": each.until(minute) for contributor, each in series}
        contributors = {contributor: counts for contributor, counts in shown.items() if any(counts)}
        return {"until": (minute + 1) * 60, "minutes": MINUTES, "contributors": contributors}


_NONE: dict[str | None, _Series] = {}
"""The series of a buffer without adds."""
