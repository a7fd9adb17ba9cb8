"""The change that brings a buffer from an export back."""

from __future__ import annotations

from dataclasses import dataclass

from service.buffers.changes import Change
from service.buffers.gradients import Dense
from service.buffers.names import BufferName
from service.buffers.record import Receipt, Record
from service.buffers.transaction import Transaction
from service.dtypes import Array
from service.errors import BufferExists


@dataclass(kw_only=True)
class Restore(Change):
    """Create the buffer with the state and the value that it had in another store, without closed steps."""

    record: Record
    value: Array

    def admit(self, record: Record | None) -> None:
        if record is not None:
            raise BufferExists(f"There is a buffer {self.name!r} already", buffer=self.name)

    def apply(self, txn: Transaction, name: BufferName, record: None, now: float) -> tuple[Receipt, Array | None]:
        txn.count_new(name, now)
        new = self.record.changed(full_name=name, id=txn.new_id(), value=None, closed=(), updated=now)
        new = new.changed(value=txn.accumulate(new, Dense(self.value, new.spec.shape), 1.0, True))
        txn.put(new)
        return new.receipt(updated=True), None
