"""Tensors as JSON: nested lists or base64, read and written in bulk.

orjson writes numbers straight from a buffer, and simdjson, if it is installed, parses them straight into a buffer. Else
they become Python objects first, as they do in a list that also holds something else (booleans, "NaN", a mistake). NaN
and infinities are the strings "NaN", "Infinity" and "-Infinity". base64 encodes little-endian, row-major bytes.
"""

from __future__ import annotations

import binascii
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import orjson
import pybase64

from service.codecs._bytes import bytes_of, count, view, wrong_size
from service.codecs._lists import ListReader, is_empty, list_text, shape_of
from service.codecs._parser import LISTS, OBJECTS, TEXT_COPIES, VALUE_BYTES, Body, parsed
from service.codecs._parser import Pairs as Pairs
from service.codecs._parser import Text as Text
from service.codecs._parser import without_mark as without_mark
from service.dtypes import WIRE_NAMES, Array, DType
from service.errors import BodyTooLarge, InvalidTensor, MalformedBody, shown
from service.limits import Limits

Encoding: TypeAlias = Literal["list", "base64"]

_FOREIGN = {
    ":": "a prefix like data:...;base64,",
    "\n": "line breaks",
    "\r": "line breaks",
    " ": "blanks",
    "-": "- or _ of the alphabet for URLs",
    "_": "- or _ of the alphabet for URLs",
}
"""What programs write into base64, by a sign of it."""

DIAGNOSED_BYTES = 2 << 20
"""The largest body, in bytes, whose errors name the place of a mistake.

To find the place takes many times the body's memory, and the interpreter's lock for up to a quarter of a second.
"""

MAX_INTEGER_CHARACTERS = 4000
"""Characters of the longest integer to parse: Python raises at 4,300 digits. A longer integer is read as infinity."""

MAX_ELEMENTS = 1 << 25
"""The most elements of all lists in a body: to read them, the interpreter's lock is held for a second or two."""

MAX_LISTS = 1 << 22
"""The most lists in a body: to look at each takes up to a microsecond, most of it with the interpreter's lock."""

MAX_MEMBERS = 4096
"""The most members of an object: to find a member, simdjson goes through all members before it."""

MAX_TENSOR_MEMBERS = 16
"""The most members of an object that takes the place of a tensor: there may be thousands of such objects."""


