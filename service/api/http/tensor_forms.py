"""The JSON forms of tensors, as pydantic models: they check the envelope of a request, and OpenAPI shows them.

pydantic never sees the numbers: they stay with the codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, create_model, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from service.codecs import json as json_codec
from service.dtypes import WIRE, Array, Kind
from service.errors import InvalidTensor, must

_ABSENT: Any = object()


Dimension = Annotated[StrictInt, Field(ge=0, lt=1 << 63)]


class Envelope(BaseModel):
    """A tensor of a request that is an object, its numbers not yet read."""

    dtype: Literal[tuple(WIRE)] | None = None  # type: ignore[valid-type]
    shape: list[Dimension] | None = None
    data: Any = _ABSENT
    base64: str | None = None

    @model_validator(mode="after")
    def _one_of_data_and_base64(self) -> Self:
        if (self.data is _ABSENT) is (self.base64 is None):
            raise PydanticCustomError("form", "a tensor must have either data or base64")
        if self.base64 is not None and self.shape is None:
            raise PydanticCustomError("form", "base64 needs a shape")
        return self


_MEMBERS = [*Envelope.model_fields]


def _envelope(name: str, members: dict[str, Any]) -> Envelope:
    """Return the tensor `name` of a request. Raises `InvalidTensor`."""
    for member in members:  # pydantic would make an error of each
        if member not in _MEMBERS:
            known = ", ".join(_MEMBERS)
            raise InvalidTensor(f"{name}.{member} is unknown; the members of a tensor are {known}", tensor=name)
    try:
        return Envelope.model_validate(members)
    except ValidationError as invalid:
        error = invalid.errors(include_url=False, include_context=False)[0]
        place = ".".join([name, *map(str, error["loc"])])
        problem = must(place, error["msg"], error["input"]) if error["loc"] else f"{place}: {error['msg']}"
        raise InvalidTensor(problem, tensor=name) from None


def read_tensor(document: json_codec.Document, name: str, value: Any, default: str) -> Array:
    """Return the tensor of a member of the document. A list without a dtype has the `default` dtype.

    Raises `InvalidTensor`, `TooManyDimensions` and `TensorTooLarge`. The caller must call `finish` before it uses it.
    """
    if not isinstance(value, dict):
        return document.tensor(name, value, WIRE[default])
    envelope = _envelope(name, value)
    dtype = WIRE[envelope.dtype or default]
    if envelope.base64 is None:
        return document.tensor(name, envelope.data, dtype, envelope.shape)
    return document.base64(name, envelope.base64, dtype, envelope.shape or [])


Number = TypeAliasType("Number", 'float | Literal["NaN", "Infinity", "-Infinity"]')


Numbers = TypeAliasType("Numbers", Number | list[Any])


Integers = TypeAliasType("Integers", int | list[Any])


Booleans = TypeAliasType("Booleans", bool | list[Any])


Values = TypeAliasType("Values", Number | bool | list[Any])
"""A number, or nested lists of numbers. A recursive type would be exact, but most generators of OpenAPI clients fail on
it."""


_DATA: Mapping[str, Any] = {
    "float": Numbers,
    "integer": Integers,
    "code": Integers,
    "scale": Numbers,
    "flag": Booleans,
    "number": Numbers,
    "element": Values,
    "any": Values,
}


def absent() -> Any:
    """Return the default of a member that an answer omits. Unlike a named default, it stays out of the schema."""


@cache
def input_type(kind: Kind) -> Any:
    head: Any = {"__config__": ConfigDict(extra="forbid"), "dtype": (Literal[kind.dtypes], kind.default)}
    name, data = kind.name.capitalize(), _DATA[kind.name]
    as_list = create_model(f"{name}List", **head, shape=(list[int] | None, None), data=(data, ...))
    as_base64 = create_model(f"{name}Base64", **head, shape=(list[int], ...), base64=(str, ...))
    return TypeAliasType(f"{name}Tensor", data | as_list | as_base64)


@cache
def output_type(kind: Kind) -> type[BaseModel]:
    """Return the model of a tensor in an answer.

    One model has both forms, where exactly three of its members are there: generators of clients tell alternatives
    apart by their members at best.
    """
    config = ConfigDict(extra="forbid", json_schema_extra={"minProperties": 3, "maxProperties": 3})
    data = Field(default_factory=absent, description="A number, or nested lists of numbers; absent beside base64.")
    base64 = Field(default_factory=absent, description="The bytes of the elements; absent beside data.")
    members: Any = {
        "dtype": (Literal[kind.dtypes], ...),
        "shape": (list[int], ...),
        "data": (_DATA[kind.name], data),
        "base64": (str, base64),
    }
    return create_model(f"{kind.name.capitalize()}TensorAnswer", __config__=config, **members)
