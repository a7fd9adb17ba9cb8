"""Graphs in exports, imports, and what the doctor says about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from service.buffers.changes import Create
from service.buffers.doctor import examine
from service.buffers.graphs import StoredGraph, digest_of
from service.buffers.memory import MemoryStore
from service.buffers.store import Store
from service.buffers.transfer import export, read, restore
from service.errors import GradserveError, GraphCorrupt, GraphExists, InvalidParameter, MalformedBody, UnknownBuffer
from service.limits import Limits
from tests.buffers.calls import add, create, spec, value
from tests.buffers.postgres import Schema
from tests.buffers.stores import MAX_BYTES, Clock, flip, open_lmdb, wrong
from tests.buffers.test_contract_graphs import LARGE, OPTIONS, SMALL, content, names, put
from tests.buffers.test_contract_runs import LIFE, join, leave

LIMITS = Limits(max_tensor_bytes=1 << 21)


class Place:
    """A store that a test opens, and what export and doctor need to find it."""

    def __init__(self, open: Callable[[], Store], url: str, schema: str, damage: Callable[[bytes], object]) -> None:
        self.open, self.url, self.schema, self.damage = open, url, schema, damage

    def export(self, file: Path, prefix: str = "") -> tuple[int, int, int]:
        return export(self.url, MAX_BYTES, file, prefix, self.schema)

    def lines(self) -> list[str]:
        return [*examine(self.url, MAX_BYTES, self.schema)]


@pytest.fixture(params=["lmdb", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Place:
    path = tmp_path / "store"
    if request.param == "lmdb":
        return Place(partial(open_lmdb, path, clock), f"lmdb:{path}", "", partial(flip, path))
    schema: Schema = request.getfixturevalue("schema")
    return Place(partial(schema.open, clock=clock), schema.url, schema.name, schema.damage)


def imported(file: Path, store: Store) -> None:
    restore(store, read(file, LIMITS, 200))


def graphs_of(store: Store) -> list[tuple[StoredGraph, bytes]]:
    """Return the graphs with the bytes of their models, without their ids."""
    return [(StoredGraph(**{**vars(graph), "id": 0}), content(store, graph.name)) for graph in store.graphs()]


def test_an_export_restores_every_graph(
    place: Place, tmp_path: Path, open_memory: Callable[[], MemoryStore], clock: Clock
) -> None:
    file = tmp_path / "saved"
    with closing(place.open()) as store:
        for number, name in enumerate(("mlp", "net.a", "net.b", "empty")):
            put(store, name, (LARGE, SMALL, SMALL[1:], b"")[number], options={} if number else OPTIONS)
            clock.advance(1)
        put(store.within("ann"), "mlp")
        create(store, "net.w")
        add(store, "net.w", [1, 2])
        before = graphs_of(store)
    assert place.export(file)[:2] == (1, 5)
    assert place.export(tmp_path / "part", "net.")[:2] == (1, 2)
    for prefix in ("~ann/", "~an", "~"):
        assert place.export(tmp_path / "own", prefix)[:2] == (0, 1)
    with pytest.raises(UnknownBuffer, match="no buffer and no graph whose name begins with 'x'"):
        place.export(tmp_path / "none", "x")
    tensors = load_file(file)
    assert tensors["graphs/mlp"].dtype == np.int32
    assert tensors["graphs/mlp"].tobytes() == LARGE + b"\0" * (-len(LARGE) % 4)
    assert {*tensors} == {
        "net.w",
        *(f"graphs/{name}" for name in ("mlp", "net.a", "net.b", "empty")),
        "~ann/graphs/mlp",
    }
    other = open_memory()
    imported(file, other)
    assert graphs_of(other) == before
    assert content(other.within("ann")) == SMALL
    assert value(other, "net.w").tolist() == [1, 2]
    part = open_memory()
    imported(tmp_path / "part", part)
    assert (names(part), part.names("")) == (["net.a", "net.b"], ["net.w"])


def test_an_export_without_graphs_is_as_before(place: Place, tmp_path: Path) -> None:
    with closing(place.open()) as store:
        create(store, "w")
    place.export(tmp_path / "saved")
    with safe_open(tmp_path / "saved", "numpy") as opened:
        assert {*opened.metadata()} == {"buffers"}


def test_an_import_makes_all_graphs_or_none(
    place: Place, tmp_path: Path, open_memory: Callable[[], MemoryStore]
) -> None:
    file = tmp_path / "saved"
    with closing(place.open()) as store:
        create(store, "w")
        for name in ("a", "b", "c"):
            put(store, name)
    place.export(file)
    other = open_memory()
    put(other, "a")
    put(other, "c", LARGE)
    with pytest.raises(GraphExists):
        imported(file, other)
    assert (names(other), other.names("")) == (["a", "c"], [])
    other = open_memory()
    put(other, "a")
    imported(file, other)
    assert (names(other), other.names("")) == (["a", "b", "c"], ["w"])


ABOUT = {"options": {}, "created": 1e9, "bytes": 6, "digest": digest_of(b"123456")}


@pytest.mark.parametrize(
    ("about", "error", "words"),
    [
        ("[]", MalformedBody, "must be an object"),
        ("{", MalformedBody, "is not JSON"),
        ({"graphs/g": []}, MalformedBody, "must be an object"),
        ({"graphs/g": {**ABOUT, "more": 1}}, MalformedBody, "has 'more', which this version does not know"),
        ({"graphs/g": {**ABOUT, "options": {"loss": 1}}}, MalformedBody, "options .* must be an object of texts"),
        ({"graphs/g": {**ABOUT, "created": -1}}, MalformedBody, "created -1"),
        ({"graphs/g": {**ABOUT, "bytes": -1}}, MalformedBody, "bytes -1"),
        ({"graphs/g": {**ABOUT, "bytes": 7}}, MalformedBody, "has no tensor 'graphs/g' as its metadata describes it"),
        ({"graphs/g": {**ABOUT, "bytes": 9}}, MalformedBody, "has no tensor 'graphs/g' as its metadata describes it"),
        ({"graphs/h": ABOUT}, MalformedBody, "has no tensor 'graphs/h' as its metadata describes it"),
        ({"g": ABOUT}, MalformedBody, "its name must have graphs/ in it"),
        ({"~a b/graphs/g": ABOUT}, MalformedBody, "a namespace must be"),
        ({"graphs/g/h": ABOUT}, InvalidParameter, "is not a graph name"),
        ({f"graphs/{'g' * 200}": ABOUT}, InvalidParameter, "the longest graph name has 100"),
        ({}, MalformedBody, "which its metadata does not describe"),
    ],
)
def test_metadata_that_no_export_writes_is_refused(
    tmp_path: Path, about: Any, error: type[GradserveError], words: str
) -> None:
    file, tensor = tmp_path / "x", np.frombuffer(b"123456\0\0", np.int32)
    known = isinstance(about, dict) and about and "graphs/h" not in about
    save_file({next(iter(about)) if known else "graphs/g": tensor}, file, metadata_of(about))
    with pytest.raises(error, match=words):
        read(file, LIMITS, 100)


def metadata_of(about: Any) -> dict[str, str]:
    return {"buffers": "{}", "graphs": about if isinstance(about, str) else json.dumps(about)}


@pytest.mark.parametrize("what", ["model", "head"])
def test_damage_is_found_and_not_exported(place: Place, tmp_path: Path, what: str) -> None:
    with closing(place.open()) as store:
        put(store, "hurt", LARGE, options={"train": "a pattern"})
        put(store, "well")
        put(store.within("ann"), "hurt", SMALL, Create(name="w", spec=spec()))
    assert [line for line in place.lines() if line.startswith("WRONG")] == []
    assert "3 graphs" in place.lines()
    place.damage(LARGE[1000:1100] if what == "model" else b"a pattern")
    found = [line for line in place.lines() if line.startswith("WRONG")]
    named = (
        "WRONG: the graph 'hurt' is damaged" if what == "head" else "WRONG: the model of the graph 'hurt' is damaged"
    )
    assert named in found
    assert [line for line in found if line != named and "belongs to no buffer" not in line] == []
    with pytest.raises(GraphCorrupt, match=f"{what} of the graph 'hurt' is damaged"):
        place.export(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert place.export(tmp_path / "saved", "~ann/")[:2] == (1, 1)


def test_a_sound_store_has_no_findings(tmp_path: Path, clock: Clock) -> None:
    with closing(open_lmdb(tmp_path / "store", clock)) as store:
        put(store, "mlp", LARGE)
        put(store, "small")
    assert wrong(tmp_path / "store") == []


# ----- runs -----


def test_runs_come_back_with_their_buffers(
    place: Place, tmp_path: Path, open_memory: Callable[[], MemoryStore]
) -> None:
    with closing(place.open()) as store:
        for own in (store, store.within("ann")):
            join(own, form={"line.a": "float32[2]"})
            create(own, "line.a", life=LIFE)
            add(own, "line.a", [1, 2], life=LIFE)
            leave(own, "x", outcome="failed", error="E: 1")
        runs = [own.run("line") for own in (store, store.within("ann"))]
    assert place.export(tmp_path / "saved")[:2] == (2, 0)
    assert "2 runs" in place.lines()
    other = open_memory()
    imported(tmp_path / "saved", other)
    for own, (run, form) in zip((other, other.within("ann")), runs, strict=True):
        found, found_form = own.run("line")
        assert (replace(found, updated=run.updated, digest=run.digest), found_form) == (run, form)
        assert (value(own, "line.a").tolist(), own.record("line.a").spec.life) == ([1, 2], LIFE)
    with pytest.raises(UnknownBuffer):
        place.export(tmp_path / "part", "other")
    with pytest.raises(GradserveError):
        imported(tmp_path / "saved", other)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"life": "line@0"}, "has life 'line@0', but it must be a life of the run, or empty"),
        ({"ended": {}}, "has ended {}, but it must be null or an object"),
        ({"form": []}, "has form"),
        ({"start": {"seed": 1 << 64}}, "must be an object of finite numbers and integers of 64 bits"),
        ({"more": 1}, "does not know"),
        ({"workers": {"x": 1}}, "workers"),
    ],
)
def test_a_file_with_a_wrong_run_is_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    run: dict[str, Any] = {"life": LIFE, "created": 1e9, "prefix": "line.", "buffer": "line.a", "workers": {}}
    run |= {"ended": None, "begun": True, "form": {}, "start": {}}
    metadata = {"buffers": "{}", "runs": json.dumps({"line": {**run, **changed}})}
    save_file({}, tmp_path / "saved", metadata)
    with pytest.raises(MalformedBody) as caught:
        read(tmp_path / "saved", LIMITS, 200)
    assert words in str(caught.value)
