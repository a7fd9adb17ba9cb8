"""The server that the commands call. Its imports take long, and help needs none of them."""

from __future__ import annotations

from typing import TypeVar

from gradserve_client._http.channels import channel
from gradserve_client._http.policy import Call, Timeouts
from gradserve_client._http.requests import Requests
from gradserve_client._http.runner import Runner
from gradserve_client.buffers import Buffers
from gradserve_client.errors import INTERRUPTED, GradserveError
from gradserve_client.graphs import Graphs
from gradserve_client.runs import Runs

T = TypeVar("T")


class Server(Runner):
    """A server that commands call. A transfer ends when nothing moves for `timeout` seconds, not when it is slow."""

    def __init__(self, url: str | None, api_key: str | None, timeout: float) -> None:
        requests = Requests(url, api_key)
        timeouts = Timeouts(timeout=timeout, cuts_transfers=False)
        super().__init__(requests, timeouts, channel(requests, None))
        self.buffers = Buffers(self)
        self.graphs, self.runs = Graphs(self), Runs(self)

    def run(self, call: Call[T]) -> T:
        """Return the result of the call. Raises `GradserveError`, also if the user interrupts a change."""
        try:
            return super().run(call)
        except KeyboardInterrupt:
            if call.key is None:
                raise
            raise GradserveError("Interrupted", code=INTERRUPTED, idempotency_key=call.key, maybe_done=True) from None
