"""Checks that kernels share. Each error names the tensor, what was expected and what came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from service.dtypes import FLOAT64, Array
from service.errors import AxisOutOfRange, DtypeMismatch, InvalidTensor, MissingTensor, ShapeMismatch, UnknownTensor


def same_shape(**tensors: Array) -> None:
    """Raise unless all tensors have the shape and dtype of the first."""
    same_shapes(**tensors)
    (name, first), *rest = tensors.items()
    for other, tensor in rest:
        if tensor.dtype != first.dtype:
            problem = f"{other} is {tensor.dtype}, but must have the dtype of {name}, {first.dtype}"
            raise DtypeMismatch(problem, tensor=other)


def same_shapes(**tensors: Array) -> None:
    """Raise `ShapeMismatch` unless all tensors have the shape of the first."""
    (name, first), *rest = tensors.items()
    for other, tensor in rest:
        if tensor.shape != first.shape:
            problem = f"{other} has shape {list(tensor.shape)}, but must have the shape of {name}, {list(first.shape)}"
            raise ShapeMismatch(problem, tensor=other)


def check_shape(name: str, tensor: Array | None, *shape: int) -> None:
    """Raise `ShapeMismatch` if there is a tensor, and it has another shape."""
    if tensor is not None and tensor.shape != shape:
        raise ShapeMismatch(f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}", tensor=name)


def same_members(**groups: Mapping[str, Array]) -> None:
    """Raise unless all groups have the names and the shapes of the first."""
    (group, first), *rest = groups.items()
    for other, members in rest:
        for member in members.keys() - first.keys():
            problem = f"{other}.{member} has no {group}.{member}: {other} must have the names of {group}"
            raise UnknownTensor(problem, tensor=f"{other}.{member}")
        for member, tensor in first.items():
            if member not in members:
                problem = f"{group}.{member} has no {other}.{member}: {other} must have the names of {group}"
                raise MissingTensor(problem, tensor=f"{other}.{member}")
            same_shapes(**{f"{group}.{member}": tensor, f"{other}.{member}": members[member]})


def one_element(name: str, tensor: Array) -> float:
    """Return the only element of the tensor `name`. Raise `InvalidTensor` if it has none or several."""
    if tensor.size != 1:
        raise InvalidTensor(f"{name} has shape {list(tensor.shape)}, but must have one element", tensor=name)
    number: float = tensor.reshape(()).astype(FLOAT64 if tensor.dtype.itemsize == 2 else tensor.dtype).item()
    return number


def numbers_of(
    name: str, given: Mapping[str, Array] | None, default: float, weights: Iterable[str]
) -> dict[str, float]:
    """Return a number for each weight: the only element of its tensor in the group `name`, or else the default."""
    numbers = dict.fromkeys(weights, default)
    for weight, tensor in (given or {}).items():
        if weight not in numbers:
            problem = f"{name}.{weight} has no weights.{weight}: {name} may have names of weights only"
            raise UnknownTensor(problem, tensor=f"{name}.{weight}")
        numbers[weight] = one_element(f"{name}.{weight}", tensor)
    return numbers


def has_shape(name: str, tensor: Array, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless `tensor` has the shape. `meaning` says what it is, for the error."""
    if tensor.shape != shape:
        problem = f"{name} has shape {list(tensor.shape)}, but must have {list(shape)}: {meaning}"
        raise ShapeMismatch(problem, tensor=name)


def normalize_axis(axis: int, rank: int, tensor: str, owner: str | None = None) -> int:
    """Return `axis` counted from the front, for a tensor of `rank` dimensions. Raise if there is no such axis.

    The error's detail says that `owner` has the axes; by default, that is `tensor`.
    """
    owner = owner or tensor
    if rank == 0:
        raise AxisOutOfRange(f"axis {axis}: {owner} is a scalar and has no axis", tensor=tensor, axis=axis)
    if not -rank <= axis < rank:
        problem = f"axis {axis} is not in [{-rank}, {rank - 1}], the axes of {owner}, which has rank {rank}"
        raise AxisOutOfRange(problem, tensor=tensor, axis=axis)
    return axis % rank
