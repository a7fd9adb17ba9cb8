"""The forms of gradients: sparse ones are rows and their indices."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from gradserve_client._wire.codes import Coded
from gradserve_client._wire.tensors import FLOATS, Array, TensorLike, as_array


class Rows:
    """A sparse gradient: row k of `rows` is added to row `indices[k]` of a buffer, and the other rows get nothing.

    `indices` are integers, int32 or int64, of rank 1. Negative indices count from the end. Rows of one index add up.
    `rows` have the shape `(len(indices), *shape[1:])`, where `shape` is the buffer's. Raises `InvalidInput`.

    >>> from gradserve_client import Rows
    >>> emb = server.buffers["emb"]
    >>> emb.create((4, 2)).shape
    (4, 2)
    >>> emb.accumulate(Rows([0, -1, 0], [[1, 2], [3, 4], [5, 6]])).count
    1
    >>> emb.value()
    array([[6., 8.],
           [0., 0.],
           [0., 0.],
           [3., 4.]], dtype=float32)
    """

    def __init__(self, indices: TensorLike, rows: TensorLike) -> None:
        self.indices: Array = as_array(indices, "indices", "int64")
        self.rows: Array = as_array(rows, "rows", "float64", FLOATS)

    def __repr__(self) -> str:
        return f"Rows({self.indices!r}, {self.rows!r})"

    @property
    def nbytes(self) -> int:
        """The bytes of both arrays."""
        return self.indices.nbytes + self.rows.nbytes

    def within(self, part: slice) -> Rows:
        """Return the rows of a range of the buffer. The indices must be sorted, and not negative."""
        low, high = np.searchsorted(self.indices, (part.start, part.stop))
        return Rows(self.indices[low:high] - part.start, self.rows[low:high])

    def whole(self, shape: tuple[int, ...]) -> Array:
        """Return the gradient of this shape as one array. No index may come twice."""
        whole: Array = np.zeros(shape, self.rows.dtype)
        whole[self.indices] = self.rows
        return whole


Gradient: TypeAlias = Array | Rows
"""The numbers of a gradient, all or only some rows."""

Sent: TypeAlias = Gradient | Coded
"""A gradient as it travels."""


def tensors_of(gradient: TensorLike | Rows | Coded, name: str) -> dict[str, Array]:
    """Return the tensors that carry the gradient of a buffer, or of `gradient`, in a request."""
    if isinstance(gradient, Coded):
        return {f"{name}/codes": gradient.codes, f"{name}/scales": gradient.scales}
    if isinstance(gradient, Rows):
        return {f"{name}/indices": gradient.indices, f"{name}/rows": gradient.rows}
    return {name: as_array(gradient, name, "float64", FLOATS)}
