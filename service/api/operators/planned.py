"""The graphs of the caller's namespace as operators. The store keeps each, and every process plans it once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from service.api.http.call import Call
from service.buffers.graph_changes import PutGraph
from service.buffers.graphs import StoredGraph
from service.buffers.names import check_name
from service.errors import Expired, GraphsNotInstalled, UnknownGraph
from service.kernels import Operator, Workspace, workspace

if TYPE_CHECKING:
    from service.graphs.graph import Graph


class Planned(NamedTuple):
    """A stored graph that can run."""

    stored: StoredGraph
    graph: Graph
    operator: Operator


def plan(call: Call, content: memoryview, options: Mapping[str, str]) -> Graph:
    """Read and plan a model, in memory that is reserved. Raises `InvalidGraph`, `GraphsNotInstalled` and `Busy`."""
    try:
        import onnx  # noqa: F401 - an extra: only servers that run graphs have it, and load it
    except ModuleNotFoundError:
        problem = "This server lacks the package onnx, which runs graphs: pip install 'gradserve[graphs]'"
        raise GraphsNotInstalled(problem) from None
    from service.graphs.graph import Graph
    from service.graphs.model import GraphLimits

    with workspace(Workspace(claim=call.reserve_in_time)):
        return Graph.read(content, GraphLimits(max_nodes=call.settings.max_graph_nodes), **options)


def keep(call: Call, stored: StoredGraph, graph: Graph) -> Planned:
    """Keep the graph for later requests."""
    planned = Planned(stored, graph, graph.operator(stored.name))
    call.cache.put(_key(call, stored.name), stored.id, planned, graph.nbytes)
    return planned


def kept(call: Call, put: PutGraph) -> Graph | None:
    """Return the graph that is to be put, if it is there already and planned."""
    try:
        stored = call.store.graph(put.name)
    except UnknownGraph:
        return None
    found: Planned | None = call.cache.get(_key(call, put.name), stored.id)
    is_same = (stored.digest, stored.options) == (put.digest, put.options)
    return found.graph if found is not None and is_same else None


async def planned(call: Call, name: str) -> Planned:
    """Return the graph. The body must have been read. Raises `UnknownGraph`, `GraphCorrupt` and what `plan` raises.

    Of several requests for a graph that is not planned, one plans it and the others wait. From here on, the time that
    the client waits counts.
    """
    call.start_clock()
    stored = await call.look_up(1, call.store.graph, check_name(name))
    key = _key(call, name)
    try:
        async with asyncio.timeout(call.patience_seconds) as wait, call.planning.setdefault(key, asyncio.Lock()):
            wait.reschedule(None)
            found: Planned = call.cache.get(key, stored.id) or await call.offload(False, _plan_stored, call, stored)
    except TimeoutError:
        raise Expired("Others have planned the graph for as long as this request waits", graph=name) from None
    return found


def _plan_stored(call: Call, stored: StoredGraph) -> Planned:
    call.reserve(stored.nbytes)
    return keep(call, stored, plan(call, call.store.graph_content(stored), stored.options))


def _key(call: Call, name: str) -> tuple[str, ...]:
    """Return the place of the graph in the cache, which has buffers, too."""
    return "graph", call.caller.namespace, name
