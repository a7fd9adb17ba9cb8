"""Messages of protobuf, read without copies, and with bounds on what a damaged file can cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from sys import getsizeof
from typing import Any

import numpy as np

from service.dtypes import Array
from service.errors import InvalidGraph
from service.graphs.plan import UNCOUNTED_BYTES
from service.kernels import claim

MAX_FIELDS = 1 << 20
"""Fields of a file together: they take a second, and 200 MB. A node has up to 40, so 20,000 nodes have fewer."""

FIELD_BYTES = 256
"""What a field takes, with what becomes of it in a plan."""

MAX_CHARACTERS = 1000
"""Characters of a name, or of another text: a plan has many copies of some. Exporters write fewer than 300."""

MAX_VARINT_BYTES = 1 << 22
"""Bytes of numbers without a fixed length in one tensor: to decode them takes `VARINT_FACTOR` times the memory."""

VARINT_FACTOR = 50

_FIXED_BYTES = {1: 8, 5: 4}
"""The length of a value, by wire type."""

_DAMAGED = "the file is no ONNX model, or it is damaged"


def numbered(text: str) -> Mapping[int, str]:
    """Return the names of a message's fields by number, from a text like `1:name 2:type`."""
    return {int(number): name for number, name in (pair.split(":") for pair in text.split())}


class Budget:
    """Counts the fields of a file, and what takes as long to plan, and claims the memory for what is read."""

    left = MAX_FIELDS
    _owed = 0

    def take(self, size: int = FIELD_BYTES, fields: int = 1) -> None:
        """Count fields, and bytes of memory. Raises `InvalidGraph` beyond `MAX_FIELDS`, and what `claim` raises."""
        self.left -= fields
        if self.left < 0:
            problem = f"the file has more than {MAX_FIELDS} fields, with those of functions at each call"
            raise InvalidGraph(problem, limit=MAX_FIELDS)
        self._owed += size
        if self._owed > UNCOUNTED_BYTES or fields > MAX_CHARACTERS:
            owed, self._owed = self._owed, 0
            claim(owed)


class Message:
    """A message's fields with the given numbers and names. The methods raise `InvalidGraph` for other types."""

    def __init__(self, data: memoryview, names: Mapping[int, str], budget: Budget) -> None:
        self.budget, self._values = budget, defaultdict[str, list[Any]](list)
        for number, value in _fields(data):
            budget.take()
            if number in names:
                self._values[names[number]].append(value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def all(self, name: str) -> list[memoryview]:
        """Return the bytes of each value of a repeated field."""
        values = self._values.get(name, [])
        if any(isinstance(value, int) for value in values):
            raise InvalidGraph(f"{_DAMAGED}: {name} is a number")
        return values

    def data(self, name: str) -> memoryview:
        """Return the bytes of a field, by default none."""
        return self.all(name)[-1] if name in self else memoryview(b"")

    def messages(self, name: str, names: Mapping[int, str]) -> list[Message]:
        """Return the messages of a field."""
        return [Message(data, names, self.budget) for data in self.all(name)]

    def texts(self, name: str) -> list[str]:
        """Return the texts of a field, each of at most `MAX_CHARACTERS`."""
        longest = max(map(len, self.all(name)), default=0)
        try:
            texts = [str(data, "utf-8") for data in self.all(name) if longest <= 4 * MAX_CHARACTERS]
        except UnicodeDecodeError:
            raise InvalidGraph(f"{_DAMAGED}: {name} is not UTF-8") from None
        if longest > 4 * MAX_CHARACTERS or max(map(len, texts), default=0) > MAX_CHARACTERS:
            problem = f"the file has a field {name} with a text of {longest} bytes; the limit is {MAX_CHARACTERS}"
            raise InvalidGraph(f"{problem} characters", limit=MAX_CHARACTERS)
        self.budget.take(sum(map(getsizeof, texts)), 0)
        return texts

    def text(self, name: str) -> str:
        """Return the text of a field, by default none."""
        return self.texts(name)[-1] if name in self else ""

    def ints(self, name: str) -> Array:
        """Return the numbers of a field, packed or not, as int64."""
        values = self._values.get(name, [])
        single = np.array([value for value in values if isinstance(value, int)], np.uint64).view(np.int64)
        return np.concatenate([single, *(_packed(value) for value in values if not isinstance(value, int))])

    def int(self, name: str, default: int = 0) -> int:
        """Return the number of a field."""
        return int(self.ints(name)[-1]) if name in self else default

    def floats(self, name: str, kind: str = "<f4") -> Array:
        """Return the floats of a field, packed or not."""
        data = b"".join(self.all(name))
        self.budget.take(len(data), 0)
        if len(data) % int(kind[-1]):
            raise InvalidGraph(f"{_DAMAGED}: {name} ends in the middle of a float")
        return np.frombuffer(data, kind)


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each field: an int, or bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = _FIXED_BYTES.get(kind)
        if kind == 2:
            length, at = _varint(data, at)
        if length is None or at + length > end:
            raise InvalidGraph(f"{_DAMAGED}: a field ends behind its message, or has no type")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where the next field begins."""
    number = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number & (1 << 64) - 1, at
        shift += 7
    raise InvalidGraph(f"{_DAMAGED}: a number has no end")


def _packed(data: memoryview) -> Array:
    """Return packed numbers as int64."""
    if len(data) > MAX_VARINT_BYTES:
        problem = f"a tensor has {len(data)} bytes of numbers without a fixed length; the limit is {MAX_VARINT_BYTES}"
        raise InvalidGraph(f"{problem}: write it with raw_data")
    claim(VARINT_FACTOR * len(data))
    raw = np.frombuffer(data, np.uint8)
    starts = np.concatenate([[0], np.flatnonzero(raw < 128) + 1])
    lengths = np.diff(starts)
    if starts[-1] != raw.size or lengths.max(initial=0) > 10:
        raise InvalidGraph(f"{_DAMAGED}: a number has no end")
    if not raw.size:
        return np.empty(0, np.int64)
    places = np.arange(raw.size) - np.repeat(starts[:-1], lengths)
    bits = (raw & 127).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts[:-1]).view(np.int64)
