"""What the first worker of a run began with, beside what this worker has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from gradserve_client._adding import learn_limits
from gradserve_client._runs.model import Model
from gradserve_client._runs.names import new_run
from gradserve_client._runs.parts import BUFFER_BYTES
from gradserve_client._runs.rules import canonical
from gradserve_client._wire.arguments import as_whole
from gradserve_client._wire.pushes import PART_BYTES
from gradserve_client.client import Client
from gradserve_client.errors import Conflict, TooLarge, mistaken


class Start:
    """The hashes of a worker's model, and its rules, and those of the worker that was first in the run."""

    def __init__(self, run: str, model: Model, rules: Mapping[str, Any]) -> None:
        self._run, self._model = run, model
        hashes = {"weights": model.weights(), "frozen weights": model.frozen(), "buffers": model.buffers()}
        self.own: dict[str, Any] = {**hashes, "rules": canonical(rules)}
        self.first: Mapping[str, Any] = self.own

    def check(self, *, has_pushes: bool) -> None:
        """Raise `Conflict` if the first worker began with other weights, or with other buffers of its model.

        Buffers may have changed since, as running statistics do, if the step `has_pushes`.
        """
        for name in ["weights", "frozen weights", "buffers"][: 2 if has_pushes else 3]:
            self._check(
                name,
                f"The first worker of this run began with other {name}: load the same, or set the same seed before"
                f" the model is made; or give start='any' and call broadcast_parameters(); {new_run(self._run)}",
            )

    def check_frozen(self) -> None:
        """Raise `Conflict` if the frozen weights are now other than those that the first worker began with."""
        self.own["frozen weights"] = self._model.frozen()
        self._check(
            "frozen weights",
            "The first worker of this run began with other frozen weights: load the same; or give start='any' if"
            " training changes them, as those of a momentum encoder",
        )

    def has(self, rules: Mapping[str, Any]) -> bool:
        """Return whether the first worker gave these rules."""
        return bool(canonical(rules) == self.first["rules"])

    def _check(self, name: str, fault: str) -> None:
        if self.own[name] != self.first[name]:
            raise Conflict(fault)


def form_of(model: Model, request_bytes: int, *, has_loss: bool) -> dict[str, Any]:
    """Return what all workers of a run have alike, by names for a person."""
    tensors = {name: f"{part.dtype}{[*part.shape]}" for name, part in model.parts.items()}
    model_hash = hashlib.sha256(model.form().encode()).hexdigest()[:16]
    return {"loss": has_loss, "request_bytes": request_bytes, **tensors, "all parameters and buffers": model_hash}


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
