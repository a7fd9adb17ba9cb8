"""The read-only face of a store, for `gradserve export` and `gradserve doctor`. Servers may use the store meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from service.buffers.names import BufferName
from service.buffers.pushes import Place
from service.buffers.record import Record, Spec
from service.dtypes import Array

WRONG = "WRONG: "
"""The prefix of a line that reports damage."""


class Moment(Protocol):
    """A store as it is at one moment."""

    def sound_records(self, prefix: str = "") -> Iterator[tuple[BufferName, Record | None]]:
        """Yield at least the buffers whose joined names begin with the prefix: name and record, None if it is damaged.

        Graphs and pushes are among them, of an older format all.
        """

    def streamed(self, spec: Spec, value: int | None) -> Iterator[Array]:
        """Yield the elements of a value in order. Each piece may overwrite the one before. Raises `BufferCorrupt`."""

    def check_staged(self, place: Place) -> None:
        """Read a staged gradient. Raises `BufferCorrupt`."""

    def faults(self) -> list[str]:
        """Return the damage that forbids to read anything else."""

    def other_findings(self, values: Collection[int]) -> Iterator[str]:
        """Yield lines about all but buffers, which have these values. Damage begins with `WRONG`."""


class ReadOnlyStore(Protocol):
    """A store that is only read."""

    def described(self) -> Iterator[str]:
        """Yield lines about the store, without secrets."""

    def now(self) -> float:
        """Return the time of the store's clock, in seconds since 1970. Raises `StoreFailed`."""

    def reading(self) -> AbstractContextManager[Moment]:
        """Read the store as it is at one moment. Raises `StoreFailed`."""
