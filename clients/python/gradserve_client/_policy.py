"""When a call is sent, sent again, and given up: written once, for both clients.

`exchange` is a generator that does no input or output itself. It yields what is to be done next, and is sent what came
of it. The clients run it, each in its own way.
"""

from __future__ import annotations

import email.utils
import json
import math
import numbers
import random
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import httpx

from gradserve_client.errors import (
    BY_CODE,
    BY_STATUS,
    ConnectionFailed,
    EpochOpen,
    GradserveError,
    InvalidInput,
    ServerFailed,
    TimedOut,
)

T = TypeVar("T")

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Seconds before the second attempt, doubled for each one after that, and their bound. Each is shortened by up to a
half at random, so that many clients do not come back at once."""

_ID = "x-request-id"

LONGEST_POLL = 20.0
"""Seconds for which one request asks the server to wait. Whoever waits longer asks again: proxies cut silent ones."""

_AGAIN = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same request may succeed."""

_NOT_DONE = frozenset({"expired", "store_full"})
"""Codes of failures of the server's after which nothing was changed. One that stops may have done it."""


class Closed(httpx.TransportError):
    """Nothing is sent any more, as the client is closed."""

    def __init__(self) -> None:
        super().__init__("The client is closed: make another one")


_NEVER_SENT = (
    Closed,
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
)


@dataclass(frozen=True)
class Patience:
    """How long a client tries. See `Client`."""

    timeout: float
    attempt_timeout: float
    max_retries: int | None

    def once(self) -> Patience:
        """The same for a call that is not tried again."""
        return replace(self, max_retries=0)


def as_seconds(name: str, given: float) -> float:
    """An argument that is seconds, as sockets take them: 0 or more. Raises `InvalidInput`."""
    try:
        if isinstance(given, numbers.Real) and 0 <= (seconds := float(given)) < math.inf:
            return seconds
    except OverflowError:
        pass
    raise InvalidInput(f"{name} is {given!r}, but must be a number of seconds", code="invalid_parameter")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what its answer means."""

    method: str
    path: str
    read: Callable[[Answer], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: list[bytes | memoryview] = field(default_factory=list)
    key: str | None = None
    """The idempotency key, if the call changes anything. It stays the same through all attempts, as the body does."""
    wait: float = 0.0
    """Seconds that the server is to wait for what is not there yet."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "wait", as_seconds("timeout", self.wait))

    @property
    def poll(self) -> float:
        """Seconds that each request asks the server to wait: with equal queries, a key is good for all of them."""
        return self.wait / (math.ceil(self.wait / LONGEST_POLL) or 1)


@dataclass(frozen=True)
class Answer:
    """What came back, read to its end."""

    status: int
    headers: httpx.Headers
    body: bytearray


class Echo:
    """Answers have the ids of their requests, unless a proxy gives these ids of its own: that is known by the first."""

    def __init__(self) -> None:
        self._is_heard = False

    def is_to(self, request_id: str, answer: Answer) -> bool:
        """Whether the answer is to this request, as far as can be told."""
        given = answer.headers.get(_ID)
        self._is_heard |= given == request_id
        return given in (None, request_id) or not self._is_heard


@dataclass(frozen=True)
class Send:
    """To be done: send the request, and give the answer, or the `httpx.TransportError` that came instead."""

    silence: float
    """Seconds without a byte after which the attempt is given up."""
    until: float
    """The end of all attempts, by `time.monotonic`."""


@dataclass(frozen=True)
class Wait:
    """To be done: nothing, for so many seconds."""

    seconds: float


