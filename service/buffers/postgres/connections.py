"""Connections to PostgreSQL, and what its errors mean for a client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import errors, sql
from psycopg_pool import ConnectionPool, PoolTimeout

from service.errors import GradserveError, StoreFailed, StoreFull

R = TypeVar("R")

Connection: TypeAlias = "psycopg.Connection[Any]"

RETRY_SECONDS = 30.0
"""How long a request waits for a database that fails over: longer than most failovers take."""

FIRST_PAUSE_SECONDS = 0.01
"""The pause before the first retry. Each later pause is twice as long, up to `LAST_PAUSE_SECONDS`."""

LAST_PAUSE_SECONDS = 1.0
"""The longest pause between retries: the database is not pressed while it starts."""

LOCK_SECONDS = 20
"""Seconds that a statement waits for a lock: a server that hangs with locks must not stop the others for ever."""

_SETTINGS = """
    select set_config('search_path', quote_ident(%s), true), set_config('lock_timeout', %s, true),
           set_config('synchronous_commit', %s, true), set_config('client_min_messages', 'warning', true)
"""

_FULL = (errors.DiskFull, errors.OutOfMemory)

_FINAL = (
    errors.InvalidAuthorizationSpecification,
    errors.InvalidPassword,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
    errors.UndefinedTable,
    errors.InvalidSchemaName,
)
"""Errors that a retry does not help."""


class Database:
    """The database at `url`, whose `schema` has the tables of the store. Its pool has at most `size` connections.

    If `replicated`, a durable commit returns once the synchronous standby has it, too; else, once the disk has it.

    All settings are made in each transaction, so that a pooler such as PgBouncer may hand each to another backend.
    """

    def __init__(self, url: str, schema: str, *, size: int, replicated: bool) -> None:
        self._url, self.schema, self.replicated = url, schema, replicated
        self._commit = "on" if replicated else "local"
        self._options: dict[str, Any] = {"autocommit": True, "prepare_threshold": None, "connect_timeout": 10}
        self._pool = ConnectionPool(
            url, min_size=1, max_size=size, kwargs=self._options, check=ConnectionPool.check_connection, open=False
        )

    def open(self) -> None:
        """Begin to use the pool."""
        self._pool.open()

    def close(self) -> None:
        """Close the connections of the pool."""
        self._pool.close()

    def connect(self) -> Connection:
        """Return a connection outside the pool."""
        return psycopg.connect(self._url, **self._options)

    def begin(self, connection: Connection, *, durable: bool = True, mode: str = "read write") -> None:
        """Begin a transaction whose statements find the tables. Without `durable` its commit does not wait."""
        connection.execute(sql.SQL("begin {}").format(sql.SQL(mode)))
        connection.execute(_SETTINGS, (self.schema, f"{LOCK_SECONDS}s", self._commit if durable else "off"))

    @contextmanager
    def transaction(
        self, *, durable: bool = True, mode: str = "read write", patience: float = RETRY_SECONDS
    ) -> Iterator[Connection]:
        """Yield a connection of the pool, in a transaction that is committed on leaving."""
        with self._pool.connection(patience) as connection:
            try:
                with connection.pipeline():
                    self.begin(connection, durable=durable, mode=mode)
                yield connection
                connection.execute("commit")
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute("rollback")
                raise


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later, or on another connection."""
    if isinstance(error, errors.UniqueViolation | PoolTimeout):
        return True
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError | errors.ReadOnlySqlTransaction):
        return False
    return not isinstance(error, (*_FINAL, *_FULL))


def as_client_error(error: Exception) -> Exception:
    """Return the error that a client gets for an error of the database."""
    if isinstance(error, GradserveError) or not isinstance(error, psycopg.Error):
        return error
    text = " ".join(str(error).split())
    if isinstance(error, _FULL):
        return StoreFull(f"The database has no room: {text}")
    return StoreFailed(f"The database does not serve: {text}")


def retried(work: Callable[[], R], closed: Callable[[], bool] = lambda: False, seconds: float = RETRY_SECONDS) -> R:
    """Return the result of `work`, tried again after transient errors. Raises the error that a client gets."""
    end, pause = time.monotonic() + seconds, FIRST_PAUSE_SECONDS
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) or closed() or time.monotonic() + pause > end:
                raise as_client_error(error) from None
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
