"""The server's answers about buffers and operators, as data classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Required, TypedDict

import numpy.typing as npt

from gradserve_client._tensors import Array


class BufferName:
    """A buffer by its name. As the input of an operator, it makes the server read the buffer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The state of a buffer after a change."""

    name: str
    updated: bool
    """Whether the call changed anything: False with `do_update=False`."""
    closed: bool
    """Whether the change closed the epoch. If so, the other fields describe the closed epoch."""
    epoch: int
    version: int
    count: int
    """The number of gradients in the sum."""
    weight: float
    """The sum of the gradients' weights."""
    replayed: bool = False
    """Whether the server had already made the change for an earlier request with the same key."""
    value: Array | None = field(default=None, compare=False)
    """The sum, if the call asked for it."""

    @property
    def etag(self) -> str:
        """The tag of the buffer after the change, for `if_match`."""
        return f'"{self.epoch + self.closed}-{self.version}"'


@dataclass(frozen=True, kw_only=True)
class Taken(Receipt):
    """The result of `take`: the receipt with the value of the epoch that it closed."""

    value: Array = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class BufferInfo:
    """A buffer's metadata."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: str
    quorum: int | None
    keep: int
    ttl_seconds: float | None
    max_norm: float | None = None
    """The largest 2-norm of a gradient that the server adds."""
    epoch: int
    """The running epoch, counted from 0."""
    version: int
    """The number of changes since the buffer was created."""
    count: int
    """The number of gradients in the running epoch's sum."""
    weight: float
    """The sum of the gradients' weights."""
    bytes: int
    """The size of the value."""
    closed_epochs: tuple[int, ...]
    """The closed epochs whose values the server keeps."""
    created_at: float
    """Seconds since 1970."""
    updated_at: float
    expires_at: float | None

    @property
    def etag(self) -> str:
        """The tag of this state, for `if_match`."""
        return f'"{self.epoch}-{self.version}"'

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> BufferInfo:
        """Read the server's JSON, without the members that this version of the client does not know."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "shape": tuple(known["shape"]), "closed_epochs": tuple(known["closed_epochs"])})


class BufferSpec(TypedDict, total=False):
    """The specification of a buffer that `create_many` creates: the arguments of `Buffer.create`."""

    shape: Required[Sequence[int] | int]
    dtype: npt.DTypeLike
    quorum: int | None
    keep: int
    nonfinite: str
    ttl_seconds: float | None
    max_norm: float | None


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """An input or output of an operator."""

    name: str
    dtypes: tuple[str, ...]
    default_dtype: str
    """The dtype of nested lists and numbers."""
    optional: bool


@dataclass(frozen=True, kw_only=True)
class OperatorInfo:
    """An operator's formula, inputs, outputs and attributes."""

    name: str
    formula: str
    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    attributes: Mapping[str, Any]
    """The attributes' defaults, by name."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """The state of the epoch after a push of `gradserve_client.torch.GradientAccumulator`."""

    epoch: int
    count: int
    """The number of pushes in the epoch, with this push."""
    weight: float
    """The sum of the pushes' weights."""
    closed: bool
    """Whether this push completed the quorum."""
    replayed: bool
    """Whether the server had counted this push before, and did not count it again."""

    @classmethod
    def of(cls, receipts: Sequence[Receipt]) -> Pushed:
        """Return the outcome of a push in several requests: what holds for all of them."""
        least = min(receipts, key=lambda receipt: receipt.count)
        return cls(
            epoch=least.epoch,
            count=least.count,
            weight=least.weight,
            closed=all(receipt.closed for receipt in receipts),
            replayed=all(receipt.replayed for receipt in receipts),
        )


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The epoch of a pull of `gradserve_client.torch.GradientAccumulator`."""

    epoch: int
    count: int
    """The number of pushes in the epoch."""
    weight: float
    """The sum of the pushes' weights. If it is 0, there is no mean, and all gradients are None."""
    contributors: Mapping[str, int] | None
    """The number of pushes of each worker, if the server knows it."""
    closed_by: str | None
    """What closed the epoch: "quorum", "deadline" or "take", if the server says so."""

    @classmethod
    def of(cls, epoch: int, receipts: Sequence[Mapping[str, Any]]) -> Pulled:
        """Return what was pulled in several requests: the receipt with the fewest pushes."""
        least = min(receipts, key=lambda receipt: receipt["count"])
        return cls(
            epoch=epoch,
            count=least["count"],
            weight=least["weight"],
            contributors=least.get("contributors"),
            closed_by=least.get("closed_by"),
        )
