"""What a store may hold: its limit, the share of a namespace's idempotency keys, and the buffers of a namespace."""

from __future__ import annotations

import sys
from typing import NamedTuple

from service.buffers.changes import Add, Create, Delete
from service.buffers.graph_changes import DeleteGraph
from service.buffers.names import BufferName
from service.buffers.perform import Outcome, Request
from service.buffers.restore import Restore
from service.buffers.rules import SetRules
from service.errors import KeysFull, PushesFull, StoreFull, TooManyBuffers, TooManyGraphs

KEYS_PART = 4
"""Keys of a namespace take at most this part of the store, a quarter: one namespace never fills it for all."""

STAGED_PART = 4
"""Gradients that a namespace has staged take at most this part of the store."""

SHRINKING_PART = 64
"""This part of the store is left to the keys of requests that add nothing, such as takes of a full store."""

UNLIMITED = sys.maxsize
"""In place of a limit."""


class Most(NamedTuple):
    """How many buffers, and how many graphs, a namespace may have."""

    buffers: int
    graphs: int

    def refusal(self, name: BufferName, count: int) -> TooManyBuffers | TooManyGraphs | None:
        """Return why the namespace of this name, which has `count` buffers or graphs, may have no further one."""
        if name.is_push:
            return None
        what, is_graph = name.kind[0], name.kind[0] == "graph"
        limit = self.graphs if is_graph else self.buffers
        if count < limit:
            return None
        setting = f"GRADSERVE_MAX_{'GRAPHS' if is_graph else 'BUFFERS'}"
        problem = f"The namespace has {count} {what}s; the limit is {limit} ({setting}): delete some first"
        return (TooManyGraphs if is_graph else TooManyBuffers)(problem, limit=limit, count=count)


def check_keys(namespace_bytes: int, max_bytes: int) -> None:
    """Raise `KeysFull` if the keys of a namespace have taken their share of the store."""
    share = max_bytes // KEYS_PART
    if namespace_bytes >= share:
        raise KeysFull(
            f"The remembered Idempotency-Keys of this namespace take {namespace_bytes} bytes, but may take {share}, a"
            " quarter of GRADSERVE_STORE_BYTES; nothing was changed. Wait until keys expire"
            " (GRADSERVE_IDEMPOTENCY_SECONDS), or let the operator run gradserve keys-forget. A request without a key"
            " needs no room for it",
            limit=share,
        )


def check_staged(namespace_bytes: int, max_bytes: int) -> None:
    """Raise `PushesFull` if the pushes that a namespace has not completed would take more than their share."""
    share = max_bytes // STAGED_PART
    if namespace_bytes > share:
        raise PushesFull(
            f"The incomplete pushes of this namespace would take {namespace_bytes} bytes, but may take {share}, a"
            " quarter of GRADSERVE_STORE_BYTES; nothing was changed. Complete a push, or wait until the oldest are"
            " forgotten (GRADSERVE_PUSH_SECONDS); GET /v1/pushes lists them",
            limit=share,
        )


def room_for(request: Request, outcome: Outcome, max_bytes: int) -> int:
    """Return how many bytes the store may hold after this request; `UNLIMITED` if the request needs no room.

    A repeated request and a refused part need none. Nor does a delete: its key takes about as much as its record.
    """
    if outcome.replayed or outcome.refusal is not None:
        return UNLIMITED
    if request.part is not None or outcome.is_new:
        return max_bytes - max_bytes // SHRINKING_PART
    for change in request.changes:
        receipt = outcome.receipts.get(change.name, {})  # a buffer with the prefix of the request may have expired
        if isinstance(change, SetRules):
            return max_bytes - max_bytes // SHRINKING_PART
        if isinstance(change, (Create, Add, Restore)) and receipt.get("created", receipt.get("updated")):
            return max_bytes - max_bytes // SHRINKING_PART
    deletes = [isinstance(change, Delete) for change in request.changes]
    only_deletes = all(deletes) and bool(deletes or isinstance(request.hidden, DeleteGraph))
    return UNLIMITED if request.key is None or only_deletes else max_bytes


def store_full(max_bytes: int) -> StoreFull:
    """Return the error of a store that has reached its own limit."""
    problem = f"The store has reached its limit of {max_bytes} bytes (GRADSERVE_STORE_BYTES); nothing was changed"
    return StoreFull(problem, limit=max_bytes)
