"""An answer in bytes: its head, and the pieces in which it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

LARGE_BYTES = 8 << 20
"""A larger answer is written in parts, between which it is the turn of other connections."""

TURN_BYTES = 1 << 19
"""Most bytes of such a part: the socket takes them in about a tenth of a millisecond."""

Headers: TypeAlias = Iterable[tuple[bytes, bytes]]
Pieces: TypeAlias = Sequence[bytes | memoryview]


class Head(NamedTuple):
    """The head of an answer, but for its Connection header and the line break at its end."""

    text: bytes
    length: int | None
    """Bytes of the body, as Content-Length says; None: the body ends with the connection."""
    is_last: bool
    """Whether the application wants the connection closed."""


def head_of(status: int, headers: Headers) -> Head:
    """Return the head of an answer. Raises RuntimeError for a header that would become two."""
    lines, length, is_last = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status], None, False
    for name, value in headers:
        if b"\n" in value or b"\r" in value:
            raise RuntimeError(f"The header {name!r} of the answer has a line break")
        lowered = name.lower()
        if lowered == b"connection":
            is_last = value.lower() == b"close"
            continue
        if lowered == b"content-length":
            length = int(value)
        lines.append(b"%b: %b\r\n" % (name, value))
    return Head(b"".join(lines), 0 if status in (204, 304) else length, is_last)


def by_turns(pieces: Pieces) -> Iterator[tuple[bytes | memoryview, bool]]:
    """Cut pieces into parts; yield each with whether it is the turn of other connections behind it."""
    left = TURN_BYTES
    for piece in pieces:
        for start in range(0, len(piece), TURN_BYTES):
            part = piece[start : start + TURN_BYTES]
            left -= len(part)
            yield part, left <= 0
            left = TURN_BYTES if left <= 0 else left


_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
