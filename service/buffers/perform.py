"""A request to a store: changes that are made together, once for each idempotency key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from service.buffers.changes import Add, Change, Delete
from service.buffers.closing import close_if_due
from service.buffers.graph_changes import HiddenChange
from service.buffers.graphs import StoredGraph
from service.buffers.names import BufferName
from service.buffers.pushes import Part
from service.buffers.record import Key, Known, Receipt, Record, name_buffer, unknown_prefix
from service.buffers.sets import Unchanged
from service.buffers.transaction import Transaction
from service.dtypes import Array
from service.errors import (
    BufferCorrupt,
    BufferExists,
    GradserveError,
    Invalid,
    KeyReused,
    StepGone,
    TooManyTensors,
    shown,
)


class Wide(NamedTuple):
    """A request for all buffers with a prefix: `change` returns the change of a buffer by its name."""

    prefix: str
    change: Callable[[str], Change]
    may_fit_none: bool = False
    """Whether a prefix that fits no buffer changes nothing; else it raises `UnknownBuffer`."""


MAX_CHANGED_BYTES = 1 << 24
"""Bytes of the records of all buffers that a request changes, a third of a second of work: others wait for it."""


def check_records(nbytes: int) -> None:
    """Raise `TooManyTensors` if the records of the buffers of one request take this many bytes."""
    if nbytes > MAX_CHANGED_BYTES:
        raise TooManyTensors(
            f"The buffers of the request have records of {nbytes} bytes or more, with their contributors and closed"
            f" steps; a request may change {MAX_CHANGED_BYTES}: send it in parts, for fewer buffers each",
            limit=MAX_CHANGED_BYTES,
        )


@dataclass(frozen=True)
class Request:
    """Changes of different buffers, all made together or none. A request with a key is made once.

    `sources` are the states of the buffers that the changes were computed from, and `answer` is what a repeated request
    answers besides its receipts, in at most `MAX_ANSWER_BYTES`. Both are stored with the key. If the request is `wide`,
    `changes` only say how much work it is: `resolved` finds the buffers in the transaction.
    """

    changes: Sequence[Change]
    key: Key | None = None
    sources: Sequence[str] = ()
    wide: Wide | None = None
    part: Part | None = None
    """The place in a push: then all changes are adds, which only the complete push makes."""
    answer: bytes = b""
    by_prefix: bool = False
    """Whether the changes come from a prefix of names: then the store keeps the names with the key."""
    hidden: HiddenChange | None = None
    """What happens to a graph or a run, together with the changes."""


@dataclass(frozen=True)
class Outcome:
    """The receipts of a request, and the values that it wants, both by buffer.

    If `replayed`, they are those of the original request, and so are its `sources` and its `answer`: if it named its
    buffers by a prefix, they may be others than this request would find. A push that is not complete has the numbers of
    its `staged` parts in place of receipts, or the `refusal` that dropped it.
    """

    receipts: dict[str, Receipt]
    values: dict[str, Array] = field(default_factory=dict)
    replayed: bool = False
    sources: Sequence[str] = ()
    staged: Sequence[int] | None = None
    refusal: GradserveError | None = None
    answer: bytes = b""
    graph: StoredGraph | None = None
    """The graph that the request has put."""
    is_new: bool = False
    """Whether that graph was new to the original request."""


def resolved(txn: Transaction, request: Request, namespace: str) -> Request:
    """Return the request with its changes. A prefix fits the buffers of this moment, or those of the original request.

    A buffer that is created while a request waits for its transaction is changed with the others.
    """
    if request.wide is None:
        return request
    known = None if request.key is None else txn.recall(request.key, ())
    names = txn.names(namespace, request.wide.prefix) if known is None else [*known.receipts]
    return replace(request, changes=[request.wide.change(name) for name in names])


def perform(txn: Transaction, request: Request, namespace: str, now: float) -> Outcome:
    """Make the changes of a `resolved` request in the namespace, or return the original outcome of its key.

    Raises what `Change.admit` raises, `TooManyTensors`, `KeyReused`, `KeysFull`, and `StepGone` if a value of the
    original outcome is gone. A `BufferExists` names all buffers that exist but should not. After `NonfiniteGradient`,
    `BufferCorrupt`, `TooManyBuffers` and `StoreFull` the store must undo changes.
    """
    key, names = request.key, [BufferName(namespace, change.name) for change in request.changes]
    made = [change.name for change in request.changes if not isinstance(change, Unchanged)]
    if key is not None and (known := txn.recall(key, made)) is not None:
        check_same(key, known)
        outcome = Outcome(known.receipts, replayed=True, sources=known.sources, answer=known.answer)
        for name, change in zip(names, request.changes, strict=True):
            if change.name not in known.receipts:
                continue
            record = alive(txn, name, now)
            if record is not None and isinstance(change, Add):
                check_same_buffer(record, known)
            if record is not None and record.id != known.ids[change.name]:
                record = None
            try:
                value = change.again(txn, record, known.receipts[change.name])
            except StepGone as error:
                raise counted_once(error.detail, known.receipts) from None
            if value is not None:
                outcome.values[change.name] = value
        return outcome
    if key is not None:
        txn.admit_key(key)
    if len(set(names)) < len(names):
        raise Invalid("A request may change each buffer once")
    many = len(names) > 1
    admitted, existing, nbytes = [], list[BufferExists](), 0
    for name, change in zip(names, request.changes, strict=True):
        try:
            record = alive(txn, name, now)
            if record is None and request.wide is not None:
                continue  # it has expired
            nbytes += 0 if record is None else record.packed_bytes
            if many:
                check_records(nbytes)
            change.admit(record)
        except BufferCorrupt:
            if existing:
                break  # the first error counts
            if not isinstance(change, Delete) or many:
                raise
            txn.forget(name)
            outcome = Outcome({change.name: {"name": change.name, "updated": True}})
            if key is not None:
                txn.remember(key, Known(key.fingerprint, outcome.receipts, {change.name: 0}), now)
            return outcome
        except BufferExists as error:
            existing.append(error)
        except GradserveError as error:
            if existing:
                break
            name_buffer(error, change.name, one_of_many=many)
            raise
        admitted.append((name, change, record))
    if existing:
        raise _all_of(existing)
    if request.wide is not None and not (admitted or request.wide.may_fit_none):
        raise unknown_prefix(request.wide.prefix)
    outcome, ids = Outcome({}), {}
    for name, change, record in admitted:
        if isinstance(change, Unchanged):
            continue
        try:
            outcome.receipts[change.name], value = change.apply(txn, name, record, now)
        except GradserveError as error:
            name_buffer(error, change.name, one_of_many=many)
            raise
        if value is not None:
            outcome.values[change.name] = value
        if key is not None:
            record = record or txn.get(name)
            ids[change.name] = 0 if record is None else record.id
    if key is not None:
        by_prefix, sources = request.by_prefix or request.wide is not None, tuple(request.sources)
        txn.remember(key, Known(key.fingerprint, outcome.receipts, ids, sources, by_prefix, request.answer), now)
    return outcome


MOST_BUFFERS_NAMED = 100
"""Buffers that an error names: their names take up to 20 KB."""


def _all_of(errors: Sequence[BufferExists]) -> BufferExists:
    """Return the first error, with the names of the buffers of all."""
    error, names = errors[0], [each.context["buffer"] for each in errors[:MOST_BUFFERS_NAMED]]
    if len(errors) > 1:
        error.detail += f"; and {len(errors) - 1} more, such as {names[1]!r}; nothing was changed"
        error.context["buffers"] = names
    return error


def check_same(key: Key, known: Known) -> None:
    """Raise `KeyReused` if another request came with this key before."""
    if known.fingerprint != key.fingerprint:
        raise KeyReused(
            f"The Idempotency-Key {shown(key.text)} was used for another request: the path, query, Content-Type or body"
            " differs, if only in one byte. A new request needs a new key"
        )


def check_same_buffer(record: Record, known: Known) -> None:
    """Raise `StepGone` unless the request with the known key has changed this buffer, not one deleted since."""
    if record.id != known.ids[record.name]:
        deed = "counted once" if known.receipts[record.name]["updated"] else "made"
        raise StepGone(
            f"This request was {deed} before, in a buffer {record.name!r} that no longer exists. A request for"
            " the new buffer of that name needs a new key",
            buffer=record.name,
            receipts={name: dict(receipt) for name, receipt in known.receipts.items()},
        )


def counted_once(why: str, receipts: Mapping[str, Receipt]) -> StepGone:
    """Return the error of a repeated request that cannot have the rest of its original answer, only the receipts."""
    problem = f"This request was made before and counted once, but the rest of its answer is no longer kept: {why}"
    return StepGone(problem, receipts={name: dict(receipt) for name, receipt in receipts.items()})


def alive(txn: Transaction, name: BufferName, now: float) -> Record | None:
    """Return the buffer; None if there is none. Remove a buffer that has expired, and close a step that is due."""
    record = txn.get(name)
    if record is None:
        return None
    if not record.lives(now):
        txn.remove(record)
        return None
    return close_if_due(txn, record, now)
