"""The protocol of a store of named accumulation buffers.

A buffer is a sum. An add does `value += weight * gradient`, `weight_total += weight`, `count += 1` and `version += 1`.
Steps divide the life of a buffer. `zero` discards the sum and begins the next step. `take`, or the add that completes
the quorum, closes the step, and then every client can read its value.

A request changes one or many buffers, all or none, and stores its idempotency key in the same transaction
(`perform.py`). The changes are in `changes.py`, written for a `Transaction`, which every store implements.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from heapq import nsmallest
from itertools import islice
from typing import Protocol, Self, TypeAlias, TypeVar

import numpy as np

from service.buffers.graphs import StoredGraph, damaged, digest_of, named_graph, unknown
from service.buffers.names import BufferName, graphs_of, pushes_of, runs_of
from service.buffers.perform import Outcome, Request
from service.buffers.pushes import DRAFT, Push
from service.buffers.record import Key, Known, Record, Snapshot, name_buffer, unknown_buffer
from service.buffers.runs import StoredRun, unknown_run
from service.buffers.steps import Closed
from service.dtypes import Array, DType
from service.errors import BufferCorrupt, GradserveError, UnknownBuffer

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)

Allocate: TypeAlias = Callable[[tuple[int, ...], DType], Array]

Committed: TypeAlias = Callable[[int, float], None]
"""The function that a store calls after each commit, with the count of its requests and its seconds."""


def uncounted(requests: int, seconds: float) -> None:
    """Ignore a commit."""


KEY_SECONDS = 24 * 3600.0
"""Seconds that a store remembers an idempotency key by default: a day, longer than most outages of a client."""

MAX_BUFFERS = 100_000
"""Buffers that a namespace may have by default: more than most models have named parameters."""


PUSHES_BYTES = 1 << 17
"""Bytes of incomplete pushes that a list takes into memory at once, without the last of them."""


def without_traceback(error: E) -> E:
    """Strip the traceback and the context of our own error before a future gets it.

    Their frames hold the future and the request: a cycle that only the garbage collector would free.
    """
    if isinstance(error, GradserveError):
        error.__traceback__ = error.__context__ = None
    return error


@contextmanager
def after_commit() -> Iterator[None]:
    """Log an error of what follows a commit. The requests are made: they must not fail, nor be made again."""
    try:
        yield
    except Exception:
        logger.exception("gradserve could not do all that follows a commit")


class Store(Protocol):
    """A store of the buffers of one namespace; `within` returns the store of another namespace.

    Thread-safe. The caller owns what the store returns.

    Whatever an answer says is durable, whichever server wrote it: with `replicated`, the standby has it. So an answer
    comes from `submit`, `durable`, `records`, `names`, `read`, `recall`, `pushes`, `graph`, `graphs` or
    `graph_content`. `record` and `look` show what may still be lost, and only say what to do next.

    `submit` never blocks. `records`, `read`, `graphs`, `graph_content` and `size` may take long in every store, and so
    may what takes many names. `record`, `durable`, `look`, `names`, `record_bytes`, `recall`, `graph`, `now` and
    `generation` block only in a store that `blocks`: then the event loop must not call them.

    The store closes a step soon after its deadline, and before the next change of its buffer. Until then a read may
    still see it open, with `Record.due` in the past.
    """

    blocks: bool
    """Whether a look-up may wait, as for a network; else it is as quick as a read of memory."""

    namespace: str = ""
    """The namespace whose buffers the store has; "" is the default namespace."""

    def within(self, namespace: str) -> Self:
        """Return the store of another namespace. Both share everything else."""
        if namespace == self.namespace:
            return self
        store = copy.copy(self)
        store.namespace = namespace
        return store

    def submit(self, request: Request) -> Future[Outcome]:
        """Make all changes of the request, durably, before the future has a result; if it has an error, make none."""

    def record(self, name: str) -> Record:
        """Return the buffer. Raises `UnknownBuffer`."""

    def durable(self, names: Sequence[str], step: int | None = None) -> list[Record]:
        """Return the buffers, with the closed `step` if it is given.

        Raises `UnknownBuffer`, `StepOpen`, `StepGone` and `BufferCorrupt`.
        """
        full = [BufferName(self.namespace, name) for name in names]
        found = self.look(full)
        records = [found.get(name) or self.record(name.name) for name in full]
        closed_steps(records, step)  # raises
        return records

    def now(self) -> float:
        """Return the time of the store's clock, in seconds since 1970. It may block like `record`."""

    def look(self, names: Collection[BufferName]) -> dict[BufferName, Record]:
        """Return the buffers of these namespaces and names, as of one moment. Leave out those that cannot be read."""

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, most_bytes: int = sys.maxsize
    ) -> list[Record]:
        """Return the buffers behind the name `after` in the order of their names, as of one moment.

        There are at most `limit`. The last may be the first whose record makes all take more than `most_bytes`. Damaged
        buffers are left out.
        """

    def names(self, prefix: str, limit: int | None = None) -> list[str]:
        """Return the names of the first buffers with the prefix, as of one moment, those of damaged buffers, too."""

    def record_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes the records of these buffers take in the store. To load them takes more memory."""

    def read(self, names: Sequence[str], step: int | Sequence[int] | None = None) -> list[Snapshot]:
        """Return the buffers with their values, as of one moment, or as of the end of `step`: one, or one of each name.

        Raises `UnknownBuffer`, `StepOpen`, `StepGone` and `BufferCorrupt`.
        """

    def recall(self, key: Key, names: Sequence[str] = ()) -> Known | None:
        """Return the data that is stored with the key. `names` are as `Transaction.recall` wants them."""

    def pushes(self, prefix: str = "", limit: int | None = None) -> list[tuple[str, Push]]:
        """Return the names of incomplete pushes with a buffer of this prefix, and the pushes, the oldest first."""

        def order(each: tuple[str, Push]) -> tuple[float, str]:
            return each[1].began, each[0]

        found = self._pushes()
        fits = (one for one in found if not prefix or any(name.startswith(prefix) for _, name, _ in one[1].gradients))
        return sorted(fits, key=order) if limit is None else nsmallest(limit, fits, key=order)

    def _pushes(self) -> Iterator[tuple[str, Push]]:
        """Yield the incomplete pushes. Few are in memory at a time: each may name thousands of buffers."""
        hidden, after = self.within(pushes_of(self.namespace)), ""
        while found := hidden.records(after=after, most_bytes=PUSHES_BYTES):
            after = found[-1].name
            yield from ((each.name, Push.of(each)) for each in found if not each.name.startswith(DRAFT))

    def graph(self, name: str) -> StoredGraph:
        """Return the graph, without its content. Raises `UnknownGraph` and `GraphCorrupt`."""
        with named_graph(name):
            (record,) = self.within(graphs_of(self.namespace)).durable([name])
        return StoredGraph.of(record)

    def graphs(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[StoredGraph]:
        """Return the first graphs with the prefix behind the name `after`, in the order of their names.

        Damaged graphs are left out.
        """
        found = self.within(graphs_of(self.namespace)).records(prefix, after, limit)
        return [StoredGraph.of(record) for record in found]

    def graph_content(self, graph: StoredGraph) -> memoryview:
        """Return the bytes of the graph's model. Raises `UnknownGraph` if it is gone, and `GraphCorrupt`."""
        with named_graph(graph.name, "model"):
            (found,) = self.within(graphs_of(self.namespace)).read([graph.name])
        if found.record.id != graph.id:
            raise unknown(graph.name)
        content = found.value.view(np.uint8).data.toreadonly()
        if digest_of(content) != graph.digest:  # the checksums of a database may be off
            raise damaged(graph.name, "model")
        return content

    def run(self, name: str) -> tuple[StoredRun, bytes]:
        """Return the run, and its form. Raises `UnknownRun` and `BufferCorrupt`."""
        try:
            (found,) = self.within(runs_of(self.namespace)).read([name])
        except UnknownBuffer:
            raise unknown_run(name) from None
        return StoredRun.of(found.record), found.value.tobytes()

    def runs(self, prefix: str = "", after: str = "", limit: int | None = None) -> list[StoredRun]:
        """Return the first runs with the prefix behind the name `after`, in the order of their names."""
        return [StoredRun.of(one) for one in self.within(runs_of(self.namespace)).records(prefix, after, limit)]

    def generation(self) -> int:
        """Return a number that changes with every change of the store by any process. Raises `StoreFailed`."""

    def check(self) -> None:
        """Raise `StoreFailed` unless the store serves requests."""
        self.generation()

    def size(self) -> tuple[int, int]:
        """Return the count of buffers in all namespaces of clients, and the bytes in use."""

    def measures(self) -> dict[str, float]:
        """Return what else the metrics say about the store: numbers of its database, by the ends of their names."""
        return {}

    def replicas(self) -> int | None:
        """Return how many servers share the store; None if it does not know, or if no other machine can."""
        return None

    def close(self) -> None:
        """Finish the submitted requests, then release all resources."""


