"""Connections to PostgreSQL, and what its errors mean for a client."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors

from service.buffers.postgres.exchange import (
    PATIENCE_SECONDS,
    Connection,
    Execution,
    OwnError,
    ResultRows,
    SilentError,
    Statement,
)
from service.buffers.postgres.statements import (
    BACKEND,
    BEGIN,
    BEGIN_READING,
    CANCEL,
    COMMIT,
    FENCE,
    HAS_STANDBY,
    IS_REPLICATED,
    SETTINGS,
)
from service.errors import BufferCorrupt, GradserveError, StoreFailed, StoreFull

logger = logging.getLogger(__name__)

R = TypeVar("R")

RETRY_SECONDS = PATIENCE_SECONDS
"""How long a request waits for a database that fails over: longer than most failovers take."""

FIRST_PAUSE_SECONDS = 0.01
"""The pause before the first retry. Each later pause is twice as long, up to `LAST_PAUSE_SECONDS`."""

LAST_PAUSE_SECONDS = 1.0
"""The longest pause between retries: the database is not pressed while it starts."""

CONNECT_SECONDS = 10
"""Seconds that a host of the URL has to accept a connection."""

LOCK_SECONDS = 20
"""Seconds that a statement waits for a lock: a server that hangs with locks must not stop the others for ever."""

HANGING_SECONDS = 30
"""Seconds after which the database ends a transaction that does nothing: its server hangs, or its machine is gone."""

READERS = 6
"""Connections for reads, at most. More of them would only share the database's bandwidth."""

WORKERS = 6
"""Connections for the other threads: three that stage, and one each that folds, tidies, takes ids or probes."""

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


MAX_SCHEMA_CHARACTERS = 24
"""Characters of the schema in the name of a connection: PostgreSQL cuts the name to 63 bytes."""


def application_of(schema: str) -> str:
    """Return how the database calls the connections of all servers for this schema, up to the name of the server."""
    return f"gradserve {schema[:MAX_SCHEMA_CHARACTERS]} "


def _server() -> str:
    """Return the name of this server, which its worker processes share."""
    parent = multiprocessing.parent_process()
    return f"{os.getpid() if parent is None else parent.pid}@{socket.gethostname()}"


class NoStandbyError(OwnError):
    """The database has no synchronous standby."""


class UnsureError(OwnError):
    """A commit may be done, and if it is, perhaps only on the primary."""