class Document:
    """A JSON object that names tensors, parsed once. Not thread-safe.

    `members` maps each name to a number, string, boolean, None or list, or to a dict of them. Lists stay in the parser
    until `tensor` reads them, except `shape` in a dict. Objects in a dict stay there until `member` reads them. A name
    in `groups` is mapped to a dict of such members; if it is a list, they are 0, 1, 2 and so on. Raises
    `MalformedBody`, `InvalidTensor`, `TooManyTensors` and `TooManyDimensions`.
    """

    def __init__(self, body: Body, limits: Limits, groups: Collection[str] = ()) -> None:
        self._text = Text(body)
        self._limits = limits
        self._lists = ListReader()
        self.encoding: Encoding = "list"
        """How the tensors read so far were written: base64 if any was, else lists."""
        self._other_lists = 0
        """How many lists in the body are shapes or groups."""
        self.members: dict[str, Any] = {}
        for name, value in members_of(parse(self._text), "The body"):
            self.members[name] = self._group(name, value) if name in groups else self.member(name, value)
        limits.check_count(sum([len(one) if name in groups else 1 for name, one in self.members.items()]))

    def _group(self, name: str, value: Any) -> dict[str, Any]:
        """Return the members of a group in the form of `members`."""
        if type(value) in LISTS:
            self._other_lists += 1
            self._limits.check_count(len(value))
            items: Iterable[tuple[str, Any]] = ((str(number), item) for number, item in enumerate(value))
        elif isinstance(value, OBJECTS):
            items = members_of(value, shown(name))
        else:
            raise InvalidTensor(f"{name} is {shown(value)}, but must be an object or a list of tensors", tensor=name)
        return {member: self.member(f"{name}.{member}", item) for member, item in items}

    def member(self, name: str, value: Any) -> Any:
        """Return the member `name` of an object in the document in the form of `members`. Raises the same errors."""
        if not isinstance(value, OBJECTS):
            return value
        members = dict(members_of(value, shown(name), MAX_TENSOR_MEMBERS))
        shape: Any = members.get("shape")
        if type(shape) in LISTS:
            self._limits.check_rank(name, len(shape), label=f"{name}.shape")
            members["shape"] = [[] if type(item) in LISTS else item for item in shape]
        elif isinstance(shape, OBJECTS):
            members["shape"] = {}  # no shape, whatever it has
        return members

    def tensor(self, name: str, data: Any, dtype: DType, shape: Sequence[int] | None = None) -> Array:
        """Return the tensor `name` from nested lists or a scalar. The caller must call `finish` before it uses it.

        If there is a `shape`, it must be the shape of the lists, and completes the shape of an empty list. Raises
        `InvalidTensor`, `TooManyDimensions` and `TensorTooLarge`.
        """
        list_shape = shape_of(name, data, self._limits)
        self._limits.check(name, list_shape, dtype)
        if shape is not None:
            self._check_shape(name, shape, dtype)
            if tuple(shape) != list_shape and not is_empty(list_shape, shape):
                problem = f"{name}.data has lists of shape {list(list_shape)}, but {name}.shape is {list(shape)}"
                raise InvalidTensor(problem, tensor=name)
        return self._lists.read(name, data, list_shape, dtype).reshape(list_shape if shape is None else shape)

    def base64(self, name: str, text: str, dtype: DType, shape: Sequence[int]) -> Array:
        """Return the tensor `name`, a read-only view of the decoded bytes. Raises the same errors as `tensor`."""
        self.encoding = "base64"
        self._check_shape(name, shape, dtype)
        place, size = f"{name}.base64", len(text) * 3 // 4
        is_long = size > math.prod(shape) * dtype.itemsize + 4  # do not decode a text that is far too long
        try:
            data = b"" if is_long else pybase64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            data = None
        if data is None or is_long:
            found = next((f"has {what}, but must be" for sign, what in _FOREIGN.items() if sign in text), None)
            if is_long and found is None:
                raise wrong_size(place, name, size, dtype, shape)
            problem = f"{place} {found or 'is not'} base64 in the standard alphabet (A-Z a-z 0-9 + /), padded with ="
            raise InvalidTensor(problem, tensor=name)
        return view(place, name, data, dtype, shape)

    def finish(self) -> None:
        """Raise `InvalidTensor` if a list stands where a number belongs. The caller must have read all tensors."""
        self._lists.finish(self._text, lambda: self._other_lists)

    def _check_shape(self, name: str, shape: Sequence[int], dtype: DType) -> None:
        self._other_lists += 1
        self._limits.check(name, shape, dtype)


def parsed_bytes(text: Body) -> int:
    """Return about how much memory it takes to parse `text`: the parser's, and that of the values."""
    return TEXT_COPIES * len(text) + VALUE_BYTES * count(text, b",")


def encode(
    tensors: Mapping[str, Array],
    encoding: Encoding,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    groups: Collection[str] = (),
) -> list[bytes]:
    """Return the pieces of a JSON object: name -> `{"dtype", "shape", "data"}`, or `"base64"` in place of `"data"`.

    `others` are members that are not tensors, by name. If weights is one of the `groups`, `weights.b` is the member `b`
    of the object `weights`.
    """
    members = {name: encode_tensor(tensor, encoding) for name, tensor in tensors.items()}
    if others:
        members |= {name: [orjson.dumps(other)] for name, other in others.items()}
    return _object_text(_grouped(members, groups) if groups else members)


def _grouped(members: Mapping[str, list[bytes]], groups: Collection[str]) -> dict[str, list[bytes]]:
    found: dict[str, dict[str, list[bytes]]] = {}
    for name, pieces in members.items():
        group, _, member = name.partition(".") if name.partition(".")[0] in groups else (name, "", "")
        found.setdefault(group, {})[member] = pieces
    return {name: one[""] if "" in one else _object_text(one) for name, one in found.items()}


def _object_text(members: Mapping[str, list[bytes]]) -> list[bytes]:
    pieces: list[bytes] = []
    for name, member in members.items():
        pieces += [(b"," if pieces else b"{") + orjson.dumps(name) + b":", *member]
    return [*(pieces or [b"{"]), b"}"]


