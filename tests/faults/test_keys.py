"""Idempotency keys never fill a store: what a day of them takes stays the same however long requests go on.

The long form adds a million times to 200 buffers, in ten days of a clock that a test moves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from service.buffers.changes import Add, Create
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Key, Spec
from service.dtypes import FLOAT32
from tests.faults.servers import LONG, PATIENCE

BUFFERS = 200
DAYS = 10
DAY_SECONDS = 86_400.0
ADDS_A_DAY = 100_000 if LONG else 150
BATCH = 50
ROOM_BYTES = (1 << 20) + 4 * ADDS_A_DAY * 600
"""The limit of the store, a quarter of it for keys. As JSON, the receipts of one add would take 45,000 bytes."""


def test_keys_do_not_fill_a_store(tmp_path: Path) -> None:
    """Only the first add of a batch changes the sums: the others do not update them, and have receipts all the same."""
    now = 1_700_000_000.0
    store = LmdbStore(tmp_path / "store", max_bytes=ROOM_BYTES, key_seconds=DAY_SECONDS, clock=lambda: now)
    names = [f"layer.{number}.weight" for number in range(BUFFERS)]
    store.submit(Request([Create(name=name, spec=Spec((2,), FLOAT32)) for name in names])).result(PATIENCE)
    adds = [Add(name=name, gradient=np.ones(2, np.float32)) for name in names]
    checks = [replace(add, do_update=False) for add in adds]
    sizes = []
    for day in range(DAYS):
        for first in range(0, ADDS_A_DAY, BATCH):
            now += BATCH * DAY_SECONDS / ADDS_A_DAY
            keys = [Key("", f"{day} {number}", bytes(16)) for number in range(first, first + BATCH)]
            made = [store.submit(Request(checks if number else adds, key)) for number, key in enumerate(keys)]
            assert not any(one.result(PATIENCE).replayed for one in made)
        sizes.append(store.size()[1])
        again = store.submit(Request(checks, keys[-1])).result(PATIENCE)
        assert (again.replayed, again.receipts) == (True, made[-1].result().receipts)
    assert store.record(names[0]).count == DAYS * ADDS_A_DAY / BATCH
    store.close()
    assert max(sizes[2:]) <= 1.1 * sizes[1], sizes
