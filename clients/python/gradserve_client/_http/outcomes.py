"""The outcome of an attempt: an answer or a transport error, and the error that the caller gets for it."""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import httpx

from gradserve_client.errors import (
    BY_CODE,
    BY_STATUS,
    ConnectionFailed,
    GradserveError,
    InvalidInput,
    ServerFailed,
    TimedOut,
)

T = TypeVar("T")

REQUEST_ID = "x-request-id"
"""The header that names a request, and its answer."""

_RETRYABLE = frozenset({408, 429, 502, 503, 504})
"""Statuses after which the same request may succeed."""

_PASSING = frozenset({"source_changed"})
"""Codes of other refusals after which the same request may succeed: other steps went first."""

_UNCHANGED = frozenset({"expired", "keys_full", "pushes_full", "store_full"})
"""Codes of server errors after which nothing has changed. After any other server error something may have changed."""

_QUOTED_BYTES = 200
"""Bytes of an unknown answer that an error quotes: enough for the sentence of a proxy."""


class Closed(httpx.TransportError):
    """The client was closed, and sends no more requests."""

    def __init__(self) -> None:
        super().__init__("The client is closed: create a new one")


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
class Answer:
    """An answer with its whole body."""

    status: int
    headers: httpx.Headers
    body: bytearray


Outcome: TypeAlias = Answer | httpx.TransportError


def result(read: Callable[[Answer], T], answer: Answer) -> T:
    """Return what `read` finds in the answer. Raises `ServerFailed` if the answer is damaged or not gradserve's."""
    try:
        return read(answer)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ServerFailed(
            f"The answer cannot be read; is this a gradserve server? {type(error).__name__}: {error}",
            status=answer.status,
            request_id=answer.headers.get(REQUEST_ID),
        ) from error


def error_for(outcome: Outcome) -> GradserveError:
    """Return the error that the caller gets for an answer that is not a success, or for a transport error."""
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


def is_retryable(outcome: Outcome, error: GradserveError) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(outcome, Answer):
        is_damaged = REQUEST_ID in outcome.headers and error.code is None  # from the server, but not whole
        is_passing = outcome.status in _RETRYABLE or error.code in _PASSING
        return is_passing or _is_running(outcome) or is_damaged
    is_impossible = isinstance(outcome, (Closed, httpx.UnsupportedProtocol, httpx.LocalProtocolError))
    return not is_impossible and "CERTIFICATE_VERIFY_FAILED" not in str(outcome)


def leaves_doubt(outcome: Outcome, error: GradserveError, before: bool) -> bool:
    """Whether the change may have been made, by this failed attempt or by those `before` it.

    A refusal does not clear a doubt, because the server may still run an earlier attempt.
    """
    if not isinstance(outcome, Answer):
        return before or not isinstance(outcome, _NEVER_SENT)
    if _is_running(outcome) or "receipts" in error.context:  # receipts prove that the change was made
        return True
    return before or not (300 <= outcome.status < 500 or error.code in _UNCHANGED)


def _is_running(answer: Answer) -> bool:
    """Whether another request with this key is still running; Retry-After then says when to ask for its outcome."""
    return answer.status == 409 and "retry-after" in answer.headers


def _refusal(answer: Answer) -> GradserveError:
    problem = _problem(answer)
    code = problem.get("code")
    kind = BY_CODE.get(code or "") or BY_STATUS.get(answer.status, ServerFailed)
    fields = ("type", "title", "status", "detail", "code")
    return kind(
        str(problem.get("detail")),
        status=answer.status,
        code=code,
        request_id=answer.headers.get(REQUEST_ID),
        retry_after=_retry_after(answer.headers.get("retry-after")),
        context={name: value for name, value in problem.items() if name not in fields},
    )


def _problem(answer: Answer) -> dict[str, Any]:
    """Return the server's problem document, or a document that quotes another server's answer."""
    try:
        problem = json.loads(answer.body)
    except (ValueError, RecursionError):
        problem = None
    if isinstance(problem, dict) and isinstance(problem.get("code"), str) and "detail" in problem:
        return problem
    text = answer.body[:_QUOTED_BYTES].decode(errors="replace").strip() or "no text"
    if 300 <= answer.status < 400 and "location" in answer.headers:
        target = answer.headers["location"][:_QUOTED_BYTES]
        text = f"a redirect to {target}; if a gradserve server is there, use its URL"
    return {"detail": f"The answer has status {answer.status}: {text}"}


def _retry_after(text: str | None) -> float | None:
    """Return the seconds from now that Retry-After names, as a number or as a date; None if it is malformed."""
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
