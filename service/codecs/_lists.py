"""Nested JSON lists -> arrays: their shape, their numbers in bulk, and the place of what is wrong in them.

A list is a `simdjson.Array`, whose numbers are still in the parser, or a Python list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import simdjson

from service.dtypes import BOOL, FLOAT64, FLOATS, INT64, Array, DType, cast
from service.errors import InvalidTensor, shown
from service.limits import Limits

Shape = tuple[int, ...]

LISTS = (simdjson.Array, list)
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_SATURATED = 0xFFFFFF
"""simdjson counts the elements of a list no further than this."""
_BATCH = 1 << 16


class Numbers:
    """Numbers of nested lists, read in bulk: flat, so that `[1, [2]]` looks like `[1, 2]` until it is proven not to."""

    def __init__(self) -> None:
        self._lists = 0  # in all that was read so far
        self._unproven: list[tuple[str, simdjson.Array, Shape, DType]] = []

    def read(self, name: str, data: Any, shape: Shape, dtype: DType) -> Array:
        """The numbers of `data`, of this `shape_of`, flat, to be trusted after `prove`. Raises `InvalidTensor`."""
        self._lists += _count_lists(shape)
        numbers = _numbers_of(data, dtype) if isinstance(data, simdjson.Array) else None
        if numbers is not None and numbers.size == math.prod(shape):
            self._unproven.append((name, data, shape, dtype))
        else:
            numbers = _scalars_of(name, data, shape, dtype)
        return _narrow(name, numbers, shape, dtype)

    def prove(self, text: bytes | bytearray | memoryview, others: Callable[[], int]) -> None:
        """Raise `InvalidTensor` if a list stands where a number belongs in anything that was read.

        Then the text has more brackets than those lists, and the `others` in it, open.
        """
        if self._unproven and count(text, b"[") != self._lists + others():
            for unproven in self._unproven:
                _scalars_of(*unproven)


def count(body: bytes | bytearray | memoryview, byte: bytes) -> int:
    """What `body.count(byte)` gives, four times as fast."""
    array, step = np.frombuffer(body, np.uint8), 1 << 18
    return sum(int(np.count_nonzero(array[k : k + step] == ord(byte))) for k in range(0, array.size, step))


def shape_of(name: str, data: Any, limits: Limits) -> Shape:
    """The shape of nested lists, the lists at each depth proven to have one length; () for a scalar.

    Raises `InvalidTensor` for ragged lists and `TooManyDimensions`.
    """
    shape: list[int] = []
    first = data
    while type(first) in LISTS:
        limits.check_rank(name, len(shape) + 1)
        shape.append(_length(name, data, tuple(shape)))
        if not shape[-1]:
            break
        first = first[0]
    return tuple(shape)


def is_empty(found: Shape, shape: Sequence[int]) -> bool:
    """Whether lists of this shape can be a tensor of that `shape`: they end where a dimension is 0."""
    return found[-1:] == (0,) and 0 in shape and (len(found) == 1 or tuple(shape[: len(found)]) == found)


def _count_lists(shape: Shape) -> int:
    """How many lists, nested ones included, a tensor of this shape is written with."""
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))


def _numbers_of(data: simdjson.Array, dtype: DType) -> Array | None:
    """All numbers of nested lists, flat, in the widest dtype of `dtype`'s kind. None if there is anything else in them,
    but blind to numbers and lists mixed at one depth."""
    wide = _widest(dtype)
    if wide == BOOL:
        return None
    try:
        return np.frombuffer(data.as_buffer(of_type="d" if wide == FLOAT64 else "i"), wide)
    except (TypeError, ValueError):  # another type; an integer beyond 64 bits
        return None


def _scalars_of(name: str, data: Any, shape: Shape, dtype: DType) -> Array:
    """What stands `len(shape)` deep in `data`, flat, in the widest dtype of `dtype`'s kind, by way of Python objects.

    For booleans, NaN and infinities, and to find a mistake: raises `InvalidTensor`, which names its place.
    """
    wide = _widest(dtype)
    numbers = np.empty(math.prod(shape), wide)
    seen = 0
    for batch in _items(data, len(shape)):
        converted = _converted(batch, wide)
        if converted is None:
            odd = next(k for k, item in enumerate(batch) if _converted([item], wide) is None)
            place = _place(name, seen + odd, shape)
            raise InvalidTensor(f"{place} is {_described(batch[odd])}, but must be {_WANTED[wide]}", tensor=name)
        numbers[seen : seen + len(batch)] = converted
        seen += len(batch)
    return numbers


_TYPES: dict[DType, set[type]] = {BOOL: {bool}, INT64: {int, float}, FLOAT64: {int, float, str}}
_WANTED = {
    BOOL: "true or false",
    INT64: "an integer of 64 bits",
    FLOAT64: 'a number in float64\'s range, "NaN", "Infinity" or "-Infinity"',
}


def _converted(batch: list[Any], dtype: DType) -> Array | None:
    """`batch` as an array of booleans, int64 or float64; None if any item of it is something else."""
    types = set(map(type, batch))
    if types - _TYPES[dtype] or math.inf in batch or -math.inf in batch:  # Python reads 1e400 as infinity
        return None
    if dtype == INT64 and float in types and batch != (batch := list(map(int, batch))):
        return None
    if str in types:
        batch = list(map(NONFINITE.get, batch, batch))
        if str in set(map(type, batch)):
            return None
    try:
        return np.array(batch, dtype)
    except OverflowError:
        return None


def _narrow(name: str, numbers: Array, shape: Shape, dtype: DType) -> Array:
    """`numbers` as `dtype`. Raises `InvalidTensor` for the first one that is out of its range."""
    if numbers.dtype == dtype:
        return numbers
    if dtype.kind == "i":
        bounds = np.iinfo(dtype)
        outside = (numbers < bounds.min) | (numbers > bounds.max)
        narrowed = numbers.astype(dtype)
    else:
        with np.errstate(over="ignore"):
            narrowed = cast(numbers, dtype)
        outside = np.isinf(narrowed)
        if outside.any():
            outside &= np.isfinite(numbers)
    if outside.any():
        odd = int(outside.argmax())
        raise InvalidTensor(
            f"{_place(name, odd, shape)} is {numbers[odd]}, which is out of {dtype}'s range", tensor=name
        )
    return narrowed


def _widest(dtype: DType) -> DType:
    """What JSON's numbers are read into before they become `dtype`."""
    if dtype == BOOL:
        return BOOL
    return FLOAT64 if dtype.name in FLOATS.dtypes else INT64


