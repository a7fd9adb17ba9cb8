"""What a call raises, by what it means for the caller.

* GradserveError
  x InvalidInput                400, 405, 406, 415, 422: the server cannot accept the request; also a ValueError
    - KeyReused                 422: another request has used the idempotency key
  x Unauthorized                401, 403: the API key is missing, unknown, or lacks the scope
  x NotFound                    404: no such buffer or operator; also a LookupError
  x Conflict                    409: the state of the buffer does not allow the change
    - StaleStep                409: the buffer is in another step than the call names
    - StepOpen                 409: the step has not closed, or has too few gradients, within `timeout`
    - NothingToAverage          409: the weights sum to zero, so there is no mean
    - DuplicateContributor      409: the step has as many gradients of the contributor as it takes
    - TooManyBuffers            409: the caller has as many buffers as the server allows
    - StepGone                 410: the server no longer keeps what the request refers to
    - PreconditionFailed        412: the buffer is not in the state that `if_match` names
  x TooLarge                    413: a body or tensor exceeds the server's limits
  x ServerFailed                500 and others: the server failed
    - StoreFull                 507: the store has no room left; nothing changed
  x Busy                        429 until the client gave up
  x Unavailable                 502, 503, 504 until the client gave up
  x TimedOut                    408, or no answer in time; also a TimeoutError
  x ConnectionFailed            the client could not connect, or lost the connection; also a ConnectionError

The client raises the last four only when every attempt has failed. For each error, `maybe_done` says whether the change
may have been made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradserve_client.models import Receipt

INTERRUPTED = "interrupted"
"""The code of a change that the user interrupted, in the command line's errors."""


class GradserveError(Exception):
    """A call failed. An attribute that does not apply is None or empty."""

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
        idempotency_key: str | None = None,
        attempts: int = 0,
        maybe_done: bool = False,
        retry_after: float | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        """A sentence that says what was wrong, what was expected and what came."""
        self.status = status
        """The HTTP status of the last answer."""
        self.code = code
        """The server's stable name for the error, such as `shape_mismatch`."""
        self.request_id = request_id
        """The id of the request in the server's log."""
        self.idempotency_key = idempotency_key
        """The key of the change. The same call with this key counts once, however often it is repeated."""
        self.attempts = attempts
        """The number of times that the client sent the request."""
        self.maybe_done = maybe_done
        """Whether the change may have been made, because an attempt ended without a final answer. To find out, repeat
        the call with `idempotency_key`. With a new key the change might count twice."""
        self.retry_after = retry_after
        """The seconds after which the server asks the client to retry."""
        self.context = dict(context or {})
        """The other members of the server's answer: `tensor`, `buffer`, `step`, `count`, `limit` and so on."""


class InvalidInput(GradserveError, ValueError):
    """The server cannot accept the request."""


class KeyReused(InvalidInput):
    """Another request has used the idempotency key."""


class Unauthorized(GradserveError):
    """The API key is missing, unknown, or lacks the scope for this call."""


class NotFound(GradserveError, LookupError):
    """There is no such buffer or operator."""


class Conflict(GradserveError):
    """The state of the buffer does not allow the change."""


class StaleStep(Conflict):
    """The buffer is in another step than the call names."""


class StepOpen(Conflict):
    """The step has not closed yet, or has too few gradients; `context` has the `step` and the `count` so far."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The contributors that the buffer expects and that are not in the step."""
        return tuple(self.context.get("missing") or ())


class NothingToAverage(Conflict):
    """The weights of the step sum to zero, so there is no mean."""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt of the step, if it has closed."""
        receipt = self.context.get("receipt")
        return Receipt.of(receipt) if receipt else None


class DuplicateContributor(Conflict):
    """The step has as many gradients of the contributor as it takes; see `per_contributor` of `Buffer.create`."""


class TooManyBuffers(Conflict):
    """The caller has as many buffers as the server allows; `context` has the `limit`. Delete some first."""


class StepGone(Conflict):
    """The server no longer keeps what the request refers to."""


class PreconditionFailed(Conflict):
    """The buffer is not in the state that `if_match` names, or it exists and `exist_ok` is False."""


class TooLarge(GradserveError):
    """A body or tensor exceeds the server's limits."""


class ServerFailed(GradserveError):
    """The server failed; the caller is not at fault."""


class StoreFull(ServerFailed):
    """The store of the buffers has no room left; nothing changed."""


class Busy(GradserveError):
    """The server has too many requests to answer."""


class Unavailable(GradserveError):
    """The server is starting or stopping, or a proxy cannot reach it."""


class TimedOut(GradserveError, TimeoutError):
    """No answer came in time."""


class ConnectionFailed(GradserveError, ConnectionError):
    """The client could not connect, or lost the connection before the answer."""


BY_CODE: dict[str, type[GradserveError]] = {
    "idempotency_key_reused": KeyReused,
    "stale_step": StaleStep,
    "step_open": StepOpen,
    "too_few_gradients": StepOpen,
    "nothing_to_average": NothingToAverage,
    "duplicate_contributor": DuplicateContributor,
    "too_many_buffers": TooManyBuffers,
}

BY_STATUS: dict[int, type[GradserveError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    405: InvalidInput,
    406: InvalidInput,
    408: TimedOut,
    409: Conflict,
    410: StepGone,
    412: PreconditionFailed,
    413: TooLarge,
    415: InvalidInput,
    422: InvalidInput,
    429: Busy,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
    507: StoreFull,
}


def mistaken(parameter: str, fault: str) -> InvalidInput:
    """Return the error for an argument. Its context names the argument, as that of a server's error does."""
    return InvalidInput(f"{parameter} {fault}", code="invalid_parameter", context={"parameter": parameter})


def led(error: GradserveError, sentence: str) -> GradserveError:
    """Return the error with a sentence before its own."""
    error.detail = f"{sentence}. {error.detail}"
    error.args = (error.detail,)
    return error


def explained(error: GradserveError, sentence: str) -> GradserveError:
    """Return the error with a further sentence."""
    error.detail = f"{error.detail}. {sentence}"
    error.args = (error.detail,)
    return error
