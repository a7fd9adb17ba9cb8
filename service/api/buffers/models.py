"""The requests and answers of the buffers' endpoints, without their tensors."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, RootModel, StrictStr, create_model
from typing_extensions import TypeAliasType, TypedDict

from service.api.buffers.specs import Contributor, FloatName, Life, NewRules
from service.api.http.tensor_forms import input_type
from service.buffers.pushes import MAX_PARTS
from service.buffers.specs import RULES
from service.codecs import json as json_codec
from service.dtypes import CODES, FLOATS, INTEGERS, SCALES

MAX_WAIT_SECONDS = 600.0
"""The longest wait for a step: ten minutes. A proxy must wait longer; deploy/nginx.conf does."""

MAX_LISTED_BUFFERS = 1000
"""Buffers on a page of a list: their metadata is about 300 KB of JSON."""

MAX_LISTED_BYTES = 1 << 20
"""Bytes of their records, after which a page ends."""

MAX_NAMED_BUFFERS = 100_000
"""Buffers that a request may name: by default as many as a namespace may have."""

MAX_NAMES_BYTES = 256 * MAX_NAMED_BUFFERS
"""Bytes of a body that names buffers: a name has at most 200 characters, and JSON puts a few more around it."""

Timeout = Annotated[
    float, Field(ge=0, le=MAX_WAIT_SECONDS, description="Seconds to wait for the step, or for enough gradients.")
]
Encoding = Annotated[
    json_codec.Encoding | None,
    Field(description="How a JSON answer writes tensors; by default in base64 if the request does, or else as lists."),
]
ValueEncoding = Annotated[
    Literal["list", "base64", "int8"] | None,
    Field(description="How a JSON answer writes tensors; `int8`: 8 bits a number, also in safetensors, as `coded`."),
]
Reduce = Annotated[Literal["sum", "mean"], Field(description="The sum, or the sum divided by the sum of the weights.")]
NextCursor = Annotated[str | None, Field(description="`cursor` of the request for the next page; null on the last.")]
AnswerDtype = Annotated[FloatName | None, Field(description="The dtype of the answer; by default the buffer's.")]


_ANSWERED: dict[str, Any] = {
    name: (str if get_origin(rule.type) is Literal else rule.type, ...) for name, rule in RULES.items()
}

_Rules = create_model("_Rules", **_ANSWERED)


class Metadata(_Rules):
    """A buffer, without its value."""

    name: str
    shape: list[int]
    dtype: str
    run: str | None = Field(description="The run that the buffer belongs to.")
    step: int = Field(description="The current step, counted from 0.")
    version: int = Field(description="The number of changes so far.")
    count: int = Field(description="The number of gradients in this step's sum.")
    weight: float = Field(description="The sum of those gradients' weights.")
    bytes: int = Field(description="Bytes of the value.")
    closed_steps: list[int] = Field(description="Closed steps whose values can be read.")
    created_at: float = Field(description="Seconds since 1970.")
    updated_at: float
    expires_at: float | None
    closed_at: float | None = Field(description="When the last step closed; null before, and after an import.")
    deadline_at: float | None = Field(description="When the deadline of this step ends; null before its first add.")
    contributors_in: dict[str, int] = Field(description="Gradients of each contributor in this step.")
    missing: list[str] | None = Field(
        description="Contributors that are not in: those that the buffer expects or, without, those of the last closed"
        " step, as long as all that are in were in it. Else null."
    )
    missing_since: dict[str, float] | None = Field(
        description="When the last step that had each of them closed; without one, when the buffer was created."
    )


class CreatedBuffer(Metadata):
    """A buffer of a request that creates many."""

    created: bool = Field(description="Whether the request has created it; else it existed.")


class CreatedBuffers(BaseModel):
    """Buffers that a request has created or found, by name."""

    buffers: dict[str, CreatedBuffer]


class BufferList(TypedDict):
    """A page of buffers, in the order of their names."""

    buffers: list[Metadata]
    next_cursor: NextCursor


class AccumulateQuery(BaseModel):
    """How gradients are added."""

    do_update: bool = Field(True, description="False: change nothing.")
    overwrite: bool = Field(False, description="True: the gradient replaces the sum.")
    weight: float = Field(1.0, allow_inf_nan=False, description="Number to multiply the gradient by.")
    step: int | None = Field(None, ge=0, description="The step that the buffer must be in.")
    contributor: Contributor = None
    life: Life = None
    answered: Literal["value"] | None = Field(None, alias="return", description="`value`: answer the sum, too.")
    encoding: Encoding = None


class AccumulateManyQuery(AccumulateQuery):
    """How the gradients of many buffers are added: at once, or as a part of a push."""

    push: str | None = Field(
        None,
        min_length=1,
        max_length=255,
        pattern="^[!-~]+$",
        description="The id of a push in parts, new for each push. The part that completes it adds all parts.",
    )
    part: int | None = Field(None, ge=0, le=MAX_PARTS, description="The number of this part, counted from 0 or from 1.")
    parts: int | None = Field(None, ge=1, le=MAX_PARTS, description="The number of parts of the push.")


class StagedParts(BaseModel):
    """The parts of a push that have come."""

    model_config = ConfigDict(json_schema_extra={"example": {"push": "step-17", "parts": 3, "staged": [1, 3]}})

    push: str
    parts: int
    staged: list[int]


class MetadataQuery(BaseModel):
    """What is read of a buffer without its value."""

    step: int | None = Field(None, ge=0, description="A closed step, whose receipt is the answer.")
    timeout: Timeout = 0.0


class ValueQuery(BaseModel):
    """How a value is read."""

    reduce: Reduce = "sum"
    dtype: AnswerDtype = None
    step: int | None = Field(None, ge=0, description="A closed step; by default the current value.")
    life: Life = None
    timeout: Timeout = 0.0
    encoding: ValueEncoding = None


class TakeQuery(BaseModel):
    """When and how a value is taken."""

    min_count: int = Field(0, ge=0, description="Gradients that the step must have.")
    answered: Literal["value", "receipt"] = Field(
        "value", alias="return", description="`receipt`: close the step and answer no value, which `value` reads later."
    )
    step: int | None = Field(None, ge=0, description="The step that the buffer must be in.")
    life: Life = None
    timeout: Timeout = 0.0
    reduce: Reduce = "sum"
    dtype: AnswerDtype = None
    encoding: ValueEncoding = None


class PrefixQuery(BaseModel):
    """Which buffers are meant."""

    prefix: str | None = Field(None, description="Prefix of the buffers' names, in place of names in the body.")


class ManyValueQuery(ValueQuery, PrefixQuery):
    """How the values of many buffers are read."""


class ManyTakeQuery(TakeQuery, PrefixQuery):
    """When and how the values of many buffers are taken."""


class WideQuery(BaseModel):
    """Which buffers are deleted, or get other rules."""

    prefix: str = Field(
        default_factory=str, description="Prefix of the buffers' names.", json_schema_extra={"minLength": 1}
    )
    all: bool = Field(False, description="In place of a prefix: all buffers of the namespace.")


class ListQuery(BaseModel):
    """What is listed."""

    prefix: str = Field("", description="Only names that begin with this.")
    limit: int = Field(100, ge=1, le=MAX_LISTED_BUFFERS, description="Entries on a page, at most.")
    cursor: str = Field("", description="`next_cursor` of the previous page.")


class Names(BaseModel):
    """Buffers by name."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"names": ["layer.weight"]}})

    names: list[StrictStr] = Field(min_length=1, max_length=MAX_NAMED_BUFFERS, fail_fast=True)


