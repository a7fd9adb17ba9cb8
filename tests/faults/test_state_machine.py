"""Two servers that share a PostgreSQL answer random requests over HTTP as a plain model does.

Hypothesis says which server gets which request. `make fuzz` makes more requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from service.buffers.changes import Add, Change, Delete
from service.buffers.store import Store
from tests.buffers import test_state_machine as machine
from tests.buffers.calls import KEY_SECONDS, Clock
from tests.buffers.postgres import Schema
from tests.faults.cluster import replicas
from tests.faults.remote import Remote
from tests.faults.servers import LONG
from tests.serving import delete_buffers

REPLICAS = 2


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
    first = draw(st.one_of(machine.adds, machine.adds, machine.changes["take"], machine.changes["zero"]))
    names = draw(st.lists(machine.names, min_size=2, max_size=3, unique=True))
    if not isinstance(first, Add):
        return [replace(first, name=name) for name in names]
    gradients = sorted((draw(machine.gradients()) for _ in names), key=lambda gradient: -gradient.itemsize)
    return [
        replace(first, name=name, match=None, gradient=gradient)
        for name, gradient in zip(names, gradients, strict=True)
    ]


class HttpMachine(machine.Machine):
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
        self.remote.turns = cycle(turns)

    def told(self, changes: list[Change], receipts: dict[str, Any]) -> dict[str, Any]:
        return {} if isinstance(changes[0], Delete) else receipts

    @rule(several=alike(), with_key=machine.keyed)
    def change_many(self, several: list[Change], with_key: bool) -> None:
        self.make(several, with_key)


@pytest.fixture(scope="module", autouse=True)
def servers(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start the servers of the machine. In the end nothing may be left in the database that no buffer has."""
    place, schema = tmp_path_factory.mktemp("machine"), Schema(postgres_url)
    HttpMachine.clock_file = place / "clock"
    FileClock(HttpMachine.clock_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADSERVE_TEST_CLOCK", str(HttpMachine.clock_file))
        own = {"module": "tests.faults.modelled", "postgres_schema": schema.name, "max_buffers": machine.MOST_BUFFERS}
        with replicas(REPLICAS, place, postgres_url, **own) as running:
            HttpMachine.urls = [server.url for server in running]
            yield
    assert schema.faults() == []
    schema.drop()


TestHttp = HttpMachine.TestCase
TestHttp.settings = settings(machine.SOME, max_examples=max(500 * LONG, 10 * machine.FUZZ))
