"""The data of a buffer: its rules, its state and its closed epochs. And the data of an idempotency key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from service.buffers.names import BufferName
from service.dtypes import DTYPES, NAMES, Array, DType
from service.errors import EpochGone, EpochOpen, GradserveError, TooManyBuffers, UnknownBuffer, shown

Receipt: TypeAlias = dict[str, Any]
"""The result of a change: name, updated, closed, epoch, version, count and weight; of a new buffer its metadata."""


def too_many(count: int, limit: int) -> TooManyBuffers:
    """Return the error of a namespace that has as many buffers as it may."""
    return TooManyBuffers(
        f"The namespace has {count} buffers; the limit is {limit} (GRADSERVE_MAX_BUFFERS): delete some first",
        limit=limit,
        count=count,
    )


@dataclass(frozen=True)
class Spec:
    """The specification of a buffer: the shape and the dtype of its sum, and its rules.

    `nonfinite="reject"` refuses an add that would make the sum infinite or NaN. The add that makes the count reach the
    `quorum` closes the epoch. The last `keep` closed epochs stay readable. The buffer expires `ttl_seconds` after its
    last change. An add is refused whose gradient has a 2-norm above `max_norm`, or none because it is not finite.
    """

    shape: tuple[int, ...]
    dtype: DType
    nonfinite: Literal["allow", "reject"] = "allow"
    quorum: int | None = None
    keep: int = 1
    ttl_seconds: float | None = None
    max_norm: float | None = None

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "dtype": NAMES[self.dtype],
            "nonfinite": self.nonfinite,
            "quorum": self.quorum,
            "keep": self.keep,
            "ttl_seconds": self.ttl_seconds,
            "max_norm": self.max_norm,
        }

    @cached_property
    def text(self) -> bytes:
        """The specification as the store writes it, with each change: without rules that are None, as by default."""
        return orjson.dumps({name: value for name, value in self.as_json().items() if value is not None})


MAX_QUORUM = 10**9
"""Gradients of a quorum: more than any epoch can gather."""

MAX_KEEP = 1000
"""Closed epochs that a buffer keeps: every record holds their list, and every change writes it."""

MAX_TTL_SECONDS = 10**9
"""The longest time to live: 31 years, in effect for ever."""


@dataclass(frozen=True)
class Closed:
    """A closed epoch. Its sum has the id `value`, or None if nothing was added."""

    epoch: int
    version: int
    count: int
    weight: float
    value: int | None

    @property
    def etag(self) -> str:
        """The tag of the epoch's last state, in quotation marks."""
        return f'"{self.epoch}-{self.version}"'


