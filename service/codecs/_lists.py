"""Nested JSON lists and arrays: the lists' shape, their numbers in bulk, and the place of a mistake in them.

When a list is read, its numbers are still in the parser, or the list is a Python list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from service.codecs._parser import IN_PARSER, LISTS, Text
from service.dtypes import BOOL, FLOAT64, FLOATS, INT64, Array, DType, cast
from service.errors import InvalidTensor, shown
from service.limits import Limits

Shape = tuple[int, ...]

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

WRITTEN_ELEMENTS = 1 << 16
"""Elements to write in one call of orjson, which holds the interpreter's lock meanwhile."""

_MAX_LENGTH = 0xFFFFFF
"""simdjson's length of every list with at least this many elements."""
_BATCH_ITEMS = 1 << 16
"""Items to handle between two chances for other threads to run."""


class ListReader:
    """Reads the numbers of nested lists in bulk, flat: `[1, [2]]` and `[1, 2]` give the same numbers.

    `finish` finds the lists that stand where a number belongs.
    """

    def __init__(self) -> None:
        self._lists = 0
        """How many lists the tensors read so far have, if their lists are proper."""
        self._unchecked: list[tuple[str, Any, Shape, DType]] = []

    def read(self, name: str, data: Any, shape: Shape, dtype: DType) -> Array:
        """Return the numbers of `data`, flat; `shape` is its `shape_of`. Raises `InvalidTensor`.

        The caller must call `finish` before it uses the numbers.
        """
        self._lists += _count_lists(shape)
        numbers = _read_in_bulk(data, dtype) if isinstance(data, IN_PARSER) else None
        if numbers is not None and numbers.size == math.prod(shape):
            self._unchecked.append((name, data, shape, dtype))
        else:
            numbers = _read_items(name, data, shape, dtype)
        return _narrow(name, numbers, shape, dtype)

    def finish(self, text: Text, count_other_lists: Callable[[], int]) -> None:
        """Raise `InvalidTensor` if a list stands where a number belongs, in any tensor read.

        In that case `text` has more opening brackets than the tensors and the other lists in it.
        """
        if self._unchecked and text.lists != self._lists + count_other_lists():
            for tensor in self._unchecked:
                _read_items(*tensor)


def shape_of(name: str, data: Any, limits: Limits) -> Shape:
    """Return the shape of nested lists, or () for a scalar.

    Raises `InvalidTensor` if lists of one depth differ in length, and `TooManyDimensions`.
    """
    shape: list[int] = []
    first = data
    while type(first) in LISTS:
        limits.check_rank(name, len(shape) + 1)
        shape.append(_length(first))
        if not shape[-1]:
            break
        first = first[0]
    if len(shape) > 1:
        _check_lengths(name, iter(data), tuple(shape), 1, [0] * len(shape))
    return tuple(shape)


def is_empty(list_shape: Shape, shape: Sequence[int]) -> bool:
    """Whether lists of `list_shape` can be an empty tensor of `shape`: lists show no dimensions after a 0."""
    depth = len(list_shape)
    return list_shape[-1:] == (0,) and 0 in shape and (depth == 1 or tuple(shape[:depth]) == list_shape)


def _count_lists(shape: Shape) -> int:
    """Return how many lists, with all nested lists, write a tensor of this shape."""
    return sum(math.prod(shape[:depth]) for depth in range(len(shape)))


def _read_in_bulk(data: Any, dtype: DType) -> Array | None:
    """Return all numbers of nested lists, flat, in the widest dtype of `dtype`'s kind.

    Return None if the lists contain anything but numbers. The function does not see a list beside a number.
    """
    wide = _widest(dtype)
    if wide == BOOL:
        return None
    try:
        return np.frombuffer(data.as_buffer(of_type="d" if wide == FLOAT64 else "i"), wide)
    except (TypeError, ValueError):  # another type; an integer beyond 64 bits
        return None


def _read_items(name: str, data: Any, shape: Shape, dtype: DType) -> Array:
    """Return the items `len(shape)` deep in `data`, flat, in the widest dtype of `dtype`'s kind.

    This makes a Python object of each item. It reads booleans, NaN and infinities, and it finds mistakes: it raises
    `InvalidTensor` with the place of the first mistake.
    """
    wide = _widest(dtype)
    numbers = np.empty(math.prod(shape), wide)
    seen = 0
    for batch in _items(data, len(shape)):
        converted = _convert(batch, wide)
        if converted is None:
            wrong = _first_wrong(batch, wide)
            place = _place(name, seen + wrong, shape)
            raise InvalidTensor(f"{place} is {_describe(batch[wrong])}, but must be {_EXPECTED[wide]}", tensor=name)
        numbers[seen : seen + len(batch)] = converted
        seen += len(batch)
    return numbers


def _first_wrong(batch: list[Any], dtype: DType) -> int:
    """Return the place of the first item that `dtype` cannot hold. There must be such an item."""
    start, stop = 0, len(batch)
    while stop - start > 1:
        middle = (start + stop) // 2
        if _convert(batch[start:middle], dtype) is None:
            stop = middle
        else:
            start = middle
    return start


_TYPES: dict[DType, set[type]] = {BOOL: {bool}, INT64: {int, float}, FLOAT64: {int, float, str}}
_EXPECTED = {
    BOOL: "true or false",
    INT64: "an integer of 64 bits",
    FLOAT64: 'a number in float64\'s range, "NaN", "Infinity" or "-Infinity"',
}


