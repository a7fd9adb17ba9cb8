"""The protocol of a transaction: the steps of a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from service.buffers.gradients import Gradient
from service.buffers.names import BufferName
from service.buffers.pushes import Place
from service.buffers.record import Key, Known, Record, Spec
from service.dtypes import Array


class Transaction(Protocol):
    """Changes that take effect together when the store commits them, or never."""

    def get(self, name: BufferName) -> Record | None:
        """Return the buffer, even if it has expired."""

    def names(self, namespace: str, prefix: str) -> list[str]:
        """Return the names of the namespace's buffers with the prefix, in their order, even of those that expired."""

    def count_new(self, name: BufferName, now: float) -> None:
        """Count a new buffer before it is `put`. Raises `TooManyBuffers` and `TooManyGraphs`."""

    def put(self, record: Record) -> None:
        """Store the buffer in place of its earlier state."""

    def remove(self, record: Record) -> None:
        """Remove the buffer and all its values."""

    def forget(self, name: BufferName) -> None:
        """Remove the buffer, damaged or not. Its values stay."""

    def new_id(self) -> int:
        """Return a number that no buffer and no value has or had."""

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        """Add to the buffer's value, or replace it. Return the id of the result. The old value is freed."""

    def free(self, value: int | None) -> None:
        """Free a value."""

    def load(self, spec: Spec, value: int | None) -> Array:
        """Return a value in memory of its own."""

    def recall(self, key: Key, names: Sequence[str]) -> Known | None:
        """Return what the key is stored with. The request's buffers have these names. Raises `BufferCorrupt`."""

    def admit_key(self, key: Key) -> None:
        """Raise `KeysFull` if the keys of its namespace have taken their share of the store."""

    def remember(self, key: Key, known: Known, now: float) -> None:
        """Store the key with its data."""

    def admit_part(self, namespace: str, nbytes: int) -> None:
        """Raise `StoreFull` if the namespace may not stage this many bytes more."""

    def stage(self, record: Record, gradient: Gradient) -> Place:
        """Store a gradient for the buffer without adding it. Return where it is."""

    def staged(self, spec: Spec, place: Place) -> Gradient:
        """Return a staged gradient, of the buffer's shape. Raises `BufferCorrupt`."""

    def add_staged(self, record: Record, place: Place, weight: float) -> int | None:
        """Add a staged gradient to the buffer's value, as `accumulate` does, and free it.

        A store does this without a look at the numbers if it can, unless the buffer refuses what is not finite.
        """

    def store_bytes(self, content: Array) -> int:
        """Store the bytes of a flat array of bool as a value. Return its id."""
