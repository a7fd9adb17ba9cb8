"""The limits of tensors, checked before memory of their size is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.dtypes import DType
from service.errors import TensorTooLarge, TooManyDimensions, TooManyTensors

MAX_RANK = 64
"""Dimensions of a tensor, at most: NumPy's own limit."""

INDEXABLE_BYTES = 1 << 63
"""NumPy counts bytes in 64 bits, signed."""


@dataclass(frozen=True, eq=False)  # caches look it up by identity: a process has only one
class Limits:
    """The size and dimensions of each input and output, at most, and the number of tensors in a request."""

    max_tensor_bytes: int
    max_tensors: int = 1 << 14
    max_dimensions: int = MAX_RANK

    def check_count(self, count: int) -> None:
        """Raise `TooManyTensors` if a request may not have `count` tensors."""
        if count > self.max_tensors:
            problem = f"The request has {count} tensors; the limit is {self.max_tensors} (GRADSERVE_MAX_TENSORS)"
            raise TooManyTensors(problem, limit=self.max_tensors)

    def check(self, tensor: str | None, shape: Sequence[int], dtype: DType, *, label: str = "") -> None:
        """Raise `TooManyDimensions` or `TensorTooLarge` if a tensor may not have this shape and dtype.

        An error's detail calls the tensor by `label`, or else by its name, `tensor`.
        """
        if len(shape) > self.max_dimensions:
            self.check_rank(tensor, len(shape), label=label)
        size = math.prod(shape) * dtype.itemsize
        if 0 < size <= self.max_tensor_bytes:
            return
        if size > self.max_tensor_bytes:
            raise TensorTooLarge(
                f"{label or tensor}, {dtype} of shape {list(shape)}, takes {size} bytes;"
                f" the limit is {self.max_tensor_bytes} (GRADSERVE_MAX_TENSOR_BYTES)",
                limit=self.max_tensor_bytes,
                **_named(tensor),
            )
        # NumPy multiplies the other dimensions of an empty tensor, too.
        if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize >= INDEXABLE_BYTES:
            problem = f"{label or tensor} has shape {list(shape)}, which is empty, but too large for NumPy to index"
            raise TensorTooLarge(problem, **_named(tensor))

    def check_rank(self, tensor: str | None, rank: int, *, label: str = "") -> None:
        """Raise `TooManyDimensions` if a tensor may not have `rank` dimensions."""
        if rank > self.max_dimensions:
            raise TooManyDimensions(
                f"{label or tensor} has {rank} dimensions; the limit is {self.max_dimensions}"
                " (GRADSERVE_MAX_DIMENSIONS)",
                limit=self.max_dimensions,
                **_named(tensor),
            )


def _named(tensor: str | None) -> dict[str, str]:
    """Return the error's context: the tensor's name, if it has one."""
    return {} if tensor is None else {"tensor": tensor}
