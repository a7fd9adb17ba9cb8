"""Graphs: ONNX models that a store keeps for the clients of a namespace.

A store keeps the bytes of a model as a value, and a small head beside it, under the graph's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from service.buffers.names import BufferName
from service.buffers.sealed import seal, seed_of, unseal
from service.errors import GraphCorrupt, TooManyGraphs, UnknownGraph, shown

MAX_GRAPHS = 1000
"""Graphs that a namespace may have by default: a trainer has a few, and each change counts them."""

DIGEST_BYTES = 16
"""Length of the digest of a model: no two models are ever expected to share one."""


@dataclass(frozen=True)
class StoredGraph:
    """A graph without the bytes of its model, which the store keeps as the value `id`.

    `id` tells the graph from earlier graphs of the same name. `options` are those of the request that made the graph.
    """

    name: str
    id: int
    created: float
    options: Mapping[str, str]
    nbytes: int
    digest: str
    """What `digest_of` returns for the model's bytes."""


def digest_of(content: bytes | memoryview) -> str:
    """Return the digest of these bytes in hexadecimal digits. A gigabyte takes more than a second."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def check_count(count: int, limit: int) -> None:
    """Raise `TooManyGraphs` if a namespace that has `count` graphs may have no more."""
    if count >= limit:
        problem = f"The namespace has {count} graphs; the limit is {limit} (GRADSERVE_MAX_GRAPHS): delete some first"
        raise TooManyGraphs(problem, limit=limit, count=count)


def known(found: StoredGraph | None, name: str, wanted: int | None = None) -> StoredGraph:
    """Return the graph that was found under a name. Raises `UnknownGraph` if there is none, or not the `wanted` id."""
    if found is None or wanted not in (None, found.id):
        raise UnknownGraph(f"There is no graph {shown(name)}; PUT /v1/graphs/{{name}} makes one", graph=name)
    return found


def damaged(name: str, what: str = "head") -> GraphCorrupt:
    """Return the error of a graph whose head or model cannot be read."""
    problem = f"The stored {what} of the graph {name!r} is damaged on the disk. Delete the graph and put it again"
    return GraphCorrupt(problem, graph=name)


def pack_graph(name: BufferName, graph: StoredGraph) -> bytes:
    """Return a graph as it is stored under its name, sealed."""
    members: list[Any] = [graph.id, graph.created, dict(graph.options), graph.nbytes, graph.digest]
    return seal(orjson.dumps(members), _seed_of(name))


def unpack_graph(name: BufferName, sealed: bytes | memoryview) -> StoredGraph:
    """Return the graph of this name from what is stored. Raises `GraphCorrupt`."""
    try:
        return StoredGraph(name.name, *orjson.loads(unseal(sealed, _seed_of(name)) or b""))
    except (TypeError, ValueError):
        raise damaged(name.name) from None


def _seed_of(name: BufferName) -> int:
    return seed_of(f"graph {name.joined}".encode())
