"""The head of an answer, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


def head_of(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the head of an answer, without the blank line at its end.

    Raises RuntimeError for a header with a line break: it would become two headers.
    """
    lines = [b"%b: %b\r\n" % header for header in headers]
    head = b"".join([_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, *lines])
    if not head.count(b"\n") == head.count(b"\r") == len(headers) + 1:
        raise RuntimeError(f"A header of the answer has a line break: {head!r}")
    return head
