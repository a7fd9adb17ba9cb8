"""What the server says of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradserve_client._tensors import Array


class BufferName:
    """A buffer, by its name: as an operator's input, the server takes it from there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a change left of a buffer."""

    name: str
    updated: bool
    """Whether anything changed: not with `do_update=False`."""
    closed: bool
    """Whether the change closed the epoch: then the rest is that of the closed epoch."""
    epoch: int
    version: int
    count: int
    """The gradients in the sum."""
    weight: float
    """The sum of their weights."""
    replayed: bool = False
    """Whether the server had made the change before, when a request with the same key came."""
    value: Array | None = field(default=None, compare=False)
    """The sum, if the call asked for it."""

    @property
    def etag(self) -> str:
        """The tag of the buffer after the change, for `if_match`."""
        return f'"{self.epoch + self.closed}-{self.version}"'


@dataclass(frozen=True, kw_only=True)
class Taken(Receipt):
    """What `take` gives: the receipt, and the value of the epoch that it closed."""

    value: Array = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class BufferInfo:
    """A buffer, but for its value."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: str
    quorum: int | None
    keep: int
    ttl_seconds: float | None
    epoch: int
    """Its running epoch, counted from 0."""
    version: int
    """How often it was changed."""
    count: int
    """The gradients in this epoch's sum."""
    weight: float
    """The sum of their weights."""
    bytes: int
    """The size of its value."""
    closed_epochs: tuple[int, ...]
    """Those whose values are kept."""
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
        """From the server's JSON, of which members that this client does not know are left out."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        return cls(**{**known, "shape": tuple(known["shape"]), "closed_epochs": tuple(known["closed_epochs"])})


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """An input or output of an operator."""

    name: str
    dtypes: tuple[str, ...]
    default_dtype: str
    """What a list without a dtype has."""
    optional: bool


@dataclass(frozen=True, kw_only=True)
class OperatorInfo:
    """What an operator computes, takes and gives."""

    name: str
    formula: str
    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    attributes: Mapping[str, Any]
    """The attributes' defaults, by name."""
