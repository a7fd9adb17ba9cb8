"""What torchrun says of a worker, in the environment, and the rules that follow from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradserve_client.errors import InvalidInput

DEADLINE_SECONDS = 120.0
"""Seconds that a step waits for workers: one that is started again and loads its checkpoint is back before."""


def with_environment(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an accumulator: those given, else those that follow from the worker's rank.

    The worker is named after its rank. A step expects all workers, with a push of each. It closes without the missing
    at the deadline, if at least half of its pushes are in.
    """
    workers = _whole("WORLD_SIZE", 1)
    rank = _whole("RANK", 0)
    if rank >= workers:
        raise InvalidInput(f"RANK is {rank}, but must be below WORLD_SIZE, which is {workers}")
    names = [f"rank{number}" for number in range(workers)]
    found: dict[str, Any] = {"worker": names[rank], "quorum": workers, "contributors": names}
    found |= {"deadline_seconds": DEADLINE_SECONDS, **given}
    if found["deadline_seconds"] is not None:
        found.setdefault("min_count", ((found["quorum"] or workers) + 1) // 2)
    return found


def _whole(name: str, least: int) -> int:
    """Return a variable of the environment. Raises `InvalidInput` unless it is a number of this size at least."""
    text = os.environ.get(name, "")
    if not text:
        raise InvalidInput(f"{name} is not set: start the workers with torchrun, or set RANK and WORLD_SIZE for each")
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise InvalidInput(f"{name} is {text!r}, but must be a whole number from {least} on")
    return int(text)
