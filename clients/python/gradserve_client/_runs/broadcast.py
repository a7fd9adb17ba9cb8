"""The parameters and buffers of one worker's model, sent to the others through buffers of the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradserve_client._runs.parts import Part, rounds
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import StepGone, StepOpen
from gradserve_client.rows import Gradient

_KEEP = 2
"""Broadcasts that a worker can read: it may begin with the last when the next comes."""


class Broadcast:
    """The tensors of a model in buffers that close with each add: their steps count the broadcasts.

    The last buffer of a broadcast is the list: the step of the training, the sender's calls in it before this one, and
    the step of each buffer.
    """

    def __init__(
        self, server: Client, prefix: str, request_bytes: int, ttl: float | None, parts: Mapping[str, Part]
    ) -> None:
        self._server, self._parts = server, parts
        self._rounds = [list(one.parts(self._parts)) for one in rounds(self._parts, {}, request_bytes)]
        self._list, self._ttl = server.buffers[f"{prefix}::state"], ttl

    def _create(self) -> None:
        """Create the buffers that do not exist: they may have expired since the last broadcast."""
        rules: Any = {"quorum": 1, "keep": _KEEP, "ttl_seconds": self._ttl}
        for names in self._rounds:
            parts = {name: self._parts[name] for name in names}
            specs: dict[str, Any] = {
                name: {**rules, "shape": part.shape, "dtype": part.dtype} for name, part in parts.items()
            }
            self._server.buffers.create_many(specs)
        self._list.create(2 + len(self._parts), dtype="float64", **rules)

    def has_sent(self, step: int) -> bool:
        """Return whether the newest broadcast is of this step or later."""
        self._create()
        try:
            newest = self._list.info().step - 1
            return newest >= 0 and int(self._list.value(step=newest)[0]) >= step
        except StepGone:  # discarded by `zero`
            return False

    def send(self, numbers: Mapping[str, Gradient], step: int, calls: int) -> None:
        """Send the tensors of a worker in this step, after this many calls in it."""
        self._create()
        steps: list[int] = []
        for names in self._rounds:
            receipts = self._server.buffers.accumulate({name: numbers[name] for name in names}, overwrite=True)
            steps += [receipts[name].step for name in names]
        self._list.accumulate(np.array([step, calls, *steps], np.float64), overwrite=True)

    def receive(self, step: int, calls: int, timeout: float) -> tuple[int, Mapping[str, Array]]:
        """Return the tensors that were sent for this call in this step, or in a later step, after their step.

        Workers make the same calls in a step. Of several broadcasts the newest counts. Raises `StepOpen` if nobody
        sends within `timeout` seconds.
        """
        self._create()
        end = time.monotonic() + timeout
        number = max(self._list.info().step - 1, 0)
        while True:
            try:
                found = self._list.value(step=number, timeout=max(end - time.monotonic(), 0.0))
                sent, before, *steps = map(int, found.tolist())
                if (sent, before) >= (step, calls):
                    return sent, self._read(steps)
                number += 1
            except StepGone:  # by newer broadcasts, by broadcasts that broke off, or by `zero`
                number = max(number + 1, self._list.info().step - 1)
            except StepOpen as error:
                error.detail = f"Nobody has sent the parameters of step {step} or later within {timeout:g} seconds"
                error.args = (error.detail,)
                raise

    def _read(self, steps: list[int]) -> Mapping[str, Array]:
        of = dict(zip((name for names in self._rounds for name in names), steps, strict=True))
        found: dict[str, Array] = {}
        for names in self._rounds:
            for step in sorted({of[name] for name in names}):
                found |= self._server.buffers.value([name for name in names if of[name] == step], step=step)
        return found
