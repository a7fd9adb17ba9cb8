"""What a request does to a graph, written in terms of a store's `Transaction`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from service.buffers.graphs import StoredGraph, digest_of, named_graph, record_of, unknown
from service.buffers.names import BufferName, graphs_of
from service.buffers.record import Record
from service.buffers.transaction import Transaction
from service.dtypes import BOOL, Array
from service.errors import GraphCorrupt, GraphExists, StepGone, shown


def _get(txn: Transaction, namespace: str, name: str) -> Record | None:
    """Return the buffer that is the graph. Raises `GraphCorrupt`."""
    with named_graph(name):
        return txn.get(BufferName(graphs_of(namespace), name))


@dataclass(frozen=True, kw_only=True)
class HiddenChange:
    """A change of a graph or a run, together with those of buffers."""

    name: str

    def buffer(self, namespace: str) -> BufferName:
        """Return the buffer that the graph or the run is."""
        return BufferName(graphs_of(namespace), self.name)

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[StoredGraph | None, bool]:
        """Make the change. Return the graph that is wanted, and whether it, or the run, is new."""
        raise NotImplementedError

    def again(self, txn: Transaction, namespace: str, marks: Sequence[str]) -> tuple[StoredGraph | None, bool]:
        """Return what `make` has returned for the same request before."""
        return None, False


@dataclass(frozen=True, kw_only=True)
class PutGraph(HiddenChange):
    """The wish for a graph of these bytes: a new one, or the one that has the same bytes and options.

    The caller must not change the `content` before the request is done.
    """

    content: Array
    """The bytes of the model, flat, as bool: the dtype of a byte."""
    digest: str
    options: Mapping[str, str] = field(default_factory=dict)
    created: float | None = None
    """When another store has made it; None for now."""

    @classmethod
    def of(cls, name: str, content: bytes | memoryview, options: Mapping[str, str]) -> PutGraph:
        """Return the change for these bytes. A gigabyte takes more than a second."""
        return cls(name=name, content=np.frombuffer(content, BOOL), digest=digest_of(content), options=options)

    def found(self, txn: Transaction, namespace: str) -> StoredGraph | None:
        """Return the same graph if it is there. Raises `GraphExists` and `GraphCorrupt`."""
        if (record := _get(txn, namespace, self.name)) is None:
            return None
        graph = StoredGraph.of(record)
        if (graph.digest, graph.options) != (self.digest, self.options):
            options = f"the options {shown(dict(graph.options))}, not {shown(dict(self.options))}"
            differing = "another model" if graph.digest != self.digest else options
            problem = f"There is a graph {self.name!r} with {differing}: delete it first, or use another name"
            raise GraphExists(problem, graph=self.name)
        return graph

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[StoredGraph, bool]:
        """Return the graph, and whether it is new. Raises what `found` raises, and `TooManyGraphs`."""
        if (found := self.found(txn, namespace)) is not None:
            return found, False
        txn.count_new(self.buffer(namespace), now)
        name, created = BufferName(namespace, self.name), now if self.created is None else self.created
        value, head = txn.store_bytes(self.content), (created, self.options, self.content.size, self.digest)
        record = record_of(name, txn.new_id(), value, *head)
        txn.put(record)
        return StoredGraph.of(record), True

    def again(self, txn: Transaction, namespace: str, marks: Sequence[str]) -> tuple[StoredGraph, bool]:
        """Return what `make` has returned for the same request before. Raises `StepGone` if the graph is gone."""
        found, (made, was_new) = _get(txn, namespace, self.name), marks
        if found is None or str(found.id) != made:
            raise StepGone(
                f"This request was made before, for a graph {self.name!r} that no longer exists. A request for a new"
                " graph of that name needs a new key",
                graph=self.name,
            )
        return StoredGraph.of(found), bool(was_new)


@dataclass(frozen=True, kw_only=True)
class DeleteGraph(HiddenChange):
    """The wish to delete a graph, even if it is damaged."""

    def make(self, txn: Transaction, namespace: str, now: float) -> tuple[None, bool]:
        """Delete the graph. Raises `UnknownGraph`."""
        try:
            record = _get(txn, namespace, self.name)
        except GraphCorrupt:  # the bytes of its model stay until an export
            txn.forget(self.buffer(namespace))
            return None, False
        if record is None:
            raise unknown(self.name)
        txn.remove(record)
        return None, False


def marks_of(graph: StoredGraph | None, is_new: bool) -> tuple[str, ...]:
    """Return what a store keeps with the key of a request, for `again`."""
    return () if graph is None else (str(graph.id), "new" if is_new else "")
