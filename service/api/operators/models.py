"""The attributes, the request and the answer of each operator, as pydantic models. The first read requests."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from typing_extensions import TypeAliasType

from service.api.buffers.receipt_models import Receipt
from service.api.http.tensor_forms import absent, input_type, output_type
from service.api.operators.job import fits_a_buffer
from service.dtypes import Kind
from service.kernels import Attribute, Operator, Tensor


def attribute_fields(operator: Operator) -> dict[str, Any]:
    """Return the fields of the operator's attributes in a model. Texts are read as their types."""
    return {one.name: (_attribute_type(one), _attribute_field(operator, one)) for one in operator.attributes}


def _attribute_field(operator: Operator, attribute: Attribute) -> Any:
    example = operator.example_attributes.get(attribute.name)
    examples = None if example is None else [example]
    if attribute.required:
        return Field(examples=examples)
    return Field(attribute.default, examples=examples)


def _attribute_type(attribute: Attribute) -> Any:
    choices = {str(choice): choice for choice in get_args(attribute.item_type)}  # of a Literal

    def read(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            return choices.get(text, text) if choices else attribute.item_type(text)
        except ValueError:
            return text  # pydantic says what it should be

    def read_list(value: Any) -> Any:
        """Cut texts at their commas: a parameter may repeat, and its text may have several items."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list):
            return value
        return [read(item) for text in texts for item in (text.split(",") if isinstance(text, str) else [text])]

    if attribute.is_list:
        return Annotated[attribute.type, BeforeValidator(read_list)]
    return Annotated[attribute.type, BeforeValidator(read)] if choices else attribute.type


def request_model(operator: Operator) -> type[BaseModel]:
    """Return the model of the operator's request."""

    def field(tensor: Tensor) -> Any:
        note = "Optional." if tensor.optional else "Required, here or by `from`."
        form = input_type(tensor.kind)
        if (
            tensor.group
        ):  # the schema has the object alone: generators of clients fail on a type that is one or the other
            note += " An object of tensors, or a list: its tensors have the names 0, 1, 2 and so on."
            form = dict[str, form]  # type: ignore[valid-type]
        return (form, Field(default_factory=absent, description=note))

    return _model(f"{operator.name}Request", ((tensor.name, field(tensor)) for tensor in operator.inputs))


@cache
def _tensor_or_receipt(kind: Kind) -> Any:
    """Return the type of an output that may go to a buffer, with `into`."""
    return TypeAliasType(f"{kind.name.capitalize()}TensorOrReceipt", output_type(kind) | Receipt)


def answer_model(operator: Operator) -> type[BaseModel]:
    """Return the model of the operator's answer."""

    def field(tensor: Tensor) -> Any:
        # Not required: the query parameter `outputs` selects outputs.
        form = _tensor_or_receipt(tensor.kind) if fits_a_buffer(tensor) else output_type(tensor.kind)
        return (dict[str, form] if tensor.group else form, Field(default_factory=absent))  # type: ignore[valid-type]

    return _model(f"{operator.name}Answer", ((tensor.name, field(tensor)) for tensor in operator.outputs))


def _model(name: str, fields: Iterable[tuple[str, Any]]) -> type[BaseModel]:
    model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **dict(fields))
    return model
