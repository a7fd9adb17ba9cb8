"""Statements that go to the database together, in one round trip, with their parameters in binary form.

The pipelines of psycopg wait for the socket at each statement: 100 us of this process for each, against 20 here.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import psycopg
from psycopg import abc
from psycopg.abc import Buffer, PQGen
from psycopg.adapt import Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import Ready, Wait

from service.buffers.packed import FORMAT, check_format

Encode: TypeAlias = Callable[[Any], bytes]
"""Returns a parameter in PostgreSQL's binary form."""

ResultRows: TypeAlias = list[tuple[Any, ...]]

R = TypeVar("R")

PATIENCE_SECONDS = 30.0
"""How long a connection waits for a silent database: as long as a request waits for a failover."""

_ARRAY = struct.Struct("!iiIii")
"""The head of an array: its dimensions, whether there are nulls, the type and count of its items, the first index."""

_LENGTH = struct.Struct("!i")
"""The length before an item."""

_NULL = _LENGTH.pack(-1)


def _encode_text(text: str) -> bytes:
    """Return the text without NUL, which PostgreSQL refuses. No name has this or the next character: it sorts alike."""
    return text.replace("\0", "\x01").encode()


_TYPES: dict[str, tuple[int, Encode]] = {
    "text": (25, _encode_text),
    "double precision": (701, struct.Struct("!d").pack),
    "bigint": (20, struct.Struct("!q").pack),
    "integer": (23, struct.Struct("!i").pack),
    "boolean": (16, struct.Struct("!?").pack),
    "bytea": (17, bytes),
}
"""The number of each type in PostgreSQL's catalog, and the encoder of its values."""

_PARAMETER = re.compile(rf"\$(\d+)::({'|'.join(_TYPES)})(\[\])?")


def _encoder(name: str, brackets: str) -> Encode:
    """Return the encoder of a type, or of an array."""
    oid, encode = _TYPES[name]

    def encode_array(values: Sequence[Any]) -> bytes:
        if not values:
            return struct.pack("!iiI", 0, 0, oid)
        items = [None if value is None else encode(value) for value in values]
        parts = [_ARRAY.pack(1, None in items, oid, len(items), 1)]
        for item in items:
            parts += (_NULL,) if item is None else (_LENGTH.pack(len(item)), item)
        return b"".join(parts)

    return encode_array if brackets else encode


class Statement:
    """A statement with `$1::TYPE`, `$2::TYPE`, ... for its parameters.

    If it `begins` a transaction, its last columns are the name of the server, and the format of the store.
    """

    def __init__(self, query: str, *, begins: bool = False) -> None:
        self.query, self.begins = query.encode(), begins
        found = {int(number): _encoder(*of) for number, *of in _PARAMETER.findall(query)}
        self.encoders = [found[number] for number in sorted(found)]

    def __call__(self, *values: Any) -> Execution:
        encoded = zip(self.encoders, values, strict=True)
        return Execution(self, [None if value is None else encode(value) for encode, value in encoded])


class Execution(NamedTuple):
    """A statement with its parameters."""

    statement: Statement
    values: Sequence[Buffer | None]


def columns(rows: Sequence[Sequence[object]], count: int) -> list[list[object]]:
    """Return the first `count` columns of the rows, as the parameters of a statement."""
    return [[row[place] for row in rows] for place in range(count)]


_CLOSE_CURSORS = Statement("close all")

_numbers = itertools.count()


class OwnError(psycopg.OperationalError):
    """The database does not serve, in words of our own: clients may read them."""


class SilentError(OwnError):
    """The database says nothing, and the connection is closed."""


