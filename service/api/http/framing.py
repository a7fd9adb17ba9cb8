"""Where a request's head ends, and where its body does: bytes behind a request stay unparsed until it is answered.

httptools passes no body of a request that offers another protocol (MagicStack/httptools#124), and uvicorn loses it
(Kludex/uvicorn#2722). Java's client offers HTTP/2 with every first request. So httptools parses heads and chunks here,
and a body of known length is counted.
"""

from __future__ import annotations

import httptools

from service.errors import MalformedBody

BLANK_LINE = b"\r\n\r\n"
"""The end of each head, and of each chunked body, for the parser takes no other line break."""

LONGEST_HEAD_BYTES = 1 << 16
"""Most bytes of a head, or of what is neither head nor body, such as the trailers behind a chunked body."""


class Incoming:
    """Bytes that came and that nobody has parsed."""

    __slots__ = ("_data", "_start", "left")

    def __init__(self) -> None:
        self._data, self._start = b"", 0
        self.left = 0
        """How many there are."""

    def add(self, data: bytes) -> None:
        """Put `data` behind the others."""
        self._data = self._data[self._start :] + data if self.left else data
        self._start, self.left = 0, len(self._data)

    def take(self, count: int) -> memoryview:
        """Return the first `count` bytes, or all if there are fewer."""
        piece = memoryview(self._data)[self._start : self._start + count]
        self._start += len(piece)
        self.left -= len(piece)
        if not self.left:
            self._data = b""  # the piece alone keeps what may be much memory
        return piece

    def take_to_blank_line(self) -> memoryview:
        """Return the bytes up to the next blank line, with it; without one, all but what may be its beginning."""
        found = self._data.find(BLANK_LINE, self._start)
        if found >= 0:
            return self.take(found + len(BLANK_LINE) - self._start)
        begun = next((count for count in (3, 2, 1) if self._data.endswith(BLANK_LINE[:count])), 0)
        return self.take(max(0, self.left - begun))


class Head:
    """A request's head. Its methods are called by the parser."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False
        self.method = self.version = ""
        self.keeps_alive = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.names = {name for name, _ in self.headers}

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise MalformedBody("The head ends before its blank line.")

    def on_body(self, body: bytes) -> None:
        self.on_message_begin()

    def values(self, wanted: bytes) -> list[bytes]:
        """Return the values of all headers of a name in lower case."""
        return [value for name, value in self.headers if name == wanted]

    def has(self, name: bytes, word: bytes) -> bool:
        """Return whether a header has this word, both in lower case."""
        return name in self.names and any(word in value.lower() for value in self.values(name))


class HeadReader:
    """Takes the bytes of one head."""

    def __init__(self) -> None:
        self._head, self._size = Head(), 0
        self._parser = httptools.HttpRequestParser(self._head)

    def take(self, incoming: Incoming) -> Head | None:
        """Return the head once it is complete. Raises `MalformedBody` for what is no head, or a very long one."""
        head, parser, piece = self._head, self._parser, incoming.take_to_blank_line()
        self._size += len(piece)
        if self._size > LONGEST_HEAD_BYTES:
            raise MalformedBody(f"The head of this request has more than {LONGEST_HEAD_BYTES} bytes.")
        upgraded = _feed(parser, piece)
        if not head.is_complete:
            return None
        head.method, head.version = parser.get_method().decode("ascii"), parser.get_http_version()
        head.keeps_alive = head.version == "1.1" and not upgraded and not head.has(b"connection", b"close")
        return head


class SizedBody:
    """Takes the bytes of a body of known length."""

    def __init__(self, length: int) -> None:
        self._left = length

    @property
    def is_complete(self) -> bool:
        """Whether all has come."""
        return not self._left

    def take(self, incoming: Incoming) -> memoryview:
        """Return the body's next bytes."""
        piece = incoming.take(self._left)
        self._left -= len(piece)
        return piece


class ChunkedBody:
    """Takes the bytes of a body in chunks, of which `codings` are the values of Transfer-Encoding."""

    def __init__(self, codings: list[bytes]) -> None:
        self._chunks, self._idle = _Chunks(), 0
        self._parser = httptools.HttpRequestParser(self._chunks)
        _feed(self._parser, b"POST / HTTP/1.1\r\nTransfer-Encoding: %b\r\n\r\n" % b", ".join(codings))

    @property
    def is_complete(self) -> bool:
        """Whether all has come, the trailers too."""
        return self._chunks.is_complete

    def take(self, incoming: Incoming) -> bytes:
        """Return the body's next bytes. Raises `MalformedBody` for what is no chunk, and for very long trailers."""
        piece, pieces = incoming.take_to_blank_line(), self._chunks.pieces
        _feed(self._parser, piece)
        body = b"".join(pieces)
        pieces.clear()
        self._idle = 0 if body else self._idle + len(piece)
        if self._idle > LONGEST_HEAD_BYTES:
            raise MalformedBody(f"Beside its chunks, this body has more than {LONGEST_HEAD_BYTES} bytes.")
        return body


class _Chunks:
    """What the parser finds in a chunked body; trailers are nothing to it, and so never become headers."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise MalformedBody("The body ends before its blank line.")


def body_of(head: Head) -> SizedBody | ChunkedBody:
    """Return what takes the body behind a head. Raises `MalformedBody` for a transfer coding that has no end."""
    if b"transfer-encoding" in head.names:
        return ChunkedBody(head.values(b"transfer-encoding"))
    return SizedBody(int(head.values(b"content-length")[0]) if b"content-length" in head.names else 0)


def split(url: bytes) -> tuple[bytes, bytes]:
    """Return path and query of a request's target, which may name its host. Raises `MalformedBody`."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError as error:
        raise _unreadable(error) from None
    return parsed.path or b"/", parsed.query or b""


def _feed(parser: httptools.HttpRequestParser, piece: bytes | memoryview) -> bool:
    """Parse `piece`; return whether the request offers another protocol."""
    try:
        parser.feed_data(piece)
    except httptools.HttpParserUpgrade:
        return True
    except httptools.HttpParserError as error:
        raise _unreadable(error) from None
    return False


def _unreadable(error: httptools.HttpParserError) -> MalformedBody:
    return MalformedBody(f"The request is no HTTP that this server reads: {str(error.__context__ or error)[:200]}")
