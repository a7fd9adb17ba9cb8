"""Heads: their size, their version, white space around the values of headers, and the header Host."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from service.api.http.framing import MAX_HEAD_BYTES, MAX_HEADERS
from tests.api.calls import fresh
from tests.api.test_body import Connection, assert_right, v1, v2
from tests.serving import serving

SPACES = [b"%b ", b" \t%b\t", b"%b \t \t"]
"""A value with white space on either side, or on both."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


# ----- size and version -----


def assert_refused(connection: Connection, status: int, code: str, word: str) -> None:
    answer = connection.answer()
    problem = json.loads(answer.body)
    assert (answer.status, answer.headers["connection"], problem["code"]) == (status, "close", code)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert word in problem["detail"]
    assert connection.is_closed()


@pytest.mark.parametrize("line", [b"a:\r\n", b"a: b\r\n", b"x-%d: y\r\n"])
def test_a_head_has_a_hundred_headers_at_most(url: str, line: bytes) -> None:
    """It is refused as soon as one more is there: an incomplete head is kept as long as a complete one."""
    lines = [line % number if b"%" in line else line for number in range(MAX_HEADERS)]
    start = b"GET /v1/limits HTTP/1.1\r\nHost: x\r\n"
    with Connection(url) as connection:
        for _ in range(2):
            connection.send(start + b"".join(lines[1:]) + b"\r\n")
            assert connection.answer().status == 200
        connection.send(start + b"".join(lines) + b"b")
        assert_refused(connection, 431, "head_too_large", f"more than {MAX_HEADERS} headers")


