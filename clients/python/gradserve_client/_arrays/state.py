"""All arrays of a tree as numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from gradserve_client._arrays.leaves import FLOAT_DTYPES, Leaf, leaves, numbers_of
from gradserve_client._arrays.tree import filled, flattened
from gradserve_client._runs.parts import Layout, Part
from gradserve_client._wire.tensors import Array
from gradserve_client.errors import InvalidInput, mistaken
from gradserve_client.rows import Gradient


class State(Layout):
    """The arrays of a tree, in parts of at most `limit` bytes. Integers travel as float64."""

    def __init__(self, nest: Any, prefix: str, limit: int) -> None:
        self.nest = nest
        """The tree; after `set`, a tree with other arrays."""
        self._tree, self._arrays = flattened(nest)
        self._leaves = leaves(self._arrays, prefix)
        super().__init__(
            {name: Part(leaf.shape, _sent_dtype(leaf), None) for name, leaf in self._leaves.items()}, limit
        )

    def numbers(self) -> dict[str, Gradient]:
        """Return the numbers of all parts. Raises `InvalidInput` for integers beyond 2**53."""
        return self.spread({name: _numbers(self._arrays[leaf.name], leaf) for name, leaf in self._leaves.items()})[0]

    def set(self, numbers: Mapping[str, Array]) -> None:
        """Make a tree of these numbers."""
        rest = dict(numbers)
        self.nest = filled(
            self._tree, {leaf.name: leaf.restored(self.joined(name, rest)) for name, leaf in self._leaves.items()}
        )


def _sent_dtype(leaf: Leaf) -> str:
    if leaf.real_dtype.name in FLOAT_DTYPES:
        return leaf.real_dtype.name
    if leaf.dtype.kind not in "biu":
        raise InvalidInput(f"{leaf.name!r} is {leaf.dtype}, which cannot be sent", code="dtype_mismatch")
    return "float64"


def _numbers(array: Any, leaf: Leaf) -> Array:
    if leaf.real_dtype.name in FLOAT_DTYPES:
        return numbers_of(array, repr(leaf.name))
    whole = np.asarray(array)
    wide = whole.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if not np.array_equal(wide.astype(whole.dtype), whole):
            raise InvalidInput(f"{leaf.name!r} has integers beyond 2**53, which float64 cannot hold")
    return wide


class Source:
    """What a program needs to go on, as the server keeps it: a dict of trees that the program changes, or a callable.

    The callable returns the tree, and takes another: `optimizer()`, `optimizer(tree)`.
    """

    def __init__(self, given: Any, prefix: str, limit: int) -> None:
        if not (isinstance(given, MutableMapping) or callable(given)):
            raise mistaken("optimizer", f"is of type {type(given).__name__}, but must be a dict, or a callable")
        self._given, self._prefix, self._limit = given, prefix, limit

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return sum(part.nbytes for part in self._state().parts.values())

    def _state(self) -> State:
        return State(self._given() if callable(self._given) else dict(self._given), self._prefix, self._limit)

    def content(self) -> tuple[dict[str, Part], dict[str, Gradient]]:
        """Return the buffers by their names, and their numbers."""
        state = self._state()
        return state.parts, state.numbers()

    def restore(self, numbers: Mapping[str, Array]) -> None:
        """Give the program its trees with these numbers."""
        state = self._state()
        state.set(numbers)
        if callable(self._given):
            self._given(state.nest)
        else:
            self._given.update(state.nest)
