"""What requests say of a buffer's specification: the shape, the dtype and the rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, create_model

from service.api.http.tensor_forms import absent
from service.buffers.names import LIFE
from service.buffers.rules import check_expected
from service.buffers.specs import RULES, Rule
from service.buffers.steps import MAX_CONTRIBUTOR_CHARACTERS

MAX_RULES_BYTES = 1 << 18
"""Bytes of a body that describes a buffer: a thousand names of contributors, each of 100 characters, take 103 KB."""

MAX_SPECS_BYTES = 1 << 24
"""Bytes of a body that describes many buffers: 1 KB for each of 16,384."""

_FIXED = {"nonfinite", "keep", "life"}
"""The rules that a buffer has for ever."""

FloatName = Literal["float16", "bfloat16", "float32", "float64"]

Contributor = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=MAX_CONTRIBUTOR_CHARACTERS,
        description="Who adds: listed in the step, which takes per_contributor gradients of each contributor.",
    ),
]

Life = Annotated[
    str | None,
    Field(
        pattern=f"^{LIFE.pattern}$",
        description="The life of the run that the buffers must have: a worker of a deleted run is refused.",
    ),
]


def _kind(rule: Rule) -> Any:
    """Return the type of a rule in a request, where a tuple is a list."""
    kind = list[StrictStr] | None if rule.type == tuple[str, ...] | None else rule.type
    return Annotated[kind, Field(description=rule.meaning, **rule.bounds)]


_NEW: dict[str, Any] = {name: (_kind(rule), rule.default) for name, rule in RULES.items()}

_CHANGED: dict[str, Any] = {
    name: (_kind(rule), Field(default_factory=absent)) for name, rule in RULES.items() if name not in _FIXED
}

NewBuffer = create_model(
    "NewBuffer",
    __config__=ConfigDict(extra="forbid", json_schema_extra={"example": {"shape": [2, 2], "dtype": "float32"}}),
    __doc__="The specification of a new buffer.",
    shape=(list[Annotated[StrictInt, Field(ge=0, lt=1 << 63)]], Field(fail_fast=True)),
    dtype=(FloatName, "float32"),
    **_NEW,
)


class NewBuffers(BaseModel):
    """The specifications of new buffers, by name."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"buffers": {"layer.weight": {"shape": [2, 2], "quorum": 4}}}}
    )

    buffers: dict[str, NewBuffer] = Field(min_length=1)


NewRules = create_model(
    "NewRules",
    __config__=ConfigDict(extra="forbid", json_schema_extra={"example": {"deadline_seconds": 30.0, "min_count": 2}}),
    __doc__="The rules to replace; those that are absent stay.",
    **_CHANGED,
)


def rules_of(new: BaseModel) -> dict[str, Any]:
    """Return the rules that the request has, as members of `Spec`. Raises `InvalidParameter`."""
    rules = {name: getattr(new, name) for name in new.model_fields_set & RULES.keys()}
    if (contributors := rules.get("contributors")) is not None:
        check_expected(contributors)
        rules["contributors"] = tuple(contributors)
    return rules
