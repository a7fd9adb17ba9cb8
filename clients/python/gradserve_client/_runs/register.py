"""The register of a run: what its first worker had, which all workers must have alike."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import numpy as np

from gradserve_client._runs.model import Model
from gradserve_client._runs.parts import BUFFER_BYTES
from gradserve_client._wire.arguments import as_whole
from gradserve_client._wire.calls import limits
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, StaleEpoch, TooLarge, mistaken

_WORDS = 8
"""Numbers of 32 bits in a SHA-256 hash. Each is exact in a buffer of float64."""

REQUEST_BYTES = 64 << 20
"""Bytes of a request at most, by default: a quarter of what a server takes by default (GRADSERVE_MAX_BODY_BYTES)."""


class FirstWorker:
    """The hashes of the worker that was first in a run: of the run and its model's form, and of its weights."""

    def __init__(
        self, server: Client, register: str, run: str, model: Model, request_bytes: int, ttl: float | None
    ) -> None:
        form = hashlib.sha256(f"{run!r} {request_bytes} {model.form()}".encode()).hexdigest()
        self._ours = np.concatenate([_words(form), _words(model.weights())])
        self._first = _first(server, register, self._ours, ttl)

    def check_form(self) -> None:
        """Raise `Conflict` if the first worker has another run or other parameters."""
        if not np.array_equal(self._ours[:_WORDS], self._first[:_WORDS]):
            raise Conflict(
                "The first worker under this prefix has another run or other parameters: their names, shapes or dtypes"
                " differ, or its request_bytes; for another model, give another run="
            )

    def check_weights(self) -> None:
        """Raise `Conflict` if the first worker began with other weights."""
        if not np.array_equal(self._ours[_WORDS:], self._first[_WORDS:]):
            raise Conflict(
                "The first worker of this run began with other weights: load the same, or set the same seed before"
                " the model is made; or give start='any' and call broadcast_parameters(); for a new run, give another"
                " run="
            )


def _first(server: Client, name: str, numbers: Array, ttl: float | None) -> Array:
    """Write the numbers unless another worker has, and return what was written first: epoch 0 closes once."""
    register = server.buffers[name]
    register.create(numbers.size, dtype="float64", quorum=1, ttl_seconds=ttl)
    with suppress(StaleEpoch):
        register.accumulate(numbers, epoch=0)
    return register.value(epoch=0)


def _words(digest: str) -> Array:
    return np.frombuffer(bytes.fromhex(digest), "<u4").astype(np.float64)


def fitting(server: Client, request_bytes: int | None) -> int:
    """Return the bytes of a request. Raises `TooLarge` if a server does not take them."""
    most: int = min(shard.run(limits())["max_body_bytes"] for shard in server.buffers._runner.shards)
    if request_bytes is None:
        return min(REQUEST_BYTES, most // 2)
    if as_whole("request_bytes", request_bytes) < 1:
        raise mistaken("request_bytes", f"is {request_bytes}, but must be at least 1")
    if request_bytes + 4 * BUFFER_BYTES > most:
        raise TooLarge(
            f"request_bytes is {request_bytes}, but the server takes {most} bytes (GRADSERVE_MAX_BODY_BYTES), with"
            f" {4 * BUFFER_BYTES} for names"
        )
    return request_bytes
