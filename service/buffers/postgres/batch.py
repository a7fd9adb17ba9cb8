"""The two round trips of a writer's transaction.

The first locks and reads all that the requests name. The second writes all that they changed, and commits.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from service.buffers.changes import Create, Restore
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.postgres.connections import Connection, Database, NoStandbyError
from service.buffers.postgres.deltas import insert_deltas
from service.buffers.postgres.schema import FREED_SECONDS
from service.buffers.postgres.transaction import (
    Changes,
    Found,
    Stored,
    digest_of,
    pack_known,
    pack_record,
    unpack_known,
    unpack_record,
)
from service.errors import GradserveError

KEY_LOCK = 1
"""The class of the advisory locks of keys."""

NAMESPACE_LOCK = 2
"""The class of the advisory locks of namespaces."""

_LOCK = "select pg_advisory_xact_lock(%s, lock) from unnest(%b::integer[]) as lock"

NOW = "select extract(epoch from clock_timestamp())::double precision"

_STANDBYS = "select current_setting('synchronous_standby_names')"

_KEYS = "select digest, at, outcome from keys where digest = any(%b::bytea[]) order by at"

_COUNTS = """
    select namespace, count(*) from buffers
    where namespace = any(%s)
        and (expires is null or expires > coalesce(%s::double precision, extract(epoch from clock_timestamp())))
    group by namespace
"""

_RECORDS = """
    select buffers.namespace, buffers.name, buffers.record, buffers.seq
    from unnest(%b::text[], %b::text[]) as wanted(namespace, name)
    join buffers on buffers.namespace = wanted.namespace collate "C" and buffers.name = wanted.name collate "C"
    order by buffers.namespace, buffers.name for update of buffers
"""

_CLAIM = "with claimed as (delete from loose where blob = any(%s) returning 1) select count(*) from claimed"

_DELETE = """
    delete from buffers using unnest(%b::text[], %b::text[]) as gone(namespace, name)
    where buffers.namespace = gone.namespace collate "C" and buffers.name = gone.name collate "C"
"""

_PUT = """
    insert into buffers (namespace, name, record, seq, expires)
    select * from unnest(%b::text[], %b::text[], %b::bytea[], %b::bigint[], %b::double precision[])
    on conflict (namespace, name) do update set record = excluded.record, seq = excluded.seq, expires = excluded.expires
"""

FREE = """
    with gone as (delete from deltas where value = any(%s) returning blob)
    insert into loose select blob, extract(epoch from clock_timestamp()) + %s from gone where blob is not null
"""

_LOOSEN = "insert into loose select blob, extract(epoch from clock_timestamp()) from unnest(%b::bigint[]) as blob"

_REMEMBER = """
    insert into keys (digest, namespace, at, outcome)
    select digest, namespace, %s, outcome
    from unnest(%b::bytea[], %b::text[], %b::bytea[]) as made(digest, namespace, outcome)
"""

FENCE = "select pg_logical_emit_message(true, 'gradserve', '')"
"""Writes to the log of the database: once the commit returns, the standby has everything that came before."""


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

    @property
    def names(self) -> list[BufferName]:
        return [BufferName(self.namespace, change.name) for change in self.request.changes]


class Batch:
    """Requests that one transaction makes. `answers` are ready once the transaction may have been committed."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.answers: list[Outcome | GradserveError] = []
        self.now = 0.0
        self.replayed = False
        """Whether an answer repeats that of a request that another server may have made a moment ago."""
        self._mark = os.urandom(16)  # a key of the transaction's own: whether it was committed

    def lock(self, database: Database, connection: Connection, clock: float | None, key_seconds: float) -> Found | None:
        """Begin the transaction, and return what it finds; None if an earlier attempt was committed after all.

        Raises `StagedLostError`, and `NoStandbyError` if the commit would not wait for one.
        """
        digests = [self._mark, *{digest_of(job.request.key) for job in self.jobs if job.request.key is not None}]
        names = sorted({name for job in self.jobs for name in job.names})
        growing = sorted({job.namespace for job in self.jobs if any(map(_may_create, job.request.changes))})
        blobs = [blob for job in self.jobs for blob in job.staged.values()]
        with connection.pipeline():
            database.begin(connection)
            connection.execute(_LOCK, (KEY_LOCK, sorted(map(_number, digests))))
            connection.execute(
                _LOCK, (NAMESPACE_LOCK, sorted(zlib.crc32(name.encode()) - (1 << 31) for name in growing))
            )
            keys = connection.execute(_KEYS, (digests,), binary=True)
            counts = connection.execute(_COUNTS, (growing, clock)) if growing else None
            rows = connection.execute(_RECORDS, _columns(names, 2), binary=True)
            claimed = connection.execute(_CLAIM, (blobs,)) if blobs else None
            time, standbys = connection.execute(NOW), connection.execute(_STANDBYS)
        self.now = time.fetchall()[0][0] if clock is None else clock
        known = {digest: outcome for digest, at, outcome in keys if at + key_seconds > self.now or digest == self._mark}
        if self._mark in known:
            connection.execute("rollback")
            return None
        if database.replicated and standbys.fetchall() == [("",)]:
            raise NoStandbyError("its synchronous_standby_names are empty")
        if claimed is not None and claimed.fetchall() != [(len(blobs),)]:
            raise StagedLostError
        records: dict[BufferName, Stored | None] = dict.fromkeys(names)
        for namespace, name, packed, seq in rows:
            full = BufferName(namespace, name)
            records[full] = Stored(unpack_record(full, packed), seq)
        found = {digest: unpack_known(outcome) for digest, outcome in known.items()}
        return Found(records, found, Counter(dict(counts or ())))

    def write(self, connection: Connection, changes: Changes, found: Found) -> bool:
        """Write the changes and commit. Return whether there were any."""
        used = {delta.blob for deltas in changes.deltas.values() for delta in deltas}
        unused = [blob for job in self.jobs for blob in job.staged.values() if blob not in used]
        gone = [name for name, stored in changes.records.items() if stored is None and found.records[name] is not None]
        put = [(*name, *_row(stored)) for name, stored in changes.records.items() if stored is not None]
        deltas = [delta for deltas in changes.deltas.values() for delta in deltas]
        has_changed = bool(changes.records or changes.keys)
        with connection.pipeline():
            if gone:
                connection.execute(_DELETE, _columns(gone, 2))
            if put:
                connection.execute(_PUT, _columns(put, 5))
            if deltas:
                insert_deltas(connection, deltas)
            if changes.freed:
                connection.execute(FREE, (changes.freed, FREED_SECONDS))
            if unused:
                connection.execute(_LOOSEN, (unused,))
            if has_changed:
                keys = [(digest, key.caller, pack_known(known)) for digest, (key, known) in changes.keys.items()]
                columns = _columns([*keys, (self._mark, "", b"")], 3)
                connection.execute(_REMEMBER, (self.now, *columns))
            connection.execute("commit")
        return has_changed


def _row(stored: Stored) -> tuple[bytes, int, float | None]:
    return pack_record(stored.record), stored.seq, stored.record.expires


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> list[list[object]]:
    return [[row[place] for row in rows] for place in range(count)]


def _may_create(change: object) -> bool:
    return isinstance(change, Create | Restore)


def _number(data: bytes) -> int:
    """Return the number of an advisory lock."""
    number: int = struct.unpack_from("<i", data)[0]
    return number
