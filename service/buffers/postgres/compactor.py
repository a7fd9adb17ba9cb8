"""The compactor thread: it replaces the first deltas of a value by their sum, so that a read has few of them to add.

A fold locks one buffer, and only while it swaps the deltas. It changes no sum: it adds the same numbers in the same
order as every reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from service.buffers.names import BufferName
from service.buffers.postgres.blobs import Blobs
from service.buffers.postgres.connections import Database
from service.buffers.postgres.deltas import Delta, Turns, complete, delta_of, nbytes_of, source_of, stream, total
from service.buffers.postgres.exchange import Connection, columns
from service.buffers.postgres.failures import survived
from service.buffers.postgres.schema import FREED_SECONDS, ROW_BYTES
from service.buffers.postgres.statements import DELTAS_OF, FREE, INSERT, LEASE, LOCKED
from service.buffers.record import Spec
from service.buffers.store import Allocate

FOLD_EVERY_SMALL = 64
"""Deltas between two folds of a small value: each fold takes as much of the database as twenty adds."""

SMALL_BYTES = 1 << 14
"""Up to this size a read of 64 deltas takes hardly longer than a read of one."""

FOLD_EVERY = 16
"""The same for values that are neither small nor large."""

FOLD_EVERY_LARGE = 8
"""The same for large values: a read has at most eight times their bytes to add."""

LARGE_BYTES = 1 << 20
"""From this size on the bytes of a value cost more than its rows."""


MOST_WAITING = 10_000
"""Values that wait for a fold, at most: a reader, or the next fold of the value, does the work of further ones."""


class Fold(NamedTuple):
    """A value whose deltas are worth a fold, and the buffer that it belongs to."""

    name: BufferName
    spec: Spec
    value: int


def is_worth_a_fold(spec: Spec, seq: int, has_ended: bool) -> bool:
    """Return whether to fold a value now: often while it grows, and at the end of a step that all workers read."""
    if spec.nbytes < LARGE_BYTES:
        return not has_ended and seq % (FOLD_EVERY_SMALL if spec.nbytes <= SMALL_BYTES else FOLD_EVERY) == 0
    return seq > 1 and spec.closes_itself if has_ended else seq % FOLD_EVERY_LARGE == 0


class _OvertakenError(Exception):
    """Another transaction has changed the value meanwhile."""


class Compactor:
    """The compactor thread. It ends with `close`."""

    def __init__(self, database: Database, blobs: Blobs, allocate: Allocate, turns: Turns) -> None:
        self._database, self._blobs, self._allocate, self._turns = database, blobs, allocate, turns
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="gradserve-compactor")
        self._waiting: set[int] = set()
        """The values that wait: each waits once, however many gradients it gets meanwhile."""

    def submit(self, fold: Fold) -> None:
        """Make the fold soon, unless its value waits already, or too many do."""
        if fold.value not in self._waiting and len(self._waiting) < MOST_WAITING:
            self._waiting.add(fold.value)
            self._pool.submit(self._try, fold)

    def close(self) -> None:
        """Drop the folds that wait: a reader, or the next fold, does their work."""
        self._pool.shutdown(cancel_futures=True)

    def _try(self, fold: Fold) -> None:
        self._waiting.discard(fold.value)  # what comes from now on may need another fold
        with (
            survived(f"The deltas of {str(fold.name)!r} stay as they are for now"),
            suppress(_OvertakenError),
            self._database.transaction(durable=False) as connection,
            np.errstate(all="ignore"),
        ):
            self._make(connection, fold)

    def _make(self, connection: Connection, fold: Fold) -> None:
        name, spec, value = fold
        leased, count = connection.exchange([LEASE(value), DELTAS_OF(value)])
        if leased == [(False,)] or count < [(2,)]:
            return  # another process folds the value, or has
        seqs: list[int] = []

        def noted() -> Iterator[Delta]:
            for delta in complete(value, stream(connection, [value])):
                seqs.append(delta.seq)
                yield delta

        source = source_of(total(connection, spec, noted(), self._allocate))
        blob = self._blobs.new(nbytes_of(source)) if nbytes_of(source) > ROW_BYTES else None
        if blob is not None:
            self._blobs.write(connection, [(blob, source)], self._turns)
        _, gone = connection.exchange([LOCKED(*name), FREE([value], seqs[-1], FREED_SECONDS)])
        if gone != [(len(seqs),)]:
            raise _OvertakenError  # the value has been freed: otherwise it only grows while it is leased
        connection.exchange([INSERT(*columns([delta_of(value, seqs[-1], source, 1.0, True, blob)], 9))])
