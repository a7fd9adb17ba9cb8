"""The parser of JSON: simdjson if it is installed, else orjson.

simdjson keeps the numbers of lists in its own memory, and writes them into a buffer. orjson makes a Python object of
each, and a million take four times as long. Both give the same tensors and errors, with one exception: orjson reads an
integer beyond 64 bits as a float, also in a large body, which simdjson refuses.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any, TypeAlias

import orjson

from service.codecs._bytes import count

try:
    import simdjson
except ImportError:  # the extra `simdjson` is not installed; there is no wheel for CPython 3.14
    simdjson = None  # type: ignore[assignment]

Body: TypeAlias = bytes | bytearray | memoryview

IN_PARSER: tuple[type[Any], ...] = () if simdjson is None else (simdjson.Array,)
"""The types of lists whose numbers are still in the parser."""

LISTS: tuple[type[Any], ...] = (*IN_PARSER, list)


class Text:
    """The `body` of a request that is JSON. To count its lists, all of it is read, so that happens at most once."""

    def __init__(self, body: Body) -> None:
        self.body = body

    @cached_property
    def lists(self) -> int:
        """How many opening brackets the text has, also in strings."""
        return count(self.body, b"[")


class Pairs(list[tuple[str, Any]]):
    """The members of an object in their order, with duplicates."""


OBJECTS: tuple[type[Any], ...] = (dict, Pairs) if simdjson is None else (simdjson.Object, dict, Pairs)

TEXT_COPIES = 4 if simdjson is None else 3
"""Times that a text is in memory while it is parsed: the parser's copies, its strings, and ours of one of them."""

VALUE_BYTES = 40 if simdjson is None else 32
"""Bytes of a number while it is parsed: 8 in the array, and 24 in simdjson, or 32 as a Python object in a list."""

REUSED_PARSER_BYTES = 48 << 20
"""The largest body, in bytes, after which a thread keeps its parser's memory: that is several times the body."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_thread = threading.local()


def without_mark(body: Body) -> bytes:
    """Return JSON without the byte order mark that some programs of Windows write before it."""
    return bytes(body).removeprefix(_BYTE_ORDER_MARK)


def parsed(body: Body) -> Any:
    """Parse JSON; the lists are of `LISTS`, and the objects of `OBJECTS`.

    Raises ValueError and RuntimeError for text that is not JSON. orjson's dict has no place for two members of one
    name, so these raise ValueError, too.
    """
    return _parse_with_orjson(bytes(body)) if simdjson is None else _parser(body).parse(body)


def _parser(body: Body) -> simdjson.Parser:
    """Return a parser for `body`: this thread's own, which has memory already, or a new parser.

    The thread's own parser refuses to parse while the last value that it parsed is alive.
    """
    if len(body) > REUSED_PARSER_BYTES:
        return simdjson.Parser()
    parser: simdjson.Parser = _thread.__dict__.setdefault("parser", simdjson.Parser())
    try:
        parser.parse(b"0")
    except RuntimeError:
        return simdjson.Parser()
    return parser


def _parse_with_orjson(text: bytes) -> Any:
    value = orjson.loads(without_mark(text))
    if has_double(value, text):
        raise ValueError("an object has two members of one name")
    return value


def has_double(value: Any, text: bytes) -> bool:
    """Return whether an object in the text has two members of one name. orjson's `value` of the text keeps the last."""
    members = _members_of(value, hidden=False)
    if count(text, b":") == members and b"\\" not in text:  # no string has a colon
        return False
    return _members_of_text(text) not in (members, _members_of(value, hidden=True))


def _members_of_text(text: bytes) -> int:
    """Count the members of all objects: each has a colon outside strings."""
    parts = text.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
    return sum(part.count(b":") for part in parts[::2])


def _members_of(value: Any, hidden: bool) -> int:
    """Count the members of all objects in `value`, but look for objects among numbers only if they may be `hidden`."""
    if isinstance(value, dict):
        return len(value) + sum(_members_of(member, hidden) for member in value.values())
    if isinstance(value, list) and value and (hidden or type(value[0]) not in (int, float)):
        return sum(_members_of(item, hidden) for item in value)
    return 0
