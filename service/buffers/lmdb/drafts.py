"""A large part of a push, or a large graph, which several transactions write: others have their turns between them.

What is written belongs to a push with a name of its own, and is staged there, until the last transaction makes the
request: then the part has it. After a crash the store forgets that push in its time.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from service.buffers.batches import COST_OF_BUFFER
from service.buffers.changes import Add
from service.buffers.gradients import Dense, Gradient, Rows, Sent, numbers_of, stored_bytes
from service.buffers.graph_changes import PutGraph
from service.buffers.lmdb.transaction import LmdbTransaction
from service.buffers.lmdb.value_writer import Written
from service.buffers.lmdb.values import is_sum, may_be_sum
from service.buffers.names import BufferName
from service.buffers.parts import Forget, make, to_stage
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import DRAFT, Part, Push, StagedPart
from service.buffers.staging import Admitted, push_of, put_push
from service.dtypes import Array
from service.errors import GradserveError

MOST_OF_GRAPH = 1 << 24
"""What a transaction writes of a graph: other requests, even of the same trainer, wait for it up to 50 ms."""

GRAPH_SECONDS = 3600.0
"""How long the store keeps what is written of a graph that is not complete, as after a crash."""


class Draft(NamedTuple):
    """The arrays of a part, their values, and whether each is its sum with zeros, as far as it is written."""

    name: BufferName
    """The push that has what is written."""
    arrays: Sequence[Array]
    values: Sequence[int]
    are_sums: Sequence[bool]
    at: int = 0
    """The first array that is not completely written."""
    done: int = 0
    """How many of its bytes are."""

    @property
    def is_written(self) -> bool:
        return self.at == len(self.arrays)

    @property
    def written(self) -> dict[int, Written]:
        found = zip(self.arrays, self.values, self.are_sums, strict=True)
        return {id(array): Written(value, is_sum) for array, value, is_sum in found}


def make_some(
    txn: LmdbTransaction, draft: Draft | None, request: Request, namespace: str, now: float
) -> Outcome | Draft:
    """Make a request as `make` does, or return the draft with what this transaction may write of its part."""
    draft = _next(txn, draft, request, namespace, now)
    if draft is not None and not draft.is_written:
        return draft
    if draft is not None:
        txn.forget(draft.name)
        txn.values.written = draft.written
    outcome = make(txn, request, namespace, now)
    for written in txn.values.written.values():  # the part was refused, or another request has staged it
        txn.free(written.value)
    txn.values.written = {}
    return outcome


def forgetting(draft: Draft) -> Request:
    """Return the request that frees what a draft has written."""
    _, (caller, name) = draft.name.kind
    return Request([Forget()], part=Part(name, 0, 1, caller, bytes(16), 0.0))


def _next(txn: LmdbTransaction, draft: Draft | None, request: Request, namespace: str, now: float) -> Draft | None:
    """Write what this transaction may of a part or a graph, behind what the draft has. Return the draft with it.

    Return None if the whole request should be made at once: it is small, the store has forgotten its draft, or it is
    refused or repeated, as far as that can be said without a look at the numbers. Raises `StoreFull`.
    """
    most = txn.most_bytes if request.hidden is None else min(txn.most_bytes, MOST_OF_GRAPH)
    if draft is not None:
        return _written(txn, draft, most) if push_of(txn, draft.name) is not None else None
    if isinstance(request.hidden, PutGraph):
        content = request.hidden.content
        if content.size <= most or not _is_new(txn, request, request.hidden, namespace):
            return None
        part = Part("", 0, 1, namespace, bytes(16), GRAPH_SECONDS)
        return _written(txn, _begun(txn, part, [(content, False)], now), most)
    if request.part is None or _size(request) <= most:
        return None
    adds = to_stage(txn, request.part, request.changes, now)
    return None if adds is None else _written(txn, _begun(txn, request.part, _arrays(adds), now), most)


def _is_new(txn: LmdbTransaction, request: Request, graph: PutGraph, namespace: str) -> bool:
    """Return whether the request makes a new graph, as far as that can be said without a look at the buffers."""
    try:
        is_known = request.key is not None and txn.recall(request.key, ()) is not None
        return not is_known and graph.found(txn, namespace) is None
    except GradserveError:
        return False


def _size(request: Request) -> int:
    """Return about how many bytes the gradients of a part have."""
    return sum(_nbytes(change.gradient) for change in request.changes if isinstance(change, Add))


def _nbytes(gradient: Gradient | Sent) -> int:
    if isinstance(gradient, np.ndarray):
        return gradient.nbytes
    return gradient.rows.nbytes if isinstance(gradient, Rows) else stored_bytes(gradient)


def _begun(txn: LmdbTransaction, part: Part, contents: Iterable[tuple[Array, bool]], now: float) -> Draft:
    """Return a draft that has nothing yet, but a part has its room from now on. Raises `PushesFull`."""
    found = {id(array): (array, may_be_sum) for array, may_be_sum in contents}
    arrays = [array for array, _ in found.values()]
    size = sum(array.nbytes for array in arrays)
    if part.push:
        txn.admit_part(part.caller, size)
    draft = Draft(
        part._replace(push=DRAFT + secrets.token_hex(16)).name,
        arrays,
        [txn.values.new_id() for _ in arrays],
        [may_be_sum for _, may_be_sum in found.values()],
    )
    staged = {"": (0, [draft.values], size)}
    put_push(txn, draft.name, Push.begun(part, now).with_part(part.number, StagedPart("", staged, {})), now)
    return draft


def _arrays(adds: Admitted) -> Iterator[tuple[Array, bool]]:
    """Yield the arrays that can be written piece by piece, and whether each may become the sum of its buffer."""
    for _, add, record in adds:
        gradient = add.onto(record.spec)
        array = numbers_of(gradient)
        if add.counts and array.flags.c_contiguous:
            yield array, isinstance(gradient, Dense) and may_be_sum(record.spec, array)


def _written(txn: LmdbTransaction, draft: Draft, most: int) -> Draft:
    """Write up to `most` bytes of the draft's arrays."""
    txn.writes += 1
    at, done, are_sums, left = draft.at, draft.done, [*draft.are_sums], most
    while left > 0 and at < len(draft.arrays):
        array = draft.arrays[at]
        end = txn.values.append(draft.values[at], array, done, left)
        are_sums[at] = are_sums[at] and is_sum(array, done, end)
        left -= end - done + COST_OF_BUFFER
        at, done = (at, end) if end < array.nbytes else (at + 1, 0)
    return draft._replace(at=at, done=done, are_sums=are_sums)
