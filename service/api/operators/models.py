"""The request and the answer of each operator, as pydantic models. OpenAPI shows both; the first reads requests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model
from typing_extensions import TypeAliasType

from service.api.buffers.models import Receipt
from service.api.http.tensor_forms import absent, output_type, tensor_field
from service.dtypes import FLOATS
from service.kernels import Operator, Tensor

FloatTensorOrReceipt = TypeAliasType("FloatTensorOrReceipt", output_type(FLOATS) | Receipt)  # type: ignore[valid-type]
"""An output that may go to a buffer, with `into`."""


@cache
def request_model(operator: Operator) -> type[BaseModel]:
    """Return the model of the operator's request."""

    def field(tensor: Tensor) -> Any:
        note = "Optional." if tensor.optional else "Required, here or by `from`."
        return (tensor_field(tensor.name, tensor.kind), Field(default_factory=absent, description=note))

    return _model(f"{operator.name}Request", ((tensor.name, field(tensor)) for tensor in operator.inputs))


def answer_model(operator: Operator) -> type[BaseModel]:
    """Return the model of the operator's answer."""

    def field(tensor: Tensor) -> Any:
        # Not required: the query parameter `outputs` selects outputs.
        form = FloatTensorOrReceipt if tensor.kind.dtypes == FLOATS.dtypes else output_type(tensor.kind)
        return (form, Field(default_factory=absent))

    return _model(f"{operator.name}Answer", ((tensor.name, field(tensor)) for tensor in operator.outputs))


def _model(name: str, fields: Iterable[tuple[str, Any]]) -> type[BaseModel]:
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **dict(fields))
    return model