class SparseGradient(BaseModel):
    """Rows that are added to those of `indices`; a negative index counts from the end."""

    model_config = ConfigDict(extra="forbid")

    indices: input_type(INTEGERS)  # type: ignore[valid-type]
    rows: input_type(FLOATS)  # type: ignore[valid-type]


class CodedGradient(BaseModel):
    """A gradient in 8 bits: each element is its code times the scale of its block of 256, in row-major order."""

    model_config = ConfigDict(extra="forbid")

    codes: input_type(CODES)  # type: ignore[valid-type]
    scales: input_type(SCALES)  # type: ignore[valid-type]


Gradient = TypeAliasType("Gradient", input_type(FLOATS) | SparseGradient | CodedGradient)  # type: ignore[valid-type]


class GradientBody(BaseModel):
    """A gradient."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"gradient": [[1.0, 2.0], [3.0, 4.0]]}})

    gradient: Gradient  # type: ignore[valid-type]


class GradientBodies(RootModel[dict[str, Gradient]]):  # type: ignore[valid-type]
    """Gradients by the names of their buffers."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "example": {"layer.weight": [[1.0, 2.0], [3.0, 4.0]], "layer.bias": [1.0, 2.0]},
        }
    )


class NewRulesOfMany(NewRules):
    """The rules to replace, and the buffers by name unless the query has their prefix."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"names": ["layer.weight"], "quorum": 3}})

    names: list[StrictStr] | None = Field(None, min_length=1, max_length=MAX_NAMED_BUFFERS, fail_fast=True)
