"""A request for a part of a push: the part is staged, and the part that completes the push makes all its adds."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from service.buffers.changes import Add, Change
from service.buffers.graph_changes import HiddenChange, marks_of
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request, alive, check_records, check_same_buffer, perform
from service.buffers.pushes import Part, Push, StagedPart
from service.buffers.record import Known, Record, name_buffer
from service.buffers.sets import Set
from service.buffers.staging import (
    AddStaged,
    Admitted,
    check_complete,
    check_norm,
    check_part,
    norm_so_far,
    push_of,
    put_push,
    staged_part,
)
from service.buffers.transaction import Transaction
from service.errors import BufferCorrupt, GradserveError, shown


class Forget(Change):
    """The wish to forget a push that is not complete."""

    def __init__(self) -> None:
        super().__init__(name="")


class Refused(Change):
    """A part that was refused before its gradients were known: it drops the push."""

    def __init__(self, error: GradserveError) -> None:
        super().__init__(name=str(error.context.get("buffer", "")))
        self.error = error


def make(txn: Transaction, request: Request, namespace: str, now: float) -> Outcome:
    """Make the changes of a `resolved` request, as `perform` does, or those of the push that its part completes."""
    if request.hidden is not None:
        return _make_with_hidden(txn, request, request.hidden, namespace, now)
    if request.part is None:
        return perform(txn, request, namespace, now)
    if any(isinstance(change, Forget) for change in request.changes):
        return _forget(txn, request.part, now)
    return _make_part(txn, request.part, request.changes, now)


def _make_with_hidden(txn: Transaction, request: Request, change: HiddenChange, namespace: str, now: float) -> Outcome:
    """Make the change of a graph or a run, and those of buffers. After every error the store must undo changes."""
    if request.key is not None and txn.recall(request.key, ()) is not None:
        outcome = perform(txn, request, namespace, now)
        graph, is_new = change.again(txn, namespace, outcome.sources)
    else:
        graph, is_new = change.make(txn, namespace, now)
        changes = request.changes if is_new else [_first(txn, one, namespace, now) for one in request.changes]
        outcome = perform(txn, replace(request, changes=changes, sources=marks_of(graph, is_new)), namespace, now)
    return replace(outcome, graph=graph, is_new=is_new, sources=())


def _first(txn: Transaction, change: Change, namespace: str, now: float) -> Change:
    """Return the change for a graph that is there already: a buffer that exists keeps its value.

    So a worker that puts the model when others train already sets nothing back.
    """
    exists = alive(txn, BufferName(namespace, change.name), now) is not None
    return replace(change, do_update=False) if exists and isinstance(change, Set) else change


def _forget(txn: Transaction, part: Part, now: float) -> Outcome:
    """Forget the push if it is not complete, and free what it has staged: these parts. None if it is damaged."""
    push = None
    try:
        push = push_of(txn, part.name)
    except BufferCorrupt:
        txn.forget(part.name)  # what it has staged stays until an export
    if push is None:
        return Outcome({}, staged=[])
    txn.remove(push.record(part.name))
    return Outcome({}, staged=push.numbers if push.until > now else [])


def _make_part(txn: Transaction, part: Part, changes: Sequence[Change], now: float) -> Outcome:
    """Stage the gradients of a part, or complete its push. An error that drops the push is in the outcome."""
    if (known := txn.recall(part.key, ())) is not None:
        return _complete_before(txn, part, known, now)
    push = push_of(txn, part.name)
    if push is not None and push.until <= now:
        txn.remove(push.record(part.name))
        push = None
    if push is not None:
        push.check_not_refused()
        if part.number in push.staged:
            part.check_same([push.staged[part.number].mark], push.numbers)
            return Outcome({}, replayed=True, staged=push.numbers)
    push = push or Push.begun(part, now)
    try:
        push.check_same(part)
        push.check_count(part, len(changes))
        adds = _admitted(txn, part, changes, now)
        norms = check_part(adds)
        push = push.with_part(part.number, StagedPart(part.mark, {}, norms))
        check_norm(push, norm_so_far(push), {name.name: record for name, _, record in adds})
    except GradserveError as error:
        return _refused(txn, part, push, error, now)
    push = push.with_part(part.number, staged_part(txn, part, adds, norms))
    if len(push.staged) == push.parts:
        return _complete(txn, part, push, now)
    put_push(txn, part.name, push, now)
    return Outcome({}, staged=push.numbers)


def to_stage(txn: Transaction, part: Part, changes: Sequence[Change], now: float) -> Admitted | None:
    """Return the adds that `make` would stage, or refuse for their numbers. Return None if it would not come so far."""
    if any(isinstance(change, Forget) for change in changes):
        return None
    try:
        push = push_of(txn, part.name) or Push.begun(part, now)
        if push.until > now:
            push.check_not_refused()
            push.check_same(part)
            if part.number in push.staged:
                return None
        return None if txn.recall(part.key, ()) is not None else _admitted(txn, part, changes, now)
    except GradserveError:
        return None


def _admitted(
    txn: Transaction, part: Part, changes: Sequence[Change], now: float
) -> list[tuple[BufferName, Add, Record]]:
    admitted = []
    for change in changes:
        if isinstance(change, Refused):
            raise copy(change.error)  # the store may make the request again, and the error gets a further sentence
        assert isinstance(change, Add)
        name = BufferName(part.caller, change.name)
        try:
            record = alive(txn, name, now)
            change.admit_part(record)
        except GradserveError as error:
            name_buffer(error, change.name, one_of_many=len(changes) > 1)
            raise
        assert record is not None
        admitted.append((name, change, record))
    return admitted


def _complete(txn: Transaction, part: Part, push: Push, now: float) -> Outcome:
    """Add all gradients of the push, or none."""
    txn.admit_key(part.key)
    records: dict[str, Record] = {}
    adds, nbytes = [], 0
    try:
        for _, buffer, staged in push.gradients:
            name = BufferName(part.caller, buffer)
            add = AddStaged(
                name=buffer, weight=push.weight, step=push.step, contributor=push.contributor, staged=staged
            )
            record = alive(txn, name, now)
            try:
                add.admit(record)
            except GradserveError as error:
                name_buffer(error, buffer, one_of_many=True)
                raise
            assert record is not None
            check_records(nbytes := nbytes + record.packed_bytes)
            records[buffer] = record
            adds.append((name, add, record))
        check_complete(txn, push, records)
    except GradserveError as error:
        return _refused(txn, part, push, error, now)
    receipts = {add.name: add.apply(txn, name, record, now)[0] for name, add, record in adds}
    if txn.get(part.name) is not None:  # a push of one part was never stored
        txn.forget(part.name)
    marks = tuple(push.staged[number].mark for number in push.numbers)
    ids = {buffer: record.id for buffer, record in records.items()}
    txn.remember(part.key, Known(part.key.fingerprint, receipts, ids, marks, True), now)
    return Outcome(receipts)


def _complete_before(txn: Transaction, part: Part, known: Known, now: float) -> Outcome:
    """Return the receipts of a push that is complete. Raises `KeyReused` and `StepGone`."""
    part.check_same(known.sources)
    for buffer in known.receipts:
        record = alive(txn, BufferName(part.caller, buffer), now)
        if record is not None:
            check_same_buffer(record, known)
    return Outcome(known.receipts, replayed=True)


def _refused(txn: Transaction, part: Part, push: Push, error: GradserveError, now: float) -> Outcome:
    """Drop the push, so that all its later parts get the error. A fault of the server does not drop the push."""
    if error.status >= 500:
        raise error
    error.detail += f". The push {shown(part.push)} is dropped: it counts nowhere, and its later parts get this error"
    for value in push.record(part.name).values:
        txn.free(value)
    put_push(txn, part.name, push.refused(error), now)
    return Outcome({}, refusal=error)
