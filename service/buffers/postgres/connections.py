"""Connections to PostgreSQL."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql

from service.buffers.packed import FORMAT
from service.buffers.postgres.exchange import Connection, Execution, ResultRows, SilentError, Statement
from service.buffers.postgres.failures import RETRY_SECONDS, BusyError, NoStandbyError, UnsureError, is_transient
from service.buffers.postgres.outage import AWAY_SECONDS
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

MAX_SCHEMA_CHARACTERS = 24
"""Characters of the schema in the name of a connection: PostgreSQL cuts the name to 63 bytes."""


def application_of(schema: str) -> str:
    """Return how the database calls the connections of all servers for this schema, up to the name of the server."""
    return f"gradserve {schema[:MAX_SCHEMA_CHARACTERS]} "


def _server() -> str:
    """Return the name of this server, which its worker processes share."""
    parent = multiprocessing.parent_process()
    return f"{os.getpid() if parent is None else parent.pid}@{socket.gethostname()}"


class _Pool:
    """At most `size` connections, for one thread each. A lost connection is not noticed before it is used.

    Each waits at most `quiet` seconds while no connection hears from the database. One that is only slow is heard: the
    watcher asks it all the time.
    """

    def __init__(self, connect: Callable[[float], Connection], size: int, quiet: float = math.inf) -> None:
        self._connect, self._free, self._quiet = connect, threading.Semaphore(size), quiet
        self._idle: list[Connection] = []
        self._is_closed, self._failed = False, 0.0

    @contextmanager
    def lend(self, seconds: float = RETRY_SECONDS) -> Iterator[Connection]:
        """Yield a connection, which is idle again after a transaction. Wait for one for at most these seconds."""
        began = time.monotonic()
        if not self._free.acquire(timeout=seconds):
            raise BusyError("all connections of this server to the database are busy")
        try:
            if self._failed > began:
                raise BusyError("the connections of this server to the database have just failed")
            connection = self._take(min(seconds, self._quiet))
            connection.patience, connection.quiet = seconds, self._quiet
            try:
                yield connection
            except Exception as error:
                if is_transient(error):
                    self._failed = time.monotonic()
                    connection.close()  # it may lead to a server that is no primary, and would lead there for ever
                raise
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

    def _take(self, seconds: float) -> Connection:
        with suppress(IndexError):
            return self._idle.pop()
        return self._connect(seconds)

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


class Database:
    """The database at `url`, whose `schema` has the tables of the store.

    If `replicated`, a durable commit returns once the synchronous standby has it, too; else, once the disk has it.
    A commit stays visible if its wait for the standby is cancelled, or if the primary crashes meanwhile.

    All settings are made in each transaction, so that a pooler such as PgBouncer may hand each to another backend.
    """

    def __init__(
        self, url: str, schema: str, *, replicated: bool, clock: Callable[[], float | None] = lambda: None
    ) -> None:
        self._url, self.schema, self.replicated = url, schema, replicated
        self.clock = clock
        """Returns the time that a test sets, else None: the database's clock counts."""
        self._pulse = [0.0]
        version = f"(select version from {sql.Identifier(schema).as_string()}.meta)"  # the path is not set yet
        self._settings = [Statement(SETTINGS + each, begins=True) for each in (str(FORMAT), version)]
        self.readers, self.workers = _Pool(self.connect, READERS, AWAY_SECONDS), _Pool(self.connect, WORKERS)

    def close(self) -> None:
        self.readers.close()
        self.workers.close()

    def connect(self, quiet: float = math.inf) -> Connection:
        """Return a connection outside the pools. It waits for `quiet` seconds while none hears from the database."""
        end = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                connection = Connection.connect(
                    self._url,
                    autocommit=True,
                    prepare_threshold=None,
                    connect_timeout=math.ceil(min(CONNECT_SECONDS, quiet)),
                    fallback_application_name=application_of(self.schema) + _server(),
                )
                break
            except psycopg.errors.ConnectionTimeout:
                if time.monotonic() > end or not self._is_heard():
                    raise
        connection.pulse, connection.quiet = self._pulse, quiet
        if connection.ask(BACKEND()) == [(connection.info.backend_pid,)]:
            connection.prepared = {}  # else a pooler is between
        return connection

    def _is_heard(self) -> bool:
        """Return whether a connection has just heard from the database."""
        return time.monotonic() < self._pulse[0] + AWAY_SECONDS

    def beginning(self, *, durable: bool = True, begin: Statement = BEGIN, checks: bool = True) -> list[Execution]:
        """Return what begins a transaction whose statements find the tables. Without `durable` no commit waits.

        It `checks` that a newer version has not brought the store over. To do that would have to wait for its end.
        """
        commit = ("on" if self.replicated else "local") if durable else "off"
        settings = self._settings[checks](self.schema, commit, f"{LOCK_SECONDS}s", f"{HANGING_SECONDS}s")
        return [begin(), settings]

    @contextmanager
    def transaction(self, *, durable: bool = True, checks: bool = True) -> Iterator[Connection]:
        """Yield a connection, in a transaction that is committed on leaving."""
        with self.workers.lend() as connection, self._begun(connection, durable=durable, checks=checks):
            yield connection
            if durable:
                self.commit(connection)
            else:
                connection.exchange([COMMIT()])

    @contextmanager
    def reading(self, patience: float) -> Iterator[Connection]:
        """Yield a connection, in a transaction that sees one moment of the primary: a standby refuses it."""
        with self.readers.lend(patience) as connection, self._begun(connection, begin=BEGIN_READING):
            yield connection
            connection.exchange([COMMIT()])

    def read(self, connection: Connection, execution: Execution) -> ResultRows:
        """Return the rows of a query, which sees one moment of the primary, in one round trip."""
        executions = [*self.beginning(begin=BEGIN_READING), execution, COMMIT()]
        return connection.exchange(executions)[2]

    def cross(self, connection: Connection) -> str:
        """Return the name of the server once its standby has all that was committed before, if there must be one."""
        self.commit(connection, self.beginning(), fenced=True)
        return connection.server

    def commit(
        self, connection: Connection, executions: Sequence[Execution | None] = (), *, fenced: bool = False
    ) -> list[ResultRows]:
        """Execute these, and commit: durable, if the transaction has written. Return the rows.

        If `replicated`, it returns once the standby has all that a `fenced` transaction saw, whichever server wrote it:
        the transaction writes to the log, so that its commit waits for everything before it.

        Raises `NoStandbyError`, and `UnsureError` if the database did not wait for its standby.
        """
        fence, after = (FENCE() if fenced else None, IS_REPLICATED()) if self.replicated else (None, None)
        connection.has_warned, backend = False, connection.info.backend_pid
        try:
            *found, crossed, _, waited = connection.exchange([*executions, fence, COMMIT(), after])
        except SilentError:
            if self._is_heard() and fence is not None and connection.prepared is not None:
                self._cancel(backend)
            raise
        if crossed == [(False,)]:
            raise NoStandbyError("it has no synchronous standby just now")
        if self.replicated and (connection.has_warned or waited != [(True,)]):
            raise UnsureError("the wait for the standby was cancelled")
        return found

    def _cancel(self, backend: int) -> None:
        """End a wait for the standby whose commit changes nothing. Else the backend would wait for it for ever."""
        with suppress(psycopg.Error), self.connect(AWAY_SECONDS) as connection:
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
