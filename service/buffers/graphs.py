"""Graphs: ONNX models that a store keeps for the clients of a namespace.

A graph is a buffer that no client names: its value has the bytes of the model, and its record the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

from service.buffers.names import BufferName, graphs_of
from service.buffers.packed import seed_of, unseal
from service.buffers.record import Record, Spec
from service.dtypes import BOOL
from service.errors import BufferCorrupt, GraphCorrupt, UnknownBuffer, UnknownGraph, shown

MAX_GRAPHS = 1000
"""Graphs that a namespace may have by default: a trainer has a few."""

DIGEST_BYTES = 16
"""Length of the digest of a model: no two models are ever expected to share one."""


@dataclass(frozen=True)
class StoredGraph:
    """A graph without the bytes of its model.

    `id` tells the graph from earlier graphs of the same name. `options` are those of the request that made the graph.
    """

    name: str
    id: int
    created: float
    options: Mapping[str, str]
    nbytes: int
    digest: str
    """What `digest_of` returns for the model's bytes."""

    @classmethod
    def of(cls, record: Record) -> StoredGraph:
        """Return the graph that a buffer is."""
        return cls(record.name, record.id, record.created, nbytes=record.spec.nbytes, **record.about)


def record_of(
    name: BufferName, graph: int, value: int, created: float, options: Mapping[str, str], nbytes: int, digest: str
) -> Record:
    """Return the buffer that is the graph of this name. `graph` is its id, and `value` has the bytes of its model."""
    full, spec, about = BufferName(graphs_of(name.namespace), name.name), Spec((nbytes,), BOOL), dict(options)
    return Record(full, spec, graph, created, created, value=value, about={"digest": digest, "options": about})


def unpack_older(name: BufferName, sealed: bytes | memoryview) -> Record:
    """Return the buffer of a graph as formats before 9 have stored it, apart. Raises `BufferCorrupt`."""
    try:
        number, *head = orjson.loads(unseal(sealed, seed_of(f"graph {name.joined}".encode())) or b"")
    except ValueError:
        raise damaged(name.name) from None
    return record_of(name, number, number, *head)


def digest_of(content: bytes | memoryview) -> str:
    """Return the digest of these bytes in hexadecimal digits. A gigabyte takes more than a second."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def unknown(name: str) -> UnknownGraph:
    """Return the error of a graph that does not exist."""
    return UnknownGraph(f"There is no graph {shown(name)}; PUT /v1/graphs/{{name}} makes one", graph=name)


def damaged(name: str, what: str = "head") -> GraphCorrupt:
    """Return the error of a graph whose head or model cannot be read."""
    problem = f"The stored {what} of the graph {name!r} is damaged on the disk. Delete the graph and put it again"
    return GraphCorrupt(problem, graph=name)


@contextmanager
def named_graph(name: str, what: str = "head") -> Iterator[None]:
    """Let errors of the buffer name the graph that it is. `what` is read of it: its head, or its model."""
    try:
        yield
    except UnknownBuffer:
        raise unknown(name) from None
    except BufferCorrupt:
        raise damaged(name, what) from None
