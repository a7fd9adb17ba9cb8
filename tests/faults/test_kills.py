"""Kill -9 at random moments, with clients that retry: every gradient counts exactly once."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.dtypes import Array
from tests.faults import coded
from tests.faults.printing import Counted
from tests.faults.servers import LONG, PATIENCE, Client, Server, moments, new_key, tensors

CLIENTS = 8
KILLS = 100 if LONG else 3
"""Kills of each of the two servers."""

PARTERS = 2
"""Clients that push in two parts, a buffer in each."""

CODERS = 2
"""Clients whose gradients come in 8 bits."""

GATHERERS = 2
"""Clients that add through GatherGrad."""

LARGE = 1000
"""Times that the second buffer repeats the first, so that its value has several chunks."""

ROWS = 8000
"""Rows of the table that GatherGrad adds into."""

STEP = 800
"""Rows between two rows of one gradient."""


class Adder:
    """A client that adds 1, 2, 3, ... and their squares to its own row in turn, and keeps the receipts."""

    buffer = "small"

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

    def there(self, values: Mapping[str, Array]) -> int:
        """Return how many of its adds are in the sums, after a check of them."""
        return sums_of(values[self.buffer][self.row])

    def repeat(self, most: int) -> None:
        """Send some gradients of all times again with their keys, and check that the receipts are the same."""
        with Client(self.url) as client:
            for number, (key, receipts) in [*enumerate(self.sent, 1)][:: 1 + len(self.sent) // most]:
                assert self.add(client, number, key) == receipts

    def gradients(self, number: int) -> dict[str, Array]:
        small = np.zeros((CLIENTS, 3))
        small[self.row] = 1, number, number**2
        return {"small": small, "large": np.broadcast_to(small, (LARGE, CLIENTS, 3))}


class Gatherer(Adder):
    """An adder that adds the same numbers to several rows of a table through GatherGrad."""

    buffer = "table"

    def add(self, client: Client, number: int, key: str) -> Any:
        rows = np.arange(self.row, ROWS, STEP)
        grad = np.tile(np.array([1.0, number, number**2]), (rows.size, 1))
        body = tensors(shape=np.array((ROWS, 3)), indices=rows, grad=grad)
        return client.done("POST", "/v1/ops/GatherGrad", key=key, params={"into": "output:table"}, **body)


class Parter(Adder):
    """An adder that pushes in parts."""

    def add(self, client: Client, number: int, key: str) -> Any:
        return client.push(self.gradients(number), push=key)


class Coder(Adder):
    """An adder of gradients in 8 bits."""

    buffer = "coded"

    def __init__(self, url: str, row: int) -> None:
        super().__init__(url, row - PARTERS)
        self.sum = coded.Sum(self.row, CODERS)

    def gradients(self, number: int) -> dict[str, Array]:
        return coded.gradient(self.row, number, CODERS)

    def there(self, values: Mapping[str, Array]) -> int:
        return self.sum.count(values["coded"][self.row])


def kind_of(row: int) -> type[Adder]:
    """Return the kind of the client that adds to a row."""
    kinds = [Parter] * PARTERS + [Coder] * CODERS + [Adder] * (CLIENTS - PARTERS - CODERS - GATHERERS)
    return [*kinds, *[Gatherer] * GATHERERS][row]


def sums_of(row: Array) -> int:
    """Return n, after a check that the row sums 1, k and k squared over k = 1 ... n."""
    n = int(row[0])
    assert row.tolist() == [n, n * (n + 1) // 2, n * (n + 1) * (2 * n + 1) // 6]
    return n


def check(client: Client, adders: list[Adder]) -> list[int]:
    """Check that the sums are the acknowledged adds and at most each add in flight; return the adds of each adder."""
    answered = [one.answered for one in adders]
    receipts, values = client.values("small", "large", "table", "coded")
    started = [one.started for one in adders]
    table = values["table"].reshape(-1, STEP, 3)
    assert (table == table[0]).all()
    assert not table[0, CLIENTS:].any()
    assert (values["large"] == values["small"]).all()
    there = [one.there(values) for one in adders]
    for least, found, most in zip(answered, there, started, strict=True):
        assert least <= found <= most
    for name, receipt in receipts.items():
        own = "small" if name == "large" else name
        expected = sum(found for one, found in zip(adders, there, strict=True) if one.buffer == own)
        assert receipt["count"] == receipt["version"] == receipt["weight"] == expected
    return there


@pytest.mark.parametrize("workers", [1, 2])
def test_every_gradient_counts_exactly_once(workers: int, tmp_path: Path, counted: Counted) -> None:
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
        client.create("coded", (CODERS, *coded.SHAPE), "float32")
        adders = [kind_of(row)(server.url, row) for row in range(CLIENTS)]
        running = [threads.submit(one.run, stop) for one in adders]
        try:
            for kill in moments(chance, KILLS, 0.05, 0.6):
                if workers > 1 and kill % 4:
                    server.kill_a_worker(chance)
                else:
                    server.restart()
                check(client, adders)
        finally:
            stop.set()
        for one in running:
            one.result(PATIENCE)
        there = check(client, adders)
        assert there == [one.started for one in adders]
        assert min(there) > KILLS / 4
        for done in [threads.submit(one.repeat, 1000 if LONG else 20) for one in adders]:
            done.result(PATIENCE)
        assert check(client, adders) == there
        counted(sum(one.answered for one in adders), sum(there), f"kills of the server or of a worker process: {KILLS}")
