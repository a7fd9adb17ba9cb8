"""The read-only face of a PostgreSQL store, for `gradserve export` and `gradserve doctor`.

An export holds one REPEATABLE READ transaction while its values stream: all that it reads is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import psycopg

from service.buffers.names import BufferName
from service.buffers.packed import unpack_known, unpack_record
from service.buffers.postgres.connections import CONNECT_SECONDS
from service.buffers.postgres.deltas import Delta, complete, read_numbers, stream, total
from service.buffers.postgres.exchange import Connection, Execution, Statement
from service.buffers.postgres.failures import as_operator_error
from service.buffers.postgres.schema import format_of, older_records
from service.buffers.postgres.statements import COMMIT, COUNTED_BYTES, NO_LIMIT, NOW, SEAL_OF_KEY, VERSION
from service.buffers.pushes import Place
from service.buffers.readonly import WRONG
from service.buffers.record import Record, Spec
from service.dtypes import Array
from service.errors import BufferCorrupt, StoreFailed

KEYS_AT_ONCE = 10_000
"""Keys that a statement reads: a longer one would make the server that drops old keys, and so all adds, wait."""

READ_ONLY = Statement("begin isolation level repeatable read, read only")
"""All that the transaction sees is of one moment."""

PATIENT_SETTINGS = Statement(f"""
    select set_config('search_path', quote_ident($1::text), true), {NO_LIMIT.format("true")},
           set_config('idle_in_transaction_session_timeout', '0', true)
""")
"""A large value, or a slow reader of the export, takes longer than requests may."""

ALL_RECORDS = Statement("""
    select namespace, name, record, seq from buffers
    where starts_with(case when namespace = '' then name else '~' || namespace || '/' || name end, $1::text)
    order by namespace, name
""")
"""The records of the buffers whose `BufferName.joined` has a prefix."""

GRADIENTS = Statement(f"select count(*), count(blob), {COUNTED_BYTES} from deltas")

MISCOUNTED = Statement("select distinct value from deltas where bytes <> octet_length(data) order by value")

UNOWNED = Statement(f"select count(*), {COUNTED_BYTES} from unowned where bytes > 0")

ORPHANS = Statement("select distinct value from deltas where value <> all($1::bigint[]) order by value")

UNOWNED_IN_USE = Statement("select blob, value from deltas join unowned using (blob) order by blob")

BLOBS_OF_NOTHING = Statement("""
    select blob, sum(octet_length(data)) from chunks
    where not exists (select 1 from unowned where unowned.blob = chunks.blob)
        and not exists (select 1 from deltas where deltas.blob = chunks.blob)
    group by blob order by blob
""")

NEXT_ID = Statement("""
    select last_value + case when is_called then seqincrement else 0 end from ids, pg_sequence
    where seqrelid = 'ids'::regclass
""")

LAST_ID = Statement("""
    select greatest((select max(value) from deltas), (select max(blob) from deltas), (select max(blob) from chunks),
                    (select max(blob) from unowned), (select (to_jsonb(meta) ->> 'ids')::bigint from meta))
""")
"""The largest number that the rows have, or that a server has taken, which format 8 does not say."""

OUTCOMES = Statement(f"""
    select digest, at, outcome, coalesce(to_jsonb(keys) ->> 'seal' = {SEAL_OF_KEY}::text, true) from keys
    where (digest, at) > ($1::bytea, $2::double precision)
    order by digest, at limit $3::bigint
