"""Values that several requests use: planned graphs, parameters that have not changed, and statistics of buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class _Entry(NamedTuple):
    state: Hashable
    value: Any
    size: int


class Cache:
    """Up to `max_bytes` of values, each of one state of its key. The value that was used longest ago goes first.

    Thread-safe. It calls `changed` with the bytes of all values whenever they change.
    """

    def __init__(self, max_bytes: int, changed: Callable[[int], None] = lambda size: None) -> None:
        self._max_bytes, self._changed, self._bytes = max_bytes, changed, 0
        self._entries: dict[Hashable, _Entry] = {}  # the one that was used last is at the end
        self._lock = threading.Lock()

    def get(self, key: Hashable, state: Hashable) -> Any:
        """Return the value of the key in this state, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.state != state:
                return None
            self._entries[key] = self._entries.pop(key)
            return entry.value

    def put(self, key: Hashable, state: Hashable, value: Any, size: int) -> None:
        """Keep a value of `size` bytes, in place of other states of the key; nothing if it is larger than the cache."""
        with self._lock:
            self._remove(key)
            if size > self._max_bytes:
                return
            while self._bytes + size > self._max_bytes:
                self._remove(next(iter(self._entries)))
            self._entries[key] = _Entry(state, value, size)
            self._bytes += size
            self._changed(self._bytes)

    def _remove(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.size
            self._changed(self._bytes)
