"""Tensors as a safetensors file: a length, a JSON header, and the bytes, which are viewed where they lie.

The format is that of the safetensors library: eight bytes with the header's length, little-endian; the header, which
gives each tensor's dtype, shape and place among the bytes, and may have texts under `__metadata__`; the bytes, of which
each belongs to one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import orjson

from service.codecs._bytes import bytes_of, view
from service.codecs._headers import MOST_VALUES, as_object, check_shape, load
from service.dtypes import SAFETENSORS, Array, DType
from service.errors import InvalidTensor, MalformedBody, shown
from service.limits import Limits

MEDIA_TYPE = "application/vnd.safetensors"

MOST_HEADER_BYTES = 100_000_000
"""The longest header, by the format's own rule."""

METADATA = "__metadata__"

VALUES_OF_TENSOR = 16
"""As many values as this for each tensor that a file may have are no more than `MOST_VALUES` by default."""

KNOWN_BYTES = 1 << 16
"""Up to this length a header is remembered: that of about 800 tensors."""

Described: TypeAlias = tuple[DType, tuple[int, ...]]
"""A tensor's dtype and shape."""

_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}


def decode(body: memoryview, limits: Limits) -> dict[str, Array]:
    """The tensors, read-only views of `body`, by name.

    Raises `MalformedBody` for a file that breaks the format's rules, `InvalidTensor`, `TensorTooLarge` and
    `TooManyDimensions`.
    """
    text = _text(body)
    header = _known_header(text, limits) if len(text) <= KNOWN_BYTES else _header(text, limits)
    data = body[8 + len(text) :]
    if header.end != len(data):
        last = max(header.places, key=lambda place: place.stop, default=None)
        ends = "the tensors end" if last is None else f"the last tensor, {shown(last.name)}, ends"
        raise MalformedBody(f"The bytes after the header are {len(data)}, but {ends} at {header.end}")
    return {
        place.name: view(f"{place.name}.data_offsets", place.name, data[place.start : place.stop], *place.described)
        for place in header.places
    }


def metadata_of(body: memoryview, limits: Limits) -> dict[str, str]:
    """The texts under `__metadata__`. Raises `MalformedBody`."""
    metadata = _loaded(_text(body), limits).get(METADATA)
    _check_metadata(metadata)
    return metadata or {}


class _Place(NamedTuple):
    """A tensor, and where its bytes are among those that follow the header."""

    name: str
    described: Described
    start: int
    stop: int


class _Header(NamedTuple):
    """The tensors of a file, and where the last one ends. To be shared, so not to be changed."""

    places: tuple[_Place, ...]
    end: int


def _text(body: memoryview) -> bytes:
    """The header as it came."""
    if len(body) < 8:
        raise MalformedBody(
            f"The body has {len(body)} bytes, but a safetensors file begins with 8 of its header's length"
        )
    length = int.from_bytes(body[:8], "little")
    if length > min(len(body) - 8, MOST_HEADER_BYTES):
        raise MalformedBody(
            f"The safetensors header is said to have {length} bytes, but at most {len(body) - 8} follow,"
            f" and the limit is {MOST_HEADER_BYTES}"
        )
    return bytes(body[8 : 8 + length])


def _loaded(text: bytes, limits: Limits) -> dict[str, Any]:
    most = max(MOST_VALUES, VALUES_OF_TENSOR * limits.max_tensors)
    return as_object(load(text, "The safetensors header", most), "The safetensors header")


def _header(text: bytes, limits: Limits) -> _Header:
    """The header, read and checked but for the number of bytes that follow it."""
    document = _loaded(text, limits)
    _check_metadata(document.pop(METADATA, None))
    limits.check_count(len(document))
    places = [_place(name, as_object(entry, shown(name)), limits) for name, entry in document.items()]
    end = 0
    for place in sorted(places, key=lambda place: (place.start, place.stop)):
        if place.start != end or place.stop < place.start:
            raise MalformedBody(
                f"{shown(place.name)} has data_offsets [{place.start}, {place.stop}], but must begin at {end}, where"
                " the tensor before it ends, and not end before that"
            )
        end = place.stop
    return _Header(tuple(places), end)


_known_header = lru_cache(maxsize=64)(_header)
"""The same for a header that is not long. A client's requests differ in their tensors, but hardly in that."""


def _place(name: str, entry: Mapping[str, Any], limits: Limits) -> _Place:
    start, stop = _offsets(name, entry)
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedBody(f"{shown(name)} has {shown(list(entry))}, but must have dtype, shape and data_offsets")
    text = entry["dtype"]
    dtype = _DTYPES.get(text) if isinstance(text, str) else None
    if dtype is None:
        raise InvalidTensor(f"{name}.dtype is {shown(text)}, but must be one of {', '.join(_DTYPES)}", tensor=name)
    shape = check_shape(name, entry["shape"])
    limits.check(name, shape, dtype)
    return _Place(name, (dtype, tuple(shape)), start, stop)


def _offsets(name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    offsets = entry.get("data_offsets")
    if not isinstance(offsets, list) or [type(one) for one in offsets] != [int, int] or min(offsets) < 0:
        raise MalformedBody(f"{shown(name)} has data_offsets {shown(offsets)}, but must have two integers from 0 on")
    return offsets[0], offsets[1]


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not all(isinstance(one, str) for one in as_object(metadata, METADATA).values()):
        raise MalformedBody(f"{METADATA} must map names to texts")


def encode(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """The pieces of a file: its header and a view of each tensor's bytes, those of large elements first."""
    ordered = in_order({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    return [head(ordered, metadata), *(bytes_of(tensors[name]) for name in ordered)]


def in_order(tensors: Mapping[str, Described]) -> dict[str, Described]:
    """The order in which the tensors' bytes follow the header: then all lie at multiples of their elements' size."""
    return dict(sorted(tensors.items(), key=lambda pair: -pair[1][0].itemsize))


def head(tensors: Mapping[str, Described], metadata: Mapping[str, str] | None = None) -> bytes:
    """What a file begins with, whose tensors, given by dtype and shape, follow in this order."""
    header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [start, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