def encoded_bytes(shape: Sequence[int], dtype: DType, encoding: Encoding) -> int:
    """Return how many bytes the text of such a tensor takes at most."""
    size = math.prod(shape)
    if encoding == "base64":
        return -(-size * dtype.itemsize // 3) * 4
    brackets = 3 * sum(math.prod(shape[:depth]) for depth in range(len(shape)))  # with a comma behind each list
    return size * _NUMBER_BYTES[dtype.kind, dtype.itemsize] + (brackets if size else 2)


def encode_tensor(tensor: Array, encoding: Encoding) -> list[bytes]:
    """Return the pieces of a tensor's JSON object."""
    head = orjson.dumps({"dtype": WIRE_NAMES[tensor.dtype], "shape": tensor.shape})[:-1]
    if encoding == "base64":
        return [head, b',"base64":"', pybase64.b64encode(bytes_of(tensor)), b'"}']
    return [head, b',"data":', *list_text(tensor), b"}"]


_INTEGER_BYTES = {("b", 1): 6, ("i", 1): 5, ("i", 4): 12, ("i", 8): 21}
_NUMBER_BYTES = {**_INTEGER_BYTES, ("f", 2): 18, ("V", 2): 18, ("f", 4): 18, ("f", 8): 26}
"""The most bytes of a number in a list, with a comma, by the dtype's kind and size."""


def parse(text: Text) -> Any:
    """Parse JSON; numbers stay in the parser. Raises `MalformedBody` and `BodyTooLarge`."""
    body = text.body
    if not body:
        raise MalformedBody("The body is empty, so it is not JSON; it must be an object")
    # An element takes two bytes or more, with its comma, and so does a list.
    if len(body) > 2 * MAX_ELEMENTS and count(body, b",") >= MAX_ELEMENTS:  # n commas part n + 1 elements
        raise _too_large(f"The lists in the body have more than {MAX_ELEMENTS} elements", MAX_ELEMENTS)
    if len(body) > 2 * MAX_LISTS and text.lists > MAX_LISTS:
        raise _too_large(f"The body has more than {MAX_LISTS} lists", MAX_LISTS)
    try:
        return parsed(body)
    except (ValueError, RuntimeError) as error:
        if len(body) > DIAGNOSED_BYTES:
            raise MalformedBody(
                f'The body is not JSON (NaN is the string "NaN"), or has a number beyond 64 bits: {error}'
            ) from None
        # The parser tells neither the place of a mistake nor the tensor of a number that is too large. Parse it again.
        return parse_pairs(body)


def parse_pairs(body: Body) -> Any:
    """Parse JSON into Python objects, and each JSON object into `Pairs`. Raises `MalformedBody`."""
    try:
        return json.loads(
            str(body, "utf-8-sig"), parse_constant=_refuse_constant, parse_int=_parse_integer, object_pairs_hook=Pairs
        )
    except RecursionError:
        raise MalformedBody("The body is nested too deeply") from None
    except ValueError as error:
        raise MalformedBody(f"The body is not JSON: {error}") from None


def _too_large(fault: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"{fault}; send large tensors as base64 or in a safetensors file", limit=limit)


def _parse_integer(text: str) -> float:
    return int(text) if len(text) <= MAX_INTEGER_CHARACTERS else float(text)


def _refuse_constant(text: str) -> None:
    raise ValueError(f'{text} is not JSON; write the string "{text}"')


def members_of(value: Any, title: str, most: int = MAX_MEMBERS) -> list[tuple[str, Any]]:
    """Return the members of an object. Raises `MalformedBody`, also for two members of one name; `title` names it."""
    if not isinstance(value, OBJECTS):
        raise MalformedBody(f"{title} is JSON, but not an object")
    is_pairs = type(value) is Pairs
    if not is_pairs and len(value) > most:
        raise MalformedBody(f"{title} has {len(value)} members; the limit is {most}", limit=most)
    names = [name for name, _ in value] if is_pairs else [*value]
    if len({*names}) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise MalformedBody(f"{title} has two members named {shown(twice)}")
    for name in names:
        if "\0" in name:  # simdjson would look up only the part before it
            raise MalformedBody(f"{title} has a member named {shown(name)}, with a null character")
    return [*value] if is_pairs else [(name, value[name]) for name in names]
