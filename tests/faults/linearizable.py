"""Is a concurrent history linearizable? A search for a serial order, and a plain model of a few buffers for it.

The search is that of Wing and Gong (1993): try each call that may be the next, and go back if its answer is wrong. As
Lowe (2017) does, it remembers which calls led to which state, and tries no pair of both twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, TypeVar

KEEP = 2
"""Closed steps that the buffers keep."""

What: TypeAlias = Literal["add", "zero", "take", "read", "look", "double"]


@dataclass(frozen=True)
class Call:
    """A request for the buffers at `places`. `look` is a read of the metadata, without the value.

    `double` is a step: it writes twice the value of the first place over the last place, which alone has a receipt.
    `match` is the step and the version that If-Match names.
    """

    what: What
    places: tuple[int, ...] = (0,)
    amount: int = 0
    step: int | None = None
    match: tuple[int, int] | None = None
    min_count: int = 0
    key: str | None = None


@dataclass(frozen=True)
class Receipt:
    """The result of a call for one buffer. `total` is its value, if the answer has it."""

    closed: bool
    step: int
    version: int
    count: int
    total: int | None = None


class Success(NamedTuple):
    receipts: tuple[Receipt, ...]
    replayed: bool = False


Answer: TypeAlias = Success | str
"""The answer to a call: receipts in the order of its places, or the code of an error."""


@dataclass(frozen=True)
class Event:
    """A call in a history: the times of its sending and of its answer. A lost answer is None, and comes at no time."""

    call: Call
    sent: float
    answered: float = math.inf
    answer: Answer | None = None


@dataclass(frozen=True)
class Buffer:
    """A buffer of the model. `kept` has the receipts and values of its last closed steps."""

    quorum: int | None = None
    step: int = 0
    version: int = 0
    count: int = 0
    total: int = 0
    kept: tuple[Receipt, ...] = ()

    def receipt(self, *, closed: bool = False, with_total: bool = False) -> Receipt:
        return Receipt(closed, self.step, self.version, self.count, self.total if with_total else None)

    def closed(self) -> Buffer:
        """Return the buffer after the end of its step, whose value is kept."""
        kept = (*self.kept, self.receipt(closed=True, with_total=True))[-KEEP:]
        return replace(self, step=self.step + 1, count=0, total=0, kept=kept)

    def of_step(self, step: int) -> Receipt | str:
        if step >= self.step:
            return "step_open"
        return next((one for one in self.kept if one.step == step), "step_gone")


class State(NamedTuple):
    """The buffers, and the receipts of the calls with keys."""

    buffers: tuple[Buffer, ...]
    known: frozenset[tuple[str, tuple[Receipt, ...]]] = frozenset()


def step(state: State, call: Call) -> tuple[State, Answer]:
    """Return the state after the call, and the only right answer."""
    buffers = [state.buffers[place] for place in call.places]
    if call.what in ("read", "look"):
        return state, _all(_read(buffer, call) for buffer in buffers)
    known = dict(state.known).get(call.key or "")
    if known is not None:
        return state, _again(buffers, call, known)
    if call.what == "double":
        call = replace(call, places=call.places[-1:], amount=2 * buffers[0].total)
    for buffer in buffers[-len(call.places) :]:
        if (refusal := _refusal(buffer, call)) is not None:
            return state, refusal
    after, receipts = [*state.buffers], []
    for place in call.places:
        after[place], receipt = _change(after[place], call)
        receipts.append(receipt)
    new = set() if call.key is None else {(call.key, tuple(replace(one, total=None) for one in receipts))}
    return State(tuple(after), state.known | new), Success(tuple(receipts))


def _all(found: Iterable[Receipt | str], *, replayed: bool = False) -> Answer:
    """Return the receipts, or the first error."""
    receipts = []
    for one in found:
        if isinstance(one, str):
            return one
        receipts.append(one)
    return Success(tuple(receipts), replayed)


def _read(buffer: Buffer, call: Call) -> Receipt | str:
    return buffer.receipt(with_total=call.what == "read") if call.step is None else buffer.of_step(call.step)


def _again(buffers: Sequence[Buffer], call: Call, known: tuple[Receipt, ...]) -> Answer:
    """Return the answer to a repeated call: what a take took is in the closed steps, or gone."""
    if call.what != "take":
        return Success(known, replayed=True)
    taken = (buffer.of_step(one.step) for buffer, one in zip(buffers, known, strict=True))
    return _all(taken, replayed=True)


def _refusal(buffer: Buffer, call: Call) -> str | None:
    if call.match not in (None, (buffer.step, buffer.version)):
        return "precondition_failed"
    if call.step not in (None, buffer.step):
        return "stale_step"
    return "too_few_gradients" if buffer.count < call.min_count else None


def _change(buffer: Buffer, call: Call) -> tuple[Buffer, Receipt]:
    after = replace(buffer, version=buffer.version + 1)
    if call.what == "take":
        return after.closed(), after.receipt(closed=True, with_total=True)
    if call.what == "zero":
        after = replace(after, step=buffer.step + 1, count=0, total=0)
        return after, after.receipt()
    if call.what == "double":
        after = replace(after, count=1, total=call.amount)
        return after, after.receipt()
    after = replace(after, count=buffer.count + 1, total=buffer.total + call.amount)
    if after.count == buffer.quorum:
        return after.closed(), after.receipt(closed=True)
    return after, after.receipt()


S = TypeVar("S", bound=Hashable)


def order_of(history: Sequence[Event], state: S, model: Callable[[S, Call], tuple[S, Answer]]) -> list[Event] | None:
    """Return the events in a serial order that explains their answers, without lost calls that were not made.

    Return None if no order does. A call stands behind every call whose answer came before it was sent.
    """
    answered = sum(1 << number for number, event in enumerate(history) if event.answer is not None)
    paths: list[tuple[int, S, tuple[int, ...]]] = [(0, state, ())]
    tried = {(0, state)}
    while paths:
        made, state, order = paths.pop()
        if made & answered == answered:
            return [history[number] for number in order]
        rest = [(number, event) for number, event in enumerate(history) if not made >> number & 1]
        end = min(event.answered for _, event in rest)
        for number, event in rest:
            if event.sent > end:
                continue
            after, answer = model(state, event.call)
            if event.answer not in (None, answer) or (event.answer is None and after == state):
                continue
            place = (made | 1 << number, after)
            if place not in tried:
                tried.add(place)
                paths.append((*place, (*order, number)))
    return None


def check(history: Sequence[Event], quorums: Sequence[int | None]) -> None:
    """Raise AssertionError unless the history of new buffers with these quorums is linearizable.

    A step may be refused whenever others change its source: then it has changed nothing.
    """
    history = [event for event in history if event.answer != "source_changed"]
    if order_of(history, State(tuple(map(Buffer, quorums))), step) is None:
        lines = [
            f"{one.sent:.4f} to {one.answered:.4f}: {one.call} -> {one.answer}"
            for one in sorted(history, key=lambda one: one.sent)
        ]
        raise AssertionError("\n".join([f"no serial order explains this, with quorums {quorums}:", *lines]))
