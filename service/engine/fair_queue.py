"""A queue that namespaces share: the next item is of the namespace that has used least."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

T = TypeVar("T")

PRESENT_SECONDS = 5.0
"""Seconds after its last item while a namespace counts as present: longer than most steps of a training take."""


class _Lane(Generic[T]):
    """The items of a namespace, what it has used, and when its last item came."""

    __slots__ = ("items", "seen", "used")

    def __init__(self) -> None:
        self.items: deque[T] = deque()
        self.used = self.seen = 0.0


class FairQueue(Generic[T]):
    """Items that wait, by namespace. Not thread-safe.

    `charge` says what an item has cost. A namespace saves nothing up while it is away: it comes back with what the
    namespace that was served last had used, or with more if it has used more itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lanes: dict[str, _Lane[T]] = {}  # the namespace that was served last is the last
        self._level = 0.0
        """What the namespace that was served last had used before."""

    def __len__(self) -> int:
        return sum([len(lane.items) for lane in self._lanes.values()])

    def count(self, namespace: str) -> int:
        """Return how many items of the namespace wait."""
        lane = self._lanes.get(namespace)
        return 0 if lane is None else len(lane.items)

    def put(self, namespace: str, item: T, key: Callable[[T], float] = lambda item: math.inf) -> None:
        """Add an item behind the others of its namespace; with a `key`, before the items that have a larger one."""
        lane = self._lanes.get(namespace)
        if lane is None:
            self._forget()
            lane = self._lanes[namespace] = _Lane()
        if not lane.items:
            lane.used = max(lane.used, self._level)
        lane.seen = self._clock()
        insort(lane.items, item, key=key)

    def take(
        self, without: Collection[str] = (), last: Collection[str] = (), fits: Callable[[T], bool] | None = None
    ) -> T | None:
        """Remove and return the first item of the namespace that has used least. Return None if it does not fit.

        Namespaces that have used the same have their turns. Those `without` a turn are left out, and those in `last`
        come after the others. Return None, too, if no item is left.
        """
        best, least = None, (True, math.inf)
        for namespace, lane in self._lanes.items():
            if lane.items and namespace not in without and (rank := (namespace in last, lane.used)) < least:
                best, least = namespace, rank
        if best is None or (fits is not None and not fits(self._lanes[best].items[0])):
            return None
        lane = self._lanes[best] = self._lanes.pop(best)
        self._level = lane.used
        return lane.items.popleft()

    def remove(self, namespace: str, item: T) -> None:
        """Remove an item. Raises ValueError if it does not wait any more."""
        self._lanes[namespace].items.remove(item)

    def charge(self, namespace: str, cost: float) -> None:
        """Count a cost as used by the namespace."""
        if namespace in self._lanes:
            self._lanes[namespace].used += cost

    def is_shared(self) -> bool:
        """Return whether items of several namespaces have come lately."""
        if len(self._lanes) < 2:
            return False
        since = self._clock() - PRESENT_SECONDS
        return sum([bool(lane.items) or lane.seen > since for lane in self._lanes.values()]) > 1

    def _forget(self) -> None:
        """Forget the namespaces that are away and have used no more than they come back with."""
        since = self._clock() - PRESENT_SECONDS
        self._lanes = {
            name: lane
            for name, lane in self._lanes.items()
            if lane.items or lane.seen > since or lane.used > self._level
        }
