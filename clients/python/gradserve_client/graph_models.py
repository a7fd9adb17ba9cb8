"""What the server says of graphs and of their runs, as data classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from gradserve_client._wire.tensors import Array


@dataclass(frozen=True, kw_only=True)
class GraphTensor:
    """An input or output of a graph."""

    dtype: str
    shape: tuple[int | None, ...] | None
    """None for a length, or for all of it, that is open."""


@dataclass(frozen=True, kw_only=True)
class GraphHead:
    """A graph in a list."""

    name: str
    bytes: int
    """The size of the model."""
    digest: str
    """BLAKE2b of the model, in hexadecimal digits."""
    options: Mapping[str, str] = field(hash=False)
    """`loss` and `train` as they were given."""
    created_at: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Read the server's JSON, without the members that this version of the client does not know."""
        known: dict[str, Any] = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        known.update({name: _tensors(known[name]) for name in _TENSORS if name in known})
        return cls(**known)


_TENSORS = ("inputs", "parameters", "statistics", "outputs", "gradients")


def _tensors(fields: Mapping[str, Any]) -> dict[str, GraphTensor]:
    shapes = {name: None if one["shape"] is None else tuple(one["shape"]) for name, one in fields.items()}
    return {name: GraphTensor(dtype=one["dtype"], shape=shapes[name]) for name, one in fields.items()}


@dataclass(frozen=True, kw_only=True)
class GraphInfo(GraphHead):
    """A graph: what it takes and gives, and its nodes."""

    kind: str
    """It is "training" if it gives gradients, else "inference"."""
    inputs: Mapping[str, GraphTensor] = field(hash=False)
    parameters: Mapping[str, GraphTensor] = field(hash=False)
    statistics: Mapping[str, GraphTensor] = field(hash=False)
    """The running means and variances of BatchNormalization."""
    outputs: Mapping[str, GraphTensor] = field(hash=False)
    gradients: Mapping[str, GraphTensor] = field(hash=False)
    """The gradients, named as the parameters."""
    nodes: Mapping[str, int] = field(hash=False)
    """The number of nodes of each operator."""
    doubts: Sequence[str] = field(default=(), hash=False)
    """Signs that an exporter has changed the parameters: training changes another model then."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The result of `Model.forward_backward`."""

    step: int
    """The step that the micro-batch is of, counted from 0."""
    counted: bool
    """Whether the gradients are in the step. False: the step had closed before, by a deadline or another worker."""
    replayed: bool = False
    """Whether the server had counted the micro-batch before, and did not count it again."""
    closed: bool = False
    """Whether the micro-batch closed the step."""
    outputs: Mapping[str, Array] = field(default_factory=dict, compare=False)
    """The outputs, with the loss. Empty unless the micro-batch has counted."""

    @property
    def loss(self) -> float | None:
        """The loss. None unless the micro-batch has counted."""
        return float(self.outputs["loss"].reshape(())) if self.outputs else None


@dataclass(frozen=True, kw_only=True)
class Step:
    """The result of `Model.optim_step`."""

    step: int
    """The number of the step, counted from 0."""
    replayed: bool
    """Whether it was done before: by another worker, or for an earlier call."""
    loss: float | None = None
    """The mean loss of the step's micro-batches. This and the following are None if the server no longer knows."""
    count: int | None = None
    """The number of its micro-batches."""
    weight: float | None = None
    """The sum of their weights."""
    contributors: Mapping[str, int] | None = field(default=None, hash=False)
    """The number of micro-batches of each worker."""
    closed_by: str | None = None
    """What closed its step: "quorum", "deadline" or "take"."""
