"""The two round trips of a writer's transaction.

The first locks and reads all that the requests name. The second writes all that they changed, and commits. Parts of
pushes take one more before: their keys and pushes say which buffers the first locks.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import psycopg
from psycopg.errors import DiskFull

from service.buffers import perform
from service.buffers.batches import COST_OF_BUFFER
from service.buffers.changes import Add, Create
from service.buffers.gradients import Gradient, Rows, adds_nothing
from service.buffers.graph_changes import PutGraph
from service.buffers.names import BufferName, runs_of
from service.buffers.packed import digest_of, pack_known, pack_record, unpack_record
from service.buffers.perform import Outcome, Request
from service.buffers.postgres import statements as sql
from service.buffers.postgres.changes import Changes, Found
from service.buffers.postgres.connections import Database
from service.buffers.postgres.deltas import nbytes_of, source_of
from service.buffers.postgres.exchange import Connection, ResultRows, columns
from service.buffers.postgres.failures import MovedError, NoStandbyError, is_damage
from service.buffers.postgres.pushes import MOVE, STAGED_BYTES, STAGED_VALUES, Stored, needed_by
from service.buffers.postgres.schema import FREED_SECONDS, ROW_BYTES
from service.buffers.restore import Restore
from service.buffers.sets import Set
from service.errors import BufferCorrupt, GradserveError


class StagedLostError(Exception):
    """A staged blob is gone: the database crashed since, or the blob waited for too long."""


@dataclass(eq=False)
class Submission:
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
        """The buffers that the request may read or change, as far as it says."""
        names, hidden = [BufferName(self.namespace, one.name) for one in self.request.changes], self.request.hidden
        specs = [one.spec for one in self.request.changes if isinstance(one, (Create, Set))]
        runs = {spec.run for spec in specs if spec is not None and spec.run is not None}
        names += [BufferName(runs_of(self.namespace), run) for run in runs]
        return names if hidden is None else [*names, hidden.buffer(self.namespace)]


def work_of(submission: Submission) -> int:
    """Return the work of a request in the transaction, as bytes: those that it writes there, and for each buffer."""
    return submission.unstaged_bytes + COST_OF_BUFFER * (1 + len(submission.request.changes))


def large_arrays(submission: Submission) -> dict[int, Gradient]:
    """Return the arrays of the request that are too large for a row, by their identity. Sum up the others."""
    changes, graph = submission.request.changes, submission.request.hidden
    added = [one.gradient for one in changes if isinstance(one, Add) and one.do_update and one.weight]
    gradients = [one.gathered if isinstance(one, Rows) else one for one in added if not adds_nothing(one)]
    arrays = [change.value for change in changes if isinstance(change, Restore)]
    arrays += [graph.content] if isinstance(graph, PutGraph) else []
    sources = {id(one): source_of(one) for one in (*gradients, *arrays) if one is not None}
    sizes = {key: nbytes_of(source) for key, source in sources.items()}
    submission.unstaged_bytes = sum(size for size in sizes.values() if size <= ROW_BYTES)
    return {key: source for key, source in sources.items() if sizes[key] > ROW_BYTES}


class Batch:
    """Requests that one transaction makes. `answers` are ready once the transaction may have been committed.

    `marks` are those of the writer's transactions before, and the times at which they were stored. A commit replaces
    them: only for the last transaction the writer may have to ask whether it was committed.
    """

    def __init__(self, submissions: Sequence[Submission], marks: list[tuple[bytes, float]]) -> None:
        self.submissions, self._marks = submissions, marks
        self.answers: list[Outcome | GradserveError] = []
        self.changes = Changes()
        self.now = 0.0
        self.may_be_committed = False
        """Whether an attempt may be: then only the same batch may be made again, for its mark says whether it is."""
        self._claimed: ResultRows = []
        """The staged blobs, and their bytes."""
        self._mark = os.urandom(16)  # a key of the transaction's own: whether it was committed

    def find(
        self, database: Database, connection: Connection, key_seconds: float, *, locks: bool = True
    ) -> Found | None:
        """Begin the transaction, and return what it finds; None if an earlier attempt was committed after all.

        It `locks` what it finds. Else it ends at once.

        Raises `TooManyTensors` if all records are too large together, `StagedLostError`, and `NoStandbyError` if the
        commit would not wait for one.
        """
        parts = [one.request.part for one in self.submissions if one.request.part is not None]
        own_keys = [one.request.key for one in self.submissions if one.request.key is not None]
        digests = [self._mark, *{digest_of(key) for key in (*own_keys, *(part.key for part in parts))}]
        clock, said, most = database.clock(), list[ResultRows](), perform.MAX_CHANGED_BYTES
        pushes: dict[BufferName, Stored | BufferCorrupt | None] = {}
        needed, values, staged_bytes = set[BufferName](), set[int](), Counter[str]()
        keys_first = [
            *database.beginning(),
            sql.BY_INDEX(),
            sql.LOCK(sql.KEY_LOCK, sorted(map(_number, digests))) if locks else None,
            sql.KEYS(digests),
        ]
        if parts:  # only their pushes say which other buffers they need
            heads = sorted({part.name for part in parts})
            finding = sql.NAMED_RECORDS[locks](most, *columns(heads, 2))
            counting = STAGED_BYTES(sorted({head.namespace for head in heads}), clock)
            *said, rows, sizes = connection.exchange([*keys_first, finding, counting])
            pushes, _ = _records(heads, rows)
            staged_bytes.update(dict(sizes))
            needed, values = needed_by(parts, pushes, {digest: outcome for digest, _, outcome in said[-1]})
            keys_first = []
        names = sorted({name for one in self.submissions for name in one.names} | needed)
        wide = [(one.namespace, one.request.wide.prefix) for one in self.submissions if one.request.wide is not None]
        # While a prefix is searched, no other server may create buffers in the namespace.
        creating = {one.namespace for one in self.submissions if any(map(_may_create, one.request.changes))}
        changed = [(one.namespace, one.request.hidden) for one in self.submissions]
        hidden = {change.buffer(namespace).namespace for namespace, change in changed if change is not None}
        growing = sorted(creating | hidden | {namespace for namespace, _ in wide})
        blobs = [blob for one in self.submissions for blob in one.staged.values()]
        numbers = sorted(zlib.crc32(name.encode()) - (1 << 31) for name in growing)
        named, reading = columns(names, 2), sql.WIDE_RECORDS if wide else sql.NAMED_RECORDS
        said += connection.exchange(
            [
                *keys_first,
                sql.LOCK(sql.NAMESPACE_LOCK, numbers) if locks and numbers else None,
                sql.COUNTS(growing, clock) if growing else None,
                reading[locks](most, *named, *columns(wide, 2 * bool(wide))),
                sql.CLAIM(blobs) if blobs else None,
                STAGED_VALUES([*values]) if values else None,
                sql.TIME(clock),
                None if locks else sql.COMMIT(),
            ]
        )
        _, _, _, _, keys, _, counts, rows, self._claimed, staged, ((self.now, standbys),), _ = said
        known = {digest: outcome for digest, at, outcome in keys if at + key_seconds > self.now or digest == self._mark}
        if not known.keys() <= set(digests):  # the index leads to a digest that has changed on the disk
            raise BufferCorrupt("The stored digest of this Idempotency-Key is damaged on the disk")
        if self._mark in known:
            connection.execute("rollback")
            executions = [*database.beginning(), sql.KEYS([self._mark])]
            if not database.commit(connection, executions, fenced=True)[-1]:
                raise MovedError("it has failed over")
            return None
        self.may_be_committed = False
        if database.replicated and not standbys:
            raise NoStandbyError("its synchronous_standby_names are empty")
        if len(self._claimed) < len(blobs):
            raise StagedLostError
        records, seqs = _records(names, rows)
        staged_values = {value for (value,) in staged}
        return Found(pushes | records, known, Counter(dict(counts)), seqs, staged_bytes, staged_values)

    def write(self, database: Database, connection: Connection, found: Found) -> None:
        """Write the changes and commit."""
        changes = self.changes
        used = {delta.blob for deltas in changes.deltas.values() for delta in deltas}
        unused = [claimed for claimed in self._claimed if claimed[0] not in used]
        gone = [name for name, stored in changes.records.items() if stored is None and found.records[name] is not None]
        put = [(*name, *_row(stored)) for name, stored in changes.records.items() if stored is not None]
        deltas = [delta for deltas in changes.deltas.values() for delta in deltas if delta.staged is None]
        moved = [(one.staged, *one) for deltas in changes.deltas.values() for one in deltas if one.staged is not None]
        keys = [(digest, key.caller, pack_known(known)) for digest, (key, known) in changes.keys.items()]
        old = [*self._marks]
        if changes:
            self._marks.append((self._mark, self.now))
        self.may_be_committed = True
        try:
            database.commit(
                connection,
                [
                    sql.DELETE(*columns(gone, 2)) if gone else None,
                    sql.PUT(*columns(put, 6)) if put else None,
                    sql.INSERT(*columns(deltas, 9)) if deltas else None,
                    MOVE(*columns(moved, 4)) if moved else None,
                    sql.FREE(changes.freed, None, FREED_SECONDS) if changes.freed else None,
                    sql.STAGE(0.0, *columns(unused, 2)) if unused else None,
                    sql.REMEMBER(self.now, *columns([*keys, (self._mark, "", b"")], 3)) if changes else None,
                    sql.FORGET_MARKS(*columns(old, 2)) if changes and old else None,
                ],
                fenced=not changes,
            )
        except psycopg.Error as error:
            self.may_be_committed = not (isinstance(error, DiskFull) or is_damage(error))
            raise
        if changes:
            del self._marks[: len(old)]


def _row(stored: Stored) -> tuple[bytes, int, float | None, float | None]:
    return pack_record(stored.record), stored.seq, stored.record.expires, stored.record.due


def _records(
    names: Sequence[BufferName], rows: ResultRows
) -> tuple[dict[BufferName, Stored | BufferCorrupt | None], dict[int, int]]:
    """Return the buffers of these names and those of the rows, and the `seq` of the last delta of each sum.

    Raises `TooManyTensors` if they are too large together.
    """
    if any(packed is None for _, _, packed, _ in rows):
        perform.check_records(perform.MAX_CHANGED_BYTES + 1)
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
    return records, seqs


def _may_create(change: object) -> bool:
    return isinstance(change, Create | Restore) or (isinstance(change, Set) and change.spec is not None)


def _number(data: bytes) -> int:
    """Return the number of an advisory lock."""
    return int.from_bytes(data[:4], "little", signed=True)
