"""The steps of a push in parts, in terms of a store's `Transaction`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.buffers.changes import Add, Addition
from service.buffers.gradients import add_whole, check_finite, norm_of, stored_bytes
from service.buffers.names import BufferName
from service.buffers.pushes import Part, Push, Staged, StagedPart, damaged
from service.buffers.record import Record, name_buffer
from service.buffers.transaction import Transaction
from service.errors import BufferCorrupt, Invalid, MissingTensor, NonfiniteGradient, NormTooLarge, UnknownBuffer


@dataclass(kw_only=True)
class AddStaged(Addition):
    """The addition of a staged gradient, which frees it."""

    staged: Staged

    def admit(self, record: Record | None) -> None:
        super().admit(record)
        assert record is not None
        if record.id != self.staged.buffer:
            problem = f"The buffer {self.name!r} was deleted and created again after the push had staged its gradient"
            raise UnknownBuffer(problem, buffer=self.name)

    def _sum(self, txn: Transaction, record: Record) -> int | None:
        if self.staged.place is None:
            return record.value
        return txn.add_staged(record, self.staged.place, self.weight)


Admitted = Sequence[tuple[BufferName, Add, Record]]
"""The adds of a part, each with its buffer, which takes the gradient."""


def staged_part(txn: Transaction, part: Part, adds: Admitted, norms: Mapping[str, float]) -> StagedPart:
    """Stage the gradients of a part, which have these `norms`. Raises `StoreFull`."""
    gradients = {}
    counting = [(name, record, add.onto(record.spec) if add.counts else None) for name, add, record in adds]
    sizes = [0 if each is None else stored_bytes(each) for _, _, each in counting]
    txn.admit_part(part.caller, sum(sizes))
    for (name, record, gradient), size in zip(counting, sizes, strict=True):
        place = None if gradient is None else txn.stage(record, gradient)
        gradients[name.name] = (record.id, place, size)
    return StagedPart(part.mark, gradients, norms)


def check_part(adds: Admitted) -> dict[str, float]:
    """Return the 2-norms of the gradients whose buffers have a `max_norm`. Raises `NonfiniteGradient`."""
    for name, add, record in adds:
        if add.counts:
            try:
                check_finite(record.spec, add.onto(record.spec), add.weight)
            except NonfiniteGradient as error:
                error.context["tensor"] = add.tensor
                name_buffer(error, name.name, one_of_many=len(adds) > 1)
                raise
    limited = [(name.name, add.onto(record.spec)) for name, add, record in adds if _is_limited(record) and add.counts]
    return {name: norm_of(gradient) for name, gradient in limited}


def _is_limited(record: Record) -> bool:
    return record.spec.max_norm is not None


def check_norm(push: Push, norm: float, records: Mapping[str, Record]) -> None:
    """Raise `NormTooLarge` if the 2-norm of a push, or of the parts so far, is above the `max_norm` of a buffer.

    The 2-norm is that of the gradients whose buffers have a `max_norm`.
    """
    for name, record in records.items():
        most = record.spec.max_norm
        if most is not None and push.weight and not norm <= most:
            problem = f"The push has the 2-norm {norm}, but the buffer {name!r} takes up to {most} (max_norm)"
            raise NormTooLarge(problem, buffer=name, norm=norm if math.isfinite(norm) else None, max_norm=most)


def norm_so_far(push: Push) -> float:
    """Return the 2-norm of all gradients whose norms are known."""
    return math.hypot(*(norm for part in push.staged.values() for norm in part.norms.values()))


def norm_of_push(txn: Transaction, push: Push, records: Mapping[str, Record]) -> float:
    """Return the 2-norm of a complete push. A gradient is read if its buffer has got its `max_norm` since."""
    norms = []
    for number, name, staged in push.gradients:
        if staged.place is not None and _is_limited(records[name]):
            known = push.staged[number].norms.get(name)
            norms.append(norm_of(txn.staged(records[name].spec, staged.place)) if known is None else known)
    return math.hypot(*norms)


def check_complete(txn: Transaction, push: Push, records: Mapping[str, Record]) -> None:
    """Raise unless the buffers take the complete push: one gradient for each, of a norm and with sums that they allow.

    Raises `MissingTensor`, `Invalid`, `NormTooLarge` and `NonfiniteGradient`.
    """
    if not push.gradients:
        raise MissingTensor("The push has no tensors; accumulate needs one per buffer, under the buffer's name")
    parts: dict[str, int] = {}
    for number, name, _ in push.gradients:
        if name in parts:
            raise Invalid(f"Parts {parts[name]} and {number} both have {name!r}; a push may change each buffer once")
        parts[name] = number
    if any(map(_is_limited, records.values())):
        check_norm(push, norm_of_push(txn, push, records), records)
    for _, name, staged in push.gradients:
        spec, place = records[name].spec, staged.place
        if spec.nonfinite == "reject" and place is not None:
            total = txn.load(spec, records[name].value).reshape(-1)
            try:
                add_whole(spec, total, total, txn.staged(spec, place), push.weight, overwrite=False)
            except NonfiniteGradient as error:
                name_buffer(error, name, one_of_many=True)
                raise


def push_of(txn: Transaction, name: BufferName) -> Push | None:
    """Return the push, even if its time is over. Raises `BufferCorrupt`."""
    try:
        record = txn.get(name)
    except BufferCorrupt:
        raise damaged(name) from None
    return None if record is None else Push.of(record)


def put_push(txn: Transaction, name: BufferName, push: Push, now: float) -> None:
    """Store the push in place of its earlier state."""
    if txn.get(name) is None:
        txn.count_new(name, now)
    txn.put(push.record(name))