class _Pool:
    """At most `size` connections, for one thread each. A lost connection is not noticed before it is used."""

    def __init__(self, connect: Callable[[], Connection], size: int) -> None:
        self._connect, self._free = connect, threading.Semaphore(size)
        self._idle: list[Connection] = []
        self._is_closed = False

    @contextmanager
    def lend(self, seconds: float = RETRY_SECONDS) -> Iterator[Connection]:
        """Yield a connection, which is idle again after a transaction. Wait for one for at most these seconds."""
        if not self._free.acquire(timeout=seconds):
            raise OwnError("all connections of this server to the database are busy")
        try:
            connection = self._take()
            connection.patience = seconds
            try:
                yield connection
            finally:
                if connection.closed or self._is_closed or connection.info.transaction_status.name != "IDLE":
                    connection.close()
                    self._close_idle()  # what ended one connection has often ended all
                else:
                    self._idle.append(connection)
        finally:
            self._free.release()

    def close(self) -> None:
        self._is_closed = True
        self._close_idle()

    def _take(self) -> Connection:
        with suppress(IndexError):
            return self._idle.pop()
        return self._connect()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class Database:
    """The database at `url`, whose `schema` has the tables of the store.

    If `replicated`, a durable commit returns once the synchronous standby has it, too; else, once the disk has it.
    A commit stays visible if its wait for the standby is cancelled, or if the primary crashes meanwhile; so what an
    answer says is read in a transaction that is fenced.

    All settings are made in each transaction, so that a pooler such as PgBouncer may hand each to another backend.
    """

    def __init__(
        self, url: str, schema: str, *, replicated: bool, clock: Callable[[], float | None] = lambda: None
    ) -> None:
        self._url, self.schema, self.replicated = url, schema, replicated
        self.clock = clock
        """Returns the time that a test sets, else None: the database's clock counts."""
        self.readers, self.workers = _Pool(self.connect, READERS), _Pool(self.connect, WORKERS)

    def close(self) -> None:
        self.readers.close()
        self.workers.close()

    def connect(self) -> Connection:
        """Return a connection outside the pools."""
        connection = Connection.connect(
            self._url,
            autocommit=True,
            prepare_threshold=None,
            connect_timeout=CONNECT_SECONDS,
            fallback_application_name=application_of(self.schema) + _server(),
        )
        if connection.ask(BACKEND()) == [(connection.info.backend_pid,)]:
            connection.prepared = {}  # else a pooler is between
        return connection

    def beginning(self, *, durable: bool = True, begin: Statement = BEGIN) -> list[Execution]:
        """Return what begins a transaction whose statements find the tables. Without `durable` no commit waits."""
        commit = ("on" if self.replicated else "local") if durable else "off"
        settings = SETTINGS(self.schema, commit, f"{LOCK_SECONDS}s", f"{HANGING_SECONDS}s")
        return [begin(), settings]

    @contextmanager
    def transaction(self, *, durable: bool = True, patience: float = RETRY_SECONDS) -> Iterator[Connection]:
        """Yield a connection, in a transaction that is committed on leaving."""
        with self.workers.lend(patience) as connection, self._begun(connection, durable=durable):
            yield connection
            if durable:
                self.commit(connection)
            else:
                connection.exchange([COMMIT()])

    @contextmanager
    def reading(self, patience: float) -> Iterator[Connection]:
        """Yield a connection, in a transaction that sees one moment of the primary: a standby refuses it.

        On leaving, it is fenced.
        """
        with self.readers.lend(patience) as connection, self._begun(connection, begin=BEGIN_READING):
            yield connection
            self.commit(connection, fenced=True)

    def read(self, connection: Connection, execution: Execution, *, fenced: bool = False) -> ResultRows:
        """Return the rows of a query, which sees one moment of the primary, in one round trip."""
        executions = [*self.beginning(begin=BEGIN_READING), execution]
        if fenced:
            return self.commit(connection, executions, fenced=True)[-1]
        return connection.exchange([*executions, COMMIT()])[-2]

    def commit(
        self, connection: Connection, executions: Sequence[Execution | None] = (), *, fenced: bool = False
    ) -> list[ResultRows]:
        """Execute these, and commit: durable, if the transaction has written. Return the rows.

        If `replicated`, it returns once the standby has all that a `fenced` transaction saw, whichever server wrote it:
        the transaction writes to the log, so that its commit waits for everything before it. Another transaction would
        not do. It may be one of the next primary, which lacks what this one saw.

        Raises `NoStandbyError`, and `UnsureError` if the database did not wait for its standby.
        """
        fence, after = (FENCE() if fenced else None, IS_REPLICATED()) if self.replicated else (None, None)
        connection.has_warned, backend = False, connection.info.backend_pid
        try:
            *found, crossed, _, waited = connection.exchange([*executions, fence, COMMIT(), after])
        except SilentError:
            if fence is not None and connection.prepared is not None:
                self._cancel(backend)
            raise
        if crossed == [(False,)]:
            raise NoStandbyError("it has no synchronous standby just now")
        if self.replicated and (connection.has_warned or waited != [(True,)]):
            raise UnsureError("the wait for the standby was cancelled")
        return found

    def _cancel(self, backend: int) -> None:
        """End a wait for the standby whose commit changes nothing. Else the backend would wait for it for ever."""
        with suppress(psycopg.Error), self.connect() as connection:
            connection.ask(CANCEL(backend))

    @contextmanager
    def _begun(self, connection: Connection, **options: Any) -> Iterator[None]:
        try:
            connection.exchange(self.beginning(**options))
            yield
        except BaseException:
            with suppress(psycopg.Error):
                connection.execute("rollback")
            raise

    def check_standby(self, connection: Connection) -> None:
        """Raise `NoStandbyError` if the commits have to wait for a synchronous standby that is not there."""
        if self.replicated and connection.ask(HAS_STANDBY()) != [(True,)]:
            raise NoStandbyError("it has no synchronous standby just now")


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


def retried(
    work: Callable[[], R],
    closed: Callable[[], bool] = lambda: False,
    seconds: float = RETRY_SECONDS,
    *,
    since: float | None = None,
    raised: Callable[[Exception], Exception] = as_client_error,
) -> R:
    """Return the result of `work`, tried again after transient errors. Raises `raised` of the last.

    The last try begins before `seconds` are over. They run from `since` on, a time of `time.monotonic`, or from now.
    """
    end, pause = (time.monotonic() if since is None else since) + seconds, FIRST_PAUSE_SECONDS
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) or closed() or time.monotonic() + pause > end:
                raise raised(error) from None
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
