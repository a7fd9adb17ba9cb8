"""The contract of every store for graphs: models that it keeps beside the buffers of a namespace."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service import errors
from service.buffers.changes import Add, Change, Create, Delete
from service.buffers.graph_changes import DeleteGraph, PutGraph
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.record import Key
from service.buffers.sets import Set
from service.buffers.store import Store
from tests.buffers.calls import add, create, do, key, ones, spec, value
from tests.buffers.stores import KEY_SECONDS, PATIENCE, Clock, open_lmdb, open_postgres

SMALL = b"a small model"
LARGE = np.random.default_rng(1).bytes((1 << 20) + 3)
OPTIONS = {"loss": "MSELoss", "train": "*"}


@pytest.fixture(params=["lmdb", "postgres"])
def limited(request: pytest.FixtureRequest, clock: Clock, tmp_path: Path) -> Iterator[Store]:
    """Yield a store with room for two graphs of a namespace, or for three megabytes."""
    limits: dict[str, Any] = {"max_graphs": 2, "max_bytes": 3 << 20}
    store: Store
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_url")
        store = open_postgres(url, clock, schema=f"test_{uuid.uuid4().hex}", **limits)
    else:
        store = open_lmdb(tmp_path / "store", clock, **limits)
    yield store
    store.close()


def put(
    store: Store,
    name: str = "mlp",
    content: bytes = SMALL,
    *changes: Change,
    options: dict[str, str] = OPTIONS,
    key: Key | None = None,
) -> Outcome:
    request = Request(changes, key, hidden=PutGraph.of(name, content, options))
    return store.submit(request).result(PATIENCE)


def delete(store: Store, name: str = "mlp", *changes: Change, key: Key | None = None) -> Outcome:
    return store.submit(Request(changes, key, hidden=DeleteGraph(name=name))).result(PATIENCE)


def content(store: Store, name: str = "mlp") -> bytes:
    return bytes(store.graph_content(store.graph(name)))


def names(store: Store, prefix: str = "", after: str = "", limit: int | None = None) -> list[str]:
    return [graph.name for graph in store.graphs(prefix, after, limit)]


@pytest.mark.parametrize("model", [b"", SMALL, LARGE], ids=len)
def test_a_graph_is_kept(store: Store, clock: Clock, model: bytes) -> None:
    graph = put(store, content=model).graph
    assert graph is not None
    assert (graph.name, graph.created, graph.options, graph.nbytes) == ("mlp", clock.now, OPTIONS, len(model))
    assert store.graph("mlp") == graph
    assert store.graphs() == [graph]
    assert content(store) == model


def test_the_same_graph_again_changes_nothing(store: Store, clock: Clock) -> None:
    first = put(store)
    clock.advance(5)
    again = put(store)
    assert (first.is_new, again.is_new) == (True, False)
    assert again.graph == first.graph


@pytest.mark.parametrize(
    ("model", "options", "differing"),
    [(b"another", OPTIONS, "with another model"), (SMALL, {"loss": "L1Loss"}, "with the options .*MSELoss.*, not ")],
)
def test_another_graph_of_the_name_is_refused(
    store: Store, model: bytes, options: dict[str, str], differing: str
) -> None:
    first = put(store).graph
    with pytest.raises(errors.GraphExists, match=differing) as caught:
        put(store, "mlp", model, Create(name="a", spec=spec()), options=options)
    assert (caught.value.code, caught.value.context) == ("graph_exists", {"graph": "mlp"})
    assert store.graph("mlp") == first
    assert content(store) == SMALL
    assert store.names("") == []


def test_a_deleted_graph_is_gone(store: Store) -> None:
    old = put(store).graph
    assert old is not None
    assert delete(store).graph is None
    for use in (lambda: store.graph("mlp"), lambda: store.graph_content(old), lambda: delete(store)):
        with pytest.raises(errors.UnknownGraph, match="no graph 'mlp'") as caught:
            use()
        assert (caught.value.code, caught.value.context) == ("unknown_graph", {"graph": "mlp"})
    assert store.graphs() == []
    new = put(store, content=LARGE).graph
    assert new is not None
    assert new.id != old.id
    with pytest.raises(errors.UnknownGraph):
        store.graph_content(old)
    assert content(store) == LARGE


def test_graphs_are_listed_by_name(store: Store) -> None:
    for name in ("b.2", "a", "b.1", "c"):
        put(store, name)
    assert names(store) == ["a", "b.1", "b.2", "c"]
    assert names(store, "b.") == ["b.1", "b.2"]
    assert names(store, "", "b.1", limit=1) == ["b.2"]
    assert names(store, "b", "b.2") == []


def test_a_namespace_has_its_own_graphs(store: Store) -> None:
    ann = store.within("ann")
    put(store)
    put(ann, content=LARGE, options={})
    put(ann, "other")
    assert (names(store), names(ann), names(store.within("bob"))) == (["mlp"], ["mlp", "other"], [])
    delete(store)
    assert content(ann) == LARGE


def test_a_graph_and_a_buffer_may_have_the_same_name(store: Store) -> None:
    create(store, "mlp")
    put(store)
    add(store, "mlp", [1, 2])
    delete(store)
    assert value(store, "mlp").tolist() == [1, 2]
    put(store)
    do(store, Delete(name="mlp"))
    assert content(store) == SMALL


def test_a_graph_and_its_buffers_come_together_or_not_at_all(store: Store) -> None:
    outcome = put(store, "mlp", LARGE, Create(name="m.p.w", spec=spec()))
    assert outcome.receipts["m.p.w"]["created"]
    with pytest.raises(errors.UnknownBuffer):
        put(store, "other", LARGE, Create(name="m.p.b", spec=spec()), Add(name="nowhere", gradient=ones(2)))
    with pytest.raises(errors.UnknownBuffer):
        delete(store, "mlp", Delete(name="m.p.w"), Delete(name="nowhere"))
    assert (names(store), store.names("")) == (["mlp"], ["m.p.w"])
    delete(store, "mlp", Delete(name="m.p.w"))
    assert (names(store), store.names("")) == ([], [])


@pytest.mark.parametrize("size", [2, 1 << 18])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_second_put_sets_no_weights_back(store: Store, size: int, keyed: bool) -> None:
    """A worker comes late, when the weights have been trained. Buffers that it lacks are made all the same."""

    def weights(*names: str) -> list[Change]:
        return [Set(name=name, gradient=ones(size), spec=spec((size,))) for name in names]

    assert put(store, "mlp", SMALL, *weights("w")).receipts["w"]["created"]
    add(store, "w", ones(size))
    late = [put(store, "mlp", SMALL, *weights("w", "b"), key=key() if keyed else None) for _ in range(2)]
    assert [(one.receipts["w"]["updated"], one.receipts["w"]["version"]) for one in late] == [(False, 2)] * 2
    assert [one.receipts["b"].get("created", False) for one in late] == [True, keyed]
    assert (value(store, "w")[0], value(store, "b")[0]) == (2, 1)
    delete(store)
    assert put(store, "mlp", SMALL, *weights("w")).receipts["w"]["updated"]
    assert value(store, "w")[0] == 1


def test_a_request_with_a_key_is_made_once(store: Store, clock: Clock) -> None:
    creation = Create(name="w", spec=spec())
    first = put(store, "mlp", SMALL, creation, key=key("put"))
    clock.advance(5)
    again = put(store, "mlp", SMALL, creation, key=key("put"))
    assert again == Outcome(first.receipts, replayed=True, graph=first.graph, is_new=True)
    assert put(store, key=key("found")).is_new is False
    assert put(store, key=key("found")).is_new is False
    with pytest.raises(errors.KeyReused):
        put(store, content=LARGE, key=key("put", request="another"))
    delete(store, key=key("delete"))
    put(store)
    assert delete(store, key=key("delete")).replayed
    assert content(store) == SMALL
    with pytest.raises(errors.StepGone, match="for a graph 'mlp' that no longer exists") as caught:
        put(store, "mlp", SMALL, creation, key=key("put"))
    assert caught.value.context == {"graph": "mlp"}
    clock.advance(KEY_SECONDS)
    assert not put(store, "mlp", SMALL, creation, key=key("put")).replayed


def test_a_request_that_fails_stores_no_key(store: Store) -> None:
    with pytest.raises(errors.UnknownBuffer):
        put(store, "mlp", LARGE, Delete(name="nowhere"), key=key())
    assert store.recall(key()) is None
    assert names(store) == []
    assert not put(store, key=key()).replayed


def test_the_bytes_of_a_model_are_counted(store: Store) -> None:
    _, before = store.size()
    put(store, content=LARGE)
    _, used = store.size()
    assert used >= before + len(LARGE)
    delete(store)


def test_a_graph_beyond_the_limit_is_refused(limited: Store) -> None:
    put(limited, "a")
    put(limited, "b")
    with pytest.raises(errors.TooManyGraphs, match="has 2 graphs; the limit is 2") as caught:
        put(limited, "c", LARGE)
    assert (caught.value.code, caught.value.context) == ("too_many_graphs", {"limit": 2, "count": 2})
    put(limited, "b")
    put(limited.within("ann"), "c")
    delete(limited, "a")
    put(limited, "c", LARGE)
    assert names(limited) == ["b", "c"]


@pytest.mark.parametrize("limited", ["lmdb"], indirect=True)  # the janitor of PostgreSQL counts in rounds
def test_a_store_without_room_refuses_graphs_and_deletes_them(limited: Store) -> None:
    put(limited, "a", LARGE)
    with pytest.raises(errors.StoreFull):
        put(limited, "b", LARGE[::-1] * 2, Create(name="w", spec=spec()))
    assert (names(limited), limited.names("")) == (["a"], [])
    delete(limited, "a", key=key())
    put(limited, "b", LARGE[::-1] * 2)
    assert content(limited, "b") == LARGE[::-1] * 2


@pytest.mark.parametrize("model", [LARGE[:600], LARGE], ids=len)
def test_a_damaged_model_harms_one_graph(reopen_damaged: Callable[..., Store], model: bytes) -> None:
    store = reopen_damaged()
    put(store, "hurt", model)
    put(store, "well")
    store = reopen_damaged(model[400:500])
    hurt = store.graph("hurt")
    assert store.graphs() == [hurt, store.graph("well")]
    with pytest.raises(errors.GraphCorrupt, match="model of the graph 'hurt' is damaged") as caught:
        store.graph_content(hurt)
    assert (caught.value.code, caught.value.context) == ("graph_corrupt", {"graph": "hurt"})
    assert content(store, "well") == SMALL
    delete(store, "hurt")
    put(store, "hurt", model)
    assert content(reopen_damaged(), "hurt") == model


def test_a_damaged_head_harms_one_graph(reopen_damaged: Callable[..., Store]) -> None:
    store = reopen_damaged()
    options = {"train": "a pattern that is damaged"}
    put(store, "hurt", options=options)
    put(store, "well")
    store = reopen_damaged(options["train"].encode())
    uses: list[Callable[[], object]] = [lambda: store.graph("hurt"), lambda: put(store, "hurt")]
    for use in uses:
        with pytest.raises(errors.GraphCorrupt, match="head of the graph 'hurt' is damaged") as caught:
            use()
        assert caught.value.context == {"graph": "hurt"}
    assert (names(store), content(store, "well")) == (["well"], SMALL)
    put(store, "other")
    delete(store, "hurt")
    put(store, "hurt")
    assert content(store, "hurt") == SMALL


def test_a_graph_that_is_there_sets_no_buffer_back(store: Store) -> None:
    def initial(name: str) -> Set:
        return Set(name=name, gradient=ones(2), spec=spec())

    assert put(store, "mlp", SMALL, initial("w")).receipts["w"]["created"]
    add(store, "w", [4, 4])
    outcome = put(store, "mlp", SMALL, initial("w"), initial("v"))
    assert (outcome.is_new, [receipt["updated"] for receipt in outcome.receipts.values()]) == (False, [False, True])
    assert (value(store, "w").tolist(), value(store, "v").tolist()) == ([5, 5], [1, 1])
    delete(store)
    put(store, "mlp", SMALL, initial("w"))
    assert value(store, "w").tolist() == [1, 1]


def test_no_client_meets_a_graph_as_a_buffer(store: Store) -> None:
    create(store, "w")
    put(store)
    put(store.within("ann"))
    assert (store.size()[0], store.names(""), [each.name for each in store.records()]) == (1, ["w"], ["w"])
    store.submit(Request([Delete(name="w")], wide=Wide("", lambda name: Delete(name=name)))).result(PATIENCE)
    assert (store.size()[0], store.names(""), names(store), names(store.within("ann"))) == (0, [], ["mlp"], ["mlp"])
