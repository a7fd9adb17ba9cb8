"""Kill -9 at random moments, under clients that try again: every gradient counts exactly once."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from tests.faults.servers import LONG, PATIENCE, Client, Server, moments, new_key, tensors

CLIENTS = 8
KILLS = 100 if LONG else 3
"""Of each of the two servers."""

GATHERERS = 2
"""How many of the clients add through GatherGrad."""

LARGE = 1000
"""Times that the second buffer repeats the first: it lies in several chunks."""

ROWS, STEP = 8000, 800
"""Of the table that GatherGrad adds into, and how far apart the rows of a gradient lie."""


class Adder:
    """Adds 1, 2, 3, ... and their squares in a row of its own, one after another, and remembers what it was told."""

    def __init__(self, url: str, row: int) -> None:
        self.url, self.row = url, row
        self.started = self.answered = 0
        self.sent: list[tuple[str, Any]] = []

    def run(self, stop: threading.Event) -> None:
        with Client(self.url) as client:
            while not stop.is_set():
                key = new_key()
                self.started += 1
                receipts = self.add(client, self.started, key)
                self.answered += 1
                self.sent.append((key, receipts))

    def add(self, client: Client, number: int, key: str) -> Any:
        return client.add_many(self.gradients(number), key=key)

    def repeat(self, most: int) -> None:
        """Send the last gradients again with their keys: the receipts are those that came then."""
        with Client(self.url) as client:
            for number, (key, receipts) in [*enumerate(self.sent, 1)][-most:]:
                assert self.add(client, number, key) == receipts

    def gradients(self, number: int) -> dict[str, Array]:
        small = np.zeros((CLIENTS, 3))
        small[self.row] = 1, number, number**2
        return {"small": small, "large": np.broadcast_to(small, (LARGE, CLIENTS, 3))}


class Gatherer(Adder):
    """Does so through GatherGrad into rows of a table that few of them change, and all alike."""

    def add(self, client: Client, number: int, key: str) -> Any:
        rows = np.arange(self.row, ROWS, STEP)
        grad = np.tile(np.array([1.0, number, number**2]), (rows.size, 1))
        body = tensors(shape=np.array((ROWS, 3)), indices=rows, grad=grad)
        return client.done("POST", "/v1/ops/GatherGrad", key=key, params={"into": "output:table"}, **body)


def sums_of(row: Array) -> int:
    """n, where the row holds the sums of 1, of k and of k squared over k = 1 ... n."""
    n = int(row[0])
    assert row.tolist() == [n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6]
    return n


def check(client: Client, adders: list[Adder]) -> list[int]:
    """What is there is what was acknowledged, and of each adder at most the add in flight. Returns how many of each."""
    answered = [one.answered for one in adders]
    receipts, values = client.values("small", "large", "table")
    started = [one.started for one in adders]
    table = values["table"].reshape(-1, STEP, 3)
    assert (table == table[0]).all()
    assert not table[0, CLIENTS:].any()
    assert (values["large"] == values["small"]).all()
    rows = [(table[0] if isinstance(one, Gatherer) else values["small"])[one.row] for one in adders]
    there = [sums_of(row) for row in rows]
    for least, found, most in zip(answered, there, started, strict=True):
        assert least <= found <= most
    gathered = sum(there[-GATHERERS:])
    for name, receipt in receipts.items():
        expected = gathered if name == "table" else sum(there) - gathered
        assert receipt["count"] == receipt["version"] == receipt["weight"] == expected
    return there


@pytest.mark.parametrize("workers", [1, 2])
def test_every_gradient_counts_exactly_once(workers: int, tmp_path: Path) -> None:
    chance = random.Random(workers)
    stop = threading.Event()
    with (
        Server(tmp_path / "store", workers=workers) as server,
        Client(server.url) as client,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        client.create("small", (CLIENTS, 3))
        client.create("large", (LARGE, CLIENTS, 3))
        client.create("table", (ROWS, 3))
        adders = [(Adder if row < CLIENTS - GATHERERS else Gatherer)(server.url, row) for row in range(CLIENTS)]
        running = [threads.submit(one.run, stop) for one in adders]
        try:
            for kill in moments(chance, KILLS, 0.05, 0.6):
                if workers > 1 and kill % 4:
                    server.kill_a_worker(chance)
                else:
                    server.kill()
                    server.start()
                check(client, adders)
        finally:
            stop.set()
        for one in running:
            one.result(PATIENCE)
        there = check(client, adders)
        assert there == [one.started for one in adders]
        assert min(there) > KILLS / 4
        for done in [threads.submit(one.repeat, 1000 if LONG else 100) for one in adders]:
            done.result(PATIENCE)
        assert check(client, adders) == there