def exchange(
    call: Call[T], patience: Patience, echo: Echo, request_id: str
) -> Generator[Send | Wait, Answer | httpx.TransportError | None, T]:
    """What the call returns. Raises `GradserveError`."""
    start = time.monotonic()
    enough, end = start + call.wait, start + call.wait + patience.timeout
    attempts = failures = 0
    doubt = False
    while True:
        attempts += 1
        outcome = yield Send(min(patience.attempt_timeout + call.poll, max(end - time.monotonic(), 0.001)), end)
        assert outcome is not None
        if isinstance(outcome, Answer) and outcome.status < 300 and not echo.is_to(request_id, outcome):
            outcome = httpx.RemoteProtocolError("the answer is that of another request")
        try:
            if isinstance(outcome, Answer) and outcome.status < 300:
                return _read(call, outcome)
            error = _error(outcome)
        except ServerFailed as unreadable:
            error = unreadable
        doubt = _leaves_doubt(outcome, error, doubt)
        error.attempts, error.idempotency_key, error.maybe_done = attempts, call.key, doubt and call.key is not None
        error.request_id = error.request_id or request_id
        cause = outcome if isinstance(outcome, httpx.TransportError) else None
        if isinstance(error, EpochOpen) and time.monotonic() < enough:
            failures = 0
            yield Wait(FIRST_DELAY)  # or whatever answers without waiting would be asked without end
            continue
        failures += 1
        spent = patience.max_retries is not None and failures > patience.max_retries
        delay = min(FIRST_DELAY * 2 ** min(failures - 1, 16), LONGEST_DELAY) * random.uniform(0.5, 1)
        delay = max(delay, error.retry_after or 0)
        if spent or not _is_worth_another(outcome, error) or time.monotonic() + delay >= end:
            try:
                raise error from cause
            finally:  # or the error and this frame would keep each other alive, and with them the call's arrays
                del error, outcome, cause
        yield Wait(delay)


def _is_worth_another(outcome: Answer | httpx.TransportError, error: GradserveError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(outcome, Answer):
        damaged = _ID in outcome.headers and error.code is None  # the server's own, then, but not whole
        return outcome.status in _AGAIN or _is_running(outcome) or damaged
    refused = isinstance(outcome, (Closed, httpx.UnsupportedProtocol, httpx.LocalProtocolError))
    return not refused and "CERTIFICATE_VERIFY_FAILED" not in str(outcome)


def _is_running(answer: Answer) -> bool:
    """Whether another request with this key is still running; the server says when to ask for what became of it."""
    return answer.status == 409 and "retry-after" in answer.headers


def _leaves_doubt(outcome: Answer | httpx.TransportError, error: GradserveError, before: bool) -> bool:
    """Whether the change may have been made, after an attempt that failed and those `before` it.

    A refusal takes no doubt away: an attempt from before may still be under way.
    """
    if not isinstance(outcome, Answer):
        return before or not isinstance(outcome, _NEVER_SENT)
    if _is_running(outcome) or "receipts" in error.context:  # which tell that it was made
        return True
    return before or not (300 <= outcome.status < 500 or error.code in _NOT_DONE)


def _read(call: Call[T], answer: Answer) -> T:
    """What the call returns. Raises `ServerFailed` if the answer is none of a gradserve server, or not whole."""
    try:
        return call.read(answer)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"The answer cannot be read; is this a gradserve server? {type(error).__name__}: {error}",
            status=answer.status,
            request_id=answer.headers.get(_ID),
        ) from error


def _error(outcome: Answer | httpx.TransportError) -> GradserveError:
    """The outcome as the caller is to see it."""
    if isinstance(outcome, Answer):
        return _refusal(outcome)
    detail = str(outcome) or type(outcome).__name__
    if isinstance(outcome, httpx.TimeoutException):
        return TimedOut(f"No answer in time: {detail}")
    if isinstance(outcome, Closed):
        return InvalidInput(detail)
    if isinstance(outcome, (httpx.UnsupportedProtocol, httpx.LocalProtocolError)):
        return InvalidInput(f"The request cannot be sent: {detail}")
    return ConnectionFailed(f"The connection failed: {detail}")


def _refusal(answer: Answer) -> GradserveError:
    try:
        problem = json.loads(answer.body)
    except (ValueError, RecursionError):
        problem = None
    is_ours = isinstance(problem, dict) and isinstance(problem.get("code"), str) and "detail" in problem
    if not is_ours:  # but of whatever stands between
        text = answer.body[:200].decode(errors="replace").strip() or "nothing more"
        if 300 <= answer.status < 400 and "location" in answer.headers:
            text = f"it leads to {answer.headers['location'][:200]}; is a gradserve server there, use its URL"
        problem = {"detail": f"The answer has status {answer.status}: {text}"}
    code = problem.get("code")
    kind = BY_CODE.get(code or "") or BY_STATUS.get(answer.status, ServerFailed)
    known = ("type", "title", "status", "detail", "code")
    return kind(
        str(problem.get("detail")),
        status=answer.status,
        code=code,
        request_id=answer.headers.get(_ID),
        retry_after=_retry_after(answer.headers.get("retry-after")),
        context={name: value for name, value in problem.items() if name not in known},
    )


def _retry_after(text: str | None) -> float | None:
    """Seconds from now, of a number of seconds or a date."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