def settle(done: Future[Outcome], outcome: Outcome) -> None:
    """Give the outcome to the future of a request, or the error that dropped its push."""
    if outcome.refusal is None:
        done.set_result(outcome)
    else:
        done.set_exception(without_traceback(outcome.refusal))


def page(records: Iterable[Record], limit: int | None, most_bytes: int) -> list[Record]:
    """Return the first of these records, as many as `Store.records` does."""
    found, size = list[Record](), 0
    for record in islice(records, limit):
        found.append(record)
        size += record.packed_bytes
        if size > most_bytes:
            break
    return found


def alive(record: Record | None, name: str, now: float) -> Record:
    """Return the record of the buffer. Raises `UnknownBuffer` if there is none, or if it has expired."""
    if record is None or not record.lives(now):
        raise unknown_buffer(name)
    return record


def closed_steps(records: Sequence[Record], step: int | Sequence[int] | None) -> list[Closed | None]:
    """Return the closed step of each record, None for its running sum. Raises `StepOpen` and `StepGone`."""
    if step is None:
        return [None] * len(records)
    steps = [step] * len(records) if isinstance(step, int) else step
    return [record.closed_step(each) for record, each in zip(records, steps, strict=True)]


def snapshots(
    records: Sequence[Record], step: int | Sequence[int] | None, load: Callable[[Record, Closed | None], Array]
) -> list[Snapshot]:
    """Return the buffers with the values that `load` returns, of now or of the closed step, its second argument.

    Raises what `Store.read` raises.
    """
    found = []
    for record, of in zip(records, closed_steps(records, step), strict=True):
        try:
            found.append(Snapshot(record, load(record, of), of))
        except BufferCorrupt as error:
            name_buffer(error, record.name, one_of_many=True)
            raise
    return found
