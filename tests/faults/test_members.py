"""Concurrent pushes, joins, leaves and deadlines of a run are linearizable, also while servers die.

The checker is that of `test_linearizable.py`, the model one of its own: whom a step awaits, and what closes it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import httpx
import pytest

from tests.faults.cluster import Balanced, replicas
from tests.faults.linearizable import order_of
from tests.faults.servers import LONG, Client, Server, new_key, pause
from tests.postgres import Cluster

WORKERS = "xyz"
QUORUM, MIN_COUNT, KEEP = 3, 2, 3
DEADLINE = 0.15
ROUNDS = 300 if LONG else 10
CALLS = 7
"""Calls of each worker in a round."""
KINDS = {"push", "join", "leave", "look", "quorum", "members"}
"""What the rounds of a test must have shown: requests, and what closes a step."""


class Told(NamedTuple):
    """What an answer says of the buffer, and what closed its step."""

    step: int
    version: int
    pushes: int
    by: str | None = None


class Members(NamedTuple):
    """What a look at the run says."""

    step: int
    left_out: frozenset[str]
    missing: frozenset[str]


Answer: TypeAlias = Told | Members | str | None


@dataclass(frozen=True)
class Call:
    """A request of a worker, or the end of a step's deadline, which nobody asks for.

    A push is `late` if the answer says that the deadline had ended before it.
    """

    what: Literal["push", "join", "leave", "look", "deadline"]
    worker: str = ""
    step: int | None = None
    late: bool = False


@dataclass(frozen=True)
class Event:
    """A call in a history. A lost answer is None, and comes at no time."""

    call: Call
    sent: float
    answered: float = math.inf
    answer: Answer = None


@dataclass(frozen=True)
class Run:
    """The model of the buffer: who is in the running step, and whom it does not await."""

    step: int = 0
    version: int = 0
    inside: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    def told(self, by: str | None = None) -> Told:
        return Told(self.step, self.version, len(self.inside), by)

    def closed(self) -> Run:
        there = self.inside - self.left_out
        return Run(self.step + 1, self.version, left_out=frozenset(WORKERS) - there)

    def reason(self, *, late: bool = False) -> str | None:
        """Return what closes the running step."""
        members = frozenset(WORKERS) - self.left_out
        if not self.step and not members <= self.inside:
            return None
        if len(self.inside) >= QUORUM:
            return "quorum"
        if len(self.inside) < MIN_COUNT:
            return None
        if self.left_out and members and members <= self.inside:
            return "members"
        return "deadline" if late and self.step else None

    def after(self, *, late: bool = False) -> tuple[Run, Told]:
        """Return the run after a change, and what its answer says."""
        by = self.reason(late=late)
        return (self, self.told()) if by is None else (self.closed(), self.told(by))


def step(run: Run, call: Call) -> tuple[Run, Answer]:
    """Return the run after the call, and the only right answer."""
    newer = replace(run, version=run.version + 1)
    if call.what == "look":
        return run, Members(run.step, run.left_out, frozenset(WORKERS) - run.left_out - run.inside)
    if call.what == "deadline":
        over = run.step == call.step and run.step > 0 and len(run.inside) >= MIN_COUNT
        return (newer.closed(), None) if over else (run, None)
    if call.what == "push":
        if call.worker in run.inside:
            return run, "duplicate_contributor"
        inside, left_out = run.inside | {call.worker}, run.left_out - {call.worker}
        return replace(newer, inside=inside, left_out=left_out).after(late=call.late)
    if (call.worker in run.left_out) == (call.what == "leave"):
        return run, ""
    return replace(newer, left_out=run.left_out ^ {call.worker}).after()[0], ""


def check(history: Sequence[Event]) -> None:
    """Raise AssertionError unless the history of a new run is linearizable."""
    steps = 1 + max(one.answer.step for one in history if isinstance(one.answer, Told | Members))
    ends = [Event(Call("deadline", step=number), min(one.sent for one in history)) for number in range(1, steps)]
    events: Sequence[Any] = [*history, *ends]
    model: Callable[[Run, Any], Any] = step
    if order_of(events, Run(), model) is None:
        lines = [
            f"{one.sent:.4f} to {one.answered:.4f}: {one.call} -> {one.answer}"
            for one in sorted(history, key=lambda one: one.sent)
        ]
        raise AssertionError("\n".join(["no serial order explains this:", *lines]))


class Counting(Balanced):
    """A client that counts its requests."""

    sent = 0

    def once(self, method: str, path: str, *, key: str | None = None, **rest: Any) -> httpx.Response:
        self.sent += 1
        return super().once(method, path, key=key, **rest)


class Game:
    """A new run of three workers, and what they have sent to it."""

    def __init__(self, client: Client, name: str) -> None:
        self.name, self.history = name, list[Event]()
        self.life = f"{name}@{new_key()[:16]}"
        for worker in WORKERS:
            self.request(client, Call("join", worker))
        rules: Any = {
            "contributors": [*WORKERS],
            "quorum": QUORUM,
            "min_count": MIN_COUNT,
            "deadline_seconds": DEADLINE,
        }
        client.create(f"{name}.w", (2,), keep=KEEP, life=self.life, **rules)

    def request(self, client: Client, call: Call) -> httpx.Response:
        """Send a request until it is answered."""
        body: dict[str, Any] = {"worker": call.worker, "life": self.life}
        if call.what == "push":
            query = {"contributor": call.worker, "life": self.life}
            gradient = {"json": {"gradient": [1.0, 1.0]}}
            return client.send("POST", f"/v1/buffers/{self.name}.w/accumulate", key=new_key(), params=query, **gradient)
        if call.what == "look":
            return client.send("GET", f"/v1/runs/{self.name}")
        if call.what == "join":
            body |= {"token": call.worker, "prefix": f"{self.name}.", "buffer": f"{self.name}.w"}
        return client.send("POST", f"/v1/runs/{self.name}/{call.what}", json=body)

    def call(self, client: Counting, call: Call) -> None:
        """Send a request, and record it. A lost join or leave has no key: it is an event of its own."""
        sent, before = time.monotonic(), client.sent
        answer = self.request(client, call)
        answered, found = time.monotonic(), answer.json()
        if call.what in ("join", "leave"):
            assert answer.is_success, answer.text
            self.history += [Event(call, sent)] * (client.sent - before - 1)
            self.history.append(Event(call, sent, answered, ""))
        elif answer.is_error:
            self.history.append(Event(call, sent, answered, found["code"]))
        elif call.what == "look":
            members = Members(found["step"], frozenset(found["left_out"]), frozenset(found["missing"]))
            self.history.append(Event(call, sent, answered, members))
        else:
            by = found.get("closed_by")
            said = Told(found["step"], found["version"], found["count"], by)
            self.history.append(Event(replace(call, late=by == "deadline"), sent, answered, said))

    def work(self, client: Counting, worker: str, chance: random.Random) -> None:
        for _ in range(CALLS):
            what = chance.choices(["push", "leave", "join", "look", "sleep"], [8, 1, 2, 4, 2])[0]
            if what == "sleep":
                pause(chance, 0, 2 * DEADLINE)
            else:
                self.call(client, Call(what, worker))  # type: ignore[arg-type]


def play(urls: Sequence[str], chance: random.Random, kinds: Set[str] = frozenset()) -> Counter[str]:
    """Play rounds until each of `kinds` has come, and check their histories. Return what came, and how often."""
    found = Counter[str]()
    with ThreadPoolExecutor(len(WORKERS)) as threads, ExitStack() as stack:
        clients = [Counting(urls) for _ in WORKERS]
        for client in clients:
            stack.callback(client.__exit__)
        for number in range(20 * ROUNDS):
            if number >= ROUNDS and found.keys() >= kinds:
                break
            game = Game(clients[0], new_key())
            jobs = [
                threads.submit(game.work, client, worker, random.Random(chance.random()))
                for client, worker in zip(clients, WORKERS, strict=True)
            ]
            for job in jobs:
                job.result()
            game.call(clients[0], Call("look", "x"))
            check(game.history)
            for one in game.history:
                found[one.call.what] += 1
                if isinstance(one.answer, Told) and one.answer.by is not None:
                    found[one.answer.by] += 1
    return found


def test_histories_of_members(database: Cluster, tmp_path: Path) -> None:
    with replicas(2, tmp_path, database.url) as servers:
        found = play([server.url for server in servers], random.Random(1), KINDS)
    assert found.keys() >= KINDS


@pytest.mark.parametrize("store", ["lmdb", "postgres"])
def test_histories_of_members_with_kills(database: Cluster, tmp_path: Path, store: str) -> None:
    chance, stop = random.Random(2), threading.Event()
    url = database.url if store == "postgres" else f"lmdb:{tmp_path / 'data'}"
    with replicas(2 if store == "postgres" else 1, tmp_path, url) as servers, ThreadPoolExecutor(1) as threads:

        def kill() -> int:
            kills = 0
            while not stop.is_set():
                pause(chance, 0.2, 0.6)
                server: Server = chance.choice(servers)
                server.kill()
                server.start()
                kills += 1
            return kills

        killing = threads.submit(kill)
        try:
            play([server.url for server in servers], random.Random(3))
        finally:
            stop.set()
        assert killing.result() > 0


def _event(what: Any, worker: str, at: float, answer: Answer, **rest: Any) -> Event:
    return Event(Call(what, worker, **rest), at, at + 0.5, answer)


ALL_IN = [
    _event("push", "x", 1, Told(0, 1, 1)),
    _event("push", "y", 2, Told(0, 2, 2)),
    _event("push", "z", 3, Told(0, 3, 3, "quorum")),
]

SOUND = {
    "all are in": ALL_IN,
    "one leaves": [*ALL_IN, _event("leave", "z", 4, ""), _event("push", "x", 5, Told(1, 5, 1)),
                   _event("push", "y", 6, Told(1, 6, 2, "members"))],
    "one is late": [*ALL_IN, _event("push", "x", 4, Told(1, 4, 1)), _event("push", "y", 5, Told(1, 5, 2)),
                    _event("look", "x", 6, Members(2, frozenset("z"), frozenset("xy")))],
}  # fmt: skip

WRONG = {
    "the first step does not wait": [*ALL_IN[:2], _event("look", "x", 3, Members(1, frozenset("z"), frozenset("xy")))],
    "a step awaits who has left": [*SOUND["one leaves"][:-1], _event("push", "y", 6, Told(1, 6, 2))],
    "a step does not await who has not left": [*ALL_IN, SOUND["one leaves"][-2], SOUND["one leaves"][-1]],
    "a push counts twice": [*ALL_IN[:1], _event("push", "y", 2, Told(0, 3, 3))],
    "who missed the deadline is awaited": [
        *SOUND["one is late"][:-1], _event("look", "x", 6, Members(2, frozenset(), frozenset("xyz")))
    ],
}  # fmt: skip


@pytest.mark.parametrize("history", SOUND)
def test_the_model_explains_a_sound_history(history: str) -> None:
    check(SOUND[history])


@pytest.mark.parametrize("history", WRONG)
def test_the_model_rejects_a_wrong_history(history: str) -> None:
    with pytest.raises(AssertionError, match="no serial order"):
        check(WRONG[history])
