"""Clumsy and hostile clients: the server answers their requests in turn or closes the connection, and keeps nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from service.api.http.wire import MAX_POLLS, PROGRESS_BYTES, READ_TURN_BYTES, receive_now
from service.codecs import safetensors
from tests.api.test_body import EITHER_API, LARGE, SIZES, SMALL, Connection, Make, assert_right, v1
from tests.serving import in_flight, serving, wait_until

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\n\r\n"
POLL = b"GET /v1/buffers/open/value?step=0&timeout=300 HTTP/1.1\r\nHost: test\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
HALF = 4 << 20
"""Elements of a buffer whose value takes more than half of the bytes that may be in flight."""


@pytest.fixture(scope="module")
def strict() -> Iterator[str]:
    with serving(keep_alive=1, max_bytes_in_flight=7 * HALF) as url:
        httpx.put(f"{url}/v1/buffers/open", json={"shape": [2]}).raise_for_status()
        httpx.put(f"{url}/v1/buffers/large", json={"shape": [HALF]}).raise_for_status()
        yield url


# ----- unreadable and very long heads -----

ENDLESS = {
    "a path": (b"GET /", b"a" * 10_000),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-More: %b\r\n" % (b"a" * 10_000)),
    "a header": (b"GET / HTTP/1.1\r\nX-Long: ", b"a" * 10_000),
    "a trailer": (v1(SMALL).chunked(50)[:-2] + b"X-Long: ", b"a" * 10_000),
    "an extension of a chunk": (v1(SMALL).head + b"Transfer-Encoding: chunked\r\n\r\n5;", b"a" * 10_000),
}


@pytest.mark.parametrize("start", ENDLESS)
def test_an_endless_head_or_trailer_is_refused(url: str, start: str) -> None:
    """The server refuses at 64 KB: its timeout is longer than this test."""
    first, more = ENDLESS[start]
    with Connection(url) as connection:
        connection.send(first, *[more] * 100, pause=0)
        answer = connection.answer()
        status = 431 if first.startswith(b"GET") else 400
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert b"more than 65536 bytes" in answer.body
        assert connection.is_closed()


def test_a_head_of_60_kilobytes_is_read(url: str) -> None:
    message = v1(SMALL)
    with Connection(url) as connection:
        for _ in range(3):
            connection.send(message.whole(*[b"X-%d: %b\r\n" % (k, b"a" * 990) for k in range(60)]))
            assert_right(connection.answer(), message)


def test_a_request_before_nonsense_is_answered(url: str) -> None:
    message = v1(SMALL)
    for others in (b"", LIVE, LIVE + LIVE):
        with Connection(url) as connection:
            connection.send(others + message.whole() + b"nonsense\r\n\r\n")
            for _ in range(others.count(b"GET")):
                assert connection.answer().body == b'{"live":true}'
            assert_right(connection.answer(), message)
            assert connection.answer().status == 400
            assert connection.is_closed()


def test_nonsense_alone_is_refused(url: str) -> None:
    with Connection(url) as connection:
        connection.send(LIVE)
        assert connection.answer().status == 200
        connection.send(b"nonsense\r\n\r\n")
        assert connection.answer().status == 400
        assert connection.is_closed()


UNREADABLE = {
    "a method": (b"FOO /v1/ops HTTP/1.1\r\nHost: x\r\n\r\n", "The request is not valid HTTP/1.1: Invalid method"),
    "a target": (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", "invalid url b'x:80'"),
    "lengths": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", "Content-Length"),
    "a chunk": (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk size"),
}


ON_V2 = {
    "no Host": b"POST /v2/models/ReluGrad/infer HTTP/1.1\r\n\r\n",
    "of an absolute URL": b"POST HTTP://x:80/v2?a HTTP/1.1\r\n\r\n",
    "a header": b"POST /v2/models/ReluGrad/infer HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
    "a long head": b"POST /v2/models/%b" % (b"a" * 65536),
    "lengths": b"POST /v2/x HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk": b"POST /v2/models/ReluGrad/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
}


@pytest.mark.parametrize("before", [b"", LIVE])
@pytest.mark.parametrize("case", ON_V2)
def test_an_unreadable_request_of_the_open_inference_protocol_gets_its_error(
    url: str, case: str, before: bytes
) -> None:
    with Connection(url) as connection:
        connection.send(before)
        for _ in range(before.count(b"GET")):
            assert connection.answer().status == 200
        connection.send(ON_V2[case])
        answer = connection.answer()
        assert answer.status == (431 if case == "a long head" else 400)
        assert answer.headers["content-type"] == "application/json"
        assert list(json.loads(answer.body)) == ["error"]
        assert connection.is_closed()


def test_options_of_an_asterisk_asks_for_the_methods_of_the_server(url: str) -> None:
    """HAProxy's documentation has this check, too. No other request has this target (RFC 9112, 3.2.4)."""
    with Connection(url) as connection:
        connection.send(b"GET * HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.answer().status == 404
        connection.send(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
        status, headers = connection.head()
        assert (status, headers["allow"]) == (204, "DELETE, GET, HEAD, PATCH, POST, PUT")


def test_the_target_of_an_earlier_request_does_not_count(url: str) -> None:
    with Connection(url) as connection:
        connection.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.answer().status == 200
        connection.send(b"POST /v1/ops/v2/ HTTP/1.1\r\n\r\n")
        assert connection.answer().headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_request_gets_a_problem(url: str, case: str) -> None:
    sent, word = UNREADABLE[case]
    with Connection(url) as connection:
        connection.send(sent)
        answer = connection.answer()
        assert (answer.status, answer.headers["content-type"]) == (400, "application/problem+json")
        problem = json.loads(answer.body)
        assert problem["code"] == "malformed_body"
        assert word in problem["detail"]
        assert len(answer.headers["x-request-id"]) == 32
        assert answer.headers["connection"] == "close"
        assert connection.is_closed()


HEADED = ["/v1/ops", "/v2/health/live", "/v2/health/ready", "/v2", "/v1/buffers", "/v1/buffers/open/value", "/metrics"]


@pytest.mark.parametrize("path", HEADED)
def test_head_answers_as_get_without_the_body(url: str, path: str) -> None:
    httpx.put(f"{url}/v1/buffers/open", json={"shape": [100_000]}).raise_for_status()
    with httpx.Client(base_url=url) as client:
        for _ in range(2):  # the connection serves a second request
            head, whole = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            for name in ("content-type", "etag"):
                assert head.headers.get(name) == whole.headers.get(name)
            if path != "/metrics":  # its body changes with each request
                assert head.headers["content-length"] == str(len(whole.content))
    answer = httpx.head(f"{url}/v1/buffers/open/zero")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_a_trailing_slash_is_not_found(url: str) -> None:
    """Behind a proxy that speaks HTTPS, a redirect would lead to plain HTTP."""
    assert httpx.get(f"{url}/v1/ops/").status_code == 404


# ----- a body is never a request -----


@EITHER_API
@SIZES
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_an_upgrade_keeps_its_body(url: str, make: Make, size: int, chunked: bool) -> None:
    """Java's client offers HTTP/2 with the first request of a connection."""
    message = make(size)
    whole = message.chunked(30_000) if chunked else message.whole()
    end_of_line = whole.index(b"\r\n") + 2
    whole = whole[:end_of_line] + UPGRADE + whole[end_of_line:]
    head = whole.index(b"\r\n\r\n") + 4
    for cut in (len(whole), head, head + 3, len(whole) - 1):
        with Connection(url) as connection:
            connection.send(whole[:cut], whole[cut:] + LIVE, pause=0.02)
            answer = connection.answer()
            assert_right(answer, message)
            assert answer.headers["connection"] == "close"
            assert connection.is_closed()


@pytest.mark.parametrize("behind", [b"GET / HTTP/1.1\r\n" + UPGRADE + b"\r\n", b"CONNECT x:1 HTTP/1.1\r\n\r\n" * 600])
def test_bytes_after_a_request_that_offers_an_upgrade_are_not_its_body(url: str, behind: bytes) -> None:
    message = v1(SMALL)
    with Connection(url) as connection:
        connection.send(LIVE + message.whole(UPGRADE) + behind)
        assert connection.answer().body == b'{"live":true}'
        assert_right(connection.answer(), message)
        assert connection.is_closed()


def test_a_body_that_looks_like_a_request_is_not_run(url: str) -> None:
    httpx.put(f"{url}/v1/buffers/dear", json={"shape": [2]}).raise_for_status()
    inner = b"DELETE /v1/buffers/dear HTTP/1.1\r\nHost: test\r\n\r\n"
    head = b"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: test\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(inner)
    for pieces in ([head + inner], [head, inner]):
        with Connection(url) as connection:
            connection.send(*pieces, pause=0.02)
            assert connection.answer().status == 400
            assert connection.is_closed()
    assert httpx.get(f"{url}/v1/buffers/dear").status_code == 200


def test_an_answer_before_the_expected_body_closes_the_connection(strict: str) -> None:
    with Connection(strict) as connection:
        head = b"GET /v1/buffers/open/value HTTP/1.1\r\nHost: test\r\n"
        connection.send(head + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert connection.is_closed()


# ----- clients that leave or do not read -----


@pytest.mark.parametrize("behind", [b"", LIVE, POLL, POLL * 3])
def test_requests_of_a_client_that_left_are_dropped(strict: str, behind: bytes) -> None:
    with Connection(strict) as connection:
        connection.send(POLL + behind)
        wait_until(lambda: in_flight(strict) == 1)
    wait_until(lambda: in_flight(strict) == 0)


def ask_for_the_large(url: str, reader: socket.socket, more: bytes = b"") -> None:
    host, port = url.removeprefix("http://").split(":")
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.connect((host, int(port)))
    head = f"GET /v1/buffers/large/value HTTP/1.1\r\nHost: test\r\nAccept: {safetensors.MEDIA_TYPE}\r\n"
    reader.sendall(head.encode() + more + b"\r\n")


def test_a_client_that_does_not_read_holds_no_memory_for_long(strict: str) -> None:
    headers = {"Accept": safetensors.MEDIA_TYPE}
    with socket.socket() as lazy:
        ask_for_the_large(strict, lazy)
        wait_until(lambda: in_flight(strict, "_bytes") > 0)
        assert httpx.get(f"{strict}/v1/buffers/large/value", headers=headers).status_code == 429
        wait_until(lambda: in_flight(strict, "_bytes") == 0)
    assert httpx.get(f"{strict}/v1/buffers/large/value", headers=headers).status_code == 200


def test_a_slow_reader_gets_the_whole_answer(strict: str) -> None:
    with socket.socket() as slow:
        ask_for_the_large(strict, slow)
        stream, got = slow.makefile("rb"), 0
        for _ in range(60):  # three seconds: the server checks the connection three times
            time.sleep(0.05)
            got += len(stream.read(4 * HALF // 64))
        got += len(stream.read(4 * HALF - got))
        assert got == 4 * HALF


def test_a_slow_reader_that_keeps_sending_gets_the_whole_answer(strict: str) -> None:
    """The reading takes longer than the server lingers on a closing connection."""
    with socket.socket() as slow:
        ask_for_the_large(strict, slow, b"Connection: close\r\n")
        stream, end = slow.makefile("rb"), 1 << 20
        assert len(stream.read(4 * HALF - end)) == 4 * HALF - end
        for _ in range(32):
            time.sleep(0.1)
            slow.send(b"x")
            assert len(stream.read(end // 32)) == end // 32


def test_other_connections_get_correct_answers(strict: str) -> None:
    """The requests above, refused or closed, left nothing on other connections."""
    with Connection(strict) as connection:
        for number in range(20):
            message = v1(LARGE if number % 5 == 0 else SMALL, number)
            connection.send(message.whole() + LIVE)
            assert_right(connection.answer(), message)
            assert connection.answer().body == b'{"live":true}'
    assert np.isclose(in_flight(strict), 0)


@pytest.mark.parametrize(("step", "most"), [(1, 1), (PROGRESS_BYTES, 1 << 10)])
def test_a_client_that_sends_byte_by_byte_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch, step: int, most: int
) -> None:
    """Every byte arrives just before the server looks again."""
    reads: list[int] = []

    def readv(socket: int, buffers: list[memoryview]) -> int:
        reads.append(min(step, len(buffers[0])))
        return reads[-1]

    monkeypatch.setattr("os.readv", readv)
    rest = receive_now(0, memoryview(bytearray(8 << 20)))
    assert len(rest) == (8 << 20) - sum(reads)
    assert len(reads) <= MAX_POLLS * most
    assert sum(reads) == (READ_TURN_BYTES if step > 1 else MAX_POLLS)


# ----- Expect: 100-continue, and paths -----


def test_a_body_sent_before_100_continue_keeps_the_connection(url: str) -> None:
    head = b"GET /v1/ops HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}"
    with Connection(url) as connection:
        connection.send(head + LIVE)
        for _ in range(2):
            answer = connection.answer()
            assert (answer.status, answer.headers.get("connection")) == (200, None)


def test_an_http_1_0_client_gets_no_100_continue(url: str) -> None:
    message = v1(10)
    whole = message.whole(b"Expect: 100-continue\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")
    with Connection(url) as connection:
        connection.send(whole[:-3], whole[-3:], pause=0.1)
        assert connection.head()[0] == 200


@pytest.mark.parametrize("target", ["http://x", "http://x?prefix=none"])
def test_an_empty_path_means_the_root(url: str, target: str) -> None:
    with Connection(url) as connection:
        connection.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        status, headers = connection.head()
    usual = httpx.get(f"{url}/")
    assert (status, headers.get("location")) == (usual.status_code, usual.headers.get("location"))
