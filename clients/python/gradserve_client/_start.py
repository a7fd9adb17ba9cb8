"""What all workers of a run must have alike when it starts."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import numpy as np

from gradserve_client._model import Model
from gradserve_client._tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, StaleEpoch

_WORDS = 8
"""Numbers of 32 bits in a SHA-256 hash. Each is exact in a buffer of float64."""


class Start:
    """The hashes of the worker that was first in a run: of its model's form, and of its weights."""

    def __init__(self, server: Client, register: str, model: Model, request_bytes: int) -> None:
        form = hashlib.sha256(f"{request_bytes} {model.form()}".encode()).hexdigest()
        self._ours = np.concatenate([_words(form), _words(model.weights())])
        self._first = _first(server, register, self._ours)

    def check_form(self) -> None:
        """Raise `Conflict` if the first worker has other parameters."""
        if not np.array_equal(self._ours[:_WORDS], self._first[:_WORDS]):
            raise Conflict(
                "The first worker under this name has other parameters: their names, shapes or dtypes differ, or its"
                " request_bytes; for another model, give another run="
            )

    def check_weights(self) -> None:
        """Raise `Conflict` if the first worker began with other weights."""
        if not np.array_equal(self._ours[_WORDS:], self._first[_WORDS:]):
            raise Conflict(
                "The first worker under this name began with other weights: load the same, or set the same seed before"
                " the model is made; or give start='any' and call broadcast_parameters(); for a new run, give another"
                " run="
            )


def _first(server: Client, name: str, numbers: Array) -> Array:
    """Write the numbers unless another worker has, and return what was written first: epoch 0 closes once."""
    register = server.buffers[name]
    register.create(numbers.size, dtype="float64", quorum=1)
    with suppress(StaleEpoch):
        register.accumulate(numbers, epoch=0)
    return register.value(epoch=0)


def _words(digest: str) -> Array:
    return np.frombuffer(bytes.fromhex(digest), "<u4").astype(np.float64)
