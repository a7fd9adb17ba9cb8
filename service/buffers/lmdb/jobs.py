"""The requests that the writer thread takes from its queue."""

from __future__ import annotations

from concurrent.futures import Future
from typing import NamedTuple

from service.buffers.perform import Outcome, Request


class Job(NamedTuple):
    """A request of a namespace, and the future of its outcome."""

    request: Request
    namespace: str
    done: Future[Outcome]


class UndoneError(Exception):
    """A request failed after it had changed something: its transaction must be undone."""

    def __init__(self, job: Job, error: Exception) -> None:
        self.job, self.error = job, error
