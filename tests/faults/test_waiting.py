"""A change that comes in the very moment in which a request begins to wait wakes it, too."""

from __future__ import annotations

import asyncio
from typing import Any

from service.api.waiting import Waiting
from service.buffers.memory import MemoryStore
from service.errors import EpochOpen


class Changing(MemoryStore):
    """A store that is changed by another process, of which one is told by the generation alone."""

    now = 0

    def generation(self) -> int:
        return self.now

    def change(self) -> None:
        self.now += 1


def test_a_change_between_the_last_look_and_the_first_poll_wakes() -> None:
    store = Changing()

    async def attempt() -> str:
        if store.now:
            return "there"
        asyncio.get_running_loop().call_soon(store.change)
        raise EpochOpen("not there")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    assert asyncio.run(Waiting(store).until(receive, 2, attempt)) == "there"
    store.close()