""")
"""Its last column says whether the key is sound, as far as format 9 knows."""


class PostgresMoment:
    """A store as it is at one moment. `connect` opens a connection for what is not of this moment."""

    def __init__(self, connection: Connection, connect: Callable[[], Connection], schema: str) -> None:
        self._connection, self._connect, self._schema = connection, connect, schema
        self._seqs: dict[int, int] = {}
        """The `seq` of the last delta of each running value, as the records have it."""
        self._miscounted: list[BufferName] = []
        """The pushes that have staged other bytes than the table says."""

    def sound_records(self, prefix: str = "") -> Iterator[tuple[BufferName, Record | None]]:
        found = [(BufferName(*row[:2]), *row[2:]) for row in self._connection.ask(ALL_RECORDS(prefix))]
        older = ((BufferName(*row[:2]), *row[2:4]) for row in older_records(self._connection))
        for full_name, packed, seq in (*found, *older):
            try:
                record = unpack_record(full_name, packed)
            except BufferCorrupt:
                yield full_name, None
                continue
            if full_name.is_push and record.spec.nbytes != seq:
                self._miscounted.append(full_name)
            if record.value is not None:
                self._seqs[record.value] = seq
            yield full_name, record

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        deltas: Iterable[Delta] = ()
        if value is not None:
            deltas = complete(value, stream(self._connection, [value]), self._seqs.get(value))
        # What the database cannot read ends a savepoint only. And its end frees the locks of the tables of blobs.
        with _operator_errors(), self._connection.transaction(force_rollback=True):
            numbers = total(self._connection, spec, deltas, np.empty)
        yield numbers

    def check_staged(self, place: Place) -> None:
        ((value,),) = place
        with _operator_errors(), self._connection.transaction(force_rollback=True):
            *_, delta = complete(value, stream(self._connection, [value]), 1)
            read_numbers(self._connection, delta)

    def faults(self) -> list[str]:
        return []

    def other_findings(self, values: Collection[int]) -> Iterator[str]:
        for name in self._miscounted:
            yield f"{WRONG}the bytes of {name.shown} are counted wrong until its next part comes"
        yield from _leftovers(self._connection, values)
        with self._connect() as connection:
            yield from _damaged_keys(connection, self._schema)


class PostgresReadOnly:
    """A store that is only read, by one connection. `connect` opens another."""

    def __init__(self, connection: Connection, connect: Callable[[], Connection], schema: str) -> None:
        self._connection, self._connect, self._schema = connection, connect, schema

    def described(self) -> Iterator[str]:
        info = self._connection.info
        major, minor = divmod(info.server_version, 10_000)
        with _operator_errors():
            ((version,),) = self._connection.exchange([*_beginning(self._schema), VERSION(), COMMIT()])[2]
        yield f"store {self._schema} in {info.dbname} at {info.host}, format {version}; PostgreSQL {major}.{minor}"

    def now(self) -> float:
        with _operator_errors():
            ((now,),) = self._connection.ask(NOW(None))
            return float(now)

    @contextmanager
    def reading(self) -> Iterator[PostgresMoment]:
        with _operator_errors():
            self._connection.exchange(_beginning(self._schema))
            yield PostgresMoment(self._connection, self._connect, self._schema)
            self._connection.execute("rollback")


@contextmanager
def opened_readonly(url: str, schema: str) -> Iterator[PostgresReadOnly]:
    """Open the store in the schema of the database at `url`. Raises `StoreFailed` if it cannot be opened."""
    connect = partial(Connection.connect, url, autocommit=True, prepare_threshold=None, connect_timeout=CONNECT_SECONDS)
    with _operator_errors():
        connection = connect()
    with connection:
        with _operator_errors():
            connection.exchange(_beginning(schema))
            if format_of(connection, schema) is None:
                raise StoreFailed(f"There is no store in the PostgreSQL schema {schema!r}")
            connection.execute("rollback")
        yield PostgresReadOnly(connection, connect, schema)


def _beginning(schema: str) -> list[Execution]:
    return [READ_ONLY(), PATIENT_SETTINGS(schema)]


@contextmanager
def _operator_errors() -> Iterator[None]:
    """Raise the operator's error for an error of the database."""
    try:
        yield
    except psycopg.Error as error:
        raise as_operator_error(error) from None


def _leftovers(connection: Connection, values: Collection[int]) -> Iterator[str]:
    """Yield lines about gradients and blobs, as the transaction of the connection sees them."""
    ((count, blobs, size),) = connection.ask(GRADIENTS())
    yield f"{count} gradients, {blobs} of them in blobs; {size} bytes"
    ((count, size),) = connection.ask(UNOWNED())
    yield f"{count} blobs of {size} bytes are staged, or wait for their deletion"
    for (value,) in connection.ask(MISCOUNTED()):
        yield f"{WRONG}the value {value} has a gradient whose bytes are counted wrong"
    for (value,) in connection.ask(ORPHANS([*values])):
        yield f"{WRONG}value {value} belongs to no buffer, graph or push that can be read"
    for blob, value in connection.ask(UNOWNED_IN_USE()):
        yield f"{WRONG}the blob {blob} of the value {value} will be deleted, although it is used"
    for blob, size in connection.ask(BLOBS_OF_NOTHING()):
        yield f"{WRONG}the blob {blob} of {size} bytes belongs to no gradient"
    (following,), (last,) = connection.ask(NEXT_ID())[0], connection.ask(LAST_ID())[0]
    if last is not None and last >= following:
        yield f"{WRONG}the sequence ids goes on with {following}, but the id {last} has been used: servers correct it"


def _damaged_keys(connection: Connection, schema: str) -> Iterator[str]:
    """Yield lines about the idempotency keys. They are of many moments: no statement holds their table for long."""
    count = damaged = 0
    place: tuple[bytes, float] = (b"", 0.0)
    while rows := connection.exchange([*_beginning(schema), OUTCOMES(*place, KEYS_AT_ONCE), COMMIT()])[2]:
        outcomes = [(bytes(outcome), sound) for _, _, outcome, sound in rows if outcome]  # a mark has none
        count += len(outcomes)
        damaged += sum(not (sound and _is_known(outcome)) for outcome, sound in outcomes)
        place = rows[-1][:2]
    yield f"{count} idempotency keys"
    if damaged:
        yield f"{WRONG}{damaged} idempotency keys are damaged: a retry with one fails, or counts again"


def _is_known(outcome: bytes) -> bool:
    try:
        unpack_known(outcome, ())
    except BufferCorrupt:
        return False
    return True
