"""The two round trips of a writer's transaction.

The first locks and reads all that the requests name. The second writes all that they changed, and commits.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from service.buffers.changes import Create, Restore
from service.buffers.names import BufferName
from service.buffers.packed import digest_of, pack_known, pack_record, unpack_record
from service.buffers.perform import Outcome, Request
from service.buffers.postgres.connections import Database, NoStandbyError
from service.buffers.postgres.deltas import INSERT
from service.buffers.postgres.exchange import (
    COMMIT,
    Connection,
    Statement,
    bigints,
    byteas,
    double,
    doubles,
    integer,
    integers,
    text,
    texts,
)
from service.buffers.postgres.schema import FREED_SECONDS
from service.buffers.postgres.transaction import Changes, Found, Stored
from service.errors import BufferCorrupt, GradserveError

KEY_LOCK = 1
"""The class of the advisory locks of keys."""

NAMESPACE_LOCK = 2
"""The class of the advisory locks of namespaces."""

_BY_INDEX = Statement("select set_config('enable_seqscan', $1, true)", text)
"""Lets the database plan for full tables: it keeps the plans that it made while they were empty."""

_LOCK = Statement("select pg_advisory_xact_lock($1, lock) from unnest($2::integer[]) as lock", integer, integers)

_TIME = Statement(
    """
    select coalesce($1::double precision, extract(epoch from clock_timestamp())),
           current_setting('synchronous_standby_names')
    """,
    double,
)

_KEYS = Statement("select digest, at, outcome from keys where digest = any($1::bytea[]) order by at", byteas)

_COUNTS = Statement(
    """
    select namespace, count(*) from buffers
    where namespace = any($1::text[])
        and (expires is null or expires > coalesce($2::double precision, extract(epoch from clock_timestamp())))
    group by namespace
    """,
    texts,
    double,
)

_RECORDS = Statement(
    """
    select buffers.namespace, buffers.name, buffers.record, buffers.seq
    from unnest($1::text[], $2::text[]) as wanted(namespace, name)
    join buffers on buffers.namespace = wanted.namespace collate "C" and buffers.name = wanted.name collate "C"
    order by buffers.namespace, buffers.name for update of buffers
    """,
    texts,
    texts,
)

_WIDE_RECORDS = Statement(
    """
    select namespace, name, record, seq from buffers
    where (namespace, name) in (
        select namespace collate "C", name collate "C" from unnest($1::text[], $2::text[]) as wanted(namespace, name)
        union
        select buffers.namespace, buffers.name from unnest($3::text[], $4::text[]) as wanted(namespace, prefix)
        join buffers on buffers.namespace = wanted.namespace collate "C"
            and buffers.name >= wanted.prefix collate "C" and starts_with(buffers.name, wanted.prefix)
    )
    order by namespace, name for update of buffers
    """,
    texts,
    texts,
    texts,
    texts,
)
"""The same with all buffers of some prefixes: in one statement, which locks them in the order of their names."""

_CLAIM = Statement(
    "with claimed as (delete from loose where blob = any($1::bigint[]) returning 1) select count(*) from claimed",
    bigints,
)

_DELETE = Statement(
    """
    delete from buffers using unnest($1::text[], $2::text[]) as gone(namespace, name)
    where buffers.namespace = gone.namespace collate "C" and buffers.name = gone.name collate "C"
    """,
    texts,
    texts,
)

_PUT = Statement(
    """
    insert into buffers (namespace, name, record, seq, expires, due)
    select * from unnest($1::text[], $2::text[], $3::bytea[], $4::bigint[], $5::double precision[],
                         $6::double precision[])
    on conflict (namespace, name) do update
    set record = excluded.record, seq = excluded.seq, expires = excluded.expires, due = excluded.due
    """,
    texts,
    texts,
    byteas,
    bigints,
    doubles,
    doubles,
)

FREE = Statement(
    """
    with gone as (delete from deltas where value = any($1::bigint[]) returning blob)
    insert into loose
    select blob, extract(epoch from clock_timestamp()) + $2::double precision from gone where blob is not null
    """,
    bigints,
    double,
)

STAGE = Statement(
    """
    insert into loose
    select blob, extract(epoch from clock_timestamp()) + $1::double precision from unnest($2::bigint[]) as blob
    """,
    double,
    bigints,
)

_REMEMBER = Statement(
    """
    insert into keys (digest, namespace, at, outcome)
    select digest, namespace, $1::double precision, outcome
    from unnest($2::bytea[], $3::text[], $4::bytea[]) as made(digest, namespace, outcome)
    """,
    double,
    byteas,
    texts,
    byteas,
)


class StagedLostError(Exception):
    """A staged blob is gone: the database crashed since, or the blob waited for too long."""


@dataclass(eq=False)
class Job:
    """A request in the queue, and the staged blobs of its gradients, by the identity of their arrays."""

    request: Request
    namespace: str
    done: Future[Outcome] = field(default_factory=Future)
    staged: dict[int, int] = field(default_factory=dict)
    unstaged_bytes: int = 0
    since: float = field(default_factory=time.monotonic)
    """When the request came."""

    @property
    def names(self) -> list[BufferName]:
        return [BufferName(self.namespace, change.name) for change in self.request.changes]


class Batch:
    """Requests that one transaction makes. `answers` are ready once the transaction may have been committed."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.answers: list[Outcome | GradserveError] = []
        self.now = 0.0
        self.server = ""
        """The name of the primary that has made the last attempt."""
        self.replayed = False
        """Whether an answer repeats that of a request that another server may have made a moment ago."""
        self._mark = os.urandom(16)  # a key of the transaction's own: whether it was committed

    def lock(self, database: Database, connection: Connection, key_seconds: float) -> Found | None:
        """Begin the transaction, and return what it finds; None if an earlier attempt was committed after all.

        Raises `StagedLostError`, and `NoStandbyError` if the commit would not wait for one.
        """
        digests = [self._mark, *{digest_of(job.request.key) for job in self.jobs if job.request.key is not None}]
        names = sorted({name for job in self.jobs for name in job.names})
        wide = [(job.namespace, job.request.wide.prefix) for job in self.jobs if job.request.wide is not None]
        # While a prefix is searched, no other server may create buffers in the namespace.
        creating = {job.namespace for job in self.jobs if any(map(_may_create, job.request.changes))}
        growing = sorted(creating | {namespace for namespace, _ in wide})
        blobs = [blob for job in self.jobs for blob in job.staged.values()]
        locks = sorted(zlib.crc32(name.encode()) - (1 << 31) for name in growing)
        clock = database.clock()
        _, ((*_, self.server),), *_, keys, counts, rows, claimed, ((self.now, standbys),) = connection.exchange(
            [
                *database.beginning(),
                _BY_INDEX("off"),
                _LOCK(KEY_LOCK, sorted(map(_number, digests))),
                _LOCK(NAMESPACE_LOCK, locks) if locks else None,
                _KEYS(digests),
                _COUNTS(growing, clock) if growing else None,
                _WIDE_RECORDS(*_columns(names, 2), *_columns(wide, 2)) if wide else _RECORDS(*_columns(names, 2)),
                _CLAIM(blobs) if blobs else None,
                _TIME(clock),
            ],
        )
        known = {digest: outcome for digest, at, outcome in keys if at + key_seconds > self.now or digest == self._mark}
        if self._mark in known:
            connection.execute("rollback")
            return None
        if database.replicated and not standbys:
            raise NoStandbyError("its synchronous_standby_names are empty")
        if blobs and claimed != [(len(blobs),)]:
            raise StagedLostError
        records: dict[BufferName, Stored | BufferCorrupt | None] = dict.fromkeys(names)
        seqs = {}
        for namespace, name, packed, seq in rows:
            full = BufferName(namespace, name)
            try:
                records[full] = stored = Stored(unpack_record(full, packed), seq)
            except BufferCorrupt as error:
                records[full] = error  # the request that needs it gets the error
                continue
            if stored.record.value is not None:
                seqs[stored.record.value] = seq
        return Found(records, known, Counter(dict(counts)), seqs)

    def write(self, connection: Connection, changes: Changes, found: Found) -> bool:
        """Write the changes and commit. Return whether there were any."""
        used = {delta.blob for deltas in changes.deltas.values() for delta in deltas}
        unused = [blob for job in self.jobs for blob in job.staged.values() if blob not in used]
        gone = [name for name, stored in changes.records.items() if stored is None and found.records[name] is not None]
        put = [(*name, *_row(stored)) for name, stored in changes.records.items() if stored is not None]
        deltas = [delta for deltas in changes.deltas.values() for delta in deltas]
        has_changed = bool(changes.records or changes.keys)
        keys = [(digest, key.caller, pack_known(known)) for digest, (key, known) in changes.keys.items()]
        connection.exchange(
            [
                _DELETE(*_columns(gone, 2)) if gone else None,
                _PUT(*_columns(put, 6)) if put else None,
                INSERT(*_columns(deltas, 9)) if deltas else None,
                FREE(changes.freed, FREED_SECONDS) if changes.freed else None,
                STAGE(0.0, unused) if unused else None,
                _REMEMBER(self.now, *_columns([*keys, (self._mark, "", b"")], 3)) if has_changed else None,
                COMMIT(),
            ],
        )
        return has_changed


def _row(stored: Stored) -> tuple[bytes, int, float | None, float | None]:
    return pack_record(stored.record), stored.seq, stored.record.expires, stored.record.due


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> list[list[object]]:
    return [[row[place] for row in rows] for place in range(count)]


def _may_create(change: object) -> bool:
    return isinstance(change, Create | Restore)


def _number(data: bytes) -> int:
    """Return the number of an advisory lock."""
    number: int = struct.unpack_from("<i", data)[0]
    return number