@pytest.mark.parametrize("end", [b"", b" HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_head_has_so_many_bytes_at_most(url: str, end: bytes) -> None:
    with Connection(url) as connection:
        connection.send(b"GET /v1/ops?" + b"a" * MAX_HEAD_BYTES + end)
        assert_refused(connection, 431, "head_too_large", f"more than {MAX_HEAD_BYTES} bytes")


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        (b"GET /v1/limits\r\n\r\n", "'/v1/limits'"),
        (b"GET /v1/limits HTTP/0.9\r\n\r\n", "'HTTP/0.9'"),
        (b'PUT /v1/buffers/w HTTP/2.0\r\nContent-Length: 13\r\n\r\n{"shape":[2]}', "'HTTP/2.0'"),
        (b"GET /v1/limits HTTP/2.0\r\nHost: x\r\n\r\n", "'HTTP/2.0'"),
        (b"GET /v1/limits RTSP/1.1\r\nHost: x\r\n\r\n", "'RTSP/1.1'"),
        (b"OPTIONS /v1/limits RTSP/1.0\r\nHost: x\r\n\r\n", "'RTSP/1.0'"),
        (b"\r\n\r\nGET /v1/limits RTSP/1.0\r\nA: b", "'RTSP/1.0'"),
        (b"GET /v1/limits HTTP/1.2\r\nHost: x\r\n\r\n", "version"),
        (b"GET /v1/limits HTTP/3.0\r\nHost: x\r\n\r\n", "version"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_only_http_1_1_and_1_0_are_spoken(url: str, sent: bytes, word: str, cut: bool) -> None:
    with Connection(url) as connection:
        connection.send(*([sent[k : k + 1] for k in range(len(sent))] if cut else [sent]), pause=0)
        assert_refused(connection, 400, "malformed_body", word)
    assert httpx.get(f"{url}/v1/buffers/w").status_code == 404


def test_empty_lines_before_a_request_are_ignored(url: str) -> None:
    with Connection(url) as connection:
        for version in (b"1.1", b"1.0"):
            connection.send(b"\r\n\r\n\r\nGET /v1/limits HTTP/%b\r\nHost: x\r\n\r\n" % version)
            assert connection.answer().status == 200


# ----- white space -----


def padded(lines: list[bytes], space: bytes) -> bytes:
    """Return the lines of headers, each value inside white space."""
    parts = (line.partition(b": ") for line in lines)
    return b"".join(name + b":" + space % value + b"\r\n" for name, _, value in parts)


@pytest.mark.parametrize("space", SPACES)
def test_white_space_is_no_part_of_the_headers_of_tensors(url: str, space: bytes) -> None:
    with Connection(url) as connection:
        for message in (v1(10), v2(10), v1(100_000), v2(100_000)):
            start, *lines = message.head.removesuffix(b"\r\n").split(b"\r\n")
            lines += [b"Content-Length: %d" % len(message.body), b"Accept-Encoding: identity", b"X-Request-ID: mine"]
            head = start + b"\r\n" + padded([*lines, b"Expect: 100-continue", b"Request-Timeout: 9"], space) + b"\r\n"
            connection.send(head)
            assert connection.head()[0] == 100
            connection.send(message.body)
            answer = connection.answer()
            assert_right(answer, message)
            assert answer.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("space", SPACES)
def test_white_space_is_no_part_of_the_headers_of_changes(url: str, space: bytes) -> None:
    """A key with a space behind it is the same key: its request counts once."""
    name = fresh()
    httpx.put(f"{url}/v1/buffers/{name}", json={"shape": [2]}).raise_for_status()
    body = b'{"gradient": [1, 2]}'
    lines = [b"Host: x", b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    lines += [
        b"Content-Encoding: identity",
        b'If-Match: "0-0"',
        b"Idempotency-Key: %b" % name.encode(),
        b"Accept: application/json",
    ]
    start = f"POST /v1/buffers/{name}/accumulate HTTP/1.1\r\n".encode()
    with Connection(url) as connection:
        for usual in (b"%b", space):
            connection.send(start + padded(lines, usual) + b"\r\n" + body)
            answer = connection.answer()
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["count"] == 1
        connection.send(start.replace(b"accumulate", b"value").replace(b"POST", b"GET"))
        tag = httpx.get(f"{url}/v1/buffers/{name}/value").headers["etag"].encode()
        connection.send(padded([b"Host: x", b"If-None-Match: %b" % tag, b"Connection: close"], space) + b"\r\n")
        assert connection.head()[0] == 304
        assert connection.is_closed()


@pytest.mark.parametrize("space", SPACES)
def test_white_space_is_no_part_of_an_origin(url: str, space: bytes) -> None:
    """Without API keys the server compares Origin with Host."""
    with Connection(url) as connection:
        for more in ([b"Origin: http://x"], [b"Sec-Fetch-Site: same-origin", b"Origin: http://x"]):
            lines = padded([b"Host: x", b"Content-Length: 0", *more], space)
            connection.send(b"POST /v2/repository/index HTTP/1.1\r\n" + lines + b"\r\n")
            assert connection.answer().status == 200


# ----- Host -----

HOSTS = {
    "none": (b"", "no Host header"),
    "two": (b"Host: a\r\nHost: b\r\n", "'a' and 'b'"),
    "the same twice": (b"Host: a\r\nX: y\r\nhost: a\r\n", "'a' and 'a'"),
    "a path": (b"Host: a/b\r\n", "'a/b'"),
    "a user": (b"Host: me@a\r\n", "'me@a'"),
    "a word too many": (b"Host: a b\r\n", "'a b'"),
    "a name that is no ASCII": (b"Host: \xc3\xa9.example\r\n", "Host is "),
    "a port that is no number": (b"Host: a:b\r\n", "'a:b'"),
    "an open bracket": (b"Host: [::1\r\n", "'[::1'"),
}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("case", HOSTS)
def test_a_request_without_one_valid_host_is_refused(url: str, case: str, version: bytes) -> None:
    lines, word = HOSTS[case]
    with Connection(url) as connection:
        connection.send(b"GET /v1/limits HTTP/%b\r\n%b\r\n" % (version, lines))
        answer = connection.answer()
        if (case, version) == ("none", b"1.0"):
            assert answer.status == 200
            return
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert word in json.loads(answer.body)["detail"]
        assert connection.is_closed()


@pytest.mark.parametrize("host", [b"", b"a_b.example", b"127.0.0.1:80", b"[::1]:8000", b"a:", b"a%20b", b"xn--e1a.x"])
def test_a_valid_host_is_taken(url: str, host: bytes) -> None:
    with Connection(url) as connection:
        connection.send(b"GET /v2/health/live HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
        assert connection.answer().status == 200
