"""A change that comes in the very moment in which a request begins to wait wakes it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service.api.waiting import Waiting
from service.buffers.changes import Add, Create, Take
from service.buffers.memory import MemoryStore
from service.buffers.requests import Request
from service.buffers.store import Record, Spec
from service.dtypes import FLOAT32

SCALAR = np.ones((), np.float32)


class Racing(MemoryStore):
    """A store that another process changes just after, or just before, it was looked at."""

    race: Callable[[], object] | None = None
    before = False

    def record(self, name: str) -> Record:
        race, self.race = self.race, None
        if race is not None and self.before:
            race()
        found = super().record(name)
        if race is not None and not self.before:
            race()
        return found


async def stay() -> dict[str, Any]:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["epoch", "count"])
def test_a_change_in_the_moment_in_which_the_wait_begins(kind: str, before: bool) -> None:
    store = Racing()
    store.submit(Request([Create(name="w", spec=Spec((), FLOAT32))])).result()
    tries = 0

    async def attempt() -> int:
        nonlocal tries
        tries += 1
        record = MemoryStore.record(store, "w")
        if kind == "epoch":
            return record.kept(0).epoch
        Take(name="w", min_count=1).admit(record)
        return 0

    change = Take(name="w") if kind == "epoch" else Add(name="w", gradient=SCALAR)
    store.race, store.before = lambda: store.submit(Request([change])).result(), before
    assert asyncio.run(Waiting(store).until("", stay, 2, attempt)) == 0
    assert tries == 2
    store.close()


def test_only_what_may_be_there_wakes() -> None:
    store = MemoryStore()
    for name in ("w", "v"):
        store.submit(Request([Create(name=name, spec=Spec((), FLOAT32))])).result()
    tries = 0

    async def attempt() -> int:
        nonlocal tries
        tries += 1
        Take(name="w", min_count=5).admit(store.record("w"))
        return tries

    async def add() -> int:
        waiting = asyncio.create_task(Waiting(store).until("", stay, 30, attempt))
        for name in ("v", "v", "w", "w", "w", "w", "w"):
            await asyncio.sleep(0.02)  # many polls; were there none, the test would only see less
            store.submit(Request([Add(name=name, gradient=SCALAR)])).result()
        return await waiting

    assert asyncio.run(add()) == 2
    store.close()
