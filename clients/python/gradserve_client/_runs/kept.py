"""States of a run that the server keeps: what a worker sends to all others, and what one goes on from after a crash."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from gradserve_client._adding import added
from gradserve_client._http.placement import balanced
from gradserve_client._runs.parts import Part
from gradserve_client._wire import bulk
from gradserve_client._wire.pushes import packed
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import StepGone, StepOpen
from gradserve_client.rows import Gradient

_KEEP = 2
"""States that a worker can read: it may begin with the last when the next comes."""

_ATTEMPTS = 5
"""Reads of a state that newer ones take the place of, before a worker gives up."""

At: TypeAlias = tuple[int, int]
"""The step that begins with a state, and a number of the state in this step."""


class Source(Protocol):
    """What a worker needs to go on: the model, and what its optimizer keeps."""

    @property
    def nbytes(self) -> int:
        """About how many bytes it has, also before the first step."""

    def content(self) -> tuple[Mapping[str, Part], Mapping[str, Gradient]]:
        """Return the buffers by their names, and their numbers."""

    def restore(self, numbers: Mapping[str, Array]) -> None:
        """Set all of it to these numbers."""


class Kept:
    """States in buffers that close with each add: all of them with one push, or none.

    One more buffer, called `name`, has the step that a state is of. Other buffers may have come later than this one, as
    those of an optimizer that keeps nothing before its first step: they stay behind it by the same number of steps.
    """

    def __init__(self, server: Client, name: str, life: str, urls: Sequence[str], request_bytes: int, ttl: Any) -> None:
        self._server, self._urls, self._request_bytes = server, urls, request_bytes
        self._rules: Any = {"quorum": 1, "keep": _KEEP, "ttl_seconds": ttl, "life": life}
        self._name, self._made = name, set[str]()

    def write(self, at: At, parts: Mapping[str, Part], numbers: Mapping[str, Gradient], key: str | None = None) -> None:
        """Keep a state. Workers that give the same key keep it once."""
        self._create(parts)
        more: Any = {"weight": 1.0, "step": None, "contributor": None, "life": self._rules["life"]}
        add = bulk.accumulate({**numbers, self._name: np.array(at, np.float64)}, idempotency_key=key, **more)
        is_small = sum(part.nbytes for part in parts.values()) <= self._request_bytes and len(self._server.urls) == 1
        added(self._server.buffers._runner, add, None if is_small else self._request_bytes)

    def _create(self, parts: Mapping[str, Part]) -> None:
        """Create the buffers that do not exist: they may have expired since the last state."""
        self._found()
        new = {name: part for name, part in parts.items() if name not in self._made}
        specs: Any = {name: {"shape": one.shape, "dtype": one.dtype, **self._rules} for name, one in new.items()}
        if self._name not in self._made:
            specs[self._name] = {"shape": 2, "dtype": "float64", **self._rules}
        if specs and len(self._server.urls) > 1:
            sizes = {name: part.nbytes for name, part in new.items()}
            self._server.place({**balanced(sizes, self._urls), self._name: min(self._urls)})
        if specs:
            self._server.buffers.create_many(specs)
            self._made |= specs.keys()

    def newest(self) -> At | None:
        """Return the place of the newest state; None without one."""
        found = self._found()
        return None if found is None else found[0]

    def read(self) -> tuple[At, dict[str, Array]] | None:
        """Return the newest state; None without one. Raises `StepGone`."""
        for attempt in range(_ATTEMPTS):
            try:
                if (found := self._found()) is None:
                    return None
                numbers = self._read(found[1])
                if attempt == _ATTEMPTS - 1 or self._found() == found:  # no other state has come between the requests
                    return found[0], numbers
            except StepGone:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def wait(self, at: At, timeout: float) -> tuple[At, dict[str, Array]]:
        """Return the newest state once it is this one or a later one. Raises `StepOpen` after `timeout` seconds."""
        end = time.monotonic() + timeout
        self._create({})
        while True:
            running = self._server.buffers[self._name].info().step
            if (found := self.read()) is not None and found[0] >= at:
                return found
            try:
                self._server.buffers[self._name].value(step=running, timeout=max(end - time.monotonic(), 0.0))
            except StepGone:  # discarded by `zero`, or by newer states
                continue
            except StepOpen as error:
                error.detail = f"Nobody has sent the parameters of step {at[0]} or later within {timeout:g} seconds"
                error.args = (error.detail,)
                raise

    def _found(self) -> tuple[At, dict[str, tuple[int, int]]] | None:
        """Return the place of the newest state, and the closed step and the bytes of each of its buffers."""
        infos = {one.name: one for one in self._server.buffers.list(self._name)}
        if len(self._server.urls) > 1:  # after the list: another worker may create them meanwhile
            self._server.place(self._server.places(self._name))
        self._made = {*infos}
        last = infos.pop(self._name, None)
        if last is None or not last.closed_steps:
            return None
        step, number = self._server.buffers[self._name].value(step=last.closed_steps[-1]).tolist()
        places = {name: (one.closed_steps[-1], one.bytes) for name, one in infos.items() if one.closed_steps}
        return (int(step), int(number)), places

    def _read(self, steps: Mapping[str, tuple[int, int]]) -> dict[str, Array]:
        """Return the values. A request is for buffers that are in one step, and fit into an answer."""
        found: dict[str, Array] = {}
        for step in sorted({at for at, _ in steps.values()}):
            sizes = {name: nbytes for name, (at, nbytes) in steps.items() if at == step}
            for names in packed(sizes, self._request_bytes):
                found |= self._server.buffers.value(names, step=step)
        return found
