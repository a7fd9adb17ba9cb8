"""JSON headers of binary formats: small, and read into Python objects, whose number is bounded."""

from __future__ import annotations

import json
from typing import Any

import orjson

from service.errors import InvalidTensor, MalformedBody, shown

MOST_VALUES = 1 << 18
"""The most values in a header: each takes up to a hundred bytes once it is read."""


def load(text: memoryview | bytes, what: str, most: int = MOST_VALUES) -> Any:
    """The header as JSON. Raises `MalformedBody`, also where an object has two members of one name."""
    raw = bytes(text)
    if len(raw) > most and raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most:
        raise MalformedBody(f"{what} has more than {most} values")
    try:
        value = orjson.loads(raw)
        # orjson keeps the last of two members of one name. Where none was lost, as many colons are left as came.
        if b"\\" in raw or raw.count(b":") != _colons(value):
            json.loads(raw, object_pairs_hook=lambda pairs: _unique(pairs, what))
    except RecursionError:
        raise MalformedBody(f"{what} is nested too deeply") from None
    except ValueError as error:
        hint = '; NaN and infinities are the strings "NaN", "Infinity" and "-Infinity"'
        nonfinite = b"NaN" in raw or b"Infinity" in raw
        raise MalformedBody(f"{what} is not JSON: {error}{hint if nonfinite else ''}") from None
    return value


def as_object(value: Any, what: str) -> dict[str, Any]:
    """`value`, which must be an object. Raises `MalformedBody`."""
    if not isinstance(value, dict):
        raise MalformedBody(f"{what} is {shown(value)}, but must be an object")
    return value


def check_shape(name: str, shape: Any) -> list[int]:
    """`shape`, which must be a list of dimensions, however many. Raises `InvalidTensor`."""
    if not isinstance(shape, list) or not all([type(dim) is int and 0 <= dim < 1 << 63 for dim in shape]):
        raise InvalidTensor(f"{name}.shape is {shown(shape)}, but must be a list of integers from 0 on", tensor=name)
    return shape


def _colons(value: object) -> int:
    """The members of all objects in `value`, and the colons in texts."""
    if isinstance(value, str):
        return value.count(":")
    if isinstance(value, dict):
        return len(value) + sum(_colons(name) + _colons(member) for name, member in value.items())
    if isinstance(value, list) and value and type(value[0]) not in (int, float):
        return sum(_colons(item) for item in value)
    return 0


def _unique(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise MalformedBody(f"{what} has two members named {shown(name)}")
        members[name] = value
    return members
