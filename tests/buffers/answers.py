"""Everything in a store that an answer may come from, and a state that it says something about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.buffers.changes import Add, Create, Take, Zero
from service.buffers.graph_changes import PutGraph
from service.buffers.parts import Forget
from service.buffers.perform import Outcome, Request, Wide
from service.buffers.pushes import Part
from service.buffers.record import Key
from service.buffers.runs import Join, as_form
from service.buffers.store import Store
from tests.buffers.calls import add, create, do, key, ones, part, spec
from tests.buffers.stores import PATIENCE

LOOKS = {
    "record",
    "record_bytes",
    "look",
    "now",
    "generation",
    "check",
    "size",
    "measures",
    "replicas",
    "within",
    "close",
}
"""Methods of a store that no answer about a buffer comes from."""


def prepare(store: Store) -> None:
    """Make what the answers are about."""
    create(store, "w", "v", keep=2)
    do(store, Add(name="w", gradient=ones(2)), key=key(caller=store.namespace))
    do(store, Take(name="w"), key=key("taken", caller=store.namespace))
    add(store, "w", 1.0)
    for number, name in enumerate("wv", 1):
        part(store, number, {name: 1}, push="whole")
    part(store, 1, {"w": 1}, push="begun")
    _put_graph(store, "g", key("graph", caller=store.namespace))
    _join(store)


def _put_graph(store: Store, name: str, key: Key | None = None) -> Outcome:
    return store.submit(Request([], key, hidden=PutGraph.of(name, b"a model", {}))).result(PATIENCE)


def _join(store: Store) -> Outcome:
    form = as_form({}, {})
    join = Join(name="r", worker="x", token="t", prefix="w", steps="w", form=form, digest="", life="r@0123456789abcdef")
    return store.submit(Request([], hidden=join)).result(PATIENCE)


def _forget(store: Store) -> Outcome:
    gone = Part("gone", 0, 1, store.namespace, bytes(16), 0.0)
    return store.submit(Request([Forget()], part=gone)).result(PATIENCE)


def _zero_none(store: Store) -> Outcome:
    wide = Wide("none.", lambda name: Zero(name=name), may_fit_none=True)
    return store.submit(Request([], wide=wide)).result(PATIENCE)


ANSWERS: dict[str, Callable[[Store], Any]] = {
    "durable": lambda store: store.durable(["w"]),
    "durable of a step": lambda store: store.durable(["w"], 0),
    "records": lambda store: store.records(),
    "names": lambda store: store.names(""),
    "read": lambda store: store.read(["w"])[0].receipt(),
    "read of a step": lambda store: store.read(["w"], 0)[0].receipt(),
    "recall": lambda store: store.recall(key(caller=store.namespace), ["w"]),
    "pushes": lambda store: store.pushes(),
    "graph": lambda store: store.graph("g"),
    "graphs": lambda store: store.graphs(),
    "graph_content": lambda store: bytes(store.graph_content(store.graph("g"))),
    "run": lambda store: store.run("r"),
    "runs": lambda store: store.runs(),
    "submit of a graph that exists": lambda store: _put_graph(store, "g"),
    "submit of a repeated graph": lambda store: _put_graph(store, "g", key("graph", caller=store.namespace)),
    "submit of a repeated add": lambda store: do(
        store, Add(name="w", gradient=ones(2)), key=key(caller=store.namespace)
    ),
    "submit of a repeated take": lambda store: (
        do(store, Take(name="w"), key=key("taken", caller=store.namespace)).receipts
    ),
    "submit of a buffer that exists": lambda store: do(store, Create(name="w", spec=spec(keep=2))),
    "submit of an add without effect": lambda store: do(store, Add(name="w", gradient=ones(2), do_update=False)),
    "submit for a prefix that fits none": _zero_none,
    "submit of a repeated part": lambda store: part(store, 1, {"w": 1}, push="begun"),
    "submit of a repeated last part": lambda store: part(store, 2, {"v": 1}, push="whole"),
    "submit that forgets no push": _forget,
}
"""Requests that change nothing, by the method of the store and what it is asked."""
