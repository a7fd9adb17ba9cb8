"""The graphs in the database. The bytes of a model are the only delta of a value, which no buffer has.

The lock of its namespace protects a graph against other servers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from service.buffers.graphs import StoredGraph, damaged, digest_of, pack_graph, unpack_graph
from service.buffers.names import BufferName
from service.buffers.postgres.deltas import complete, read_numbers, stream
from service.buffers.postgres.exchange import Connection, Execution, ResultRows, Statement, columns
from service.errors import BufferCorrupt, GraphCorrupt

HEADS = Statement("""
    select graphs.namespace, graphs.name, graphs.record from unnest($1::text[], $2::text[]) as wanted(namespace, name)
    join graphs on graphs.namespace = wanted.namespace collate "C" and graphs.name = wanted.name collate "C"
""")

GRAPH_COUNTS = Statement("""
    select namespace, count(*) from graphs where namespace = any($1::text[]) group by namespace
""")

LISTED = Statement("""
    declare found no scroll cursor for select namespace, name, record from graphs
    where namespace = $1::text and starts_with(name, $2::text) and name > $3::text and name >= $2::text order by name
""")

ALL_GRAPHS = Statement("""
    select namespace, name, record from graphs
    where starts_with(case when namespace = '' then name else '~' || namespace || '/' || name end, $1::text)
    order by namespace, name
""")
"""The graphs whose `BufferName.joined` has a prefix."""

_PUT = Statement("""
    insert into graphs (namespace, name, record) select * from unnest($1::text[], $2::text[], $3::bytea[])
    on conflict (namespace, name) do update set record = excluded.record
""")

_REMOVE = Statement("""
    delete from graphs using unnest($1::text[], $2::text[]) as gone(namespace, name)
    where graphs.namespace = gone.namespace collate "C" and graphs.name = gone.name collate "C"
""")

HEADS_AT_ONCE = 100
"""Graphs that a list fetches at once."""


def ask_graphs(names: Collection[BufferName]) -> tuple[Execution | None, Execution | None]:
    """Return what reads the graphs of these names, and what counts those of their namespaces."""
    if not names:
        return None, None
    return HEADS(*columns([*names], 2)), GRAPH_COUNTS(sorted({name.namespace for name in names}))


def found_graphs(names: Iterable[BufferName], rows: ResultRows) -> dict[BufferName, StoredGraph | BufferCorrupt | None]:
    """Return the graphs of these names. The request that needs a damaged one gets the error."""
    found = {name: graph or damaged(name.name) for name, graph in unpacked(rows)}
    return {name: found.get(name) for name in names}


def unpacked(rows: Iterable[tuple[str, str, bytes]]) -> Iterator[tuple[BufferName, StoredGraph | None]]:
    """Yield the graphs of these rows: name and graph, None if it is damaged."""
    for namespace, name, packed in rows:
        full = BufferName(namespace, name)
        try:
            yield full, unpack_graph(full, packed)
        except GraphCorrupt:
            yield full, None


def put_graphs(graphs: Mapping[BufferName, StoredGraph | None]) -> list[Execution]:
    """Return what stores these graphs, and removes those that are None."""
    put = [(*name, pack_graph(name, graph)) for name, graph in graphs.items() if graph is not None]
    gone = [name for name, graph in graphs.items() if graph is None]
    return [_PUT(*columns(put, 3)), _REMOVE(*columns(gone, 2))] if graphs else []


def model_of(connection: Connection, graph: StoredGraph) -> memoryview:
    """Return the bytes of a graph's model. Raises `GraphCorrupt`, and what the database raises."""
    try:
        *_, delta = complete(graph.id, stream(connection, [graph.id]), 1)
        content = read_numbers(connection, delta).view("u1").data.toreadonly()
    except BufferCorrupt:
        raise damaged(graph.name, "model") from None
    if digest_of(content) != graph.digest:  # the database's own checksums may be off
        raise damaged(graph.name, "model")
    return content
