"""The parameters and buffers of one worker's model, sent to the others through buffers of the server."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradserve_client._runs.parts import Part, rounds
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import EpochGone, EpochOpen
from gradserve_client.rows import Gradient

_KEEP = 2
"""Broadcasts that a worker can read: it may begin with the last when the next comes."""


class Broadcast:
    """The tensors of a model in buffers that close with each add: their epochs count the broadcasts.

    The last buffer of a broadcast is the list: the epoch of the training, the sender's calls in it before this one, and
    the epoch of each buffer.
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

    def has_sent(self, epoch: int) -> bool:
        """Return whether the newest broadcast is of this epoch or later."""
        self._create()
        try:
            newest = self._list.info().epoch - 1
            return newest >= 0 and int(self._list.value(epoch=newest)[0]) >= epoch
        except EpochGone:  # discarded by `zero`
            return False

    def send(self, numbers: Mapping[str, Gradient], epoch: int, calls: int) -> None:
        """Send the tensors of a worker in this epoch, after this many calls in it."""
        self._create()
        epochs: list[int] = []
        for names in self._rounds:
            receipts = self._server.buffers.accumulate({name: numbers[name] for name in names}, overwrite=True)
            epochs += [receipts[name].epoch for name in names]
        self._list.accumulate(np.array([epoch, calls, *epochs], np.float64), overwrite=True)

    def receive(self, epoch: int, calls: int, timeout: float) -> tuple[int, Mapping[str, Array]]:
        """Return the tensors that were sent for this call in this epoch, or in a later epoch, after their epoch.

        Workers make the same calls in an epoch. Of several broadcasts the newest counts. Raises `EpochOpen` if nobody
        sends within `timeout` seconds.
        """
        self._create()
        end = time.monotonic() + timeout
        number = max(self._list.info().epoch - 1, 0)
        while True:
            try:
                found = self._list.value(epoch=number, timeout=max(end - time.monotonic(), 0.0))
                sent, before, *epochs = map(int, found.tolist())
                if (sent, before) >= (epoch, calls):
                    return sent, self._read(epochs)
                number += 1
            except EpochGone:  # by newer broadcasts, by broadcasts that broke off, or by `zero`
                number = max(number + 1, self._list.info().epoch - 1)
            except EpochOpen as error:
                error.detail = f"Nobody has sent the parameters of epoch {epoch} or later within {timeout:g} seconds"
                error.args = (error.detail,)
                raise

    def _read(self, epochs: list[int]) -> Mapping[str, Array]:
        of = dict(zip((name for names in self._rounds for name in names), epochs, strict=True))
        found: dict[str, Array] = {}
        for names in self._rounds:
            for epoch in sorted({of[name] for name in names}):
                found |= self._server.buffers.value([name for name in names if of[name] == epoch], epoch=epoch)
        return found
