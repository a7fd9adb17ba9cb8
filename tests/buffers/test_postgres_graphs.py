"""Graphs over PostgreSQL: several servers, and the blobs of large models."""

from __future__ import annotations

import psycopg
import pytest

from service.buffers.changes import Create, Delete
from service.buffers.graph_changes import PutGraph
from service.buffers.perform import Request
from service.buffers.postgres import batch
from service.errors import GraphCorrupt, GraphExists, TooManyGraphs, UnknownBuffer
from tests.buffers.calls import create, do, key, spec
from tests.buffers.postgres import Once, Schema, part_tables, until
from tests.buffers.stores import PATIENCE, Gate
from tests.buffers.test_contract_graphs import LARGE, SMALL, content, delete, names, put


def test_servers_share_their_graphs(schema: Schema) -> None:
    one, other = schema.open(), schema.open(max_graphs=2)
    assert put(one, "mlp", LARGE).is_new
    assert content(other) == LARGE
    assert not put(other, "mlp", LARGE).is_new
    put(one, "second")
    with pytest.raises(TooManyGraphs):
        put(other, "third")
    delete(other)
    assert (names(one), one.names("")) == (["second"], [])


def test_requests_of_one_transaction_see_each_other(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open(max_graphs=1)
    gate = Gate(monkeypatch, "made")
    graphs = [PutGraph.of("g", SMALL, {}), PutGraph.of("g", SMALL, {}), PutGraph.of("g", LARGE, {})]
    more = PutGraph.of("h", SMALL, {})
    futures = gate.together(store, [Request([], hidden=graph) for graph in (*graphs, more)])
    assert [futures[0].result(PATIENCE).is_new, futures[1].result(PATIENCE).is_new] == [True, False]
    for future, error in zip(futures[2:], (GraphExists, TooManyGraphs), strict=True):
        with pytest.raises(error):
            future.result(PATIENCE)
    assert content(store, "g") == SMALL
    schema.close()
    assert schema.faults() == []


def test_no_blob_of_a_graph_is_lost(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    part_tables(monkeypatch)
    store = schema.open()
    create(store, "w")
    with pytest.raises(UnknownBuffer):
        put(store, "mlp", LARGE, Delete(name="nowhere"))
    put(store, "mlp", LARGE, Create(name="v", spec=spec()), key=key())
    assert put(store, "mlp", LARGE, Create(name="v", spec=spec()), key=key()).replayed
    with pytest.raises(GraphExists):
        put(store, "mlp", LARGE[::-1])
    put(store, "other", LARGE[::-1])
    delete(store, "other")
    until(lambda: len(schema.tables()) == 1, "the tables of nothing stay")
    assert content(store) == LARGE
    assert schema.faults() == []
    delete(store)
    until(lambda: schema.tables() == {}, "the table of the model stays")
    assert schema.faults() == []


def test_a_graph_whose_staged_model_is_lost_is_staged_again(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    lose = Once(monkeypatch, "staged", lambda: schema.ask("delete from unowned where bytes > 0"))
    assert put(store, "mlp", LARGE).is_new
    assert lose.times == 2
    assert content(store) == LARGE


def test_a_commit_whose_answer_is_lost_puts_one_graph(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    store = schema.open()
    usual, lost = batch.Batch.write, list[bool]()

    def write(self: batch.Batch, *arguments: object) -> None:
        usual(self, *arguments)  # type: ignore[arg-type]
        if not lost:
            lost.append(True)
            raise psycopg.OperationalError("lost")

    monkeypatch.setattr(batch.Batch, "write", write)
    assert put(store, "mlp", LARGE).is_new
    assert lost
    assert not put(store, "mlp", LARGE).is_new


def test_bytes_that_the_database_has_changed_are_noticed(schema: Schema) -> None:
    store = schema.open()
    put(store, "mlp", LARGE)
    put(store, "well", LARGE[::-1])
    blob = "(select min(blob) from chunks where number = 3)"
    schema.ask(
        f"update chunks set data = set_byte(data, 100, 255 - get_byte(data, 100)) where blob = {blob} and number = 3"
    )
    with pytest.raises(GraphCorrupt, match="model of the graph 'mlp' is damaged"):
        store.graph_content(store.graph("mlp"))
    assert content(store, "well") == LARGE[::-1]
    do(store)
