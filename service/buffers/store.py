"""Named accumulation buffers: what a buffer is, how it changes, and what every store promises.

A buffer is a sum with a memory: an add does `value += weight * gradient`, `weight_total += weight`, `count += 1` and
`version += 1`. Its life is cut into epochs: `zero` discards the sum and begins the next one; `take`, or the add that
completes the quorum, closes the epoch, whose value is then set aside for everyone to read.

A request changes one or many buffers, all or none, and stores its idempotency key in the same transaction
(`perform.py`). What it does is written once, in `changes.py`, in terms of a `Transaction`; a store is what gives
transactions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, Self, TypeAlias, TypeVar

from service.buffers.perform import Outcome, Request
from service.buffers.record import Key, Known, Record, Snapshot
from service.dtypes import Array, DType
from service.errors import GradserveError

E = TypeVar("E", bound=BaseException)

Allocate: TypeAlias = Callable[[tuple[int, ...], DType], Array]

Committed: TypeAlias = Callable[[int, float], None]
"""Told after each commit how many requests it made, and how many seconds it took."""


def uncounted(requests: int, seconds: float) -> None:
    """Nobody wants to know of commits."""


KEY_SECONDS = 24 * 3600.0
"""How long an idempotency key is remembered unless a store is told otherwise."""

MOST_BUFFERS = 100_000
"""How many buffers a namespace may have unless a store is told otherwise."""


def told(error: E) -> E:
    """`error` as a future takes it: an error of ours without its traceback and context, whose frames have the future,
    and the request, which only the collector of reference cycles could free then."""
    if isinstance(error, GradserveError):
        error.__traceback__ = error.__context__ = None
    return error


class Store(Protocol):
    """Keeps buffers. A store knows those of one namespace, by their names; `within` gives it for another namespace.

    Thread-safe; what it returns is the caller's own, and shared with nobody.

    `submit` never blocks. `records`, `read` and `size` may take long in every store. `record`, `recall` and
    `generation` block only in a store that `blocks`: then the event loop must not call them.
    """

    blocks: bool
    """Whether a look-up may wait, for a network say; else it is as quick as a look into memory."""

    namespace: str = ""
    """The namespace whose buffers it knows; "" is the one without a name."""

    def within(self, namespace: str) -> Self:
        """Return the store as this namespace sees it. Both share everything but the namespace."""
        if namespace == self.namespace:
            return self
        seen = copy.copy(self)
        seen.namespace = namespace
        return seen

    def submit(self, request: Request) -> Future[Outcome]:
        """Make the request's changes: all, durably, before the future has its result, or none if it has an error."""

    def record(self, name: str) -> Record:
        """The buffer as it is. Raises `UnknownBuffer`."""

    def records(
        self, prefix: str = "", after: str = "", limit: int | None = None, *, strict: bool = False
    ) -> list[Record]:
        """Buffers in the order of their names, as they are at one moment: those behind `after`.

        Those that are damaged are left out, or, if `strict`, raise `BufferCorrupt`.
        """

    def read(self, names: Sequence[str], epoch: int | None = None) -> list[Snapshot]:
        """Buffers with their values at one moment, or when they closed `epoch`.

        Raises `UnknownBuffer`, `EpochOpen`, `EpochGone` and `BufferCorrupt`.
        """

    def recall(self, key: Key) -> Known | None:
        """What is stored with the key."""

    def generation(self) -> int:
        """A number that is another one after every change, whoever made it. Raises `StoreFailed`."""

    def size(self) -> tuple[int, int]:
        """How many buffers there are in all namespaces, and the bytes that everything takes."""

    def close(self) -> None:
        """Finish what was submitted, and let go of everything."""
