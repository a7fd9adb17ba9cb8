"""The loop of a call: perform the steps of the retry policy until it returns a result."""

from __future__ import annotations

import time
import uuid
from typing import Any, Never, Protocol, TypeVar

import httpx

from gradserve_client._http.log import Log
from gradserve_client._http.outcomes import Answer, Closed, Outcome
from gradserve_client._http.policy import Call, RequestIds, Send, Timeouts, steps_of
from gradserve_client._http.requests import Requests

T = TypeVar("T")


class Channel(Protocol):
    """A way to the server for whole requests and answers."""

    def send(self, request: httpx.Request, until: float) -> Answer:
        """Send the request and read the answer, by `until` on `time.monotonic`. Raises `httpx.TransportError`."""

    def close(self) -> None:
        """Close the connections."""


class Runner:
    """Runs the calls of a client. The client, its operators and its buffers share it."""

    def __init__(self, requests: Requests, timeouts: Timeouts, channel: Channel) -> None:
        self._requests, self._timeouts, self._channel = requests, timeouts, channel
        self._ids, self._log = RequestIds(), Log(requests.place)
        self.limits: dict[str, Any] = {}
        """The limits of the server, once they are known."""

    @property
    def patience(self) -> float:
        """Seconds for which what may succeed later is tried again."""
        return self._timeouts.timeout if self._timeouts.max_retries is None else 0.0

    @property
    def shards(self) -> tuple[Runner, ...]:
        """The runners of the servers, one each."""
        return (self,)

    def place_of(self, buffer: str) -> str:
        """Return the URL of the buffer's server."""
        return self._requests.place

    def routes(self, call: Call[T]) -> list[tuple[Runner, Call[T]]]:
        """Return the runners of the servers that a call is for, each with its part of the call."""
        return [(self, call)]

    def run(self, call: Call[T]) -> T:
        """Return the result of the call. Raises `GradserveError`."""
        self._requests.check_open()
        request_id = uuid.uuid4().hex
        steps = steps_of(call, self._timeouts, self._ids, self._log, request_id)
        outcome: Outcome | None = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                outcome = None  # the error's traceback holds this frame: a cycle that would keep the call's arrays
            if isinstance(step, Send):
                outcome = self._send(call, request_id, step)
            else:
                time.sleep(step)

    def close(self) -> None:
        """Close the connections, and refuse further calls."""
        self._requests.is_closed = True
        self._channel.close()

    def _send(self, call: Call[T], request_id: str, step: Send) -> Outcome:
        if self._requests.is_closed:
            return Closed()
        try:
            return self._channel.send(self._requests.request(call, request_id, step), step.until)
        except httpx.TransportError as error:
            return error

    def __getstate__(self) -> Never:
        raise TypeError("A client cannot be copied or pickled: make one in each process")
