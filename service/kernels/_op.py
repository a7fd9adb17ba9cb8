"""`@op`: a kernel's Python signature is its schema, and `OPERATORS` is the table of all of them.

Positional-only parameters are tensor inputs (`T | None = None`: optional) and keyword-only ones are attributes, except
`out`. The annotation is the type constraint; parameters that share a type variable share a dtype.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from service import dtypes

Array = np.ndarray[Any, np.dtype[Any]]

T = TypeVar("T", bound=Annotated[Array, dtypes.FLOATS])
T_GRAD = TypeVar("T_GRAD", bound=Annotated[Array, dtypes.FLOATS])
Tind = TypeVar("Tind", bound=Annotated[Array, dtypes.INTEGERS])
Shape = TypeVar("Shape", bound=Annotated[Array, dtypes.INTEGERS])
Flag = Annotated[Array, dtypes.FLAG]
AnyTensor = Annotated[Array, dtypes.ANY]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator: its name, its dtypes, and the type variable it shares with others, if any."""

    name: str
    kind: dtypes.Kind
    variable: str | None = None
    optional: bool = False


@dataclass(frozen=True)
class Attribute:
    """A number or string that shapes the computation: its name, Python type and default."""

    name: str
    type: type
    default: Any


@dataclass(frozen=True, eq=False)
class Operator:
    """Everything that the service knows of an operator, read from its kernel's declaration."""

    name: str
    kernel: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    formula: str
    description: str
    example: Mapping[str, Any]
    """One tensor for each input, as JSON: a nested list, a scalar, or an object with dtype and data."""

    def __call__(self, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
        """Run the kernel on `tensors`, input name -> array, and name what it returns."""
        result = self.kernel(*(tensors.get(tensor.name) for tensor in self.inputs), **attributes)
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip((output.name for output in self.outputs), results, strict=True))


OPERATORS: dict[str, Operator] = {}


def op(name: str, *, outputs: str, example: Mapping[str, Any]) -> Callable[[F], F]:
    """Declare the decorated kernel as the operator `name`, with the space-separated names of its `outputs`.

    The kernel is handed back unchanged.
    """

    def register(kernel: F) -> F:
        OPERATORS[name] = _read(name, kernel, outputs.split(), example)
        return kernel

    return register


def _read(name: str, kernel: Callable[..., Any], outputs: list[str], example: Mapping[str, Any]) -> Operator:
    hints = get_type_hints(kernel, include_extras=True)
    parameters = inspect.signature(kernel).parameters.values()
    returned = hints["return"]
    returns = get_args(returned) if get_origin(returned) is tuple else (returned,)
    doc = inspect.getdoc(kernel) or ""
    formula, _, description = doc.partition("\n")
    return Operator(
        name=name,
        kernel=kernel,
        inputs=tuple(_tensor(p.name, hints[p.name]) for p in parameters if p.kind is p.POSITIONAL_ONLY),
        outputs=tuple(_tensor(*pair) for pair in zip(outputs, returns, strict=True)),
        attributes=tuple(
            Attribute(p.name, hints[p.name], p.default)
            for p in parameters
            if p.kind is p.KEYWORD_ONLY and p.name != "out"
        ),
        formula=formula.strip(),
        description=description.strip(),
        example=example,
    )


def _tensor(name: str, hint: Any) -> Tensor:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        optional = True
    variable = hint.__name__ if isinstance(hint, TypeVar) else None
    constraint: Any = hint.__bound__ if isinstance(hint, TypeVar) else hint
    (kind,) = constraint.__metadata__
    return Tensor(name, kind, variable, optional)
