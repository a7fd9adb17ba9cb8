"""Tensors as JSON: nested lists or base64, read and written in bulk.

Numbers are parsed by simdjson straight into a buffer and written by orjson straight from one; no Python object is made
for a number, except where a list holds something else than numbers (booleans, "NaN", a mistake). NaN and infinities are
the strings "NaN", "Infinity" and "-Infinity"; base64 is of little-endian, row-major bytes.
"""

from __future__ import annotations

import binascii
import itertools
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import orjson
import pybase64
import simdjson

from service.codecs._bytes import bytes_of, view, wrong_size
from service.codecs._lists import NONFINITE, Numbers, count, is_empty, shape_of
from service.dtypes import NAMES, Array, DType
from service.errors import BodyTooLarge, InvalidTensor, MalformedBody, shown
from service.limits import Limits

Form: TypeAlias = Literal["list", "base64"]
Body: TypeAlias = bytes | bytearray | memoryview

DIAGNOSED_BYTES = 2 << 20
"""The largest body of which an error says the place: to find it takes many times the body's memory, and the
interpreter's lock for up to a quarter of a second."""

LONGEST_INTEGER = 4000
"""Characters of an integer beyond which it is taken for infinity: Python gives up at a few more."""

WRITTEN_AT_ONCE = 1 << 16
"""Elements: to write more, orjson would hold the interpreter's lock for long."""

MOST_ELEMENTS = 1 << 25
"""The most commas in a body, and so elements of its lists: to read them, simdjson holds the interpreter's lock for up
to a second."""

MOST_MEMBERS = 4096
"""The most members of an object: simdjson finds each by going through those before it."""

REUSED_BYTES = 48 << 20
"""The largest body for which a thread keeps its parser's memory, which is several times that, for the next one."""


class Document:
    """A JSON object that names tensors, parsed once. Not thread-safe.

    `members` maps each name to a number, string, boolean, None, list, or a dict of these; lists, but for `shape` in a
    dict, stay in the parser until `tensor` reads them. Raises `MalformedBody` and `TooManyDimensions`.
    """

    def __init__(self, body: Body, limits: Limits) -> None:
        self._body = body
        self._limits = limits
        self._numbers = Numbers()
        self._shapes = 0  # lists that tell a shape
        self.members = {name: _plain(name, value, limits) for name, value in members_of(parse(body), "The body")}
        limits.check_count(len(self.members))

    def tensor(self, name: str, data: Any, dtype: DType, shape: Sequence[int] | None = None) -> Array:
        """The tensor `name` from nested lists or a scalar, to be trusted after `finish`.

        `shape`, if given, must be that of the lists; it settles the shape of an empty list. Raises `InvalidTensor`,
        `TooManyDimensions` and `TensorTooLarge`.
        """
        found = shape_of(name, data, self._limits)
        self._limits.check(name, found, dtype)
        if shape is not None:
            self._settle(name, shape, dtype)
            if tuple(shape) != found and not is_empty(found, shape):
                raise InvalidTensor(f"{name} has lists of shape {list(found)}, but says {list(shape)}", tensor=name)
        return self._numbers.read(name, data, found, dtype).reshape(found if shape is None else shape)

    def base64(self, name: str, text: str, dtype: DType, shape: Sequence[int]) -> Array:
        """The tensor `name`, a read-only view of the decoded bytes. Raises like `tensor`."""
        self._settle(name, shape, dtype)
        place, size = f"{name}.base64", len(text) * 3 // 4
        if size > math.prod(shape) * dtype.itemsize + 4:  # so much too long a text is not worth decoding
            raise wrong_size(place, name, size, dtype, shape)
        try:
            data = pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidTensor(
                f"{place} is not base64 in the standard alphabet (A-Z a-z 0-9 + /), padded with =", tensor=name
            ) from None
        return view(place, name, data, dtype, shape)

    def finish(self) -> None:
        """Raise `InvalidTensor` if a list stands where a number belongs in any tensor read, which must be all."""
        self._numbers.prove(self._body, lambda: self._shapes)

    def _settle(self, name: str, shape: Sequence[int], dtype: DType) -> None:
        self._shapes += 1
        self._limits.check(name, shape, dtype)


def encode(
    tensors: Mapping[str, Array], form: Form, others: Mapping[str, Mapping[str, Any]] | None = None
) -> list[bytes]:
    """The pieces of a JSON object: name -> `{"dtype", "shape", "data"}`, or `"base64"` in place of `"data"`.

    `others` are members that are no tensors.
    """
    pieces: list[bytes] = []
    for name, tensor in tensors.items():
        pieces += [(b"," if pieces else b"{") + orjson.dumps(name) + b":", *encode_tensor(tensor, form)]
    for name, other in (others or {}).items():
        pieces.append((b"," if pieces else b"{") + orjson.dumps(name) + b":" + orjson.dumps(other))
    return [*(pieces or [b"{"]), b"}"]


