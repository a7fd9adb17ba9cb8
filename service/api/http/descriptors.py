"""File descriptors: how many the server may have, and which connections end when few are left."""

from __future__ import annotations

import math
import resource
from collections.abc import Collection

from service.api.http.wire import Wire

MAX_DESCRIPTORS = 1 << 16
"""The server asks the system for no more: 65,536 idle connections take 250 to 500 MB."""

MIN_RESERVE = 64
"""Descriptors that connections leave free, at least: a process has 20 to 40 files of its own."""

RESERVE_PART = 8
"""Connections leave an eighth free: of many clients that come at once, the event loop closes none until all are in."""

CLOSED_PART = 16
"""A sixteenth of the idle connections is closed together, so that the search for the longest idle is rare."""


def raise_limit() -> None:
    """Let this process, and those that it starts, open as many files as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    while soft != resource.RLIM_INFINITY and wanted > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        except (ValueError, OSError):  # macOS has a lower limit besides
            wanted //= 2


def max_connections() -> float:
    """Return how many connections leave the reserve free."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - min(max(MIN_RESERVE, limit // RESERVE_PART), limit // 2)


def close_longest_idle(connections: Collection[Wire]) -> list[Wire]:
    """Abort the connections that have been idle longest, and return them.

    Those that never sent a request come first. The newest of them come last: they have had no time for it. Before them
    come those whose clients have longest left an answer unread.
    """
    unread = [one for one in connections if one.unread_since < one.due == math.inf]
    slow = sorted(unread, key=lambda one: one.unread_since)
    idle = sorted((one for one in connections if one.due < math.inf), key=lambda one: one.due)
    count = max(1, len(idle) // CLOSED_PART)
    silent, asked = [one for one in idle if not one.has_asked], [one for one in idle if one.has_asked]
    closed = [*silent[:-count], *asked, *slow, *silent[-count:]][:count]
    for one in closed:
        one.transport.abort()
    return closed
