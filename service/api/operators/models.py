"""The request and the answer of each operator, as pydantic models for OpenAPI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    create_model,
)

from service.api.buffers.models import Receipt
from service.api.http.tensor_forms import absent, input_type, output_type
from service.dtypes import FLOATS
from service.kernels import Operator, Tensor

# What follows is for OpenAPI.


def request_model(operator: Operator) -> type[BaseModel]:
    """The operator's request as OpenAPI shows it."""

    def field(tensor: Tensor) -> Any:
        note = "Optional." if tensor.optional else "Required, here or by `from`."
        return (input_type(tensor.kind), Field(default_factory=absent, description=note))

    return _model(f"{operator.name}Request", ((tensor.name, field(tensor)) for tensor in operator.inputs))


def answer_model(operator: Operator) -> type[BaseModel]:
    """The operator's answer as OpenAPI shows it."""

    def field(tensor: Tensor) -> Any:
        # Not required: the query parameter `outputs` leaves out what is not asked for.
        made = output_type(tensor.kind)
        if tensor.kind.dtypes == FLOATS.dtypes:
            made |= Receipt  # with `into`
        return (made, Field(default_factory=absent))

    return _model(f"{operator.name}Answer", ((tensor.name, field(tensor)) for tensor in operator.outputs))


def _model(name: str, fields: Iterable[tuple[str, Any]]) -> type[BaseModel]:
    made: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **dict(fields))
    return made
