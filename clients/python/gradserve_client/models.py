"""The server's answers about buffers and operators, as data classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Required, Self, TypedDict

if TYPE_CHECKING:
    import numpy.typing as npt


class BufferName:
    """A buffer by its name. As the input of an operator, it makes the server read the buffer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True)
class _FromJson:
    """What the server says in JSON."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Read the server's JSON, without the members that this version of the client does not know."""
        known = {name: value for name, value in fields.items() if name in cls.__dataclass_fields__}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        return cls(**{**known, **more})


@dataclass(frozen=True, kw_only=True)
class Receipt(_FromJson):
    """The state of a buffer after a change."""

    name: str
    updated: bool
    """Whether the call changed anything: False with `do_update=False`."""
    closed: bool
    """Whether the change closed the step. If so, the other fields describe the closed step."""
    step: int
    version: int
    count: int
    """The number of gradients in the sum."""
    weight: float
    """The sum of the gradients' weights."""
    replayed: bool = False
    """Whether the server had already made the change for an earlier request with the same key."""
    closed_by: str | None = None
    """What closed the step, if it is closed: "quorum", "deadline" or "take"."""
    contributors: Mapping[str, int] | None = field(default=None, hash=False)
    """The number of gradients of each contributor, if the step is closed."""
    value: npt.NDArray[Any] | None = field(default=None, compare=False)
    """The sum, if the call asked for it."""

    @property
    def etag(self) -> str:
        """The tag of the buffer after the change, for `if_match`."""
        return f'"{self.step + self.closed}-{self.version}"'


@dataclass(frozen=True, kw_only=True)
class Taken(Receipt):
    """The result of `take`: the receipt with the value of the step that it closed."""

    value: npt.NDArray[Any] = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class BufferInfo(_FromJson):
    """A buffer's metadata."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nonfinite: str
    quorum: int | None
    keep: int
    ttl_seconds: float | None
    deadline_seconds: float | None = None
    """The seconds from its first gradient after which a step closes."""
    min_count: int = 1
    """The number of gradients without which the deadline closes no step."""
    quorum_weight: float | None = None
    """The sum of the weights that closes a step."""
    contributors: tuple[str, ...] | None = None
    """The contributors that each step expects."""
    per_contributor: int = 1
    """The number of gradients that a step takes of each contributor."""
    max_norm: float | None = None
    """The largest 2-norm of a gradient that the server adds."""
    run: str | None = None
    """The run that the buffer belongs to."""
    life: str | None = None
    """The life of that run: a run of the same name that was deleted had another."""
    step: int
    """The running step, counted from 0."""
    version: int
    """The number of changes since the buffer was created."""
    count: int
    """The number of gradients in the running step's sum."""
    weight: float
    """The sum of the gradients' weights."""
    bytes: int
    """The size of the value."""
    closed_steps: tuple[int, ...]
    """The closed steps whose values the server keeps."""
    created_at: float
    """Seconds since 1970."""
    updated_at: float
    expires_at: float | None
    deadline_at: float | None = None
    """When the deadline of the running step ends. None before its first gradient."""
    contributors_in: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The number of gradients of each contributor in the running step."""
    missing: tuple[str, ...] | None = None
    """The expected contributors that are not in the running step. None if nobody knows whom it expects."""
    missing_since: Mapping[str, float] | None = field(default=None, hash=False)
    """When the last step that had each missing contributor closed, in seconds since 1970; None from older servers."""

    @property
    def etag(self) -> str:
        """The tag of this state, for `if_match`."""
        return f'"{self.step}-{self.version}"'


@dataclass(frozen=True, kw_only=True)
class RunInfo(_FromJson):
    """A run: what its workers have in common, and how it is."""

    name: str
    life: str
    """What tells the run from others of its name, before and after."""
    state: str
    """One of "joining", "running", "waiting", "idle", "finished" and "failed"."""
    step: int
    """The running step, counted from 0."""
    members: tuple[str, ...]
    """The workers that the running step waits for."""
    missing: tuple[str, ...] | None
    """Those that are not in it. None if nobody knows them."""
    left_out: tuple[str, ...]
    """The expected workers that missed a deadline, or left."""
    prefix: str
    """What the names of the run's buffers begin with."""
    buffer: str
    """The buffer whose steps are those of the run."""
    created_at: float
    """Seconds since 1970."""
    updated_at: float
    """When a worker joined, left or added last."""
    ended: Mapping[str, Any] | None = field(default=None, hash=False)
    """`outcome`, `at`, `worker` and `error` of a run that has ended."""
    form: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What all workers have alike. This and `start` are not in lists."""
    start: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What the first worker began with."""