@dataclass(frozen=True)
class Record:
    """A buffer without its numbers. The store keeps them under the id `value`; None means zeros, which are not stored.

    `id` tells the buffer from earlier buffers of the same name.
    """

    full_name: BufferName
    spec: Spec
    id: int
    created: float
    updated: float
    epoch: int = 0
    version: int = 0
    count: int = 0
    weight: float = 0.0
    value: int | None = None
    closed: tuple[Closed, ...] = ()

    def changed(self, **changes: Any) -> Record:
        """Return a copy with other values in some fields, in a fifth of the time of `dataclasses.replace`."""
        copy = object.__new__(Record)
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    @property
    def name(self) -> str:
        """The name that clients know."""
        return self.full_name.name

    @property
    def etag(self) -> str:
        """The short tag of the buffer's state, in quotation marks."""
        return f'"{self.epoch}-{self.version}"'

    def tag_of(self, state: Record | Closed) -> str:
        """Return the tag of the state of this buffer, and of no other buffer of the same name.

        It adds the microsecond of the creation, for caches: a buffer that is created again has the same short tags.
        """
        return f'{state.etag[:-1]}-{round(self.created * 1e6):x}"'

    @property
    def tags(self) -> frozenset[str]:
        """The tags that fit the buffer's state, with `*`, which fits every state."""
        return frozenset({"*", self.etag, self.tag_of(self)})

    @property
    def expires(self) -> float | None:
        """When the buffer expires unless it changes, in seconds since 1970."""
        return None if self.spec.ttl_seconds is None else self.updated + self.spec.ttl_seconds

    @property
    def values(self) -> list[int]:
        """The ids of the buffer's values, including those of its closed epochs."""
        return [value for value in (self.value, *(epoch.value for epoch in self.closed)) if value is not None]

    def lives(self, now: float) -> bool:
        return self.expires is None or now < self.expires

    def closed_epoch(self, epoch: int) -> Closed:
        """Return the closed epoch. Raises `EpochOpen` if it has not closed, and `EpochGone` if it is no longer kept."""
        if epoch >= self.epoch:
            raise EpochOpen(
                f"Epoch {epoch} of {self.name!r} has not closed: the buffer is in epoch {self.epoch},"
                f" whose count is {self.count}{'' if self.spec.quorum is None else f' of {self.spec.quorum}'}",
                buffer=self.name,
                epoch=self.epoch,
                count=self.count,
            )
        for closed in self.closed:
            if closed.epoch == epoch:
                return closed
        raise EpochGone(
            f"Epoch {epoch} of {self.name!r} is no longer kept: it was zeroed, or is older than the last"
            f" {self.spec.keep} closed epochs (see keep)",
            buffer=self.name,
            epoch=self.epoch,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.spec.as_json(),
            "epoch": self.epoch,
            "version": self.version,
            "count": self.count,
            "weight": self.weight,
            "bytes": self.spec.nbytes,
            "closed_epochs": [closed.epoch for closed in self.closed],
            "created_at": self.created,
            "updated_at": self.updated,
            "expires_at": self.expires,
        }

    def receipt(self, *, updated: bool, of: Closed | None = None) -> Receipt:
        """Return the receipt of a change; with `of`, of the epoch that the change closed."""
        state = self if of is None else of
        return {
            "name": self.name,
            "updated": updated,
            "closed": of is not None,
            "epoch": state.epoch,
            "version": state.version,
            "count": state.count,
            "weight": state.weight,
        }


class Key(NamedTuple):
    """An idempotency key: its caller, its text, and the fingerprint of the request that has it."""

    caller: str
    text: str
    fingerprint: bytes


class Known(NamedTuple):
    """The data that is stored with a key: the fingerprint of its request, the receipts, and the ids of the buffers.

    `sources` are the states of the buffers that the request was computed from, in the request's order.
    """

    fingerprint: bytes
    receipts: dict[str, Receipt]
    ids: dict[str, int]
    sources: tuple[str, ...] = ()


def unknown(name: str) -> UnknownBuffer:
    """Return the error of a buffer that does not exist."""
    return UnknownBuffer(f"There is no buffer {shown(name)}; PUT /v1/buffers/{{name}} creates one", buffer=name)


def name_buffer(error: GradserveError, name: str, *, one_of_many: bool) -> None:
    """Add the buffer to the error's context; if the request has many buffers, add it to the text, too."""
    if "buffer" not in error.context:
        if one_of_many:
            error.detail += f" (the buffer is {name!r})"
        error.context["buffer"] = name


@dataclass(frozen=True)
class Snapshot:
    """A buffer with its value, now or when its epoch `of` closed. Nothing else refers to the value."""

    record: Record
    value: Array
    of: Closed | None = None

    @property
    def etag(self) -> str:
        """The tag of this state, in quotation marks."""
        return self.record.tag_of(self.of or self.record)

    @property
    def state(self) -> str:
        """A text that differs for every value of every buffer."""
        return f"{self.record.id}-{self.record.epoch}-{self.record.version}"

    @property
    def weight(self) -> float:
        """The sum of the weights in the value."""
        return (self.of or self.record).weight

    def receipt(self) -> Receipt:
        return self.record.receipt(updated=False, of=self.of)


def spec_of(members: Mapping[str, Any]) -> Spec:
    """Return the specification whose `as_json` has these members."""
    return Spec(**{**members, "shape": tuple(members["shape"]), "dtype": DTYPES[members["dtype"]]})
