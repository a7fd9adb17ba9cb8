"""Concurrent adds, takes, zeros and reads of one buffer are linearizable.

Each add adds 1 to its own element, so a value shows the adds in its sum. Each change has its own version. In the order
of versions, a plain model must give the server's answers.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from service.dtypes import Array
from tests.faults.servers import LONG, PATIENCE, SAFETENSORS, Client, Server, contents, new_key, pause, tensors

ADDERS = 5
EACH = 400 if LONG else 60
KILLS = 10 if LONG else 1
ADDS = ADDERS * EACH

Receipt = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A request: the times of its first sending and of its answer, its kind, and its answer."""

    what: Literal["add", "take", "zero", "value"]
    sent: float
    answered: float
    receipt: Receipt
    element: int = -1
    value: frozenset[int] | None = None

    @property
    def version(self) -> int:
        version: int = self.receipt["version"]
        return version


class Recorder:
    """A recorder of the calls of several clients."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self.history: list[Call] = []

    def call(self, client: Client, what: Literal["add", "take", "zero", "value"], element: int = -1) -> None:
        sent = time.monotonic()
        value = None
        if what == "add":
            receipt = client.done("POST", "/v1/buffers/it/accumulate", key=new_key(), **tensors(**one_hot(element)))
        elif what == "zero":
            receipt = client.done("POST", "/v1/buffers/it/zero", key=new_key())
        else:
            method, key = ("POST", new_key()) if what == "take" else ("GET", None)
            answer = client.send(method, f"/v1/buffers/it/{what}", key=key, headers={"Accept": SAFETENSORS})
            receipts, found = contents(answer)
            receipt, value = receipts["it"], adds_in(found["value"])
        self.history.append(Call(what, sent, time.monotonic(), receipt, element, value))

    def add(self, which: int) -> None:
        with self._connect() as client:
            for element in range(which * EACH, (which + 1) * EACH):
                self.call(client, "add", element)

    def until(self, stop: threading.Event, what: Literal["take", "zero", "value"], pause: float) -> None:
        with self._connect() as client:
            while not stop.wait(pause):
                self.call(client, what)


def one_hot(element: int) -> dict[str, Array]:
    """Return the tensors of a gradient. Every second one is in 8 bits."""
    gradient = np.zeros(ADDS, np.int8)
    gradient[element] = 1
    if element % 2:
        return {"gradient/codes": gradient, "gradient/scales": np.ones(-(-ADDS // 256), np.float32)}
    return {"gradient": gradient.astype(np.float64)}


def adds_in(value: Array) -> frozenset[int]:
    """Return the adds in the value, after a check that no add counts twice."""
    assert set(np.unique(value)) <= {0.0, 1.0}, "an add counted twice, or in part"
    return frozenset(np.flatnonzero(value).tolist())


def check(history: list[Call]) -> None:
    """Raise AssertionError unless some serial order of the calls explains the history."""
    changes = sorted((call for call in history if call.what != "value"), key=lambda call: call.version)
    assert [call.version for call in changes] == list(range(1, len(changes) + 1))
    step, there = 0, frozenset[int]()
    states = [(step, there)]
    for call in changes:
        before = there
        if call.what == "add":
            assert call.element not in there
            there |= {call.element}
        else:
            there, step = frozenset(), step + 1
        states.append((step, there))
        if call.what == "take":
            assert call.value == before
            expected = (step - 1, len(before), True)
        else:
            expected = (step, len(there), False)
        assert (call.receipt["step"], call.receipt["count"], call.receipt["closed"]) == expected
    for call in history:
        if call.what == "value":
            assert (call.receipt["step"], call.value) == states[call.version]
            assert call.receipt["count"] == len(states[call.version][1])
    order = sorted(history, key=lambda call: (call.version, call.what == "value", call.sent))
    latest = 0.0
    for call in order:  # no later call in the order may have ended before this call began
        assert call.answered > latest, "a call does not see one that was over before it"
        latest = max(latest, call.sent)


def check_calls(
    connect: Callable[[], Any], chance: random.Random, fail: Callable[[], object], patience: float = PATIENCE
) -> None:
    """Record concurrent calls of a buffer while something fails `KILLS` times, and check their history."""
    others = [("take", 0.02), ("take", 0.03), ("zero", 0.1), ("value", 0.0), ("value", 0.001)]
    recorders, stop = [Recorder(connect) for _ in range(ADDERS + len(others))], threading.Event()
    with connect() as client, ThreadPoolExecutor(len(recorders)) as threads:
        client.create("it", (ADDS,), keep=50)
        adding = [threads.submit(recorders[which].add, which) for which in range(ADDERS)]
        running = [
            threads.submit(recorder.until, stop, what, pause)  # type: ignore[arg-type]
            for recorder, (what, pause) in zip(recorders[ADDERS:], others, strict=True)
        ]
        try:
            for _ in range(KILLS):
                pause(chance, 0.1, 0.3)
                fail()
            for one in adding:
                one.result(patience)
        finally:
            stop.set()
        for one in running:
            one.result(PATIENCE)
        recorders[0].call(client, "value")
    history = [call for recorder in recorders for call in recorder.history]
    check(history)
    assert sorted(call.element for call in history if call.what == "add") == list(range(ADDS))
    assert sum(call.what == "take" for call in history) > 5


def test_concurrent_calls_are_linearizable(tmp_path: Path) -> None:
    chance = random.Random(8)
    with Server(tmp_path / "store", workers=2) as server:
        check_calls(partial(Client, server.url), chance, lambda: server.kill_a_worker(chance))


def _call(what: Any, at: float, version: int, step: int, count: int, **rest: Any) -> Call:
    receipt = {"version": version, "step": step, "count": count, "closed": what == "take"}
    return Call(what, at, at + 0.5, receipt, **rest)


SOUND = [
    _call("add", 1, 1, 0, 1, element=0),
    _call("value", 2, 1, 0, 1, value=frozenset({0})),
    _call("add", 3, 2, 0, 2, element=1),
    _call("take", 4, 3, 0, 2, value=frozenset({0, 1})),
    _call("zero", 5, 4, 2, 0),
    _call("value", 6, 4, 2, 0, value=frozenset()),
]

WRONG: dict[str, Callable[[], list[Call]]] = {
    "a take without an add": lambda: _with(3, value=frozenset({1})),
    "a read of the past": lambda: _with(1, sent=3.6, answered=3.9),
    "a read of the future": lambda: _with(1, sent=0.1, answered=0.2),
    "a wrong count": lambda: _with(2, receipt={**SOUND[2].receipt, "count": 1}),
    "a change of no version": lambda: SOUND[1:],
    "two changes of one version": lambda: [*SOUND, SOUND[4]],
}


def _with(which: int, **changed: Any) -> list[Call]:
    return [*SOUND[:which], replace(SOUND[which], **changed), *SOUND[which + 1 :]]


def test_the_checker_accepts_a_sound_history() -> None:
    check(SOUND)


@pytest.mark.parametrize("wrong", WRONG)
def test_the_checker_rejects_a_wrong_history(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(WRONG[wrong]())
