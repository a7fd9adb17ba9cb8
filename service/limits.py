"""What a tensor may be at most, asked before anything of its size is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from service.dtypes import DType
from service.errors import TensorTooLarge, TooManyDimensions, TooManyTensors

MAX_RANK = 64
"""The most dimensions that a tensor can have: NumPy's own bound."""


@dataclass(frozen=True)
class Limits:
    """`max_tensor_bytes` and `max_dimensions` bound every input and output, `max_tensors` their number in a request."""

    max_tensor_bytes: int
    max_tensors: int = 1 << 14
    max_dimensions: int = MAX_RANK

    def check_count(self, count: int) -> None:
        """Raise `TooManyTensors` for a request with so many."""
        if count > self.max_tensors:
            raise TooManyTensors(
                f"The request has {count} tensors; the limit is {self.max_tensors} (GRADSERVE_MAX_TENSORS)",
                limit=self.max_tensors,
            )

    def check(self, tensor: str | None, shape: Sequence[int], dtype: DType, *, what: str = "") -> None:
        """Raise `TooManyDimensions` or `TensorTooLarge` for a tensor of this shape, whatever its numbers.

        `what` is what it is called in words, where that is not its name, or where it has none.
        """
        if len(shape) > self.max_dimensions:
            self.check_rank(tensor, len(shape), what=what)
        size = math.prod(shape) * dtype.itemsize
        if 0 < size <= self.max_tensor_bytes:
            return
        if size > self.max_tensor_bytes:
            raise TensorTooLarge(
                f"{what or tensor}, {dtype} of shape {list(shape)}, takes {size} bytes;"
                f" the limit is {self.max_tensor_bytes} (GRADSERVE_MAX_TENSOR_BYTES)",
                limit=self.max_tensor_bytes,
                **_named(tensor),
            )
        # NumPy multiplies the other dimensions of an empty tensor too, and they must fit its 64-bit count.
        if math.prod(max(dim, 1) for dim in shape) * dtype.itemsize >= 1 << 63:
            raise TensorTooLarge(
                f"{what or tensor} has shape {list(shape)}, which is empty but too large to index", **_named(tensor)
            )

    def check_rank(self, tensor: str | None, rank: int, *, what: str = "") -> None:
        """Raise `TooManyDimensions` for so many."""
        if rank > self.max_dimensions:
            raise TooManyDimensions(
                f"{what or tensor} has {rank} dimensions; the limit is {self.max_dimensions}"
                " (GRADSERVE_MAX_DIMENSIONS)",
                limit=self.max_dimensions,
                **_named(tensor),
            )


def _named(tensor: str | None) -> dict[str, str]:
    """What an error tells programs of it."""
    return {} if tensor is None else {"tensor": tensor}
