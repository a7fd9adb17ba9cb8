"""What requests say of a buffer's specification: the shape, the dtype and the rules."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr

from service.api.http.tensor_forms import absent
from service.buffers.epochs import MAX_CONTRIBUTORS, MAX_KEEP, MAX_QUORUM, MAX_TTL_SECONDS

MAX_RULES_BYTES = 1 << 18
"""Bytes of a body that describes a buffer: a thousand names of contributors, each of 100 characters, take 103 KB."""

MAX_SPECS_BYTES = 1 << 24
"""Bytes of a body that describes many buffers: 1 KB for each of 16,384."""

FloatName = Literal["float16", "bfloat16", "float32", "float64"]
Quorum = Annotated[
    StrictInt | None, Field(ge=1, le=MAX_QUORUM, description="Gradients after which an epoch closes by itself.")
]
TtlSeconds = Annotated[
    float | None,
    Field(strict=True, gt=0, le=MAX_TTL_SECONDS, description="Seconds from its last change until it is deleted."),
]
DeadlineSeconds = Annotated[
    float | None,
    Field(
        strict=True,
        gt=0,
        le=MAX_TTL_SECONDS,
        description="Seconds from its first gradient until an epoch closes by itself, if min_count gradients are in;"
        " if not, the gradient that brings them closes it.",
    ),
]
MinCount = Annotated[
    StrictInt, Field(ge=1, le=MAX_QUORUM, description="Gradients without which the deadline closes no epoch.")
]
QuorumWeight = Annotated[
    float | None,
    Field(
        strict=True, gt=0, allow_inf_nan=False, description="Sum of the weights with which an epoch closes by itself."
    ),
]
Contributors = Annotated[
    list[StrictStr] | None,
    Field(
        min_length=1,
        max_length=MAX_CONTRIBUTORS,
        fail_fast=True,
        description="Contributors that each epoch expects: while it is open, the server says who is missing.",
    ),
]
MaxNorm = Annotated[
    float | None,
    Field(strict=True, gt=0, allow_inf_nan=False, description="The largest 2-norm of a gradient that is added."),
]
PerContributor = Annotated[
    StrictInt, Field(ge=1, le=MAX_QUORUM, description="Gradients that an epoch takes of each contributor.")
]


class NewBuffer(BaseModel):
    """The specification of a new buffer."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"shape": [2, 2], "dtype": "float32"}})

    shape: list[Annotated[StrictInt, Field(ge=0, lt=1 << 63)]] = Field(fail_fast=True)
    dtype: FloatName = "float32"
    nonfinite: Literal["allow", "reject"] = Field("allow", description="Whether the value may become infinite or NaN.")
    quorum: Quorum = None
    keep: StrictInt = Field(1, ge=1, le=MAX_KEEP, description="Closed epochs that stay readable.")
    ttl_seconds: TtlSeconds = None
    deadline_seconds: DeadlineSeconds = None
    min_count: MinCount = 1
    quorum_weight: QuorumWeight = None
    contributors: Contributors = None
    per_contributor: PerContributor = 1
    max_norm: MaxNorm = None


class NewBuffers(BaseModel):
    """The specifications of new buffers, by name."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"buffers": {"layer.weight": {"shape": [2, 2], "quorum": 4}}}}
    )

    buffers: dict[str, NewBuffer] = Field(min_length=1)


class NewRules(BaseModel):
    """The rules to replace; those that are absent stay."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"deadline_seconds": 30.0, "min_count": 2}})

    quorum: Quorum = Field(default_factory=absent)
    ttl_seconds: TtlSeconds = Field(default_factory=absent)
    deadline_seconds: DeadlineSeconds = Field(default_factory=absent)
    min_count: MinCount = Field(default_factory=absent)
    quorum_weight: QuorumWeight = Field(default_factory=absent)
    contributors: Contributors = Field(default_factory=absent)
    per_contributor: PerContributor = Field(default_factory=absent)
    max_norm: MaxNorm = Field(default_factory=absent)
