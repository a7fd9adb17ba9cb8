"""Concurrent calls of one or two buffers over two servers are linearizable: some serial order explains all answers.

`test_history.py` takes the order from the versions in the answers. Here no number is trusted, answers get lost, and
calls are conditional, are repeated, and change two buffers at once.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import one_dies, replicas
from tests.faults.histories import CLIENTS, Caller, Round, play
from tests.faults.linearizable import Answer, Buffer, Call, Event, Receipt, State, Success, check, order_of, step
from tests.faults.servers import LONG, Server, new_key
from tests.postgres import Cluster

ROUNDS = 1500 if LONG else 30
KILLS = 60 if LONG else 2


@contextmanager
def players(servers: list[Server], *elements: int) -> Iterator[Callable[[random.Random], Counter[str]]]:
    """Yield a function that plays a round with buffers of a size, checks its history, and counts what came."""
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        callers = [Caller([server.url for server in servers], seed) for seed in range(CLIENTS)]
        for caller in callers:
            stack.callback(caller.close)

        def play_round(chance: random.Random) -> Counter[str]:
            quorums = [chance.choice([None, 3]) for _ in range(chance.choice([1, 2]))]
            game = Round([new_key() for _ in quorums], quorums, chance.choice(elements))
            game.create(callers[0].servers[-1])  # which does not die
            play(game, callers, threads)
            check(game.history, quorums)
            return Counter(kind for event in game.history for kind in kinds(event))

        yield play_round


def kinds(event: Event) -> list[str]:
    """Return the kind of a call, and the kind of its answer."""
    if event.answer is None:
        return ["lost"]
    if isinstance(event.answer, str):
        return [event.answer]
    return ["repeated" if event.answer.replayed else event.call.what]


ALL = {
    "add",
    "double",
    "zero",
    "take",
    "read",
    "look",
    "repeated",
    "lost",
    "precondition_failed",
    "stale_step",
    "step_open",
}


def test_histories_of_two_servers(database: Cluster, tmp_path: Path) -> None:
    """A gradient of five elements is staged."""
    chance, found = random.Random(1), Counter[str]()
    own = {"module": "tests.faults.modelled"}
    with replicas(2, tmp_path, database.url, **own) as servers, players(servers, 1, 5) as play_round:
        for number in range(20 * ROUNDS):
            found += play_round(chance)
            if number + 1 >= ROUNDS and found.keys() >= ALL:
                break
    assert found.keys() >= ALL


def test_histories_with_kills(database: Cluster, tmp_path: Path) -> None:
    """One of the servers dies at a point of a commit, or at any time. A gradient of 9,000 elements is staged."""
    chance, order, deaths = random.Random(2), tmp_path / "order", 0
    with one_dies(database, tmp_path, order) as (mortal, other), players([mortal, other], 2, 9000) as play_round:
        for number in range(KILLS):
            if number % 4 < 3:
                order.write_text(f"{['committed', 'made', 'staged'][number % 4]}:{chance.randint(1, 3)}")
            else:
                threading.Timer(chance.uniform(0, 0.1), mortal.process.kill).start()
            play_round(chance)
            order.unlink(missing_ok=True)
            if mortal.process.poll() is not None:
                deaths += 1
                mortal.restart()
    assert deaths > KILLS // 3


def told(step: int, version: int, count: int, total: int | None = None, **rest: bool) -> Success:
    closed, replayed = rest.get("closed", False), rest.get("replayed", False)
    return Success((Receipt(closed, step, version, count, total),), replayed)


def added(amount: int, **rest: Any) -> Call:
    return Call("add", amount=amount, **rest)


READ, TAKE, ZERO, LOOK, DOUBLE = (Call(what) for what in ("read", "take", "zero", "look", "double"))
BOTH = (0, 1)
KEYED, ONCE = added(1, key="k"), added(1, match=(0, 0))
FIRST, SEEN = (added(1), 0, 1, told(0, 1, 1)), (READ, 3, 4, told(0, 1, 1, 1))

LINEARIZABLE: dict[str, list[Any]] = {
    "nothing": [],
    "one after the other": [
        FIRST,
        (READ, 2, 3, told(0, 1, 1, 1)),
        (added(2, step=0, match=(0, 1)), 4, 5, told(0, 2, 2)),
        (TAKE, 6, 7, told(0, 3, 2, 3, closed=True)),
        (Call("read", step=0), 8, 9, told(0, 3, 2, 3, closed=True)),
        (added(4, step=0), 10, 11, "stale_step"),
        (added(4, match=(0, 2)), 12, 13, "precondition_failed"),
        (Call("read", step=1), 14, 15, "step_open"),
        (ZERO, 16, 17, told(2, 4, 0)),
        (Call("read", step=1), 18, 19, "step_gone"),
        (LOOK, 20, 21, told(2, 4, 0)),
    ],
    "the later call first": [
        (added(1), 0, 9, told(0, 2, 2)),
        (added(2), 1, 8, told(0, 1, 1)),
        (READ, 2, 7, told(0, 0, 0, 0)),
    ],
    "a lost add that was made": [(added(1), 0), (READ, 5, 6, told(0, 1, 1, 1))],
    "a lost add that was made late": [(added(1), 0), (READ, 5, 6, told(0, 0, 0, 0)), (READ, 7, 8, told(0, 1, 1, 1))],
    "a lost add that was never made": [(added(1), 0), (added(2), 5, 6, told(0, 1, 1))],
    "a lost add that was made, and its repetition": [(KEYED, 0), (KEYED, 1, 2, told(0, 1, 1, replayed=True)), SEEN],
    "a lost add that was not made, and its repetition": [(KEYED, 0), (KEYED, 1, 2, told(0, 1, 1)), SEEN],
    "two changes of one state, one of them refused": [
        (ONCE, 0, 9, "precondition_failed"),
        (added(2, match=(0, 0)), 0, 9, told(0, 1, 1)),
    ],
    "a step, and another that was refused": [
        FIRST,
        (DOUBLE, 2, 9, told(0, 2, 1)),
        (DOUBLE, 2, 9, "source_changed"),
        (READ, 10, 11, told(0, 2, 1, 2)),
    ],
    "a step from one buffer to another, and its repetition": [
        (added(3, places=(1,)), 0, 1, told(0, 1, 1)),
        (Call("double", (1, 0), key="k"), 2, 3, told(0, 1, 1)),
        (Call("double", (1, 0), key="k"), 4, 5, told(0, 1, 1, replayed=True)),
        (READ, 6, 7, told(0, 1, 1, 6)),
    ],
    "two buffers at one moment": [
        (Call("add", BOTH, 1), 0, 9, Success((Receipt(False, 0, 1, 1), Receipt(False, 0, 1, 1)))),
        (Call("read", BOTH), 1, 8, Success((Receipt(False, 0, 1, 1, 1), Receipt(False, 0, 1, 1, 1)))),
    ],
}

WRONG: dict[str, list[Any]] = {
    "two steps from one state": [
        FIRST,
        (DOUBLE, 2, 9, told(0, 2, 1)),
        (DOUBLE, 2, 9, told(0, 3, 1)),
        (READ, 10, 11, told(0, 3, 1, 2)),
    ],
    "a step that overwrites an add": [
        FIRST,
        (added(8), 2, 9, told(0, 2, 2)),
        (DOUBLE, 2, 9, told(0, 3, 1)),
        (READ, 10, 11, told(0, 3, 1, 2)),
    ],
    "a step from a source of another moment": [
        FIRST,
        (Call("double", (0, 1)), 2, 3, told(0, 1, 1)),
        (Call("read", (1,)), 4, 5, told(0, 1, 1, 0)),
    ],
    "a lost update": [(added(1), 0, 9, told(0, 1, 1)), (added(2), 0, 9, told(0, 1, 1))],
    "an update lost from the sum alone": [FIRST, (added(2), 2, 3, told(0, 2, 2)), (READ, 4, 5, told(0, 2, 2, 2))],
    "a stale read": [FIRST, (READ, 2, 3, told(0, 0, 0, 0))],
    "stale metadata": [FIRST, (LOOK, 2, 3, told(0, 0, 0))],
    "a read of the future": [(READ, 0, 1, told(0, 1, 1, 1)), (added(1), 2, 3, told(0, 1, 1))],
    "reads that go back": [(added(1), 0), (READ, 1, 2, told(0, 1, 1, 1)), (READ, 3, 4, told(0, 0, 0, 0))],
    "an add counted twice": [FIRST, (READ, 2, 3, told(0, 2, 2, 2))],
    "an add of a lost answer counted twice": [(KEYED, 0), (KEYED, 1, 2, told(0, 2, 2)), (READ, 3, 4, told(0, 2, 2, 2))],
    "a repetition counted as new": [(KEYED, 0, 1, told(0, 1, 1)), (KEYED, 2, 3, told(0, 2, 2))],
    "a repetition of nothing": [(KEYED, 0, 1, told(0, 1, 1, replayed=True))],
    "two changes of one state": [(ONCE, 0, 9, told(0, 1, 1)), (added(2, match=(0, 0)), 0, 9, told(0, 2, 2))],
    "a refusal without a reason": [(ONCE, 0, 1, "precondition_failed")],
    "an add that two takes took": [
        FIRST,
        (TAKE, 2, 9, told(0, 2, 1, 1, closed=True)),
        (TAKE, 2, 9, told(0, 2, 1, 1, closed=True)),
    ],
    "half of a request": [
        (Call("add", BOTH, 1), 0, 9, Success((Receipt(False, 0, 1, 1), Receipt(False, 0, 1, 1)))),
        (Call("read", BOTH), 1, 8, Success((Receipt(False, 0, 1, 1, 1), Receipt(False, 0, 0, 0, 0)))),
    ],
    "a step that closes before its quorum": [FIRST, (added(2), 2, 3, told(0, 2, 2, closed=True))],
}


@pytest.mark.parametrize("name", LINEARIZABLE)
def test_the_checker_accepts_a_linearizable_history(name: str) -> None:
    check([Event(*row) for row in LINEARIZABLE[name]], [3, None])


@pytest.mark.parametrize("name", WRONG)
def test_the_checker_rejects_a_wrong_history(name: str) -> None:
    with pytest.raises(AssertionError, match="no serial order"):
        check([Event(*row) for row in WRONG[name]], [3, None])


def test_the_checker_finds_every_order_and_no_other() -> None:
    """Of all histories of three concurrent reads and adds, the right ones are those of the six orders."""
    calls = [added(1), added(2), READ]
    right = set()
    for order in permutations(range(3)):
        state, answers = State((Buffer(),)), dict[int, Answer]()
        for which in order:
            state, answers[which] = step(state, calls[which])
        right.add(tuple(answers[which] for which in range(3)))
    for found in product(*[{one[which] for one in right} for which in range(3)]):
        history = [Event(call, 0, 1, answer) for call, answer in zip(calls, found, strict=True)]
        assert (order_of(history, State((Buffer(),)), step) is not None) == (found in right)
