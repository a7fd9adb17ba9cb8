"""What the writer thread makes: the requests of clients, and the folds that it asks itself for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from service.buffers.batches import COST_OF_BUFFER, MOST_SHARED_BYTES
from service.buffers.changes import Change
from service.buffers.graph_changes import PutGraph
from service.buffers.lmdb.drafts import MOST_OF_GRAPH, Draft, forgetting, make_some
from service.buffers.lmdb.transaction import LmdbTransaction
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request, resolved
from service.buffers.record import Receipt, Record
from service.buffers.room import room_for
from service.buffers.transaction import Transaction
from service.dtypes import Array
from service.errors import GradserveError

Answer: TypeAlias = Outcome | GradserveError | Draft
"""What a transaction makes of a request; a draft needs more transactions."""


class Submission(NamedTuple):
    """A request of a namespace, and the future of its outcome."""

    request: Request
    namespace: str
    done: Future[Outcome]
    draft: Draft | None = None
    """What transactions have written of it: it has begun."""

    def work(self, records: Mapping[BufferName, Record | None]) -> int:
        """Return the work as bytes: of its buffers, as far as they are in `records`, and for each buffer."""
        changes, graph = self.request.changes, self.request.hidden
        work = COST_OF_BUFFER * (1 + len(changes))
        work += min(graph.content.size, MOST_OF_GRAPH) if isinstance(graph, PutGraph) else 0
        for change in changes:
            if work > MOST_SHARED_BYTES:
                break
            record = records.get(BufferName(self.namespace, change.name))
            work += 0 if record is None else record.spec.nbytes
        return work

    def begin(self, *, closing: bool) -> bool:
        """Return whether to make it: its client still waits, and it is no fold of a store that is `closing`."""
        if self.draft is not None:
            return True
        return not (closing and self.is_fold) and self.done.set_running_or_notify_cancel()

    def make(self, txn: LmdbTransaction, now: float, max_bytes: int) -> tuple[Outcome | Draft, int]:
        """Make the request, or some of it. Return the outcome or the draft, and what the store may hold after it."""
        request = resolved(txn, self.request, self.namespace)
        made = make_some(txn, self.draft, request, self.namespace, now)
        return made, room_for(request, made if isinstance(made, Outcome) else Outcome({}, is_new=True), max_bytes)

    def forgetting(self) -> list[Submission]:
        """Return the request that frees what was written, if anything was."""
        return [] if self.draft is None else [Submission(forgetting(self.draft), self.namespace, Future())]

    def is_ended_by(self, answer: Answer) -> bool:
        """Return whether a client has its answer."""
        return not (self.is_fold or isinstance(answer, Draft))

    @property
    def is_fold(self) -> bool:
        """Whether no client waits for it."""
        changes = self.request.changes
        return len(changes) > 0 and isinstance(changes[0], Fold)


class UndoneError(Exception):
    """A request failed after it had changed something: its transaction must be undone."""

    def __init__(self, submission: Submission, error: Exception) -> None:
        self.submission, self.error = submission, error


@dataclass(kw_only=True)
class Fold(Change):
    """The addition of some of what waits for a value, running or closed, if the buffer still has the value.

    Nothing that a client sees changes. Without a fold every read adds what waits, and the next add folds it.
    """

    value: int

    def admit(self, record: Record | None) -> None:
        """Allow the fold, even of nothing."""

    def apply(self, txn: Transaction, name: BufferName, record: Any, now: float) -> tuple[Receipt, Array | None]:
        if record is not None and self.value in record.values:
            assert isinstance(txn, LmdbTransaction)
            txn.fold(record, self.value)
        return {}, None


def folds(values: Mapping[int, BufferName]) -> list[Submission]:
    """Return a request for each of these values, which namespaces pay for as for their own."""
    return [
        Submission(Request([Fold(name=name.name, value=value)]), name.namespace, Future())
        for value, name in values.items()
    ]
