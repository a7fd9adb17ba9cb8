"""Bodies over a real socket: in pieces, stalled, cut off, too large, compressed, and without our protocol."""

from __future__ import annotations

import gzip
import json
import logging
import select
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from service.api.http import wire
from service.api.http.body import DIRECT_BYTES
from service.codecs import safetensors
from tests.kernels.calls import peak_bytes
from tests.serving import assert_problem, serving

LIMIT = 2 << 20
"""The max_body_bytes of the server in conftest.py."""

SMALL, LARGE = 10, 100_000
assert 2 * 4 * SMALL + 1000 < DIRECT_BYTES < 2 * 4 * LARGE < LIMIT


@pytest.fixture(autouse=True)
def _nothing_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if the server logs an error: no client may cause one."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    yield
    logger.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


class Message(NamedTuple):
    """A request for ReluGrad: its head without the body's length, its body, and the expected numbers."""

    head: bytes
    body: bytes
    numbers: np.ndarray[Any, np.dtype[np.float32]]

    def whole(self, *more: bytes) -> bytes:
        return self.headers(*more) + self.body

    def headers(self, *more: bytes) -> bytes:
        return b"".join([self.head, b"Content-Length: %d\r\n" % len(self.body), *more, b"\r\n"])

    def chunked(self, size: int) -> bytes:
        pieces = [self.body[k : k + size] for k in range(0, len(self.body), size)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return self.head + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


def v1(size: int, first: float = 0) -> Message:
    numbers = np.arange(first, first + size, dtype=np.float32)
    body = b"".join(safetensors.encode({"dY": numbers, "X": np.ones(size, np.float32)}))
    head = f"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: test\r\nContent-Type: {safetensors.MEDIA_TYPE}\r\n"
    return Message(head.encode(), body, numbers)


def v2(size: int, first: float = 0) -> Message:
    numbers = np.arange(first, first + size, dtype=np.float32)
    form = {"datatype": "FP32", "shape": [size], "parameters": {"binary_data_size": 4 * size}}
    inputs = [{"name": name, **form} for name in ("dY", "X")]
    text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    head = f"POST /v2/models/ReluGrad/infer HTTP/1.1\r\nHost: test\r\nInference-Header-Content-Length: {len(text)}\r\n"
    return Message(head.encode(), text + numbers.tobytes() + np.ones(size, np.float32).tobytes(), numbers)


Make = Callable[..., Message]
EITHER_API = pytest.mark.parametrize("make", [v1, v2])
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """A socket that sends raw bytes and reads answers one by one."""

    def __init__(self, url: str) -> None:
        """Connect to a URL, or to `unix:` and the path of a socket."""
        if url.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(30)
            self.socket.connect(url.removeprefix("unix:"))
        else:
            host, port = url.removeprefix("http://").split(":")
            self.socket = socket.create_connection((host, int(port)), timeout=30)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.socket.close()

    def send(self, *pieces: bytes, pause: float = 0.001) -> None:
        """Send the pieces with pauses: the server reads each alone."""
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(pause)
            self.socket.sendall(piece)

    def head(self) -> tuple[int, dict[str, str]]:
        status = self._stream.readline().decode()
        assert status.startswith("HTTP/1.1 "), status
        lines = iter(lambda: self._stream.readline().decode().rstrip("\r\n"), "")
        headers = (line.partition(": ") for line in lines)
        return int(status.split()[1]), {name.lower(): value for name, _, value in headers}

    def answer(self) -> Answer:
        status, headers = self.head()
        return Answer(status, headers, self._stream.read(int(headers["content-length"])))

    def wait_for_end(self) -> None:
        """Wait until the server has closed its direction, and leave unread what came before."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        assert poll.poll(30_000)

    def is_closed(self) -> bool:
        """Wait for the server to close the connection; return whether it did."""
        try:
            return self._stream.read(1) == b""
        except ConnectionResetError:
            return True


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with Connection(url) as connection:
        yield connection


def assert_right(answer: Answer, message: Message) -> None:
    assert answer.status == 200, answer.body
    assert answer.body.endswith(message.numbers.tobytes())
    if answer.headers["content-type"] == safetensors.MEDIA_TYPE:
        assert int.from_bytes(answer.body[:8], "little") == len(answer.body) - 8 - message.numbers.nbytes
    else:
        length = int(answer.headers["inference-header-content-length"])
        assert len(answer.body) == length + message.numbers.nbytes


def exchange(connection: Connection, message: Message, *pieces: bytes) -> None:
    """Send the message, in these pieces if any are given, and check the answer."""
    connection.send(*(pieces or [message.whole()]))
    assert_right(connection.answer(), message)


# ----- pieces -----


def cut(whole: bytes, *places: int) -> list[bytes]:
    return [whole[start:stop] for start, stop in pairwise((0, *places, len(whole)))]


PIECES: dict[str, Callable[[int, int], Iterable[int]]] = {
    "at once": lambda head, end: [],
    "the head first": lambda head, end: [head],
    "the head and the first byte": lambda head, end: [head + 1],
    "the head without its last byte": lambda head, end: [head - 1],
    "single bytes around the head's end": lambda head, end: range(head - 5, head + 40),
    "single bytes at the end": lambda head, end: range(end - 20, end),
    "the last byte late": lambda head, end: [end - 1],
    "pieces of 100 KiB": lambda head, end: range(head, end, 100 << 10),
    "pieces of a prime": lambda head, end: range(0, end, 65_537),
    "the head in single bytes": lambda head, end: range(1, head + 1),
    "the first 64 KiB, then the rest": lambda head, end: [min(head + (64 << 10), end - 1)],
}


@EITHER_API
@SIZES
@pytest.mark.parametrize("pieces", PIECES)
def test_a_body_may_arrive_in_pieces(connection: Connection, make: Make, size: int, pieces: str) -> None:
    message = make(size)
    whole, head = message.whole(), len(message.headers())
    exchange(connection, message, *cut(whole, *PIECES[pieces](head, len(whole))))
    connection.send(whole)  # on the same connection
    assert_right(connection.answer(), message)


@EITHER_API
@pytest.mark.parametrize("chunk", [7, 1000, 70_000, 1 << 20])
def test_a_body_may_be_chunked(connection: Connection, make: Make, chunk: int) -> None:
    for size in (SMALL, LARGE):
        message = make(size if chunk >= 1000 else SMALL)
        exchange(connection, message, *cut(message.chunked(chunk), 150, 151, 300))


@EITHER_API
@pytest.mark.parametrize("extension", [b";a=b", b" ;a=b", b"\t ;a", b' ;a="b c"', b" "])
def test_blanks_may_stand_behind_the_size_of_a_chunk(connection: Connection, make: Make, extension: bytes) -> None:
    """RFC 9112, 7.1.1, wants them read before an extension. nginx and HAProxy read them without one, too."""
    message = make(SMALL)
    size = b"%x" % len(message.body)
    chunked = message.chunked(len(message.body)).replace(
        b"\r\n" + size + b"\r\n", b"\r\n%b%b\r\n" % (size, extension), 1
    )
    exchange(connection, message, *cut(chunked, len(message.head) + 30, len(message.head) + 33))


@pytest.mark.parametrize("size", [b"1 2", b" 12", b"12 \n", b"12 3;a", b"-1", b"0x12"])
def test_the_size_of_a_chunk_is_one_number(connection: Connection, size: bytes) -> None:
    connection.send(v1(SMALL).head + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n")
    assert connection.answer().status == 400


@EITHER_API
def test_heads_and_json_may_have_any_length(connection: Connection, make: Make) -> None:
    """The lengths of head and JSON decide the alignment of the tensors."""
    for extra in range(20):
        message = make(LARGE + extra % 3, first=extra)
        exchange(connection, message, *cut(message.whole(b"X-Padding: %b\r\n" % (b"x" * extra)), 200 + extra))


@pytest.mark.parametrize("sizes", [(SMALL, SMALL), (SMALL, LARGE), (LARGE, SMALL), (LARGE, LARGE)])
@pytest.mark.parametrize("makes", [(v1, v1), (v1, v2), (v2, v1), (v2, v2)])
def test_requests_may_be_pipelined(connection: Connection, makes: tuple[Make, Make], sizes: tuple[int, int]) -> None:
    messages = [make(size, first) for first, (make, size) in enumerate(zip(makes * 2, sizes * 2, strict=True))]
    everything = b"".join(message.whole() for message in messages)
    sending = threading.Thread(
        target=connection.send, args=[everything]
    )  # the server may need its answers read meanwhile
    sending.start()
    for message in messages:
        assert_right(connection.answer(), message)
    sending.join()


@EITHER_API
@pytest.mark.parametrize("overlap", [1, 100, 300, 5000])
def test_the_next_request_may_begin_in_the_piece_that_ends_a_body(
    connection: Connection, make: Make, overlap: int
) -> None:
    first, second = make(LARGE, 1), make(LARGE, 2)
    exchange(connection, first, *cut(first.whole() + second.whole(), 50_000, len(first.whole()) + overlap))
    assert_right(connection.answer(), second)


def test_one_connection_serves_many_requests(connection: Connection) -> None:
    for number in range(60):
        message = (v1, v2)[number % 2]((SMALL, LARGE, 0, 20_000)[number // 2 % 4], number)
        exchange(connection, message, message.chunked(30_000) if number % 5 == 4 else message.whole())


@EITHER_API
@SIZES
def test_a_client_that_expects_100_continue_gets_it(connection: Connection, make: Make, size: int) -> None:
    message = make(size)
    for _ in range(2):
        connection.send(message.headers(b"Expect: 100-continue\r\n"))
        assert connection.head() == (100, {})
        exchange(connection, message, *cut(message.body, 1))


@EITHER_API
@SIZES
def test_connection_close_closes_the_connection(connection: Connection, make: Make, size: int) -> None:
    message = make(size)
    exchange(connection, message, message.whole(b"Connection: close\r\n"))
    assert connection.is_closed()


def test_many_clients_get_their_own_answers(url: str) -> None:
    def client(number: int) -> None:
        with Connection(url) as connection:
            for turn in range(4):
                message = (v1, v2)[turn % 2](LARGE, number + turn)
                exchange(connection, message, *cut(message.whole(), 100, 100_000 + number, 500_000))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))


# ----- clients that stall or leave -----


@pytest.fixture(scope="module")
def impatient() -> Iterator[str]:
    with serving(request_timeout=0.3, threads=1) as url:
        yield url


STALLS: dict[str, Callable[[Message], bytes]] = {
    "before the body": lambda message: message.headers(),
    "after a byte": lambda message: message.whole()[: len(message.headers()) + 1],
    "in the middle": lambda message: message.whole()[: len(message.headers()) + len(message.body) // 2],
    "before the last byte": lambda message: message.whole()[:-1],
    "before the first chunk": lambda message: message.chunked(50)[: len(message.head) + 30],
    "in a chunk": lambda message: message.chunked(50)[: len(message.head) + 100],
    "before the last chunk": lambda message: message.chunked(50)[:-5],
}


def assert_too_late(answer: Answer, make: Make) -> None:
    if make is v1:
        response = httpx.Response(answer.status, headers=answer.headers, content=answer.body)
        assert_problem(response, 408, "request_timeout", "0.3 seconds", "GRADSERVE_REQUEST_TIMEOUT")
    else:
        assert answer.status == 400
        assert json.loads(answer.body).keys() == {"error"}
        assert b"0.3 seconds" in answer.body
    assert answer.headers["connection"] == "close"


def test_a_stalled_request_times_out(impatient: str) -> None:
    cases = [(make, size, stall) for make in (v1, v2) for size in (SMALL, LARGE) for stall in STALLS]
    connections = [Connection(impatient) for _ in cases]  # all wait at the same time
    for connection, (make, size, stall) in zip(connections, cases, strict=True):
        connection.send(STALLS[stall](make(size)))
    for connection, (make, _, _) in zip(connections, cases, strict=True):
        with connection:
            assert_too_late(connection.answer(), make)
            assert connection.is_closed()
    for message in (v1(SMALL), v2(LARGE)):
        with Connection(impatient) as connection:
            exchange(connection, message)


def test_an_idle_connection_is_closed() -> None:
    message = v1(SMALL)
    refused = message.head + b"Content-Length: %d\r\n\r\n" % (1 << 40)
    starts = {b"": 0, message.head[:20]: 0, message.headers()[:-1]: 0, message.whole(): 200, refused: 413}
    with serving(keep_alive=1) as url:
        connections = [Connection(url) for _ in starts]
        for connection, start in zip(connections, starts, strict=True):
            connection.send(start)
        for connection, status in zip(connections, starts.values(), strict=True):
            with connection:
                if status:
                    assert connection.answer().status == status
                if status == 413:
                    connection.send(b"{")
                assert connection.is_closed()


@SIZES
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_arrives_byte_by_byte_times_out(
    impatient: str, size: int, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body holds its memory from the beginning, and other requests cannot use it."""
    monkeypatch.setattr(wire, "MIN_BYTES_PER_SECOND", 1 << 18)
    message = v1(size)
    whole = message.chunked(80_000) if chunked else message.whole()
    begun = len(message.head) + (81_000 if size == LARGE else 40)
    with Connection(impatient) as connection:
        connection.send(whole[:begun])
        for number in range(60):
            if select.select([connection.socket], [], [], 0.2)[0]:
                break
            start = begun + number
            connection.send(whole[start : start + 1])
        else:
            raise AssertionError("the server never gives up")
        assert_too_late(connection.answer(), v1)


def test_a_slow_body_within_the_timeout_is_read() -> None:
    """No pause is as long as the timeout, but all together are longer."""
    messages = [make(size) for make in (v1, v2) for size in (SMALL, LARGE)]
    wholes = [message.whole() for message in messages]
    with serving(request_timeout=6) as url, ExitStack() as opened:
        connections = [opened.enter_context(Connection(url)) for _ in messages]
        for start, stop in pairwise((0, *range(-21, 0), None)):
            for connection, whole in zip(connections, wholes, strict=True):
                connection.send(whole[start:stop])
            time.sleep(0.3)  # the clients' slowness: there is nothing to wait for
        for connection, message in zip(connections, messages, strict=True):
            assert_right(connection.answer(), message)


@EITHER_API
@SIZES
@pytest.mark.parametrize("stall", STALLS)
def test_a_client_that_leaves_in_a_body_harms_nobody(url: str, make: Make, size: int, stall: str) -> None:
    message = make(size)
    for _ in range(3):
        with Connection(url) as connection:
            connection.send(STALLS[stall](message))
    with Connection(url) as connection:
        exchange(connection, message)


@EITHER_API
@SIZES
def test_a_client_that_leaves_before_its_answer_harms_nobody(url: str, make: Make, size: int) -> None:
    message = make(size)
    for _ in range(5):
        with Connection(url) as connection:
            connection.send(message.whole())
    with Connection(url) as connection:
        exchange(connection, message)


# ----- too large -----


@EITHER_API
def test_a_content_length_over_the_limit_is_refused_before_the_body(connection: Connection, make: Make) -> None:
    connection.send(make(SMALL).head + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1))
    answer = connection.answer()
    assert answer.status == 413
    assert b"2097153 bytes" in answer.body
    assert b"GRADSERVE_MAX_BODY_BYTES" in answer.body
    connection.send(bytes(LIMIT + 1))  # the server discards these bytes
    assert answer.headers["connection"] == "close"
    assert connection.is_closed()


