"""The graphs of a store: their heads found, listed, and counted for their namespaces."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from service.buffers.graphs import StoredGraph, unpack_graph
from service.buffers.lmdb.environment import Environment
from service.buffers.lmdb.format import key_range, name_of
from service.buffers.names import BufferName
from service.errors import GraphCorrupt


class GraphReader:
    """The graphs that a transaction sees."""

    def __init__(self, env: Environment, txn: Any) -> None:
        self._env, self._txn = env, txn

    def find(self, name: BufferName) -> StoredGraph | None:
        """Return the graph. Raises `GraphCorrupt`."""
        sealed = self._txn.get(name.joined.encode(), db=self._env.graphs)
        return None if sealed is None else unpack_graph(name, sealed)

    def count(self, namespace: str) -> int:
        """Return the number of graphs of a namespace."""
        return sum(1 for _ in self._stored(*key_range(namespace, "", "")))

    def all(self, start: bytes, stop: bytes) -> Iterator[tuple[BufferName, StoredGraph | None]]:
        """Yield the graphs whose keys lie from `start` up to, but without, `stop`: name and graph, None if damaged."""
        for key, sealed in self._stored(start, stop):
            name = name_of(key)
            try:
                yield name, unpack_graph(name, sealed)
            except GraphCorrupt:
                yield name, None

    def _stored(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, memoryview]]:
        if self._env.graphs is None:  # a store of format 6, which is only read
            return
        with self._txn.cursor(db=self._env.graphs) as cursor:
            if cursor.set_range(start):
                stored = ((bytes(key), sealed) for key, sealed in cursor)
                yield from itertools.takewhile(lambda each: each[0] < stop, stored)
