"""The protocol of a transaction: what a change can do to buffers."""

from __future__ import annotations

from typing import Protocol

from service.buffers.gradients import Gradient
from service.buffers.names import BufferName
from service.buffers.record import Key, Known, Record, Spec
from service.dtypes import Array


class Transaction(Protocol):
    """Changes that take effect together when the store commits them, or never."""

    def get(self, name: BufferName) -> Record | None:
        """The buffer, expired or not."""

    def count_new(self, name: BufferName, now: float) -> None:
        """Count a buffer that is about to be `put` where there is none. Raises `TooManyBuffers`."""

    def put(self, record: Record) -> None:
        """Store the buffer in place of what was there."""

    def remove(self, record: Record) -> None:
        """Forget the buffer and all its values."""

    def remove_damaged(self, name: BufferName) -> None:
        """Forget the buffer, of which nothing can be read."""

    def new_id(self) -> int:
        """A number that no buffer and no value has or had."""

    def accumulate(self, record: Record, gradient: Gradient, weight: float, overwrite: bool) -> int | None:
        """Add to the buffer's value. Returns the id of the result, under which the old value is no more."""

    def free(self, value: int | None) -> None:
        """Forget a value."""

    def load(self, spec: Spec, value: int | None) -> Array:
        """A value, in memory of its own."""

    def recall(self, key: Key) -> Known | None:
        """What was stored with the key, whatever the fingerprint."""

    def remember(self, key: Key, known: Known, now: float) -> None:
        """Store the key."""
