"""Clients that call two servers at once, and record a history for the checker."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from service.codecs import safetensors
from tests.faults.linearizable import KEEP, Answer, Call, Event, Receipt, Success, What
from tests.faults.remote import contents
from tests.faults.servers import PATIENCE, SAFETENSORS, new_key

CLIENTS = 4
CALLS = 6
"""Calls of each client in a round."""


@dataclass
class Round:
    """One or two new buffers, and what the clients have sent to them. All elements of a value are the same."""

    names: list[str]
    quorums: list[int | None]
    elements: int
    history: list[Event] = field(default_factory=list)
    with_keys: list[Call] = field(default_factory=list)
    amounts: Iterator[int] = field(default_factory=lambda: iter([1 << bit for bit in range(50)]))
    """Different powers of two: a sum shows which adds are in it."""

    def create(self, http: httpx.Client) -> None:
        for name, quorum in zip(self.names, self.quorums, strict=True):
            rules = {"shape": [self.elements], "dtype": "float64", "quorum": quorum, "keep": KEEP}
            http.put(f"/v1/buffers/{name}", json=rules).raise_for_status()


class Caller:
    """A client with connections of its own to all servers."""

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self.chance = random.Random(seed)
        self._stack = ExitStack()
        options: dict[str, Any] = {"timeout": PATIENCE, "headers": {"Accept": SAFETENSORS}}
        self.servers = [self._stack.enter_context(httpx.Client(base_url=url, **options)) for url in urls]

    def close(self) -> None:
        self._stack.close()

    def play(self, game: Round, start: threading.Barrier) -> None:
        """Make random calls. Repeat those with a key whose answer is lost."""
        seen = {place: (0, 0) for place in range(len(game.names))}
        start.wait(PATIENCE)
        for _ in range(CALLS):
            call = self._chosen(game, seen)
            if call.key is not None:
                game.with_keys.append(call)
            patience = self.chance.choices([PATIENCE, self.chance.uniform(0.001, 0.01)], [9, 1])[0]
            answer = self.call(game, call, patience)
            if answer is None and call.key is not None:
                answer = self.call(game, call)
            if isinstance(answer, Success):
                places = call.places[-1:] if call.what == "double" else call.places
                for place, one in zip(places, answer.receipts, strict=True):
                    seen[place] = (one.step + one.closed, one.version)

    def call(self, game: Round, call: Call, patience: float = PATIENCE) -> Answer | None:
        """Send the call to any server, and record it. Return None if no answer comes in `patience` seconds."""
        for http in self.chance.sample(self.servers, len(self.servers)):
            sent = time.monotonic()
            try:
                answer = http.request(**_request(game, call), timeout=patience)
            except httpx.ConnectError:
                continue  # nothing was sent
            except httpx.TransportError:
                event = Event(call, sent)
            else:
                known = answer.status_code != 503
                event = Event(call, sent, time.monotonic(), _read(game, call, answer)) if known else Event(call, sent)
            game.history.append(event)
            return event.answer
        raise AssertionError("all servers are dead")

    def _chosen(self, game: Round, seen: dict[int, tuple[int, int]]) -> Call:
        chance = self.chance
        if game.with_keys and chance.random() < 0.15:
            return chance.choice(game.with_keys[-3:])  # perhaps while another client waits for its answer
        whats: list[What] = ["add", "zero", "take", "read", "look", "double"]
        what = chance.choices(whats, [8, 1, 2, 5, 2, 3])[0]
        place = chance.choice([*seen])
        step, version = seen[place]
        if what in ("read", "look"):
            past = chance.choice([None, None, max(step - 1, 0), step]) if what == "read" else None
            return Call(what, (place,) if what == "look" else self._some(game, place), step=past)
        call = Call(what, (place,), key=new_key() if chance.random() < 0.6 else None)
        if what == "add":
            call = replace(call, amount=next(game.amounts))
        if what == "take":
            call = replace(call, min_count=chance.choice([0, 0, 2]))
        if what == "double":
            source = chance.choice([*seen])
            call = replace(call, places=(place,) if source == place else (source, place))
        elif what != "zero" and chance.random() < 0.3:
            call = replace(call, step=step)
        if chance.random() < 0.25:
            return replace(call, match=(step, version))
        return call if what == "double" else replace(call, places=self._some(game, place))

    def _some(self, game: Round, place: int) -> tuple[int, ...]:
        """Return this place alone, or all places."""
        return tuple(range(len(game.names))) if self.chance.random() < 0.5 else (place,)


def play(game: Round, callers: Sequence[Caller], threads: ThreadPoolExecutor) -> None:
    """Let all clients call at once. Then repeat what is unknown, and read the buffers in the end."""
    start = threading.Barrier(len(callers))
    for done in [threads.submit(caller.play, game, start) for caller in callers]:
        done.result(2 * PATIENCE)
    last = callers[0]
    for event in [*game.history]:
        if event.answered == math.inf and event.call.key is not None:
            last.call(game, event.call)
    while last.call(game, Call("read", tuple(range(len(game.names))))) is None:
        pass  # a server died of the read before


def _request(game: Round, call: Call) -> dict[str, Any]:
    """Return the request for a call."""
    names = [game.names[place] for place in call.places]
    path = f"/v1/buffers/{names[0]}" if len(names) == 1 else "/v1/buffers"
    headers = {} if call.key is None else {"Idempotency-Key": call.key}
    if call.match is not None:
        headers["If-Match"] = '"{}-{}"'.format(*call.match)
    query = {} if call.step is None else {"step": call.step}
    request: dict[str, Any] = {"method": "POST", "headers": headers, "params": query}
    if call.what == "look":
        return {"method": "GET", "url": path, "headers": {"Accept": "application/json"}}
    if call.what == "add":
        gradient = np.full(game.elements, float(call.amount))
        body = safetensors.encode(dict.fromkeys(["gradient"] if len(names) == 1 else names, gradient))
        headers["Content-Type"] = SAFETENSORS
        return {**request, "url": f"{path}/accumulate", "content": b"".join(body)}
    if call.what == "double":
        uses, headers["Accept"] = {"from": f"input:{names[0]}", "set": f"output:{names[-1]}"}, "application/json"
        return {**request, "url": "/v1/ops/Scale", "params": uses, "json": {"scale": 2}}
    if call.what == "take":
        query["min_count"] = call.min_count
    if len(names) > 1:
        request["json"] = {"names": names}
    elif call.what == "read":
        request["method"] = "GET"
    return {**request, "url": f"{path}/{'value' if call.what == 'read' else call.what}"}


def _read(game: Round, call: Call, answer: httpx.Response) -> Answer:
    """Return what the answer says."""
    if answer.is_error:
        code: str = answer.json()["code"]
        return code
    names = [game.names[place] for place in call.places]
    if call.what == "double":
        names = names[-1:]
    receipts, values = dict[str, Any](), dict[str, Any]()
    if call.what in ("look", "double"):
        receipts[names[0]] = answer.json()["output"] if call.what == "double" else answer.json()
    else:
        receipts, values = contents(answer, names)
    found = []
    for name in names:
        one, total = receipts[name], None
        if name in values:
            (total,) = {int(each) for each in np.unique(values[name])}  # or only a part of an add is there
        assert one["weight"] == one["count"]
        found.append(Receipt(one.get("closed", False), one["step"], one["version"], one["count"], total))
    return Success(tuple(found), answer.headers.get("Idempotency-Replayed") == "true")
