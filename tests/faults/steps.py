"""Contributors to steps that end by deadlines or quorums, while rules change and servers die."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np

from service.dtypes import Array
from tests.faults.cluster import wait
from tests.faults.servers import PATIENCE, Client, new_key, tensors

CONTRIBUTORS = 3

KEEP = 1000
"""Closed steps that the buffer keeps: those of a short run."""

PAUSES = (0.0, 0.01, 0.15)
"""Seconds that each contributor waits before its adds: the last often comes after the deadline."""


class Contributor:
    """A contributor that adds once to each step, unless it is late. `made` are the steps that its adds are in."""

    def __init__(self, connect: Callable[[], Client], row: int) -> None:
        self._connect, self.row, self.name = connect, row, f"rank{row}"
        self.made: set[int] = set()

    def run(self, stop: threading.Event) -> None:
        step = 0
        with self._connect() as client:
            while not stop.wait(PAUSES[self.row]):
                self._add(client, step)
                while (answer := _receipt(client, step, timeout=1)).status_code == 409:
                    assert answer.json()["code"] == "step_open", answer.text
                    if stop.is_set():
                        return
                assert answer.status_code == 200, answer.text
                step += 1

    def gradient(self, step: int) -> Array:
        gradient = np.zeros((CONTRIBUTORS, 2))
        gradient[self.row] = 1, step
        return gradient

    def _add(self, client: Client, step: int) -> None:
        add = {"params": {"step": step, "contributor": self.name}, **tensors(gradient=self.gradient(step))}
        answer = client.send("POST", "/v1/buffers/b/accumulate", key=new_key(), **add)
        if answer.status_code == 200:
            assert answer.json()["step"] == step
            self.made.add(step)
        else:
            assert answer.json()["code"] == "stale_step", answer.text


class Ruler:
    """A client that changes the rules all the time, each time to other values."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect, self.made = connect, 0

    def run(self, stop: threading.Event) -> None:
        with self._connect() as client:
            while not stop.wait(0.05):
                self.made += 1
                rules = {
                    "deadline_seconds": 0.04 + self.made % 100 / 1000,
                    "min_count": 1 + self.made % 2,
                    "quorum": [None, 3, 2][self.made % 3],
                }
                found = client.done("PATCH", "/v1/buffers/b", key=new_key(), json=rules)
                assert {name: found[name] for name in rules} == rules


@contextmanager
def running(connect: Callable[[], Client]) -> Iterator[None]:
    """Let contributors add and rules change until the context is left. Then each add must be in its step, once.

    Without faults in the end, steps end by their deadlines and by their quorums.
    """
    stop, ruler = threading.Event(), Ruler(connect)
    several = [Contributor(connect, row) for row in range(CONTRIBUTORS)]
    with connect() as client, ThreadPoolExecutor(CONTRIBUTORS + 1) as threads:
        names = [one.name for one in several]
        client.create("b", (CONTRIBUTORS, 2), keep=KEEP, deadline_seconds=1.0, contributors=names)
        runs = [*(one.run for one in several), ruler.run]
        made = [threads.submit(run, stop) for run in runs]
        try:
            yield
            first = client.metadata("b")["step"]
            both = {"deadline", "quorum"}
            wait(lambda: _ways(client, first) == both or any(one.done() for one in made), "steps do not close")
        finally:
            stop.set()
        for one in made:
            one.result(2 * PATIENCE)
        _check(client, several, ruler)


def _ways(client: Client, first: int) -> set[str]:
    """Return what has closed the steps from `first` on."""
    return {_receipt(client, step).json()["closed_by"] for step in range(first, client.metadata("b")["step"])}


def _check(client: Client, several: list[Contributor], ruler: Ruler) -> None:
    client.done("PATCH", "/v1/buffers/b", json={"deadline_seconds": None, "min_count": 1})  # nothing changes now
    known = client.metadata("b")
    assert known["closed_steps"] == [*range(max(0, known["step"] - KEEP), known["step"])]
    found = []
    for step in known["closed_steps"]:
        receipt = _receipt(client, step).json()
        within = [one for one in several if step in one.made]
        assert receipt["contributors"] == {one.name: 1 for one in within}
        assert receipt["count"] == receipt["weight"] == len(within)
        assert (client.value("b", step=step) == sum(one.gradient(step) for one in within)).all()
        found.append(receipt["closed_by"])
    assert known["contributors_in"] == {one.name: 1 for one in several if known["step"] in one.made}
    assert "deadline" in found
    assert {*found} <= {"deadline", "quorum"}
    least = sum(len(one.made) for one in several) + ruler.made + 1
    assert least <= known["version"] <= least + known["step"]  # closings by the clock have versions of their own


def _receipt(client: Client, step: int, timeout: float = 0) -> httpx.Response:
    return client.send("GET", "/v1/buffers/b", params={"step": step, "timeout": timeout})
