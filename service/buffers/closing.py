"""The end of an epoch, in terms of a store's `Transaction`."""

from __future__ import annotations

from service.buffers.epochs import Closed, ClosedBy
from service.buffers.record import Record
from service.buffers.transaction import Transaction


def close(txn: Transaction, record: Record, by: ClosedBy) -> tuple[Record, Closed]:
    """Close the epoch: keep its value as a closed epoch, and begin the next epoch."""
    closed = Closed(record.epoch, record.version, record.count, record.weight, record.value, by, record.contributors_in)
    epochs = (*record.closed, closed)
    for old in epochs[: -record.spec.keep]:
        txn.free(old.value)
    record = next_epoch(record).changed(closed=epochs[-record.spec.keep :])
    txn.put(record)
    return record, closed


def next_epoch(record: Record) -> Record:
    """Return the record at the begin of its next epoch."""
    return record.changed(epoch=record.epoch + 1, count=0, weight=0.0, value=None, began=None, contributors_in={})


def close_if_due(txn: Transaction, record: Record, now: float) -> Record:
    """Close the epoch if its deadline is over. Return the record after that.

    The result depends on the record alone, not on the moment: the deadline counts as a change when it ends.
    """
    if record.began is None or (due := record.due) is None or due > now:
        return record
    return close(txn, record.changed(updated=max(record.updated, due), version=record.version + 1), "deadline")[0]
