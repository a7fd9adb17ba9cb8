"""The head of an answer, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import NamedTuple

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class AnswerHead(NamedTuple):
    """The head of an answer, without its Connection header and its last line break."""

    text: bytes
    length: int | None
    """Bytes of the body, as Content-Length says; None: the body ends with the connection."""
    is_last: bool
    """Whether the application wants the connection closed."""


def head_of(status: int, headers: Iterable[tuple[bytes, bytes]]) -> AnswerHead:
    """Return the head of an answer. Raises RuntimeError for a header with a line break, which would become two."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    length, is_last = None, False
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
    return AnswerHead(b"".join(lines), 0 if status in (204, 304) else length, is_last)
