"""What `GET /v1/ops` says of the operators."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from service.api.operators import openapi
from service.kernels import Attribute, Operator, Tensor


class TensorInfo(TypedDict):
    """An input or output of an operator."""

    name: str
    dtypes: list[str]
    default_dtype: Annotated[str, Field(description="The dtype of a JSON list that names none.")]
    type_variable: Annotated[str | None, Field(description="Tensors of the same type variable share a dtype.")]
    optional: bool
    group: Annotated[bool, Field(description="Whether it is any number of such tensors, by name.")]
    names_of: Annotated[
        str | None,
        Field(
            description="Of a group of outputs: the group of inputs with the same names. Without: 0, 1, 2 and so on."
        ),
    ]


class AttributeInfo(TypedDict):
    """An attribute of an operator, a query parameter."""

    name: str
    type: str
    required: bool
    default: Any


class Example(TypedDict):
    """A request, its attributes and its answer."""

    request: dict[str, Any]
    attributes: dict[str, Any]
    answer: dict[str, Any]


class OperatorInfo(TypedDict):
    """An operator: its formula, inputs, outputs and attributes."""

    name: str
    family: Annotated[str, Field(description="The heading that it belongs under, such as Activations.")]
    method: Annotated[str, Field(description="Its method in the Python client.")]
    formula: str
    description: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    attributes: list[AttributeInfo]
    example: Example


class NotServed(TypedDict):
    """A training operator of ONNX Runtime that this server does not have."""

    name: str
    why: str


class OperatorList(TypedDict):
    """All operators."""

    operators: list[OperatorInfo]
    not_served: Annotated[list[NotServed], Field(description="The training operators that ONNX Runtime has besides.")]


@cache
def describe(operator: Operator) -> OperatorInfo:
    """Return the operator's declaration as clients read it."""
    return OperatorInfo(
        name=operator.name,
        family=operator.family,
        method=operator.kernel.__name__,
        formula=operator.formula,
        description=openapi.description(operator),
        inputs=list(map(_tensor_info, operator.inputs)),
        outputs=list(map(_tensor_info, operator.outputs)),
        attributes=list(map(_attribute_info, operator.attributes)),
        example=Example(
            request=dict(operator.example),
            attributes=dict(operator.example_attributes),
            answer=openapi.example_answer(operator),
        ),
    )


def _attribute_info(attribute: Attribute) -> AttributeInfo:
    return AttributeInfo(
        name=attribute.name,
        type=attribute.type_name,
        required=attribute.required,
        default=None if attribute.required else attribute.default,
    )


def _tensor_info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(
        name=tensor.name,
        dtypes=list(tensor.kind.dtypes),
        default_dtype=tensor.kind.default,
        type_variable=tensor.variable,
        optional=tensor.optional,
        group=tensor.group,
        names_of=tensor.like,
    )
