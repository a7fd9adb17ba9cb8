"""The types of a kernel's parameters: the dtypes and ranks of tensors, groups of tensors, and attributes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge

from service import dtypes
from service.dtypes import Array, DType
from service.errors import DtypeMismatch

T = TypeVar("T", bound=Annotated[Array, dtypes.FLOATS])
T_GRAD = TypeVar("T_GRAD", bound=Annotated[Array, dtypes.FLOATS])
U = TypeVar("U", bound=Annotated[Array, dtypes.FLOATS])
V = TypeVar("V", bound=Annotated[Array, dtypes.FLOATS])
Number = TypeVar("Number", bound=Annotated[Array, dtypes.NUMBERS])
Element = TypeVar("Element", bound=Annotated[Array, dtypes.ELEMENTS])
Tind = TypeVar("Tind", bound=Annotated[Array, dtypes.INTEGERS])
TSize = TypeVar("TSize", bound=Annotated[Array, dtypes.INTEGERS])
Shape = TypeVar("Shape", bound=Annotated[Array, dtypes.INTEGERS])
Flag = Annotated[Array, dtypes.FLAG]
AnyTensor = Annotated[Array, dtypes.ANY]

# Tensors whose rank `Tensor.rank` tells clients. The other tensors have one dimension, or work with one.
AnyArray = TypeVar("AnyArray", bound=Array)
Rank0 = Annotated[AnyArray, 0]
Rank2 = Annotated[AnyArray, 2]
Rank3 = Annotated[AnyArray, 3]
Rank4 = Annotated[AnyArray, 4]

Group = Mapping[str, AnyArray]
"""A group of tensors, in order. A sequence has the names 0, 1, 2 and so on."""

Bit = Literal[0, 1]
Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator: its name, its dtypes, and the type variable it shares with others, if any."""

    name: str
    kind: dtypes.Kind
    variable: str | None = None
    optional: bool = False
    rank: int = 1
    """The number of dimensions that clients read: the only one, or, if the kernel takes several, one that works."""
    group: bool = False
    """Whether it is a group of such tensors."""
    like: str | None = None
    """The group of inputs that an output, if it is a group, takes its names from. Without one, they are 0, 1, 2, ..."""
    members: Collection[str] | None = None
    """The names of a group's tensors if they are fixed."""


@dataclass(frozen=True)
class Attribute:
    """An option of an operator: its name, Python type, and default, or `inspect.Parameter.empty` if required."""

    name: str
    type: Any
    default: Any
    parameter: str
    """The name in Python: `lambda_` for `lambda`, as that is no name there."""

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def item_type(self) -> Any:
        """The type of an item of a list, or of the value, if it is no list, without its bounds."""
        return _parts(self.type)[0]

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return _parts(self.type)[1]

    @property
    def minimum(self) -> Any:
        """The least value of an item, or None."""
        notes = getattr(_item(self.type), "__metadata__", ())
        return next((note.ge for note in notes if isinstance(note, Ge)), None)

    @property
    def type_name(self) -> str:
        """The type as text for readers: int, float, list[str] | None, or the choices of a literal."""
        item, is_list, optional = _parts(self.type)
        text = " | ".join(map(str, get_args(item))) if get_origin(item) is Literal else item.__name__
        return (f"list[{text}]" if is_list else text) + " | None" * optional


def read_tensor(declared: str, hint: Any) -> Tensor:
    """Return the tensor of a parameter, or of an output: `updated:weights` has the names of the group `weights`."""
    name, _, like = declared.partition(":")
    hint, optional = _without_none(hint)
    group = isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping)
    if group:
        _, hint = get_args(hint)
    notes = getattr(hint, "__metadata__", ())
    base: Any = hint.__origin__ if notes else hint
    variable = base.__name__ if isinstance(base, TypeVar) else None
    notes += base.__bound__.__metadata__ if variable else ()
    kinds = [note for note in notes if isinstance(note, dtypes.Kind)]
    if len(kinds) != 1:
        raise TypeError(f"{name} is {hint}, which has no dtypes")
    (rank,) = [note for note in notes if isinstance(note, int)] or [1]
    return Tensor(name, kinds[0], variable, optional, rank, group, like or None)


def check_dtypes(given: Iterable[tuple[str, Tensor, DType]]) -> None:
    """Raise `DtypeMismatch` unless the dtype of each named tensor fits, and is that of others of its type variable."""
    bound: dict[str, tuple[str, DType]] = {}
    for name, expected, dtype in given:
        if dtypes.NAMES.get(dtype) not in expected.kind.dtypes:
            known = ", ".join(expected.kind.dtypes)
            wanted = f"one of {known}" if ", " in known else f"{known}: cast to {known}"
            raise DtypeMismatch(f"{name} is {dtype}, but must be {wanted}", tensor=name)
        if expected.variable is None:
            continue
        first, common = bound.setdefault(expected.variable, (name, dtype))
        if dtype != common:
            raise DtypeMismatch(
                f"{name} is {dtype} and {first} is {common}, but they must share a dtype"
                f" (a JSON list without one is {expected.kind.default})",
                tensor=name,
            )


def read_attribute(name: str, hint: Any, default: Any) -> Attribute:
    """Return the attribute of a parameter. Raises `TypeError` if the service cannot read such an attribute."""
    item, _, _ = _parts(hint)
    if item not in (int, float, str) and get_origin(item) is not Literal:
        raise TypeError(
            f"The attribute {name} is {hint}, but must be an int, a float, a str, a Literal or a list of one"
        )
    return Attribute(name.rstrip("_"), hint, default, name)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return what a hint allows beside None, and whether it allows None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    (one,) = (arm for arm in get_args(hint) if arm is not type(None))
    return one, True


def _parts(hint: Any) -> tuple[Any, bool, bool]:
    """Return the type of an attribute's items, whether the attribute is a list, and whether it may be None."""
    item, (hint, optional) = _item(hint), _without_none(hint)
    return item.__origin__ if get_origin(item) is Annotated else item, get_origin(hint) is list, optional


def _item(hint: Any) -> Any:
    """Return the type of an attribute's items, with its bounds."""
    hint, _ = _without_none(hint)
    return get_args(hint)[0] if get_origin(hint) is list else hint
