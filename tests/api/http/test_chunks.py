"""Chunked bodies: extensions and trailers get one answer over HTTP, HTTPS and a UNIX socket, however they are cut."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from service.api.http.framing import MAX_HEAD_BYTES, MAX_HEADERS, ChunkedBody, HeadReader, Incoming
from tests.api.http.test_endings import assert_lives, secure
from tests.api.test_body import Connection
from tests.serving import serving

HEAD = b"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"dY": [1], "X": [1]}'
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
Open = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def ways(certificate: tuple[Path, Path]) -> Iterator[list[Open]]:
    """Yield what opens a connection, in three ways."""
    made, key = certificate
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plain = stack.enter_context(serving())
        tls = stack.enter_context(serving(tls_certificate=made, tls_key=key, socket=Path(folder) / "s"))
        yield [
            lambda: Connection(plain).socket,
            lambda: Connection(f"unix:{folder}/s").socket,
            lambda: secure(tls, made),
        ]


def chunked(extension: bytes = b"", trailers: bytes = b"", ending: bytes = b"\r\n") -> bytes:
    size = b"%x" % len(BODY)
    return HEAD + size + extension + b"\r\n" + BODY + ending + b"0" + extension + b"\r\n" + trailers + b"\r\n"


def filled(size: int, line: bytes) -> bytes:
    """Return the line with as many bytes in place of % as give it `size` bytes."""
    return line.replace(b"%", b"a" * (size - len(line) + 1))


ACCEPTED = {
    "a tab before a name": chunked(b";\ta=b"),
    "blanks around everything": chunked(b' \t; \ta \t= \tb\t ; c = "d" '),
    "a semicolon in quotes": chunked(b'; a="b;c=\\"d\\" \t e"'),
    "two names": chunked(b";a;b"),
    "bytes beyond ASCII in quotes": chunked(b';a="\x80\xff"'),
    "zeros before the size": chunked().replace(HEAD, HEAD + b"0" * 30),
    "a long extension": chunked(filled(MAX_HEAD_BYTES - len(b"15\r\n"), b";a=%")),
    "as many trailers as may be": chunked(trailers=b"A: b\r\n" * MAX_HEADERS),
    "a long trailer": chunked(trailers=filled(MAX_HEAD_BYTES, b"A: %\r\n")),
    "a trailer that would say a length": chunked(trailers=b"Content-Length: 5\r\n"),
}
REFUSED = {
    "20,000 trailers": (chunked(trailers=b"A: b\r\n" * 20_000), b"more than 100 trailers"),
    "one trailer too many": (chunked(trailers=b"A: b\r\n" * (MAX_HEADERS + 1)), b"more than 100 trailers"),
    "a trailer too long": (chunked(trailers=filled(MAX_HEAD_BYTES + 1, b"A: %\r\n")), b"more than 65536 bytes"),
    "long trailers": (chunked(trailers=filled(MAX_HEAD_BYTES // 2 + 1, b"A: %\r\n") * 2), b"more than 65536 bytes"),
    "an extension too long": (chunked(filled(MAX_HEAD_BYTES, b";a=%")), b"more than 65536 bytes"),
    "an extension without its semicolon": (chunked(b" a"), b"The chunk size of the body is '15 a"),
    "a zero byte": (chunked(b";a=\0"), b"The chunk size"),
    "a carriage return in an extension": (chunked(b";a=\rb"), b"The chunk size"),
    "a line feed alone": (chunked(b";a\n"), b"The chunk size"),
    "a size beyond 60 bits": (chunked().replace(HEAD, HEAD + b"f" * 15), b"The chunk size"),
    "no line break behind a chunk": (chunked(ending=b"xx\r\n"), b"The end of a chunk of the body is 'xx"),
    "a line feed behind a chunk": (chunked(ending=b"\n"), b"The end of a chunk"),
    "a trailer without a colon": (chunked(trailers=b"A\r\n"), b"The trailer of the body is 'A"),
    "a blank before the colon": (chunked(trailers=b"A : b\r\n"), b"The trailer of the body is 'A :"),
    "a folded trailer": (chunked(trailers=b"A: b\r\n c\r\n"), b"The trailer of the body is ' c"),
    "a control character": (chunked(trailers=b"A: \1\r\n"), b"The trailer of the body"),
}


def answers(ways: list[Open], sent: bytes) -> list[bytes]:
    """Return the head and the beginning of the body of each way's answer."""
    found = []
    for open_way in ways:
        with open_way() as connection:
            connection.sendall(sent)
            answer = b""
            while b"}" not in answer:
                part = connection.recv(1 << 16)
                assert part, answer
                answer += part
            found.append(answer)
            if answer.startswith(b"HTTP/1.1 200"):
                connection.sendall(LIVE)  # nothing is left over
                assert_lives(connection)
    return found


@pytest.mark.parametrize("case", ACCEPTED)
def test_extensions_and_trailers_are_ignored(ways: list[Open], case: str) -> None:
    for answer in answers(ways, ACCEPTED[case]):
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"dX":' in answer


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_and_very_long_lines_are_refused(ways: list[Open], case: str) -> None:
    sent, words = REFUSED[case]
    for answer in answers(ways, sent):
        assert answer.startswith(b"HTTP/1.1 400")
        assert words in answer


BLANKS = {
    "of one byte": b"1\r\n \r\n" * 40_000,
    "of sizes in several forms": b"1\r\n \r\n01\r\n \r\n001\t\r\n \r\n" * 10_000,
    "with extensions": b'1;a="b"\r\n \r\n' * 20_000,
    "of 17 bytes": (b"11\r\n" + b" " * 17 + b"\r\n") * 20_000,
}


@pytest.mark.parametrize("case", BLANKS)
def test_other_connections_have_their_turn_during_small_chunks(
    ways: list[Open], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = [0], ChunkedBody.take

    def counted(body: ChunkedBody, incoming: Incoming) -> bytes:
        asyncio.get_running_loop().call_soon(taken.append, 0)  # a turn of the loop begins
        piece = take(body, incoming)
        taken[-1] += len(piece)
        return piece

    monkeypatch.setattr(ChunkedBody, "take", counted)
    sent = chunked().replace(HEAD, HEAD + BLANKS[case])
    for answer in answers(ways, sent):
        assert answer.startswith(b"HTTP/1.1 200")
    blanks = BLANKS[case].count(b" ")
    assert sum(taken) == len(ways) * (blanks + len(BODY))
    assert max(taken) * BLANKS[case].count(b"\r\n") <= 1000 * 2 * blanks


def test_other_connections_have_their_turn_during_blank_lines(
    ways: list[Open], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = [0], HeadReader.take

    def counted(reader: HeadReader, incoming: Incoming) -> object:
        asyncio.get_running_loop().call_soon(taken.append, 0)
        taken[-1] += 1
        return take(reader, incoming)

    monkeypatch.setattr(HeadReader, "take", counted)
    for answer in answers(ways, b"\r\n" * 30_000 + chunked()):
        assert answer.startswith(b"HTTP/1.1 200")
    assert max(taken) <= 100


def test_a_client_may_close_its_direction_behind_small_chunks(
    ways: list[Open], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TCP and a UNIX socket; TLS cannot close one direction."""
    monkeypatch.setattr("service.api.http.connection.ONE_WAY_SECONDS", 30)
    for open_way in ways[:2]:
        with open_way() as connection:
            connection.sendall(chunked().replace(HEAD, HEAD + BLANKS["of one byte"]))
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
