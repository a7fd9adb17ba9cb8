"""The register of a run: what its first worker had, which all workers must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from gradserve_client._adding import learn_limits
from gradserve_client._runs.model import Model
from gradserve_client._runs.names import new_run, register_name
from gradserve_client._runs.parts import BUFFER_BYTES
from gradserve_client._runs.rules import canonical
from gradserve_client._wire.arguments import as_whole
from gradserve_client._wire.pushes import PART_BYTES
from gradserve_client._wire.tensors import Array
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, StaleStep, TooLarge, mistaken

_WORDS = 8
"""Numbers of 32 bits in a SHA-256 hash. Each is exact in a buffer of float64."""


class FirstWorker:
    """The hashes of the worker that was first in a run: of its model's form and numbers, and of its rules."""

    def __init__(
        self,
        server: Client,
        prefix: str,
        run: str,
        model: Model,
        request_bytes: int,
        rules: Mapping[str, Any],
        *,
        has_loss: bool,
    ) -> None:
        self._prefix, self._model, self._has_loss = prefix, model, has_loss
        form = f"{run!r} {request_bytes} {model.form()}"
        forms = [_hash(form), _hash(f"{form} loss")]
        self._other = _words(forms[not has_loss])
        """The form of a run that differs in its losses alone."""
        hashes = [forms[has_loss], model.weights(), model.frozen(), model.buffers(), _hash(repr(canonical(rules)))]
        self._ours, ttl = [_words(one) for one in hashes], rules.get("ttl_seconds")
        self._first = _first(server, register_name(prefix), np.concatenate(self._ours), ttl).reshape(-1, _WORDS)

    def check_form(self) -> None:
        """Raise `Conflict` if the first worker has another run or other parameters, or if only one has a loss."""
        if np.array_equal(self._other, self._first[0]):
            raise Conflict(
                f"The first worker of this run has loss={not self._has_loss}, and this worker has"
                f" loss={self._has_loss}: all workers give the same; {new_run(self._prefix)}"
            )
        self._check(
            0,
            "The first worker under this prefix has another run or other parameters: their names, shapes or dtypes"
            f" differ, also of those that are frozen and of buffers, or its request_bytes; {new_run(self._prefix)}",
        )

    def check_start(self, *, has_pushes: bool) -> None:
        """Raise `Conflict` if the first worker began with other weights, or with other buffers of its model.

        Buffers may have changed since, as running statistics do, if the step `has_pushes`.
        """
        for number, name in enumerate(["weights", "frozen weights", "buffers"][: 2 if has_pushes else 3], 1):
            self._check(
                number,
                f"The first worker of this run began with other {name}: load the same, or set the same seed before"
                f" the model is made; or give start='any' and call broadcast_parameters(); {new_run(self._prefix)}",
            )

    def check_frozen(self) -> None:
        """Raise `Conflict` if the frozen weights are now other than those that the first worker began with."""
        self._ours[2] = _words(self._model.frozen())
        self._check(
            2,
            "The first worker of this run began with other frozen weights: load the same; or give start='any' if"
            " training changes them, as those of a momentum encoder",
        )

    def has(self, rules: Mapping[str, Any]) -> bool:
        """Return whether the first worker gave these rules."""
        return np.array_equal(_words(_hash(repr(canonical(rules)))), self._first[4])

    def _check(self, number: int, fault: str) -> None:
        if not np.array_equal(self._ours[number], self._first[number]):
            raise Conflict(fault)


def _first(server: Client, name: str, numbers: Array, ttl: float | None) -> Array:
    """Write the numbers unless another worker has, and return what was written first: step 0 closes once."""
    register = server.buffers[name]
    register.create(numbers.size, dtype="float64", quorum=1, ttl_seconds=ttl)
    with suppress(StaleStep):
        register.accumulate(numbers, step=0)
    return register.value(step=0)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _words(digest: str) -> Array:
    return np.frombuffer(bytes.fromhex(digest), "<u4").astype(np.float64)


def fitting(server: Client, request_bytes: int | None) -> int:
    """Return the bytes of a request. Raises `TooLarge` if a server does not take them."""
    shards = server.buffers._runner.shards
    for shard in shards:
        learn_limits(shard)
    most: int = min(shard.limits["max_body_bytes"] for shard in shards)
    if request_bytes is None:
        return min(PART_BYTES, most // 2)
    if as_whole("request_bytes", request_bytes) < 1:
        raise mistaken("request_bytes", f"is {request_bytes}, but must be at least 1")
    if request_bytes + 4 * BUFFER_BYTES > most:
        raise TooLarge(
            f"request_bytes is {request_bytes}, but the server takes {most} bytes (GRADSERVE_MAX_BODY_BYTES), with"
            f" {4 * BUFFER_BYTES} for names"
        )
    return request_bytes
