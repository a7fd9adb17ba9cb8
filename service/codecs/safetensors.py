"""Tensors as a safetensors file: a length, a JSON header and the tensors' bytes.

The format is that of the safetensors library. The first 8 bytes are the header's length, little-endian. The header has
each tensor's dtype, shape and place among the bytes, and may have strings under `__metadata__`. Each byte after the
header belongs to one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson

from service.codecs._bytes import bytes_of, view
from service.codecs._headers import MAX_HEADER_VALUES, as_object, check_shape, load
from service.dtypes import INT8, SAFETENSORS, Array, DType
from service.errors import InvalidTensor, MalformedBody, shown
from service.limits import Limits

MEDIA_TYPE = "application/vnd.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""The longest header, in bytes, that the format allows."""

METADATA = "__metadata__"
"""The member of the header that holds the file's metadata."""

VALUES_PER_TENSOR = 16
"""JSON values to allow for each tensor. With the default limit of tensors, that makes `MAX_HEADER_VALUES`."""

CACHED_HEADER_BYTES = 1 << 16
"""The longest header, in bytes, to cache: a header of about 800 tensors."""

TensorType: TypeAlias = tuple[DType, tuple[int, ...]]
"""A tensor's dtype and shape."""

_NAMES = {**SAFETENSORS, INT8: "I8"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def decode(body: memoryview, limits: Limits) -> dict[str, Array]:
    """Return the tensors by name, as read-only views of `body`.

    Raises `MalformedBody` for a file that breaks the format's rules, `InvalidTensor`, `TensorTooLarge` and
    `TooManyDimensions`.
    """
    text = _text(body)
    header = _cached_header(text, limits) if len(text) <= CACHED_HEADER_BYTES else _read_header(text, limits)
    data = body[8 + len(text) :]
    if header.end != len(data):
        last = max(header.tensors, key=lambda tensor: tensor.stop, default=None)
        ends = "the tensors end" if last is None else f"the last tensor, {shown(last.name)}, ends"
        raise MalformedBody(f"{len(data)} bytes follow the header, but {ends} at {header.end}")
    return {
        name: view(f"{name}.data_offsets", name, data[start:stop], *tensor_type)
        for name, tensor_type, start, stop in header.tensors
    }


def metadata_of(body: memoryview, limits: Limits) -> dict[str, str]:
    """Return the strings under `__metadata__`. Raises `MalformedBody`."""
    metadata = _load(_text(body), limits).get(METADATA)
    _check_metadata(metadata)
    return metadata or {}


class _HeaderTensor(NamedTuple):
    """A tensor in the header. Its bytes are at `start` to `stop`, counted from the end of the header."""

    name: str
    type: TensorType
    start: int
    stop: int


class _Header(NamedTuple):
    """The tensors of a file, and where the last tensor ends. The cache shares it, so nothing may change it."""

    tensors: tuple[_HeaderTensor, ...]
    end: int


def _text(body: memoryview) -> bytes:
    """Return the header's text."""
    if len(body) < 8:
        raise MalformedBody(
            f"The body has {len(body)} bytes, but a safetensors file begins with 8 bytes, its header's length"
        )
    length = int.from_bytes(body[:8], "little")
    if length > min(len(body) - 8, MAX_HEADER_BYTES):
        raise MalformedBody(
            f"The safetensors header's length is {length} bytes, but only {len(body) - 8} bytes follow,"
            f" and the limit is {MAX_HEADER_BYTES}"
        )
    return bytes(body[8 : 8 + length])


def _load(text: bytes, limits: Limits) -> dict[str, Any]:
    max_values = max(MAX_HEADER_VALUES, VALUES_PER_TENSOR * limits.max_tensors)
    return as_object(load(text, "The safetensors header", max_values), "The safetensors header")


def _read_header(text: bytes, limits: Limits) -> _Header:
    """Read the header, and check all but the number of bytes that follow it."""
    document = _load(text, limits)
    _check_metadata(document.pop(METADATA, None))
    limits.check_count(len(document))
    tensors = [_read_tensor(name, as_object(entry, shown(name)), limits) for name, entry in document.items()]
    end = 0
    for name, _, start, stop in sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if start != end or stop < start:
            raise MalformedBody(
                f"{shown(name)} has data_offsets [{start}, {stop}], but must begin at {end}, where the previous tensor"
                " ends, and must not end before it begins"
            )
        end = stop
    return _Header(tuple(tensors), end)


_cached_header = lru_cache(maxsize=64)(_read_header)
"""`_read_header` for short headers: the requests of a client have other numbers, but mostly the same header."""


def _read_tensor(name: str, entry: Mapping[str, Any], limits: Limits) -> _HeaderTensor:
    start, stop = _offsets(name, entry)
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedBody(f"{shown(name)} has {shown(list(entry))}, but must have dtype, shape and data_offsets")
    text = entry["dtype"]
    dtype = _DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise InvalidTensor(f"{name}.dtype is {shown(text)}, but must be one of {', '.join(_DTYPES)}", tensor=name)
    shape = check_shape(name, entry["shape"])
    limits.check(name, shape, dtype)
    return _HeaderTensor(name, (dtype, tuple(shape)), start, stop)


def _offsets(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int] or min(offsets) < 0:
        raise MalformedBody(f"{shown(name)} has data_offsets {shown(offsets)}, but must have two non-negative integers")
    return offsets[0], offsets[1]


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not all(isinstance(text, str) for text in as_object(metadata, METADATA).values()):
        raise MalformedBody(f"{METADATA} must map names to strings")


def encode(
    tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None, *, aligned: bool = True
) -> list[bytes | memoryview]:
    """Return the pieces of a file: its header, and a view of each tensor's bytes, large elements first if `aligned`."""
    types: Mapping[str, TensorType] = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    ordered = in_order(types) if aligned else types
    return [head(ordered, metadata), *(bytes_of(tensors[name]) for name in ordered)]


def in_order(tensors: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """Sort tensors by the size of their elements, the largest first. Then all bytes in a file are aligned."""
    return dict(sorted(tensors.items(), key=lambda pair: -pair[1][0].itemsize))


def head(tensors: Mapping[str, TensorType], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the length and header of a file whose tensors follow in the order of `tensors`."""
    header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
