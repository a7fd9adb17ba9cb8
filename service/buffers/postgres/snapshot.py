"""The read-only face of a PostgreSQL store, for `gradserve export` and `gradserve doctor`.

An export holds one REPEATABLE READ transaction while its values stream: all that it reads is of one moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import numpy as np
import psycopg

from service.buffers.names import BufferName
from service.buffers.postgres.connections import Connection, Database, as_client_error
from service.buffers.postgres.deltas import Delta, read_deltas, total
from service.buffers.postgres.examination import damaged_keys, leftovers
from service.buffers.postgres.schema import VERSION, check_version
from service.buffers.postgres.transaction import unpack_record
from service.buffers.record import Record, Spec
from service.dtypes import Array
from service.errors import BufferCorrupt, StoreFailed

_UNLIMITED = """
    select set_config('statement_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true)
"""
"""A large value, or a slow reader of the export, takes longer than requests may."""

_JOINED = "case when namespace = '' then name else '~' || namespace || '/' || name end"
"""`BufferName.joined` in SQL."""

_RECORDS = f"""
    select namespace, name, record, seq from buffers where starts_with({_JOINED}, %s) order by namespace, name
"""


class PostgresMoment:
    """A store as it is at one moment. `database` opens connections for what is not of this moment."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database, self._connection = database, connection
        self._seqs: dict[int, int] = {}
        """The `seq` of the last delta of each running value, as the records have it."""

    def sound_records(self, prefix: str = "") -> Iterator[tuple[BufferName, Record | None]]:
        with self._connection.cursor(binary=True) as cursor:
            rows = cursor.execute(_RECORDS, (prefix,)).fetchall()
        for namespace, name, packed, seq in rows:
            full_name = BufferName(namespace, name)
            try:
                record = unpack_record(full_name, packed)
            except (LookupError, TypeError, ValueError):
                yield full_name, None
                continue
            if record.value is not None:
                self._seqs[record.value] = seq
            yield full_name, record

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        deltas = [] if value is None else read_deltas(self._connection, [value])[value]
        if value is not None:
            _check_complete(value, deltas, self._seqs.get(value))
        try:
            yield total(self._connection, spec, deltas, np.empty)
        except (LookupError, TypeError, ValueError) as error:
            raise BufferCorrupt(f"A gradient of the value {value} is damaged in the database: {error}") from None

    def faults(self) -> list[str]:
        return []

    def rest(self, values: Collection[int]) -> Iterator[str]:
        yield from leftovers(self._connection, values)
        with self._database.connect() as connection:
            yield from damaged_keys(connection, self._database.schema)


def _check_complete(value: int, deltas: list[Delta], last: int | None) -> None:
    """Raise `BufferCorrupt` if a delta of the value is missing. `last` is the `seq` of its last, None if not known."""
    seqs = [delta.seq for delta in deltas]
    is_whole = bool(deltas) and seqs == [*range(seqs[0], seqs[0] + len(seqs))]
    if not is_whole or (seqs[0] > 1 and not deltas[0].overwrite) or last not in (None, seqs[-1]):
        raise BufferCorrupt(f"The database lacks gradients of the value {value}")


class PostgresReadOnly:
    """A store that is only read, by one connection."""

    def __init__(self, database: Database, connection: Connection) -> None:
        self._database, self._connection = database, connection

    def described(self) -> Iterator[str]:
        info = self._connection.info
        major, minor = divmod(info.server_version, 10_000)
        place = f"{self._database.schema} in {info.dbname} at {info.host}"
        yield f"store {place}, version {VERSION}; PostgreSQL {major}.{minor}"

    def now(self) -> float:
        with _client_errors():
            query = "select extract(epoch from clock_timestamp())::double precision"
            now: float = self._connection.execute(query).fetchall()[0][0]
            return now

    @contextmanager
    def reading(self) -> Iterator[PostgresMoment]:
        with _client_errors():
            self._database.begin(self._connection, isolation="repeatable read")
            self._connection.execute("set transaction read only")
            self._connection.execute(_UNLIMITED)
            yield PostgresMoment(self._database, self._connection)
            self._connection.execute("rollback")


@contextmanager
def opened_readonly(url: str, schema: str) -> Iterator[PostgresReadOnly]:
    """Open the store in the schema of the database at `url`. Raises `StoreFailed` if it cannot be opened."""
    database = Database(url, schema, replicated=False)
    with _client_errors():
        connection = database.connect()
    with connection:
        with _client_errors():
            if connection.execute("select to_regclass(%s)", (f'"{schema}".meta',)).fetchall() == [(None,)]:
                raise StoreFailed(f"There is no store in the PostgreSQL schema {schema!r}")
            database.begin(connection)
            check_version(connection, schema)
            connection.execute("commit")
        yield PostgresReadOnly(database, connection)


@contextmanager
def _client_errors() -> Iterator[None]:
    """Raise the client's error for an error of the database."""
    try:
        yield
    except psycopg.Error as error:
        raise as_client_error(error) from None