class Connection(psycopg.Connection[Any]):
    """A connection that makes several statements in one round trip.

    It ends if the database is silent for `patience` seconds while this process waits for it. Otherwise a network that
    loses everything, or a standby that is gone, would hold a thread for ever. `quiet` seconds suffice if it says
    nothing to others, either.
    """

    patience = PATIENCE_SECONDS
    quiet = math.inf
    pulse: list[float]
    """When the connections of this process have heard from the database last."""
    server = ""
    """The name of the primary that has begun the last transaction: the time of its start."""
    has_warned = False
    """Whether the database has warned, as of a commit that did not wait for the standby."""

    prepared: dict[Statement, bytes] | None = None
    """The names of the statements that the backend has prepared. None if each transaction may have another backend."""

    @classmethod
    def connect(cls, *arguments: Any, **named: Any) -> Self:
        connection = super().connect(*arguments, **named)
        connection.pulse = [0.0]
        connection.add_notice_handler(lambda warning: setattr(connection, "has_warned", True))
        return connection

    def ask(self, execution: Execution) -> ResultRows:
        """Execute one statement, which the database plans for the tables as they are."""
        return self.exchange([execution], prepares=False)[0]

    def fetched(self, opening: Execution, count: int) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of the cursor `found`, which `opening` declares. At most `count` are in memory at once."""
        fetch = Statement(f"fetch {count} from found")()
        *_, rows = self.exchange([_CLOSE_CURSORS(), opening, fetch])
        while rows:
            yield from rows
            (rows,) = self.exchange([fetch]) if len(rows) == count else ([],)

    def exchange(self, executions: Sequence[Execution | None], *, prepares: bool = True) -> list[ResultRows]:
        """Execute in one round trip, and return the rows of each. Raises the error of the first that fails.

        Raises `StoreFailed` if the store has another format than this version's.
        """
        self.pgconn.enter_pipeline_mode()
        for execution in filter(None, executions):
            self._send(execution, prepares)
        self.pgconn.pipeline_sync()
        results = self.wait(_results(self.pgconn))
        self.pgconn.exit_pipeline_mode()
        transformer, found = Transformer(self), list[ResultRows]()
        answers = (each for each in results if each.command_status or each.status == ExecStatus.FATAL_ERROR)
        for one in executions:
            found.append([] if one is None else self._rows(transformer, next(answers)))
            if one is not None and one.statement.begins:
                ((*_, self.server, version),) = found[-1]
                check_format(str(version), "The store", [str(FORMAT)])
        return found

    def _rows(self, transformer: abc.Transformer, result: PGresult) -> ResultRows:
        if result.status == ExecStatus.FATAL_ERROR:
            if self.prepared:
                self.prepared.clear()  # the database has ignored all after the error
            raise error_from_result(result)
        if result.status != ExecStatus.TUPLES_OK:
            return []
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)

    def wait(self, gen: PQGen[R], *arguments: Any, **named: Any) -> R:
        return super().wait(self._impatient(gen), *arguments, **named)

    def _impatient(self, gen: PQGen[R]) -> PQGen[R]:
        began: float | None = None
        try:
            wanted = next(gen)
            while True:
                ready, now = (yield wanted), time.monotonic()
                if ready:
                    began, self.pulse[0] = None, now
                elif began is None:
                    began = now
                elif now > began + self.patience or now > max(began, self.pulse[0]) + self.quiet:
                    self.close()
                    raise SilentError(f"the database has been silent for {min(self.patience, self.quiet):g} seconds")
                wanted = gen.send(ready)
        except StopIteration as done:
            result: R = done.value
            return result

    def _send(self, execution: Execution, prepares: bool) -> None:
        query, values = execution.statement.query, execution.values
        formats = [Format.BINARY] * len(values)
        if self.prepared is None or not (prepares and values):
            self.pgconn.send_query_params(query, values, None, formats, Format.BINARY)
            return
        name = self.prepared.get(execution.statement)
        if name is None:
            begin = b" ".join(query.split()[:3])  # for those who read a trace of the network
            name = self.prepared[execution.statement] = b"%d %s" % (next(_numbers), begin)
            self.pgconn.send_prepare(name, query)
        self.pgconn.send_query_prepared(name, values, formats, Format.BINARY)


def _results(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """Send what is to be sent, and return the results up to the end of the pipeline."""
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()
    results: list[PGresult] = []
    is_between = False
    while True:
        while pgconn.is_busy():
            yield Wait.R
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None and is_between:
            raise OwnError("the connection to the database is lost")
        is_between = result is None
        if result is not None and result.status == ExecStatus.PIPELINE_SYNC:
            return results
        if result is not None:
            results.append(result)