def _convert(batch: list[Any], dtype: DType) -> Array | None:
    """Return `batch` as an array of bool, int64 or float64, or None if `dtype` cannot hold some item."""
    types = set(map(type, batch))
    if types - _TYPES[dtype]:
        return None
    try:
        if str in types:
            return _convert_names(batch, dtype)
        if dtype == INT64 and float in types and batch != (batch := list(map(int, batch))):
            return None
        numbers = np.array(batch, dtype)
    except OverflowError:
        return None
    return numbers if dtype != FLOAT64 or np.isfinite(numbers).all() else None  # Python reads 1e400 as infinity


def _convert_names(batch: list[Any], dtype: DType) -> Array | None:
    """Do the same for a batch with the names of NaN and infinities."""
    if math.inf in batch or -math.inf in batch:
        return None
    batch = list(map(NONFINITE.get, batch, batch))
    return None if str in set(map(type, batch)) else np.array(batch, dtype)


def _narrow(name: str, numbers: Array, shape: Shape, dtype: DType) -> Array:
    """Return `numbers` as `dtype`. Raises `InvalidTensor` for the first number out of the dtype's range."""
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
        first = int(outside.argmax())
        problem = f"{_place(name, first, shape)} is {numbers[first]}, which is out of {dtype}'s range"
        raise InvalidTensor(problem, tensor=name)
    return narrowed


def _widest(dtype: DType) -> DType:
    """Return the dtype to read JSON into before it becomes `dtype`."""
    if dtype == BOOL:
        return BOOL
    return FLOAT64 if dtype.name in FLOATS.dtypes else INT64


def _items(data: Any, depth: int) -> Iterator[list[Any]]:
    """Yield the items `depth` lists deep in `data`, in batches. Other threads can run between batches."""
    items: Iterator[Any] = iter([data])
    for _ in range(depth):
        items = itertools.chain.from_iterable(items)
    return _batches(items)


def _batches(items: Iterator[Any]) -> Iterator[list[Any]]:
    return iter(lambda: list(itertools.islice(items, _BATCH_ITEMS)), [])


def _check_lengths(name: str, lists: Iterator[Any], shape: Shape, depth: int, seen: list[int]) -> None:
    """Raise `InvalidTensor` unless `lists`, `depth` deep, are lists of the `shape`, each visited once.

    `seen` has how many lists of each depth were visited before.
    """
    for batch in _batches(lists):
        if set(map(type, batch)) - set(LISTS):
            wrong = next(k for k, item in enumerate(batch) if type(item) not in LISTS)
            place = _place(name, seen[depth] + wrong, shape[:depth])
            raise InvalidTensor(f"{place} is {_describe(batch[wrong])}, but its neighbours are lists", tensor=name)
        lengths = list(map(_length if shape[depth] >= _MAX_LENGTH else len, batch))
        if set(lengths) != {shape[depth]}:
            wrong = next(k for k, length in enumerate(lengths) if length != shape[depth])
            place = _place(name, seen[depth] + wrong, shape[:depth])
            problem = f"{place} has {_length(batch[wrong])} elements, but its neighbours have {shape[depth]}"
            raise InvalidTensor(problem, tensor=name)
        seen[depth] += len(batch)
        if depth + 1 < len(shape):
            _check_lengths(name, itertools.chain.from_iterable(batch), shape, depth + 1, seen)


def _length(item: Any) -> int:
    length = len(item)
    return length if length < _MAX_LENGTH or isinstance(item, list) else sum(1 for _ in item)


def _place(name: str, number: int, shape: Shape) -> str:
    return name + "".join(f"[{k}]" for k in np.unravel_index(number, shape))


def _describe(item: Any) -> str:
    if type(item) in LISTS:
        return "a list"
    return shown(item) if item is None or isinstance(item, (int, float, str)) else "an object"


def list_text(tensor: Array) -> Iterator[bytes]:
    """Yield the pieces of the tensor as nested lists. Other threads can run between pieces."""
    if not tensor.size:
        yield b"[]"  # there may be a billion empty rows, and the answer's shape tells their number
    elif tensor.size <= WRITTEN_ELEMENTS:
        yield _list_text(tensor)
    else:
        height = WRITTEN_ELEMENTS * len(tensor) // tensor.size
        for start in range(0, len(tensor), max(1, height)):
            yield b"," if start else b"["
            if height:
                yield _list_text(tensor[start : start + height])[1:-1]
            else:
                yield from list_text(tensor[start])
        yield b"]"


def _list_text(tensor: Array) -> bytes:
    """Return the tensor, which must not be empty, as nested lists."""
    if tensor.dtype.itemsize == 2:
        tensor = tensor.astype(np.float32)
    text = orjson.dumps(np.ascontiguousarray(tensor), option=orjson.OPT_SERIALIZE_NUMPY)
    if not tensor.ndim:
        text = text[1:-1]  # ascontiguousarray has made a scalar a row
    if tensor.dtype.kind != "f":
        return text
    finite = np.isfinite(tensor)
    if finite.all():
        return text
    # orjson has written null for every number that is not finite.
    names = {repr(value): f'"{name}"'.encode() for name, value in NONFINITE.items()}
    replacements = [names[repr(value)] for value in tensor[~finite].tolist()]
    return b"".join(itertools.chain.from_iterable(zip(text.split(b"null"), [*replacements, b""], strict=True)))
