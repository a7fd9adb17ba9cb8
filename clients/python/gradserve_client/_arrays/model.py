"""A tree of arrays between its gradients and the buffers of their sums."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from gradserve_client._arrays.leaves import FLOAT_DTYPES, HALF_DTYPES, Leaf, is_of_jax, leaves, numbers_of, sum_dtype
from gradserve_client._arrays.tree import filled, flattened, leaves_of
from gradserve_client._runs.parts import Layout, Part
from gradserve_client._runs.summed import Summed
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import InvalidInput
from gradserve_client.rows import Gradient


class Model(Layout):
    """The arrays of a tree, and their buffers, each of at most `limit` bytes.

    Raises `InvalidInput` for a tree that cannot be accumulated.
    """

    def __init__(self, nest: Any, prefix: str, wire: str | None, pulled: str | None, limit: int) -> None:
        self._tree, arrays = flattened(nest)
        self._wire, self._leaves = wire, leaves(arrays, prefix)
        for leaf in self._leaves.values():
            if leaf.real_dtype.name not in FLOAT_DTYPES:
                known = ", ".join((*FLOAT_DTYPES, "complex64", "complex128"))
                raise InvalidInput(
                    f"{leaf.name!r} is {leaf.dtype}, but must be one of {known}; None in its place leaves it out",
                    code="dtype_mismatch",
                )
        wholes = {
            name: Part(leaf.shape, sum_dtype(leaf.real_dtype), _answered(leaf, pulled))
            for name, leaf in self._leaves.items()
        }
        super().__init__(wholes, limit)
        self._weights = _hash(numbers_of(arrays[leaf.name], repr(leaf.name)) for leaf in self._leaves.values())

    def form(self) -> str:
        """Return what the trees of all workers have alike."""
        return repr(([(leaf.name, leaf.shape, leaf.dtype.name) for leaf in self._leaves.values()], self.parts))

    def weights(self) -> str:
        """Return a hash of the arrays as they were when the accumulator was made."""
        return self._weights

    def frozen(self) -> str:
        """Return a hash of nothing: a tree has only what is trained."""
        return _hash([])

    buffers = frozen

    def gradients(self, nest: Any, *, copied: bool) -> dict[str, Gradient]:
        """Return the gradients that are not None, `copied` if the caller may overwrite them."""
        found = leaves_of(self._tree, nest)
        return {
            name: self._gradient(leaf, found[leaf.name], copied)
            for name, leaf in self._leaves.items()
            if leaf.name in found
        }

    def _gradient(self, leaf: Leaf, value: Any, copied: bool) -> Gradient:
        gradient = leaf.gradient(value, self._wire)
        return deepcopy(gradient) if copied and not is_of_jax(value) else gradient

    def numbers(self, gradients: Mapping[str, Gradient], weight: float) -> tuple[dict[str, Gradient], set[str]]:
        """Return the numbers of all buffers, and the buffers that have a gradient. Weight 0 has none."""
        return self.spread(gradients if weight else {})

    def tree(self, summed: Summed, *, zeros: bool) -> Any:
        """Return a tree of the sums. Those that nobody had are None, or `zeros`."""
        return filled(
            self._tree,
            {
                leaf.name: leaf.restored(self.joined(name, summed.values))
                for name, leaf in self._leaves.items()
                if summed.has(self.names(name), zeros=zeros)
            },
        )


def _answered(leaf: Leaf, wire: str | None) -> str | None:
    """Return the dtype of a sum in an answer, if that is half precision, or 8 bits."""
    own = leaf.real_dtype.name
    return own if own in HALF_DTYPES and wire != "int8" else wire


def _hash(arrays: Iterable[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
