"""Checks that kernels share; each raises an error that names the tensor, what was expected and what came."""

from __future__ import annotations

from service.dtypes import Array
from service.errors import AxisOutOfRange, DtypeMismatch, ShapeMismatch


def same_shape(**tensors: Array) -> None:
    """Raise unless all tensors, given by name, have the shape and dtype of the first."""
    (name, first), *rest = tensors.items()
    for other, tensor in rest:
        if tensor.shape != first.shape:
            raise ShapeMismatch(
                f"{other} has shape {list(tensor.shape)}, but must have the shape of {name}, {list(first.shape)}",
                tensor=other,
            )
        if tensor.dtype != first.dtype:
            raise DtypeMismatch(
                f"{other} is {tensor.dtype}, but must have the dtype of {name}, {first.dtype}", tensor=other
            )


def normalize_axis(axis: int, rank: int, tensor: str, called: str | None = None) -> int:
    """`axis` counted from the front, for a tensor of `rank` dimensions; raise if it has no such axis.

    `called` is what the error says in words of what has the axes, if it is not `tensor` itself.
    """
    what = called or tensor
    if rank == 0:
        raise AxisOutOfRange(f"axis {axis}: {what} is a scalar and has no axis", tensor=tensor, axis=axis)
    if not -rank <= axis < rank:
        raise AxisOutOfRange(
            f"axis {axis} is not in [{-rank}, {rank - 1}], the axes of {what}, which has rank {rank}",
            tensor=tensor,
            axis=axis,
        )
    return axis % rank
