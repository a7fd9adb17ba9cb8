"""Heads and bodies end where the parser says, wherever the received bytes are cut."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.http.exchange import body_of
from service.api.http.framing import BLANK_LINE, ChunkedBody, Head, HeadReader, Incoming
from service.errors import MalformedBody

SIZED = b"POST /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n1\r\n\r\n234"
CHUNKED = b"POST /a?b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"5;x=y\r\n1\r\n\r\n\r\n3\r\n234\r\n0\r\nA: b\r\n\r\n"
OFFER = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


def received(pieces: list[bytes]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Return target and body of each request, and the bytes left over."""
    incoming, reader, body, url, requests = Incoming(), HeadReader(), None, b"", list[tuple[bytes, bytes]]()
    for piece in pieces:
        incoming.add(piece)
        while size := incoming.size:
            if body is None and (head := reader.take(incoming)) is not None:
                body, url, text = body_of(head), head.url, bytearray()
            elif body is not None:
                text += body.take(incoming)
            if body is not None and body.is_complete:
                requests.append((url, bytes(text)))
                reader, body = HeadReader(), None
            if incoming.size == size:
                break
    return requests, bytes(incoming.take(incoming.size))


@given(st.lists(st.sampled_from([SIZED, CHUNKED]), max_size=4), st.lists(st.integers(1, 40)), st.booleans())
def test_cutting_the_bytes_does_not_change_the_requests(messages: list[bytes], sizes: list[int], offers: bool) -> None:
    if offers:
        messages = [message.replace(b"\r\n", b"\r\n" + OFFER, 1) for message in messages]
    whole, pieces = b"".join(messages), list[bytes]()
    for size in sizes:
        pieces.append(whole[:size])
        whole = whole[size:]
    assert received([*pieces, whole]) == ([(b"/a?b", b"1\r\n\r\n234")] * len(messages), b"")


PARTS = [b"\r", b"\n", b"\r\n", b"A: b", b"A", b":", b" ", b"\0", b"0", b"1", b"0\r\n", b"ab", b";"]


@given(st.sampled_from([b"GET / HTTP/1.1\r\n", b""]), st.lists(st.sampled_from(PARTS), max_size=8))
def test_the_parser_ends_a_head_at_a_blank_line_only(start: bytes, parts: list[bytes]) -> None:
    assert_ends(Head(), start, b"".join(parts))


CHUNKS = [*PARTS, b"\t", b"=", b'"', b"5\r\nhello\r\n", b"1;a=b\r\nc\r\n", b"0\r\n\r\n", b"GET"]


class Seen:
    """What the parser of heads makes of a chunked body."""

    def __init__(self) -> None:
        self.body, self.is_complete = b"", False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


@given(st.lists(st.sampled_from(CHUNKS), max_size=10))
def test_a_chunked_body_is_what_another_parser_takes_it_for(parts: list[bytes]) -> None:
    """That parser, of heads, refuses some of what RFC 9112 allows."""
    seen = Seen()
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    text = b"".join(parts)
    for count in range(len(text)):
        try:
            parser.feed_data(text[count : count + 1])
        except httptools.HttpParserError:
            return
        if seen.is_complete:
            assert taken([text]) == (seen.body, True, text[count + 1 :])
            return
    assert taken([text]) == (seen.body, False, b"")


@given(st.lists(st.sampled_from(CHUNKS), max_size=10))
def test_cutting_a_chunked_body_does_not_change_it(parts: list[bytes]) -> None:
    text = b"".join(parts)
    assert taken([text]) == taken([text[place : place + 1] for place in range(len(text))])


def taken(pieces: list[bytes]) -> tuple[bytes, bool, bytes] | str:
    """Return the body, whether it is complete, and the bytes that are left; or the error."""
    body, incoming, text = ChunkedBody(), Incoming(), b""
    for piece in pieces:
        incoming.add(piece)
        try:
            text += b"" if body.is_complete else body.take(incoming)
        except MalformedBody as error:
            return error.detail
    return text, body.is_complete, bytes(incoming.take(incoming.size))


def assert_ends(seen: Head, start: bytes, text: bytes) -> None:
    parser = httptools.HttpRequestParser(seen)
    parser.feed_data(start)
    for count in range(len(text)):
        try:
            parser.feed_data(text[count : count + 1])
        except httptools.HttpParserError:
            return
        if seen.is_complete:
            assert (start + text[: count + 1]).endswith(BLANK_LINE)
            return


@pytest.mark.parametrize("more", [b"", b"Content-Length: 5\r\n"])
def test_bytes_after_a_head_in_the_same_piece_are_refused(more: bytes) -> None:
    """A parser might accept another line break: the rest is neither part of this request nor lost."""
    head = Head()
    parser = httptools.HttpRequestParser(head)
    with pytest.raises(httptools.HttpParserError) as raised:
        parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\nGET / HTTP/1.1\r\n\r\n" % more)
    assert isinstance(raised.value.__context__, MalformedBody)
