"""A change at the very moment when a request begins to wait wakes the request, too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import TypeVar

import numpy as np
import pytest

from service.api.http.waiting import ANY, Waiting
from service.buffers.changes import Add, Change, Create, Delete, Take
from service.buffers.memory import MemoryStore
from service.buffers.names import BufferName
from service.buffers.perform import Request
from service.buffers.record import Record, Spec
from service.dtypes import FLOAT32
from service.errors import InvalidParameter, PreconditionFailed
from tests.api.calls import PATIENCE

R = TypeVar("R")

SCALAR = np.ones((), np.float32)


class Racing(MemoryStore):
    """A store that another process changes just after or just before a look-up."""

    race: Callable[[], object] | None = None
    before = False

    def look(self, names: Collection[BufferName]) -> dict[BufferName, Record]:
        race, self.race = self.race, None
        if race is not None and self.before:
            race()
        found = super().look(names)
        if race is not None and not self.before:
            race()
        return found


async def stay() -> None:
    await asyncio.sleep(60)


def waited(store: MemoryStore, attempt: Callable[[], Awaitable[R]], match: frozenset[str] = ANY) -> R:
    """Return the result of a wait with a timeout of ten minutes."""

    async def wait() -> R:
        return await asyncio.wait_for(Waiting(store).until("", stay, 600, attempt, match), PATIENCE)

    return asyncio.run(wait())


def change(store: MemoryStore, *changes: Change) -> None:
    store.submit(Request(changes)).result()


W = Create(name="w", spec=Spec((), FLOAT32))
ADD = Add(name="w", gradient=SCALAR)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["step", "count", "tag"])
def test_a_change_as_the_wait_begins_ends_the_wait(kind: str, before: bool) -> None:
    store = Racing()
    change(store, W)
    tries = 0

    async def attempt() -> int:
        nonlocal tries
        tries += 1
        record = MemoryStore.record(store, "w")
        if kind == "step":
            return record.closed_step(0).step
        with suppress(PreconditionFailed):
            Take(name="w", min_count=5 if kind == "tag" else 1, match=match).admit(record)
        return 0

    match = frozenset({'"0-0"'} if kind == "tag" else ANY)
    store.race, store.before = lambda: change(store, Take(name="w") if kind == "step" else ADD), before
    assert waited(store, attempt, match) == 0
    assert tries == 2
    store.close()


def test_a_wait_checks_a_recreated_buffer_again() -> None:
    store = Racing()
    change(store, W)

    async def attempt() -> int:
        Take(name="w", min_count=2).admit(MemoryStore.record(store, "w"))
        return 0

    def recreate() -> None:
        change(store, Delete(name="w"))
        change(store, Create(name="w", spec=Spec((), FLOAT32, quorum=2)))

    store.race = recreate
    with pytest.raises(InvalidParameter, match="quorum"):
        waited(store, attempt)
    store.close()


def test_a_wait_tries_again_only_after_a_relevant_change() -> None:
    store = MemoryStore()
    for name in ("w", "v"):
        change(store, Create(name=name, spec=Spec((), FLOAT32)))
    tries = 0

    async def attempt() -> int:
        nonlocal tries
        tries += 1
        Take(name="w", min_count=5).admit(store.record("w"))
        return tries

    async def add() -> int:
        waiting = asyncio.create_task(Waiting(store).until("", stay, 600, attempt))
        for name in ("v", "v", "w", "w", "w", "w", "w"):
            await asyncio.sleep(0.02)  # time for many polls
            change(store, Add(name=name, gradient=SCALAR))
        return await asyncio.wait_for(waiting, PATIENCE)

    assert asyncio.run(add()) == 2
    store.close()
