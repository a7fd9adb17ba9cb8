"""`@op`: a kernel's Python signature is its schema, and `OPERATORS` is the table of all operators.

Positional-only parameters are tensor inputs (`T | None = None`: optional). Keyword-only parameters are attributes,
except `out`, and `wanted`: the names of the outputs to compute, for a kernel that can compute fewer. The annotation is
the type constraint; parameters that share a type variable share a dtype. `Rank3[T]` is a T with three dimensions.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from service import dtypes
from service.dtypes import Array

T = TypeVar("T", bound=Annotated[Array, dtypes.FLOATS])
T_GRAD = TypeVar("T_GRAD", bound=Annotated[Array, dtypes.FLOATS])
Tind = TypeVar("Tind", bound=Annotated[Array, dtypes.INTEGERS])
TSize = TypeVar("TSize", bound=Annotated[Array, dtypes.INTEGERS])
Shape = TypeVar("Shape", bound=Annotated[Array, dtypes.INTEGERS])
Flag = Annotated[Array, dtypes.FLAG]
AnyTensor = Annotated[Array, dtypes.ANY]

# Tensors whose rank `Tensor.rank` tells clients. The other tensors have one dimension, or work with one.
AnyArray = TypeVar("AnyArray", bound=Array)
Rank2 = Annotated[AnyArray, 2]
Rank3 = Annotated[AnyArray, 3]
Rank4 = Annotated[AnyArray, 4]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator: its name, its dtypes, and the type variable it shares with others, if any."""

    name: str
    kind: dtypes.Kind
    variable: str | None = None
    optional: bool = False
    rank: int = 1
    """The number of dimensions that clients read: the only one, or, if the kernel takes several, one that works."""


@dataclass(frozen=True)
class Attribute:
    """An option of an operator: its name, Python type and default."""

    name: str
    type: Any
    default: Any

    @property
    def type_name(self) -> str:
        """The type as text for readers: int, float, list[str] | None, or the choices of a literal."""
        if get_origin(self.type) is Literal:
            return " | ".join(get_args(self.type))
        return self.type.__name__ if isinstance(self.type, type) else str(self.type)


@dataclass(frozen=True, eq=False)
class Operator:
    """Everything that the service knows about an operator, read from its kernel's declaration."""

    name: str
    kernel: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    formula: str
    description: str
    example: Mapping[str, Any]
    """A tensor for each input, as JSON: a nested list, a scalar, or an object with dtype and data."""

    takes_wanted: bool
    """Whether the kernel has a parameter `wanted`, and computes only the outputs that it names."""
    linear: bool
    """Whether the bytes of the inputs bound the operator's time and memory."""
    sparse: Callable[..., Any] | None
    """A function with the kernel's parameters. It returns the only output as an object that computes pieces of it."""

    @cached_property
    def input_names(self) -> frozenset[str]:
        """The names of the inputs."""
        return frozenset(tensor.name for tensor in self.inputs)

    @cached_property
    def needed_names(self) -> tuple[str, ...]:
        """The names of the inputs that are not optional."""
        return tuple(tensor.name for tensor in self.inputs if not tensor.optional)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs."""
        return tuple(tensor.name for tensor in self.outputs)

    def __call__(
        self, tensors: Mapping[str, Array], attributes: Mapping[str, Any], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the kernel on `tensors`, input name -> array. Return the outputs by name, or only those in `wanted`."""
        selection = {"wanted": wanted} if wanted is not None and self.takes_wanted else {}
        result = self.kernel(*self._in_order(tensors), **attributes, **selection)
        results = dict(zip(self.output_names, result if isinstance(result, tuple) else (result,), strict=True))
        return results if wanted is None else {name: results[name] for name in wanted}

    def in_pieces(self, tensors: Mapping[str, Array], attributes: Mapping[str, Any]) -> Any:
        """Return the only output of a `sparse` operator as an object that computes pieces of it."""
        assert self.sparse is not None
        return self.sparse(*self._in_order(tensors), **attributes)

    def _in_order(self, tensors: Mapping[str, Array]) -> list[Array | None]:
        return [tensors.get(tensor.name) for tensor in self.inputs]


OPERATORS: dict[str, Operator] = {}


def op(
    name: str,
    *,
    outputs: str,
    example: Mapping[str, Any],
    linear: bool = True,
    sparse: Callable[..., Any] | None = None,
) -> Callable[[F], F]:
    """Declare the decorated kernel as the operator `name`, with the space-separated names of its `outputs`.

    Pass `linear=False` if a few bytes of input can keep the kernel busy for long. Pass `sparse` if most of the output
    may be zero: it computes the output piece by piece. The decorator returns the kernel unchanged.
    """

    def register(kernel: F) -> F:
        hints = get_type_hints(kernel, include_extras=True)
        parameters = inspect.signature(kernel).parameters.values()
        returned = hints["return"]
        returns = get_args(returned) if get_origin(returned) is tuple else (returned,)
        formula, _, description = (inspect.getdoc(kernel) or "").partition("\n")
        OPERATORS[name] = Operator(
            name=name,
            kernel=kernel,
            inputs=tuple(_tensor(p.name, hints[p.name]) for p in parameters if p.kind is p.POSITIONAL_ONLY),
            outputs=tuple(_tensor(*pair) for pair in zip(outputs.split(), returns, strict=True)),
            attributes=tuple(
                Attribute(p.name, hints[p.name], p.default)
                for p in parameters
                if p.kind is p.KEYWORD_ONLY and p.name not in ("out", "wanted")
            ),
            formula=formula.strip(),
            description=description.strip(),
            example=example,
            takes_wanted="wanted" in hints,
            linear=linear,
            sparse=sparse,
        )
        return kernel

    return register


def _tensor(name: str, hint: Any) -> Tensor:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        optional = True
    notes = getattr(hint, "__metadata__", ())
    base: Any = hint.__origin__ if notes else hint
    variable = base.__name__ if isinstance(base, TypeVar) else None
    notes += base.__bound__.__metadata__ if variable else ()
    (kind,) = (note for note in notes if isinstance(note, dtypes.Kind))
    (rank,) = [note for note in notes if isinstance(note, int)] or [1]
    return Tensor(name, kind, variable, optional, rank)
