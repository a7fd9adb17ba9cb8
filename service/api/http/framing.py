"""Framing: where a request's head ends, and where its body ends. Bytes behind a request stay unparsed.

httptools does not pass on the body of a request that offers another protocol (MagicStack/httptools#124), and uvicorn
loses it (Kludex/uvicorn#2722). Java's client offers HTTP/2 with every first request. In a chunked body httptools
refuses blanks that RFC 9112 allows, and does not say how long trailers are. So it parses only heads here.
"""

from __future__ import annotations

import re
from functools import lru_cache

import httptools

from service.errors import HeadTooLarge, MalformedBody, shown

LINE_BREAK = b"\r\n"

BLANK_LINE = LINE_BREAK * 2
"""The end of each head: the parser accepts no other line break."""

MAX_HEAD_BYTES = 1 << 16
"""Bytes of a head, or of the trailers behind a chunked body. deploy/nginx.conf has the same limit."""

MAX_HEADERS = 100
"""Headers of a head: in memory an empty one takes 30 times its bytes. Browsers and proxies together send about 40."""

TURN_CHUNKS = 1 << 6
"""Chunks to parse at once: small ones take a microsecond or more each, and one read of the socket may have 40,000."""

VERSIONS = (b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")
"""The ends of a request's first line. The parser takes those of HTTP/0.9, HTTP/2.0 and RTSP, too."""

_is_host = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?").fullmatch
"""The value of Host: a name, an address, or nothing, and a port (RFC 3986, 3.2.2)."""

_absolute = re.compile(rb"[a-z]+://([^/?]*)", re.IGNORECASE).match
"""A target with the host, as clients send it to a proxy."""

_chunk = re.compile(rb"(0*[0-9A-Fa-f]{1,15})[\t ]*(;[\t -~\x80-\xff]*)?\r\n").fullmatch
"""The size of a chunk, with blanks behind it and any extensions: they are not judged, because nothing reads them."""

_is_trailer = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*\r\n").fullmatch


class Incoming:
    """The bytes that have come and are not parsed yet."""

    __slots__ = ("_data", "_start", "size")

    def __init__(self) -> None:
        self._data, self._start = b"", 0
        self.size = 0

    def add(self, data: bytes) -> None:
        self._data = self._data[self._start :] + data if self.size else data
        self._start, self.size = 0, len(self._data)

    def take(self, count: int) -> memoryview:
        """Return the first `count` bytes, or all if there are fewer."""
        count = count if count < self.size else self.size
        piece = memoryview(self._data)[self._start : self._start + count]
        self._start += count
        self.size -= count
        if self.size < self._start:
            self._data, self._start = self._data[self._start :], 0  # free what may be much memory, with the piece
        return piece

    def take_to_blank_line(self) -> memoryview:
        """Return the bytes through the next blank line; if there is none, all but a possible beginning of it."""
        place = self._data.find(BLANK_LINE, self._start)
        if place >= 0:
            return self.take(place + len(BLANK_LINE) - self._start)
        partial = next((count for count in (3, 2, 1) if self._data.endswith(BLANK_LINE[:count])), 0)
        return self.take(max(0, self.size - partial))


class Head:
    """A request's head. The parser calls its `on_` methods. Once it is complete, nothing changes it."""

    url = b""
    method = version = ""
    is_complete = keeps_alive = False

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header without the white space behind its value. The parser refuses all but blanks and tabs."""
        self.headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.last = dict(self.headers)  # the last value of each header

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise MalformedBody("The head ends before its blank line.")

    def on_body(self, body: bytes) -> None:
        self.on_message_begin()

    def values(self, wanted: bytes) -> list[bytes]:
        """Return the values of all headers with the name `wanted`, in lower case."""
        return [value for name, value in self.headers if name == wanted]

    def has(self, name: bytes, word: bytes) -> bool:
        """Return whether a header of this name has the word; both are in lower case."""
        return any(word in value.lower() for value in self.values(name))

    def check_host(self) -> None:
        """Raise `MalformedBody` unless the head has one valid Host, or none in HTTP/1.0 (RFC 9112, 3.2)."""
        if len(self.last) == len(self.headers) and _is_host(self.last.get(b"host", b"?")):
            return
        hosts = self.values(b"host")
        if len(hosts) > 1 or (hosts and not _is_host(hosts[0])):
            given = " and ".join(shown(host.decode("latin-1")) for host in hosts[:2])
            raise MalformedBody(f"Host is {given}, but must be one name or address, and perhaps a port")
        if not hosts and self.version == "1.1":
            raise MalformedBody("The request has no Host header, but HTTP/1.1 needs one")

    def replace_host(self) -> None:
        """Let the host of an absolute target replace Host (RFC 9112, 3.2.2). Raises `MalformedBody`."""
        if (absolute := _absolute(self.url)) is not None:
            self.headers = [*((name, value) for name, value in self.headers if name != b"host"), (b"host", absolute[1])]
            self.last = dict(self.headers)
            self.check_host()


class HeadReader:
    """Parses the bytes of one head."""

    def __init__(self) -> None:
        self._head, self._size, self._line = Head(), 0, b""
        self._parser = httptools.HttpRequestParser(self._head)

    @property
    def url(self) -> bytes:
        """The target, as far as it has come."""
        return self._head.url

    def take(self, incoming: Incoming) -> Head | None:
        """Return the head once it is complete. Raises `MalformedBody` if it is not valid, `HeadTooLarge`."""
        head, parser, piece = self._head, self._parser, incoming.take_to_blank_line()
        self._size += len(piece)
        upgraded = _feed(parser, piece)
        if len(head.headers) > MAX_HEADERS:
            raise HeadTooLarge(f"The head of the request has more than {MAX_HEADERS} headers, the limit")
        if self._size > MAX_HEAD_BYTES:
            raise HeadTooLarge(f"The head of the request has more than {MAX_HEAD_BYTES} bytes, the limit")
        self._check_line(piece)
        if not head.is_complete:
            return None
        head.method, head.version = parser.get_method().decode("ascii"), parser.get_http_version()
        head.check_host()
        if head.url[:1] != b"/":
            head.replace_host()
        closes = b"connection" in head.last and head.has(b"connection", b"close")
        head.keeps_alive = head.version == "1.1" and not upgraded and not closes
        return head

    def _check_line(self, piece: memoryview) -> None:
        """Raise `MalformedBody` if the first line is complete, and not that of a request in HTTP/1.1 or HTTP/1.0."""
        if self._line[-1:] != b"\n":
            line, end, _ = (self._line + piece).lstrip(b"\r\n").partition(b"\n")
            self._line = line + end
            if end and not self._line.endswith(VERSIONS):
                found = shown(line.rpartition(b" ")[2].decode("latin-1").rstrip())
                raise MalformedBody(f"The request's first line ends in {found}, but must end in HTTP/1.1 or HTTP/1.0")


class SizedBody:
    """Counts the bytes of a body whose length is known."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_complete = not length
        """Whether the whole body has come."""

    def take(self, incoming: Incoming) -> memoryview:
        piece = incoming.take(self._left)
        self._left -= len(piece)
        self.is_complete = not self._left
        return piece


class ChunkedBody:
    """Parses the bytes of a chunked body (RFC 9112, 7.1). It ignores extensions and trailers."""

    is_complete = False
    """Whether the whole body has come, and its trailers."""

    def __init__(self) -> None:
        self._take_line = ChunkedBody._take_size  # not bound: that would be a reference cycle
        self._left = 0  # bytes of the running chunk
        self._rest = b""  # what has come of a line
        self._trailers = self._trailer_bytes = 0

    def take(self, incoming: Incoming) -> bytes:
        """Return the body's next bytes, of `TURN_CHUNKS` chunks at most.

        Raises `MalformedBody` for an invalid line, and for too long or many lines.
        """
        data, pieces, at = self._rest + incoming.take(incoming.size), list[bytes](), 0
        while at < len(data) and len(pieces) < TURN_CHUNKS and not self.is_complete:
            if self._left:
                pieces.append(data[at : at + self._left])
                at += len(pieces[-1])
                self._left -= len(pieces[-1])
            elif end := data.find(b"\n", at) + 1:
                self._take_line(self, data[at:end])
                at = self._take_chunks(data, end, pieces)
            else:
                break
        self._rest = data[at:]
        if self.is_complete or len(pieces) == TURN_CHUNKS:
            incoming.add(self._rest)
            self._rest = b""
        elif self._trailer_bytes + len(self._rest) > MAX_HEAD_BYTES:
            raise _too_long()
        return b"".join(pieces)

    def _take_chunks(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take the running chunk and the next ones if all of their bytes have come. Return the place behind them."""
        while len(pieces) < TURN_CHUNKS and (size := self._left) and data[at + size : at + size + 2] == LINE_BREAK:
            pieces.append(data[at : at + size])
            at += size + 2
            end = data.find(b"\n", at) + 1
            if not end:
                self._left, self._take_line = 0, ChunkedBody._take_size
                break
            self._take_size(data[at:end])
            at = end
        return at

    def _take_size(self, line: bytes) -> None:
        self._left = _size_of(line)
        self._take_line = ChunkedBody._take_end if self._left else ChunkedBody._take_trailer

    def _take_end(self, line: bytes) -> None:
        if line != LINE_BREAK:
            raise _invalid("end of a chunk", line, "a line break")
        self._take_line = ChunkedBody._take_size

    def _take_trailer(self, line: bytes) -> None:
        if line == LINE_BREAK:
            self.is_complete = True
            return
        if not _is_trailer(line):
            raise _invalid("trailer", line, "a name, a colon and a value")
        self._trailers += 1
        self._trailer_bytes += len(line)
        if self._trailers > MAX_HEADERS:
            raise MalformedBody(f"Behind its chunks, this body has more than {MAX_HEADERS} trailers, the limit")
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise _too_long()


@lru_cache(16)
def _size_of(line: bytes) -> int:
    """Return the size of the chunk behind this line. Most chunks of a body have the same."""
    if len(line) > MAX_HEAD_BYTES:
        raise _too_long()
    match = _chunk(line)
    if match is None:
        raise _invalid("chunk size", line, "hexadecimal digits, and perhaps extensions behind a semicolon")
    return int(match[1], 16)


def _too_long() -> MalformedBody:
    return MalformedBody(f"Beside its chunks, this body has more than {MAX_HEAD_BYTES} bytes.")


def _invalid(what: str, line: bytes, expected: str) -> MalformedBody:
    return MalformedBody(f"The {what} of the body is {shown(line.decode('latin-1'))}, but must be {expected}")


def _feed(parser: httptools.HttpRequestParser, piece: bytes | memoryview) -> bool:
    """Parse `piece`; return whether the request offers another protocol."""
    try:
        parser.feed_data(piece)
    except httptools.HttpParserUpgrade:
        return True
    except httptools.HttpParserError as error:
        raise unreadable(error) from None
    return False


def unreadable(error: httptools.HttpParserError) -> MalformedBody:
    """Return the error of a head that the parser refuses."""
    return MalformedBody(f"The request is not valid HTTP/1.1: {str(error.__context__ or error)[:200]}")
