"""The retry policy of both clients: when to send a call, when to send it again, and when to give up.

`steps_of` is a generator without any input or output. It yields what to send, or the seconds to wait, and receives the
outcome. A runner performs the steps, with or without `await`.
"""

from __future__ import annotations

import math
import numbers
import random
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx

from gradserve_client._http.log import SAID_SECONDS, Log
from gradserve_client._http.outcomes import REQUEST_ID, Answer, Outcome, error_for, is_retryable, leaves_doubt, result
from gradserve_client.errors import GradserveError, ServerFailed, StepOpen, mistaken

T = TypeVar("T")

FIRST_DELAY = 0.1
"""Seconds before the second attempt. Each further delay is twice as long, and a random part of up to a half is cut off,
so that clients that failed together do not retry together."""

LONGEST_DELAY = 5.0
"""Seconds between two attempts at most, so that a client soon notices a server that is back."""

LONGEST_POLL = 5.0
"""Seconds that one request asks the server to wait. Longer waits take several requests, because proxies cut silent
connections, many after 60 seconds, and because the log says after the first of them what the call waits for."""

_SHORTEST_TIMEOUT = 0.001
"""Seconds of an attempt's timeout at least: 0 would make the socket non-blocking."""

_CONNECT_SHARE = 0.9
"""The part of the remaining seconds that an attempt may spend on connecting. If connecting ends first, the client knows
that the server never saw the request."""

_FOREVER = 1e8
"""Seconds, three years: the longest timeout that every socket accepts."""


@dataclass(frozen=True)
class Timeouts:
    """The limits of a client's attempts; see `Client`. Raises `InvalidInput`."""

    timeout: float = 60.0
    attempt_timeout: float = 20.0
    max_retries: int | None = None
    cuts_transfers: bool = True
    """Whether `timeout` ends an attempt whose bytes still move."""

    def __post_init__(self) -> None:
        for name, seconds in {"timeout": self.timeout, "attempt_timeout": self.attempt_timeout}.items():
            if not (isinstance(seconds, numbers.Real) and seconds > 0):
                raise mistaken(name, f"is {seconds!r}, but must be a number of seconds above 0")
            object.__setattr__(self, name, float(min(seconds, _FOREVER)))
        if not (self.max_retries is None or (isinstance(self.max_retries, int) and self.max_retries >= 0)):
            raise mistaken("max_retries", f"is {self.max_retries!r}, but must be None or an integer of at least 0")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and how to read its answer."""

    method: str
    path: str
    read: Callable[[Answer], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: list[bytes | memoryview] = field(default_factory=list)
    key: str | None = None
    """The idempotency key, if the call changes anything. All attempts have the same key and the same body."""
    wait: float = 0.0
    """Seconds that the server may wait for a step."""
    is_retried: bool = True
    """Whether the client tries again after a failure."""
    buffers: Collection[str] | None = ()
    """The buffers that the call names. None: those with a prefix, on every server."""
    body_for: Callable[[Collection[str]], list[bytes | memoryview]] | None = None
    """Returns the body of the same call for some of its buffers. None: the call cannot be split among servers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wait", _seconds(self.wait))

    @property
    def poll(self) -> float:
        """Seconds that each request asks the server to wait: the same for all requests, so that a key fits them all."""
        return self.wait / (math.ceil(self.wait / LONGEST_POLL) or 1)


class RequestIds:
    """Checks that an answer carries the id of its request, unless a proxy gives requests its own ids."""

    def __init__(self) -> None:
        self._is_heard = False

    def is_to(self, request_id: str, answer: Answer) -> bool:
        """Whether the answer can belong to this request."""
        answered_id = answer.headers.get(REQUEST_ID)
        self._is_heard |= answered_id == request_id
        return answered_id in (None, request_id) or not self._is_heard


@dataclass(frozen=True)
class Send:
    """A step: send the request, and return its answer or its `httpx.TransportError`. All times are seconds."""

    connect: float
    """The longest time to connect."""
    write: float
    """The longest silence while the request is sent."""
    read: float
    """The longest silence before and within the answer."""
    until: float
    """The end of the attempt, by `time.monotonic`."""


def steps_of(
    call: Call[T], timeouts: Timeouts, ids: RequestIds, log: Log, request_id: str
) -> Generator[Send | float, Outcome | None, T]:
    """Return the result of the call. Raises `GradserveError`."""
    silent_until = (start := time.monotonic()) + LONGEST_POLL
    poll_end, end = start + call.wait, start + call.wait + timeouts.timeout
    attempts = failures = 0
    in_doubt = False
    while True:
        attempts += 1
        outcome = yield _attempt(call, timeouts, end)
        assert outcome is not None
        if isinstance(outcome, Answer) and outcome.status < 300 and not ids.is_to(request_id, outcome):
            outcome = httpx.RemoteProtocolError("the answer belongs to another request")
        try:
            if isinstance(outcome, Answer) and outcome.status < 300:
                found = result(call.read, outcome)
                log.answered()
                return found
            error = error_for(outcome)
        except ServerFailed as unreadable:
            error = unreadable
        in_doubt = leaves_doubt(outcome, error, in_doubt)
        error.attempts, error.idempotency_key = attempts, call.key
        error.maybe_done = in_doubt and call.key is not None
        error.request_id = error.request_id or request_id
        again = is_retryable(outcome, error)
        if not again:
            log.answered()
        if isinstance(error, StepOpen) and (now := time.monotonic()) < poll_end:
            failures = 0
            if now >= silent_until:
                silent_until = now + SAID_SECONDS
                log.waits(error, now - start)
            yield FIRST_DELAY  # a server that answers without waiting must not be polled in a tight loop
            continue
        failures += 1
        delay = _delay(failures, error)
        is_last = failures > _most_retries(call, timeouts) or time.monotonic() + delay >= end
        if is_last or not again:
            cause = outcome if isinstance(outcome, httpx.TransportError) else None
            try:
                raise error from cause
            finally:  # the error's traceback holds this frame: a cycle that would keep the call's arrays in memory
                del error, outcome, cause
        log.retries(f"{call.method} {call.path}", error, end - time.monotonic())
        yield delay


def _attempt(call: Call[Any], timeouts: Timeouts, end: float) -> Send:
    rest = max(end - time.monotonic(), _SHORTEST_TIMEOUT)
    read = min(timeouts.attempt_timeout + call.poll, rest)
    write = min(timeouts.attempt_timeout, read)
    connect = min(write, max(_CONNECT_SHARE * rest, _SHORTEST_TIMEOUT))
    return Send(connect, write, read, until=end if timeouts.cuts_transfers else math.inf)


def _most_retries(call: Call[Any], timeouts: Timeouts) -> float:
    if not call.is_retried:
        return 0
    return math.inf if timeouts.max_retries is None else timeouts.max_retries


def _delay(failures: int, error: GradserveError) -> float:
    longest = min(FIRST_DELAY * 2.0 ** min(failures - 1, 16), LONGEST_DELAY)
    return max(longest * random.uniform(0.5, 1), error.retry_after or 0)


def _seconds(number: float) -> float:
    """Return the seconds to wait for a step. Raises `InvalidInput` unless they are finite, and 0 or more."""
    with suppress(OverflowError):
        if isinstance(number, numbers.Real) and 0 <= (seconds := float(number)) < math.inf:
            return seconds
    raise mistaken("timeout", f"is {number!r}, but must be a number of seconds")
