"""The receipts that the buffers' endpoints answer."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.api.http.tensor_forms import absent, output_type
from service.dtypes import CODES, FLOATS, SCALES

EXAMPLE_RECEIPT: dict[str, Any] = {
    "name": "layer.weight",
    "updated": True,
    "closed": False,
    "step": 0,
    "version": 1,
    "count": 1,
    "weight": 1.0,
}
"""The receipt of the first add of the example gradient."""


class CodedValue(BaseModel):
    """A value in 8 bits, in the form that a gradient may have."""

    codes: output_type(CODES)  # type: ignore[valid-type]
    scales: output_type(SCALES)  # type: ignore[valid-type]


class Receipt(BaseModel):
    """The result of changing a buffer."""

    model_config = ConfigDict(json_schema_extra={"example": EXAMPLE_RECEIPT})

    name: str
    updated: bool = Field(description="Whether the buffer was changed.")
    closed: bool = Field(description="Whether this closed the step; if so, the receipt has its final state.")
    step: int
    version: int
    count: int
    weight: float
    created: bool = Field(default_factory=absent, description="True if `set` of an operator has created the buffer.")
    closed_by: Literal["quorum", "deadline", "take"] = Field(
        default_factory=absent, description="What has closed the step, if it is closed."
    )
    contributors: dict[str, int] = Field(
        default_factory=absent, description="Gradients of each contributor, if the step is closed."
    )
    value: output_type(FLOATS) = Field(default_factory=absent)  # type: ignore[valid-type]
    coded: CodedValue = Field(default_factory=absent, description="The value in 8 bits, with `encoding=int8`.")


class Receipts(BaseModel):
    """The results of changing several buffers, by name."""

    model_config = ConfigDict(json_schema_extra={"example": {"buffers": {"layer.weight": EXAMPLE_RECEIPT}}})

    buffers: dict[str, Receipt]
