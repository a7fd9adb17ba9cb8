"""Errors of the database: which of them pass, and what its clients and its operator read of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import psycopg
from psycopg import errors

from service.buffers.postgres.exchange import PATIENCE_SECONDS, OwnError
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull

logger = logging.getLogger(__name__)

R = TypeVar("R")

RETRY_SECONDS = PATIENCE_SECONDS
"""How long a request waits for a database that fails over: longer than most failovers take."""

FIRST_PAUSE_SECONDS = 0.01
"""The pause before the first retry. Each later pause is twice as long, up to `LAST_PAUSE_SECONDS`."""

LAST_PAUSE_SECONDS = 1.0
"""The longest pause between retries: the database is not pressed while it starts."""

_FINAL = (
    errors.InsufficientPrivilege,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InvalidPassword,
    errors.InvalidSchemaName,
    errors.OutOfMemory,
    errors.ProgramLimitExceeded,
    errors.UndefinedTable,
)
"""Errors that a retry does not help."""

_PASSING = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.FeatureNotSupported,  # a standby refuses to write with it
    errors.ReadOnlySqlTransaction,
    errors.UniqueViolation,
)
"""Errors after which the same request may succeed, unless they are final."""


class BusyError(OwnError):
    """All connections of this server are in use."""


class NoStandbyError(OwnError):
    """The database has no synchronous standby."""


class MovedError(OwnError):
    """Another server has become the primary. It may lack what the last had shown."""


class UnsureError(OwnError):
    """A commit may be done, and if it is, perhaps only on the primary."""


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later, or on another connection."""
    return isinstance(error, _PASSING) and not (isinstance(error, (*_FINAL, errors.DiskFull)) or is_damage(error))


def is_damage(error: BaseException) -> bool:
    """Return whether the database cannot read what it has stored, or has a gradient where a new one belongs."""
    if isinstance(error, errors.UniqueViolation):
        return error.diag.table_name == "deltas"
    return isinstance(error, (errors.DataCorrupted, errors.IndexCorrupted))


def as_operator_error(error: Exception) -> Exception:
    """Return the error that the operator gets for an error of the database, in the database's words."""
    if isinstance(error, GradserveError) or not isinstance(error, psycopg.Error):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, errors.DiskFull):
        return StoreFull(f"The database has no room: {text}")
    if is_damage(error):
        return BufferCorrupt(f"The database is damaged: {text}")
    return StoreFailed(f"The database does not serve: {text}")


_FOR_CLIENTS: dict[type[GradserveError], str] = {
    BufferCorrupt: "The database is damaged where this request reads or writes; the log of the server says how",
    StoreFailed: "The database does not serve requests just now; the log of the server says why",
    StoreFull: "The database has no room: No space left on device",
}
"""What clients read in place of the database's words, which may name its address, its users and its files."""


def as_client_error(error: Exception) -> Exception:
    """Return the error that a client gets for an error of the database. The log gets the database's words."""
    full = as_operator_error(error)
    if full is error or isinstance(error, OwnError | errors.LockNotAvailable) or not isinstance(full, GradserveError):
        return full
    _log(full.detail)
    return type(full)(_FOR_CLIENTS[type(full)])


def away() -> StoreFailed:
    """Return the error that a client gets while the database is known to be away."""
    return StoreFailed(_FOR_CLIENTS[StoreFailed])


LOGGED_SECONDS = 10.0
"""How long the same words are not logged again: all requests fail with them."""

_logged: tuple[str, float] = "", 0.0
"""What was logged last, and when."""


def _log(text: str) -> None:
    global _logged
    now = time.monotonic()
    if text != _logged[0] or now > _logged[1] + LOGGED_SECONDS:
        _logged = text, now
        logger.warning("%s", text)


@contextmanager
def survived(what: str) -> Iterator[None]:
    """Log an error behind `what`: the thread outlives what it cannot do, and goes on with its other work."""
    try:
        yield
    except Exception as error:
        logger.warning("%s: %s", what, " ".join(str(error).split()))


def retried(
    work: Callable[[], R],
    closed: Callable[[], bool] = lambda: False,
    seconds: float = RETRY_SECONDS,
    *,
    since: float | None = None,
    raised: Callable[[Exception], Exception] = as_client_error,
    tells: bool = False,
) -> R:
    """Return the result of `work`, tried again after transient errors. Raises `raised` of the last.

    The last try begins before `seconds` are over. They run from `since` on, a time of `time.monotonic`, or from now.
    If it `tells`, it logs the first error: a start is silent otherwise.
    """
    end, pause = (time.monotonic() if since is None else since) + seconds, FIRST_PAUSE_SECONDS
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) or closed() or time.monotonic() + pause > end:
                raise raised(error) from None
            if tells:
                tells = False
                text = " ".join(str(error).split())
                logger.warning("Waiting for the database, %d seconds at most: %s", seconds, text)
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
