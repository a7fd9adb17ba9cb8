"""Checks that kernels share. Each error names the tensor, what was expected and what came."""

from __future__ import annotations

from service.dtypes import Array
from service.errors import AxisOutOfRange, DtypeMismatch, ShapeMismatch


def same_shape(**tensors: Array) -> None:
    """Raise unless all tensors have the shape and dtype of the first."""
    (name, first), *rest = tensors.items()
    for other, tensor in rest:
        if tensor.shape != first.shape:
            problem = f"{other} has shape {list(tensor.shape)}, but must have the shape of {name}, {list(first.shape)}"
            raise ShapeMismatch(problem, tensor=other)
        if tensor.dtype != first.dtype:
            problem = f"{other} is {tensor.dtype}, but must have the dtype of {name}, {first.dtype}"
            raise DtypeMismatch(problem, tensor=other)


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
