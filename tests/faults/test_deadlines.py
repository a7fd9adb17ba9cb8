"""Kill -9 while epochs with deadlines are open: each epoch closes once, and every gradient is in one of them."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.faults.servers import LONG, PATIENCE, Client, Server, new_key

KILLS = 40 if LONG else 2

DEADLINE = 0.15
"""Seconds of a deadline: the server is killed before it, at it, and after it."""

CLIENTS = 3


def test_a_deadline_is_honoured_after_a_kill(tmp_path: Path) -> None:
    """Whether the server dies before the deadline, or while it closes the epochs."""
    chance = random.Random(1)
    with Server(tmp_path / "store") as server, Client(server.url) as client:
        for kill in range(KILLS):
            names = [f"b{kill}.{number}" for number in range(20)]
            for name in names:
                client.create(name, (2,), deadline_seconds=DEADLINE, quorum=9)
            client.add_many({name: np.array([1.0, kill]) for name in names})
            time.sleep(chance.uniform(0, 1.3 * DEADLINE))
            server.kill()
            server.start()
            for name in names:
                receipt = client.done("GET", f"/v1/buffers/{name}", params={"epoch": 0, "timeout": 30})
                assert (receipt["closed_by"], receipt["count"], receipt["version"]) == ("deadline", 1, 2)
                known = client.metadata(name)
                assert (known["epoch"], known["version"], known["closed_epochs"]) == (1, 2, [0])
                assert client.value(name, epoch=0).tolist() == [1, kill]


def test_two_processes_close_each_epoch_once(tmp_path: Path) -> None:
    """Clients add all the time, workers are killed: the epochs follow each other, and lose nothing."""
    chance, stop = random.Random(2), threading.Event()
    with (
        Server(tmp_path / "store", workers=2) as server,
        Client(server.url) as client,
        ThreadPoolExecutor(CLIENTS) as threads,
    ):
        client.create("b", (1,), deadline_seconds=DEADLINE / 3, keep=1000)

        def add() -> int:
            count = 0
            with Client(server.url) as own:
                while not stop.is_set():
                    own.add("b", np.ones(1), key=new_key())
                    count += 1
                    time.sleep(0.01)
            return count

        running = [threads.submit(add) for _ in range(CLIENTS)]
        for _ in range(KILLS):
            time.sleep(0.4)
            server.kill_a_worker(chance)
        stop.set()
        adds = sum(one.result(PATIENCE) for one in running)
        last = client.metadata("b")["epoch"]
        if client.metadata("b")["count"]:
            client.done("GET", "/v1/buffers/b", params={"epoch": last, "timeout": 30})
        known = client.metadata("b")
        receipts = [client.done("GET", "/v1/buffers/b", params={"epoch": epoch}) for epoch in known["closed_epochs"]]
        assert known["closed_epochs"] == [*range(known["epoch"])]
        assert {receipt["closed_by"] for receipt in receipts} == {"deadline"}
        assert sum(receipt["count"] for receipt in receipts) == adds
        assert known["version"] == adds + known["epoch"]
        assert sum(client.value("b", epoch=epoch)[0] for epoch in known["closed_epochs"]) == adds
