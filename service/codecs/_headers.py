"""JSON headers of binary formats: read into Python objects, whose number has a limit."""

from __future__ import annotations

import json
from typing import Any

import orjson

from service.codecs._parser import has_double
from service.codecs.json import Pairs, members_of
from service.errors import InvalidTensor, MalformedBody, shown

MAX_HEADER_VALUES = 1 << 18
"""The most JSON values in a header: each takes up to 100 bytes of memory as a Python object."""


def load(text: memoryview | bytearray | bytes, title: str, max_values: int = MAX_HEADER_VALUES) -> Any:
    """Parse a header. `title` names it in errors.

    Raises `MalformedBody` for text that is not JSON, for too many values, and for two members of one name.
    """
    raw = bytes(text)
    if len(raw) > max_values and raw.count(b",") + raw.count(b"[") + raw.count(b"{") > max_values:
        raise MalformedBody(f"{title} has more than {max_values} values")
    try:
        value = orjson.loads(raw)
        if has_double(value, raw):
            json.loads(raw, object_pairs_hook=lambda pairs: members_of(Pairs(pairs), title))
    except RecursionError:
        raise MalformedBody(f"{title} is nested too deeply") from None
    except ValueError as error:
        hint = '; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"'
        nonfinite = b"NaN" in raw or b"Infinity" in raw
        raise MalformedBody(f"{title} is not JSON: {error}{hint if nonfinite else ''}") from None
    return value


def as_object(value: Any, title: str) -> dict[str, Any]:
    """Return `value` if it is an object. Raises `MalformedBody`, which names it `title`."""
    if not isinstance(value, dict):
        raise MalformedBody(f"{title} is {shown(value)}, but must be an object")
    return value


def check_shape(name: str, shape: Any) -> list[int]:
    """Return `shape` if it is a list of dimensions, of any length. Raises `InvalidTensor`."""
    if not isinstance(shape, list) or not all([type(dim) is int and 0 <= dim < 1 << 63 for dim in shape]):
        raise InvalidTensor(f"{name}.shape is {shown(shape)}, but must be a list of non-negative integers", tensor=name)
    return shape
