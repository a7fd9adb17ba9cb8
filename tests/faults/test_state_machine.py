"""Servers answer random requests over HTTP as a plain model does: over PostgreSQL, over LMDB, and in memory.

Two servers share a store, and Hypothesis says which of them gets which request. `make fuzz` makes more requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import TestCase

import httpx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from service.buffers.changes import Add, Change, Create, Delete, Take
from service.buffers.record import Spec
from service.buffers.rules import CloseIfDue
from service.buffers.store import Store
from service.dtypes import Array
from service.errors import NothingToAverage
from tests.buffers import test_state_machine as machine
from tests.buffers.postgres import Schema
from tests.buffers.stores import KEY_SECONDS, MAX_BYTES, Clock, shrink_lmdb, wrong
from tests.faults.cluster import replicas
from tests.faults.remote import Doubled, Remote
from tests.faults.servers import LONG, Server
from tests.kernels.equality import assert_same_bits
from tests.serving import delete_buffers

REPLICAS = 2

OWN: dict[str, Any] = {"module": "tests.faults.modelled", "max_buffers": machine.MOST_BUFFERS}
"""What the servers of the machines have of their own."""


class FileClock(Clock):
    """A clock whose time is in a file, for the servers. It goes on from where the last clock of the file stopped."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        if file.exists():
            self.now = float(file.read_text())
        self.advance(KEY_SECONDS)  # the servers forget the keys of the last clock

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        new = self._file.with_suffix(".new")
        new.write_text(str(self.now))
        new.replace(self._file)


@st.composite
def alike(draw: st.DrawFn) -> list[Change]:
    """Draw changes of several buffers that are one request over HTTP, in the order of its tensors."""
    of_kinds = ("take", "zero", "create")
    first = draw(st.one_of(machine.adds, machine.adds, *[machine.changes[kind] for kind in of_kinds]))
    names = draw(st.lists(machine.names, min_size=2, max_size=3, unique=True))
    if isinstance(first, Create):
        return [replace(first, name=name, spec=draw(machine.specs)) for name in names]
    if not isinstance(first, Add):
        return [replace(first, name=name) for name in names]
    gradients = sorted((draw(machine.gradients()) for _ in names), key=lambda gradient: -gradient.itemsize)
    return [
        replace(first, name=name, match=None, gradient=gradient)
        for name, gradient in zip(names, gradients, strict=True)
    ]


class HttpMachine(machine.Machine):
    """The machine of servers, which `serving` starts for all of its runs."""

    urls: ClassVar[list[str]]
    clock_file: ClassVar[Path]

    def new_clock(self) -> Clock:
        return FileClock(self.clock_file)

    def open(self) -> Store:
        with httpx.Client(base_url=self.urls[0]) as client:
            delete_buffers(client)
        self.remote = Remote(self.urls)
        return cast(Store, self.remote)

    @initialize(turns=st.lists(st.integers(0, REPLICAS - 1), min_size=1, max_size=20))
    def begin(self, turns: list[int]) -> None:
        self.remote.turns = cycle([turn % len(self.urls) for turn in turns])

    def told(self, changes: list[Change], receipts: dict[str, Any]) -> dict[str, Any]:
        return {} if isinstance(changes[0], Delete) else receipts

    def shown(self, change: Change, total: Array, weight: float) -> Array:
        return machine.mean_of(total, weight) if isinstance(change, Take) and change.mean else total

    @rule(several=alike(), with_key=machine.keyed)
    def change_many(self, several: list[Change], with_key: bool) -> None:
        self.make(several, with_key)

    def expect(self, changes: list[Change], text: str | None) -> None:
        """Compute a step from what its source is now. Its source may be gone."""
        if any(isinstance(change, Doubled) and change.source not in self.model.alive() for change in changes):
            assert self.ask(changes, text) == "unknown_buffer"
            return
        super().expect([self.computed(change) if isinstance(change, Doubled) else change for change in changes], text)

    def computed(self, step: Doubled) -> Doubled:
        source = self.model.alive()[step.source]
        with np.errstate(all="ignore"):
            return replace(step, gradient=np.asarray(source.value * 2), spec=Spec(source.spec.shape, source.spec.dtype))

    @rule(source=machine.names, name=machine.names, with_key=machine.keyed)
    def double(self, source: str, name: str, with_key: bool) -> None:
        step = Doubled(name=name, source=source, gradient=np.zeros(0))
        self.ask([CloseIfDue(name=source)], None)
        self.make([step], with_key)

    @rule(name=machine.names, step=st.integers(0, 4))
    def read_mean(self, name: str, step: int) -> None:
        buffer = self.model.alive().get(name)
        if buffer is None or step not in buffer.steps:
            return
        receipt, total = buffer.steps[step]
        if receipt["weight"]:
            assert_same_bits(self.remote.mean(name, step), machine.mean_of(total, receipt["weight"]))
            return
        with pytest.raises(NothingToAverage) as caught:
            self.remote.mean(name, step)
        assert caught.value.context == {"buffer": name, "receipt": {**receipt, "updated": False}}

    @classmethod
    @contextmanager
    def serving(cls, place: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
        raise NotImplementedError


class PostgresMachine(HttpMachine):
    @classmethod
    @contextmanager
    def serving(cls, place: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
        """Start the servers. In the end nothing may be left in the database that no buffer has."""
        url: str = request.getfixturevalue("postgres_url")
        schema = Schema(url)
        with replicas(REPLICAS, place, url, postgres_schema=schema.name, **OWN) as servers:
            yield servers
        assert schema.faults() == []
        schema.drop()


class LmdbMachine(HttpMachine):
    @classmethod
    @contextmanager
    def serving(cls, place: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
        """Start the servers. In the end nothing may be left on the disk that no buffer has."""
        store, own = place / "store", {"store_bytes": MAX_BYTES, **OWN}
        with Server(store, **own) as first, Server(store, log=place / "second.log", **own) as second:
            yield [first, second]
        with pytest.MonkeyPatch.context() as patch:
            shrink_lmdb(patch)  # the doctor knows chunks of the servers' size only
            assert wrong(store) == []


class MemoryMachine(HttpMachine):
    @classmethod
    @contextmanager
    def serving(cls, place: Path, request: pytest.FixtureRequest) -> Iterator[list[Server]]:
        with Server(place / "none", store="memory:", **OWN) as server:
            yield [server]


@pytest.fixture(scope="class", autouse=True)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start the servers of a machine."""
    place, kind = tmp_path_factory.mktemp("machine"), request.cls.kind
    kind.clock_file = place / "clock"
    FileClock(kind.clock_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_TEST_CLOCK", str(kind.clock_file))
        with kind.serving(place, request) as running:
            kind.urls = [server.url for server in running]
            yield


def case_of(kind: type[HttpMachine]) -> type[TestCase]:
    """Return the test case of a machine."""
    case: Any = kind.TestCase
    case.kind = kind
    case.settings = settings(machine.SOME, max_examples=max(500 * LONG, 10 * machine.FUZZ))
    return cast(type[TestCase], case)


TestPostgres = case_of(PostgresMachine)
TestLmdb = case_of(LmdbMachine)
TestMemory = case_of(MemoryMachine)
