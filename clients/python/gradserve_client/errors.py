"""What a call raises, by what it means for the caller.

* GradserveError
  x InvalidInput                400, 405, 406, 415, 422: the request makes no sense as it is; also a ValueError
    - KeyReused                 422: the idempotency key was used for another request
  x Unauthorized                401, 403: the API key is missing, unknown, or not good for this
  x NotFound                    404: no such buffer or operator; also a LookupError
  x Conflict                    409: the state of the buffer does not allow it
    - StaleEpoch                409: the epoch that the call names is not the buffer's
    - EpochOpen                 409: the epoch has not closed, or has too few gradients, and `timeout` is over
    - TooManyBuffers            409: the caller has as many buffers as the server lets them have
    - EpochGone                 410: what the request refers to is not kept any more
    - PreconditionFailed        412: the buffer is not in the state that `if_match` names
  x TooLarge                    413: a body or tensor is beyond the server's limits
  x ServerFailed                500 and others: the fault is the server's
    - StoreFull                 507: the store has no room left; nothing was changed
  x Busy                        429, still so at the end of the client's patience
  x Unavailable                 502, 503, 504, still so at the end of the client's patience
  x TimedOut                    408, or no answer in time; also a TimeoutError
  x ConnectionFailed            no connection, or none that lasted; also a ConnectionError

The last four are raised only once all attempts were in vain. Whichever it is, `maybe_done` says whether a change may
have been made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class GradserveError(Exception):
    """A call failed. The attributes say what is known of it; each may be None or empty."""

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
        """What was wrong, what was expected and what came, in a sentence."""
        self.status = status
        """The HTTP status of the last answer."""
        self.code = code
        """The server's stable name for the error, such as `shape_mismatch`."""
        self.request_id = request_id
        """What the request is called in the server's log."""
        self.idempotency_key = idempotency_key
        """With this key the call can be made again, with the same arguments, and counts once nevertheless."""
        self.attempts = attempts
        """How often the request was sent."""
        self.maybe_done = maybe_done
        """Whether the change may have been made all the same: an attempt ended without word of it. Make the call again
        with `idempotency_key` to know, and never with a new key: it might count twice."""
        self.retry_after = retry_after
        """In how many seconds the server asks to try again."""
        self.context = dict(context or {})
        """What else the server says: `tensor`, `buffer`, `epoch`, `count`, `limit` and so on."""


class InvalidInput(GradserveError, ValueError):
    """The request makes no sense as it is."""


class KeyReused(InvalidInput):
    """The idempotency key was used before, for another request."""


class Unauthorized(GradserveError):
    """The API key is missing, unknown, or not good for this."""


class NotFound(GradserveError, LookupError):
    """There is no such buffer or operator."""


class Conflict(GradserveError):
    """The state of the buffer does not allow this."""


class StaleEpoch(Conflict):
    """The epoch that the call names is not the buffer's."""


class EpochOpen(Conflict):
    """The epoch has not closed yet, or has too few gradients; `context` has the `epoch` and `count` so far."""


class TooManyBuffers(Conflict):
    """There are as many buffers as the server lets the caller have; `context` has the `limit`. Delete some first."""


class EpochGone(Conflict):
    """What the request refers to was there once, and is not kept any more."""


class PreconditionFailed(Conflict):
    """The buffer is not in the state that `if_match` names, or is there, and `exist_ok` is False."""


class TooLarge(GradserveError):
    """A body or tensor is beyond the server's limits."""


class ServerFailed(GradserveError):
    """The server failed; the fault is not the caller's."""


class StoreFull(ServerFailed):
    """The store of the buffers has no room left; nothing was changed."""


class Busy(GradserveError):
    """The server has too much to do."""


class Unavailable(GradserveError):
    """The server is starting or stopping, or whatever stands before it cannot reach it."""


class TimedOut(GradserveError, TimeoutError):
    """No answer came in time."""


class ConnectionFailed(GradserveError, ConnectionError):
    """There was no connection, or none that lasted until the answer."""


BY_CODE: dict[str, type[GradserveError]] = {
    "idempotency_key_reused": KeyReused,
    "stale_epoch": StaleEpoch,
    "epoch_open": EpochOpen,
    "too_few_gradients": EpochOpen,
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
    410: EpochGone,
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
