"""A store that is a service: the requests of the state machine over HTTP, each to the next of several servers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import numpy as np

from service.buffers.changes import Add, Change, Create, Delete, Take
from service.buffers.perform import Outcome, Request
from service.buffers.rules import CloseIfDue, SetRules
from service.buffers.sets import Set
from service.codecs import safetensors
from service.dtypes import Array
from service.errors import GradserveError, tree
from service.limits import Limits
from tests.buffers.calls import tensors_of
from tests.faults.servers import PATIENCE, SAFETENSORS

BUFFERS = "/v1/buffers"
TO_JSON = {"Accept": "application/json"}
ERRORS = {each.code: each for each in tree()}
PROBLEM = {"type", "title", "status", "detail", "code"}
"""The members of every problem."""


@dataclass(kw_only=True)
class Doubled(Set):
    """A step: it writes twice the value of the buffer `source` over its buffer."""

    source: str


@dataclass
class Found:
    """A buffer as a client finds it: with its metadata, or with a receipt and the value."""

    name: str
    answer: dict[str, Any]
    value: Array = field(default_factory=lambda: np.zeros(0))

    def as_json(self) -> dict[str, Any]:
        return self.answer

    @property
    def record(self) -> Found:
        return self

    @property
    def step(self) -> int:
        step: int = self.answer["step"]
        return step

    @property
    def due(self) -> float | None:
        """When the running step closes by its deadline."""
        ends: float | None = self.answer["deadline_at"]
        return ends if self.answer["count"] >= self.answer["min_count"] else None

    def receipt(self) -> dict[str, Any]:
        return self.answer


class Remote:
    """The part of a store's protocol that the state machine needs. `turns` says which server gets which request."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._clients = [
            self._stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE, headers={"Accept": SAFETENSORS}))
            for url in urls
        ]
        self.turns: Iterator[int] = cycle(range(len(urls)))

    def close(self) -> None:
        self._stack.close()

    def submit(self, request: Request) -> Future[Outcome]:
        """Make the changes before the return. Those of several buffers must be alike: HTTP has no other requests."""
        made = Future[Outcome]()
        try:
            made.set_result(self._make(request))
        except GradserveError as error:
            made.set_exception(error)
        return made

    def read(self, names: Sequence[str], step: int | None = None) -> list[Found]:
        if not names:
            return []
        if step is None:
            answer = self._send("POST", "/value", json={"names": names})
        else:
            (name,) = names
            answer = self._send("GET", f"/{name}/value", params={"step": step})
        receipts, values = contents(answer, names)
        return [Found(name, receipts[name], values[name]) for name in names]

    def mean(self, name: str, step: int) -> Array:
        answer = self._send("GET", f"/{name}/value", params={"step": step, "reduce": "mean"})
        return contents(answer, [name])[1][name]

    def records(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[Found]:
        query = {"prefix": prefix, "cursor": after, "limit": max(limit, 1)}
        found = self._send("GET", "", params=query, headers=TO_JSON).json()["buffers"]
        return [Found(one["name"], one) for one in found[:limit]]

    def record(self, name: str) -> Found:
        return Found(name, self._send("GET", f"/{name}", headers=TO_JSON).json())

    def _make(self, request: Request) -> Outcome:
        changes, first = request.changes, request.changes[0]
        headers = {} if request.key is None else {"Idempotency-Key": request.key.text}
        if first.match is not None:
            headers["If-Match"] = ", ".join(sorted(first.match))
        path = f"/{first.name}" if len(changes) == 1 else ""
        if isinstance(first, Create) and len(changes) > 1:
            new = {change.name: change.spec.as_json() for change in changes if isinstance(change, Create)}
            answer = self._send("POST", "/create", headers=headers | TO_JSON, json={"buffers": new})
            receipts, values = answer.json()["buffers"], dict[str, Array]()
        elif isinstance(first, Create):
            answer = self._send("PUT", path, headers=headers | TO_JSON, json=first.spec.as_json())
            receipts = {first.name: {**answer.json(), "created": answer.status_code == 201}}
            values = {}
        elif isinstance(first, SetRules):
            answer = self._send("PATCH", path, headers=headers | TO_JSON, json=dict(first.rules))
            receipts, values = {first.name: answer.json()}, {}
        elif isinstance(first, CloseIfDue):  # to look is enough
            answer = self._send("GET", path, headers=TO_JSON)
            receipts, values = {first.name: answer.json()}, {}
        elif isinstance(first, Doubled):
            uses = {"from": f"input:{first.source}", "set": f"output:{first.name}"}
            sent: dict[str, Any] = {"params": uses, "headers": headers | TO_JSON, "json": {"scale": 2}}
            answer = self._send("POST", "", "/v1/ops/Scale", **sent)
            receipts, values = {first.name: answer.json()["output"]}, {}
        elif isinstance(first, Delete):
            answer, receipts, values = self._send("DELETE", path, headers=headers), {}, {}
        else:
            answer = self._change_sums(path, changes, headers)
            receipts, values = contents(answer, [change.name for change in changes])
        return Outcome(receipts, values, answer.headers.get("Idempotency-Replayed") == "true")

    def _change_sums(self, path: str, changes: Sequence[Change], headers: dict[str, str]) -> httpx.Response:
        first = changes[0]
        if isinstance(first, Add):
            adds = {"gradient" if path else one.name: one for one in changes if isinstance(one, Add)}
            tensors = {f"{name}{end}": part for name, one in adds.items() for end, part in tensors_of(one).items()}
            body = safetensors.encode(tensors)
            sent: dict[str, Any] = {"content": b"".join(body), "headers": {**headers, "Content-Type": SAFETENSORS}}
            return self._send("POST", f"{path}/accumulate", params=_query(first), **sent)
        named: dict[str, Any] = {} if path else {"json": {"names": [change.name for change in changes]}}
        if isinstance(first, Take):
            query = {"min_count": first.min_count, "reduce": "mean" if first.mean else "sum", **_step(first)}
            return self._send("POST", f"{path}/take", params=query, headers=headers, **named)
        return self._send("POST", f"{path}/zero", headers=headers, **named)

    def _send(self, method: str, path: str, root: str = BUFFERS, **rest: Any) -> httpx.Response:
        """Return an answer of the next server. Raise the error that it names."""
        answer = self._clients[next(self.turns)].request(method, f"{root}{path}", **rest)
        if answer.is_error:
            members = answer.json()
            context = {name: value for name, value in members.items() if name not in PROBLEM}
            raise ERRORS[members["code"]](answer.text, **context)
        return answer


def contents(answer: httpx.Response, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return receipts and values by buffer. The caller may change the values."""
    body, limits = memoryview(answer.content), Limits(1 << 30)
    receipts = json.loads(safetensors.metadata_of(body, limits)["receipts"])
    tensors = safetensors.decode(body, limits)
    if "value" in tensors:
        (name,) = names
        tensors = {name: tensors["value"]}
    return receipts, {name: tensors[name].copy() for name in names if name in tensors}


def _query(add: Add) -> dict[str, Any]:
    query = {"weight": add.weight, "do_update": add.do_update, "overwrite": add.overwrite, **_step(add)}
    optional = {"return": "value" if add.want_value else None, "contributor": add.contributor}
    return query | {name: value for name, value in optional.items() if value is not None}


def _step(change: Add | Take) -> dict[str, int]:
    return {} if change.step is None else {"step": change.step}
