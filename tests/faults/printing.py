"""What a worker prints in a run with faults, where it waits, and what a test counts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from gradserve_client._http.transport import Transport

GATE = "gate"
"""The file with the first step that no worker begins yet, so that no fault comes too late."""

Counted: TypeAlias = Callable[[int, int, str], None]
"""Keeps how many adds were acknowledged, how many are in the sums, and through what, for the end of the run."""


def await_gate(step: int) -> None:
    """Wait until a test lets the workers begin this step."""
    while step >= int(Path(GATE).read_text()):
        time.sleep(0.01)


def print_requests() -> None:
    """Write a line before each request of this process, and one after its answer."""
    send = Transport.send

    def sent(self: Transport, request: Any, until: float) -> Any:
        write(f"{request.method} {request.url.raw_path.decode()}")
        answer = send(self, request, until)
        write(str(answer.status))
        return answer

    Transport.send = sent  # type: ignore[method-assign]


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