@EITHER_API
def test_a_chunked_body_over_the_limit_is_refused_before_its_end(connection: Connection, make: Make) -> None:
    chunk = b"%x\r\n%b\r\n" % (1 << 18, bytes(1 << 18))
    connection.send(make(SMALL).head + b"Transfer-Encoding: chunked\r\n\r\n", *([chunk] * 8))
    connection.send(b"1\r\n \r\n")
    answer = connection.answer()
    assert answer.status == 413
    assert b"more than 2097152 bytes; the limit is 2097152" in answer.body


@EITHER_API
@pytest.mark.parametrize(
    "lines", [b"Transfer-Encoding: gzip, chunked\r\n", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"]
)
def test_a_body_in_another_transfer_coding_is_refused(connection: Connection, make: Make, lines: bytes) -> None:
    message = make(SMALL)
    connection.send(message.head + lines + b"\r\n" + message.chunked(50).partition(b"\r\n\r\n")[2])
    answer = connection.answer()
    assert answer.status == 400
    assert b"gzip, chunked" in answer.body
    assert b"but must be chunked" in answer.body


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_exactly_the_limit_is_read(client: httpx.Client, chunked: bool) -> None:
    def post(size: int) -> httpx.Response:
        body = b'{"dY": 1, "X": 1}'.ljust(size)
        content: Any = iter(cut(body, 5, 100_000)) if chunked else body
        return client.post("/v1/ops/ReluGrad", content=content, headers={"Content-Type": "application/json"})

    assert post(LIMIT).status_code == 200
    assert_problem(post(LIMIT + 1), 413, "body_too_large", "2097152")


BOMBS = {"gzip": gzip.compress(bytes(64 << 20)), "deflate": zlib.compress(bytes(64 << 20))}


@pytest.mark.parametrize("path", ["/v1/ops/ReluGrad", "/v2/models/ReluGrad/infer"])
@pytest.mark.parametrize("coding", BOMBS)
def test_a_compression_bomb_is_not_inflated(client: httpx.Client, path: str, coding: str) -> None:
    assert len(BOMBS[coding]) < 1 << 17

    def post() -> None:
        answer = client.post(path, content=BOMBS[coding], headers={"Content-Encoding": coding})
        assert answer.status_code == 413
        assert "decompressed" in answer.text

    assert peak_bytes(post) < 3 * LIMIT


@EITHER_API
@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "deflate"])
def test_a_compressed_body_may_arrive_in_pieces(connection: Connection, make: Make, coding: str) -> None:
    plain = make(LARGE)
    squeezed = zlib.compress(plain.body) if coding == "deflate" else gzip.compress(plain.body)
    message = Message(plain.head + f"Content-Encoding: {coding}\r\n".encode(), squeezed, plain.numbers)
    for whole in (message.whole(), message.chunked(10_000)):
        exchange(connection, plain, *cut(whole, 250, 100_000))
