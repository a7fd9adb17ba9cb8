"""What the writer thread makes: the requests of clients, and the folds that it asks itself for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from service.buffers.changes import Change
from service.buffers.lmdb.staging import Staging
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.record import Receipt, Record
from service.buffers.transaction import Transaction
from service.dtypes import Array


class Submission(NamedTuple):
    """A request of a namespace, and the future of its outcome."""

    request: Request
    namespace: str
    done: Future[Outcome]

    def begin(self, *, closing: bool) -> bool:
        """Return whether to make it: its client still waits, and it is no fold of a store that is `closing`."""
        return not (closing and self.is_fold) and self.done.set_running_or_notify_cancel()

    @property
    def is_fold(self) -> bool:
        """Whether no client waits for it."""
        changes = self.request.changes
        return len(changes) > 0 and isinstance(changes[0], Fold)


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
            assert isinstance(txn, Staging)
            txn.fold(record, self.value)
        return {}, None


def folds(values: Mapping[int, BufferName]) -> list[Submission]:
    """Return a request for each of these values, which namespaces pay for as for their own."""
    return [
        Submission(Request([Fold(name=name.name, value=value)]), name.namespace, Future())
        for value, name in values.items()
    ]