def encode_tensor(tensor: Array, form: Form) -> list[bytes]:
    """The pieces of one tensor."""
    head = orjson.dumps({"dtype": NAMES[tensor.dtype], "shape": tensor.shape})[:-1]
    if form == "base64":
        return [head, b',"base64":"', pybase64.b64encode(bytes_of(tensor)), b'"}']
    return [head, b',"data":', *list_text(tensor), b"}"]


def list_text(tensor: Array) -> Iterator[bytes]:
    """The pieces of the tensor as nested lists. Between them other threads come to their turn."""
    if not tensor.size:
        yield b"[]"  # the shape says the rest, which may be a billion empty rows
    elif tensor.size <= WRITTEN_AT_ONCE:
        yield _list_text(tensor)
    else:
        height = WRITTEN_AT_ONCE * len(tensor) // tensor.size
        for start in range(0, len(tensor), max(1, height)):
            yield b"," if start else b"["
            if height:
                yield _list_text(tensor[start : start + height])[1:-1]
            else:
                yield from list_text(tensor[start])
        yield b"]"


def _list_text(tensor: Array) -> bytes:
    """The tensor, which is not empty, as nested lists."""
    if tensor.dtype.itemsize == 2:
        tensor = tensor.astype(np.float32)
    text = orjson.dumps(np.ascontiguousarray(tensor), option=orjson.OPT_SERIALIZE_NUMPY)
    if not tensor.ndim:
        text = text[1:-1]  # ascontiguousarray makes a row of a scalar
    if tensor.dtype.kind != "f":
        return text
    finite = np.isfinite(tensor)
    if finite.all():
        return text
    # orjson has written null for every other number.
    names = {repr(value): f'"{name}"'.encode() for name, value in NONFINITE.items()}
    others = [names[repr(value)] for value in tensor[~finite].tolist()]
    return b"".join(itertools.chain.from_iterable(zip(text.split(b"null"), [*others, b""], strict=True)))


_kept = threading.local()


def _parser(body: Body) -> simdjson.Parser:
    """A parser for `body`: this thread's own, whose memory is in place, unless what it parsed last is still alive."""
    if len(body) > REUSED_BYTES:
        return simdjson.Parser()
    parser: simdjson.Parser = _kept.__dict__.setdefault("parser", simdjson.Parser())
    try:
        parser.parse(b"0")
    except RuntimeError:
        return simdjson.Parser()
    return parser


def parse(body: Body) -> Any:
    """The JSON value, whose numbers stay in the parser. Raises `MalformedBody` and `BodyTooLarge`."""
    if not body:
        raise MalformedBody("The body is empty, and not JSON; it must be an object")
    if len(body) > MOST_ELEMENTS and count(body, b",") >= MOST_ELEMENTS:
        raise BodyTooLarge(
            f"The body has lists of more than {MOST_ELEMENTS} elements in all; send tensors of so many as base64, or in"
            " a safetensors file",
            limit=MOST_ELEMENTS,
        )
    try:
        return _parser(body).parse(body)
    except (ValueError, RuntimeError) as error:
        if len(body) > DIAGNOSED_BYTES:
            raise MalformedBody(f"The body is not JSON, or has a number beyond 64 bits: {error}") from None
        # simdjson says neither where, nor which tensor a number beyond 64 bits is in: read it again, slowly.
        try:
            return json.loads(
                str(body, "utf-8-sig"), parse_constant=_refuse_constant, parse_int=_whole, object_pairs_hook=Pairs
            )
        except RecursionError:
            raise MalformedBody("The body is nested too deeply") from None
        except ValueError as error:
            raise MalformedBody(f"The body is not JSON: {error}") from None


class Pairs(list[tuple[str, Any]]):
    """The members of an object in their order, duplicates included."""


def _whole(text: str) -> float:
    return int(text) if len(text) <= LONGEST_INTEGER else float(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f'{text} is not JSON; write the string "{text}"')


def members_of(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    """The members of an object, each once. Raises `MalformedBody`."""
    if not isinstance(value, (simdjson.Object, Pairs)):
        raise MalformedBody(f"{what} is JSON, but not an object")
    if len(value) > MOST_MEMBERS:
        raise MalformedBody(f"{what} has {len(value)} members; the limit is {MOST_MEMBERS}", limit=MOST_MEMBERS)
    seen = set()
    for name, member in value if isinstance(value, Pairs) else ((name, None) for name in value):
        if name in seen:
            raise MalformedBody(f"{what} has two members named {shown(name)}")
        if "\0" in name:  # where simdjson's look-up would end
            raise MalformedBody(f"{what} has a member named {shown(name)}, with a null character")
        seen.add(name)
        yield name, member if isinstance(value, Pairs) else value[name]


def _plain(name: str, value: Any, limits: Limits) -> Any:
    if not isinstance(value, (simdjson.Object, Pairs)):
        return value
    form = dict(members_of(value, shown(name)))
    if isinstance(form.get("shape"), simdjson.Array):
        limits.check_rank(name, len(form["shape"]), label=f"{name}.shape")
        form["shape"] = [[] if isinstance(item, simdjson.Array) else item for item in form["shape"]]
    return form
