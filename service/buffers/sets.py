"""The changes of a step that was computed from buffers: it writes outputs over buffers, if no source has changed."""

from __future__ import annotations

from dataclasses import dataclass

from service.buffers.changes import Add, Change
from service.buffers.lives import new_buffer
from service.buffers.names import BufferName
from service.buffers.record import Receipt, Record, Spec
from service.buffers.transaction import Transaction
from service.dtypes import Array
from service.errors import GradserveError, PreconditionFailed, ShapeMismatch


@dataclass(kw_only=True)
class Unchanged(Change):
    """The condition that a buffer still has the `state` from which a step was computed. It is not applied."""


@dataclass(kw_only=True)
class Set(Add):
    """Replace the sum by the gradient, which has exactly the buffer's shape, with the weight 1.

    With `spec` create the buffer if it is missing: then the receipt has `created`. With a `state` it must exist.
    """

    overwrite: bool = True
    spec: Spec | None = None
    refusal: GradserveError | None = None
    """Why no new buffer may be like this, if so."""

    def admit(self, record: Record | None) -> None:
        super().admit(self._new() if record is None and self.state is None else record)

    def admit_part(self, record: Record | None) -> None:
        super().admit_part(record)
        assert record is not None
        if self.gradient.shape != record.spec.shape:
            found, expected = [*(self.gradient.shape or ())], [*record.spec.shape]
            problem = f"{self.tensor} has shape {found}, but set= needs that of the buffer {self.name!r}, {expected}"
            raise ShapeMismatch(problem, buffer=self.name, tensor=self.tensor)

    def _new(self) -> Record | None:
        """Return what the buffer is before its first value; None if it may not be created. Raises the `refusal`."""
        if self.spec is None:
            return None
        if self.match is not None:
            raise PreconditionFailed(f"There is no buffer {self.name!r}, but If-Match needs one", buffer=self.name)
        if self.refusal is not None:
            raise self.refusal
        return Record(BufferName("", self.name), self.spec, 0, 0.0, 0.0)

    def apply(
        self, txn: Transaction, name: BufferName, record: Record | None, now: float
    ) -> tuple[Receipt, Array | None]:
        if record is not None:
            return super().apply(txn, name, record, now)
        assert self.spec is not None
        receipt, value = super().apply(txn, name, new_buffer(txn, name, self.spec, now), now)
        return {**receipt, "created": True}, value