def _items(data: Any, depth: int) -> Iterator[list[Any]]:
    """What stands `depth` lists deep in `data`, in batches, between which other threads get the interpreter."""
    items: Iterator[Any] = iter([data])
    for _ in range(depth):
        items = itertools.chain.from_iterable(items)
    return iter(lambda: list(itertools.islice(items, _BATCH)), [])


def _length(name: str, data: Any, shape: Shape) -> int:
    """The one length of all lists that stand `len(shape)` deep in `data`, of which there is at least one."""
    expected, seen = -1, 0
    for batch in _items(data, len(shape)):
        if set(map(type, batch)) - set(LISTS):
            odd = next(k for k, item in enumerate(batch) if type(item) not in LISTS)
            place = _place(name, seen + odd, shape)
            raise InvalidTensor(f"{place} is {_described(batch[odd])}, but its neighbours are lists", tensor=name)
        lengths = list(map(len, batch))
        if _SATURATED in lengths:
            lengths = [sum(1 for _ in item) if n == _SATURATED else n for n, item in zip(lengths, batch, strict=True)]
        expected = expected if seen else lengths[0]
        if set(lengths) != {expected}:
            odd = next(k for k, n in enumerate(lengths) if n != expected)
            place = _place(name, seen + odd, shape)
            raise InvalidTensor(f"{place} has {lengths[odd]} elements, but its neighbours have {expected}", tensor=name)
        seen += len(batch)
    return expected


def _place(name: str, number: int, shape: Shape) -> str:
    return name + "".join(f"[{k}]" for k in np.unravel_index(number, shape))


def _described(item: Any) -> str:
    if type(item) in LISTS:
        return "a list"
    if item is None or isinstance(item, bool):
        return {None: "null", True: "true", False: "false"}[item]
    return shown(item) if isinstance(item, (int, float, str)) else "an object"