@dataclass(frozen=True, kw_only=True)
class StagedPush(_FromJson):
    """A push in parts that is not complete."""

    push: str
    """The id of the push."""
    parts: int
    """The number of parts that complete it."""
    staged: tuple[int, ...]
    """The numbers of the parts that the server has."""
    bytes: int
    """The bytes of the staged gradients."""
    count: int
    """The number of buffers with a staged gradient."""
    buffers: tuple[str, ...]
    """The names of up to 100 of them."""
    weight: float
    step: int | None
    contributor: str | None
    began_at: float
    """When the first part came, in seconds since 1970."""
    expires_at: float
    """When the server forgets the push unless it is complete."""
    refused: str | None
    """The code of the error that dropped the push."""


@dataclass(frozen=True, kw_only=True)
class Statistics(_FromJson):
    """The statistics of a sum. `min`, `max`, `mean` and `norm` are of its finite elements, None if it has none."""

    step: int
    version: int
    """The state of the buffer that the server has computed."""
    count: int
    weight: float
    size: int
    nan: int
    infinite: int
    zeros: int
    min: float | None
    max: float | None
    mean: float | None
    norm: float | None
    """The 2-norm."""
    histogram: Mapping[str, Any] | None = field(default=None, hash=False)
    """`bounds` of magnitudes and `counts` of elements. This and the following are of `Buffer.statistics` alone."""
    steps: Sequence[Mapping[str, Any]] = field(default=(), hash=False)
    """The closed steps that the buffer keeps, oldest first: step, count, weight, mean, norm, nonfinite, closed_by."""
    heat_map: npt.NDArray[Any] | None = field(default=None, compare=False)
    """Means of cells, NaN without a finite element, if the call asked for them."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Read the server's JSON, with the heat map as an array."""
        if heat_map := fields.get("heat_map"):
            import numpy as np

            shape = heat_map["rows"], heat_map["columns"]
            more["heat_map"] = np.array(heat_map["values"], np.float64).reshape(shape)
        return super().of(fields, **more)


class BufferRules(TypedDict, total=False):
    """The rules of a buffer, which `Buffer.set_rules` changes."""

    quorum: int | None
    ttl_seconds: float | None
    deadline_seconds: float | None
    min_count: int
    quorum_weight: float | None
    contributors: Sequence[str] | None
    per_contributor: int
    max_norm: float | None


class BufferSpec(BufferRules, total=False):
    """The specification of a buffer that `create_many` creates: the arguments of `Buffer.create`."""

    shape: Required[Sequence[int] | int]
    dtype: npt.DTypeLike
    keep: int
    nonfinite: str
    life: str | None


@dataclass(frozen=True, kw_only=True)
class TensorInfo(_FromJson):
    """An input or output of an operator."""

    name: str
    dtypes: tuple[str, ...]
    default_dtype: str
    """The dtype of nested lists and numbers."""
    optional: bool
    group: bool = False
    """Whether it is any number of such tensors, by name."""


@dataclass(frozen=True, kw_only=True)
class OperatorInfo(_FromJson):
    """An operator's formula, inputs, outputs and attributes."""

    name: str
    formula: str
    description: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    attributes: Mapping[str, Any]
    """The attributes' defaults, by name."""
    required: tuple[str, ...] = ()
    """The names of the attributes without a default."""
