"""The buffers of a model's parameters, in groups that one request can carry."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Set
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from gradserve_client._wire.codes import FEWEST
from gradserve_client._wire.pushes import packed
from gradserve_client._wire.tensors import Array
from gradserve_client.rows import Gradient, Rows

BUFFER_BYTES = 320
"""Bytes of a request for a buffer beside its numbers: its name of up to 200 characters in JSON, and its tally."""

_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number in a buffer."""


@dataclass(frozen=True)
class Part:
    """A buffer for a parameter, or for a range of a parameter that is larger than a request."""

    shape: tuple[int, ...]
    dtype: str
    answered: str | None
    """The dtype of its values in answers; None: the buffer's."""
    range: slice | None = None
    """Its rows of the parameter; None: all. A row that is larger than a request is divided: then its elements."""

    @property
    def size(self) -> int:
        """The elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the sum."""
        return self.size * _ITEM_BYTES[self.dtype]

    def of(self, numbers: Array) -> Array:
        """Return this part of a parameter's numbers."""
        return numbers if self.range is None else numbers.reshape(-1, *self.shape[1:])[self.range]

    def of_rows(self, rows: Rows) -> Gradient:
        """Return this part of some rows of a parameter, in the form that takes fewer bytes of a request."""
        some = rows if self.range is None else rows.within(self.range)
        whole = math.prod(self.shape) * some.rows.itemsize
        return some if some.nbytes + BUFFER_BYTES < whole else some.whole(self.shape)


def parts(name: str, shape: tuple[int, ...], dtype: str, answered: str | None, limit: int) -> dict[str, Part]:
    """Return the buffers of a parameter, each of at most `limit` bytes: one, or several for ranges of it.

    Only a parameter of `FEWEST` numbers or more is answered in 8 bits.
    """
    length, size = max(limit // _ITEM_BYTES[dtype], 1), math.prod(shape)
    if answered == "int8" and size < FEWEST:
        answered = None
    if size <= length:
        return {name: Part(shape, dtype, answered)}
    row = shape[1:] if math.prod(shape[1:]) <= length else ()
    height, count = length // math.prod(row), size // math.prod(row)
    ranges = [slice(start, min(start + height, count)) for start in range(0, count, height)]
    return {
        f"{name}::{number}": Part((one.stop - one.start, *row), dtype, answered, one)
        for number, one in enumerate(ranges)
    }


class Layout:
    """The buffers of named arrays, each of at most `limit` bytes. `wholes` are buffers without this limit."""

    def __init__(self, wholes: Mapping[str, Part], limit: int) -> None:
        self._wholes = wholes
        self._parts = {name: parts(name, one.shape, one.dtype, one.answered, limit) for name, one in wholes.items()}
        self.parts = {name: part for some in self._parts.values() for name, part in some.items()}
        """The buffers by their names."""

    def spread(self, wholes: Mapping[str, Gradient]) -> tuple[dict[str, Gradient], set[str]]:
        """Return the numbers of all buffers, and the buffers of these arrays. The other buffers get zero."""
        zero: Gradient = np.zeros((), np.float32)  # broadcasts to every shape
        numbers, used = dict.fromkeys(self.parts, zero), set[str]()
        for name, whole in wholes.items():
            numbers |= self.divided(name, whole)
            used |= self.names(name)
        return numbers, used

    def names(self, name: str) -> Set[str]:
        """Return the buffers of an array."""
        return self._parts[name].keys()

    def divided(self, name: str, whole: Gradient) -> dict[str, Gradient]:
        """Return the numbers of an array's buffers."""
        parts = self._parts[name]
        if isinstance(whole, Rows):
            if all(part.shape[1:] == whole.rows.shape[1:] for part in parts.values()):
                return {part: one.of_rows(whole) for part, one in parts.items()}
            whole = whole.whole(self._wholes[name].shape)
        return {part: one.of(whole) for part, one in parts.items()}

    def joined(self, name: str, numbers: MutableMapping[str, Array]) -> Array:
        """Take the numbers of an array's buffers out of others, and return those of the array in their order."""
        found = [numbers.pop(part) for part in self._parts[name]]
        return found[0] if len(found) == 1 else np.concatenate(found)


@dataclass(frozen=True)
class Group:
    """Buffers of one server that change together, and the buffer of their tally."""

    names: tuple[str, ...]

    @property
    def tally(self) -> str:
        """A buffer that every push adds to: whether each buffer of the group got a gradient, and more."""
        return f"{self.names[0]}::tally"


@dataclass(frozen=True)
class Round:
    """Groups, one on each server, that one call adds to."""

    groups: tuple[Group, ...]

    @property
    def names(self) -> list[str]:
        """The buffers."""
        return [name for group in self.groups for name in (*group.names, group.tally)]

    def parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Return those parts that are in this round."""
        return {name: parts[name] for group in self.groups for name in group.names}

    def reads(self, parts: Mapping[str, Part]) -> dict[str | None, list[str]]:
        """Return the buffers by the dtype of their answers. The tallies are in the first read."""
        reads: dict[str | None, list[str]] = {None: [group.tally for group in self.groups]}
        for group in self.groups:
            for name in group.names:
                reads.setdefault(parts[name].answered, []).append(name)
        return reads


def rounds(parts: Mapping[str, Part], places: Mapping[str, str], limit: int) -> list[Round]:
    """Return the buffers in rounds whose groups have at most `limit` bytes. All workers of a model agree."""
    sizes: dict[str, dict[str, int]] = {}
    for name, part in parts.items():
        sizes.setdefault(places.get(name, ""), {})[name] = part.nbytes + BUFFER_BYTES
    groups = [[Group(tuple(names)) for names in packed(some, limit)] for _, some in sorted(sizes.items())]
    return [Round(tuple(group for group in one if group is not None)) for one in zip_longest(*groups)]
