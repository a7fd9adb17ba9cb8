"""How many functions of Python and C the server calls for a small request: a count that no machine changes."""

from __future__ import annotations

import itertools
import socket
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from service.codecs.json import encode
from tests.serving import serving

WARM_UP = 100
"""Requests that fill the caches first. After the first one the event loop computes."""

REQUESTS = 400

ROOM = 1.03
"""How many times as many calls are fine: another version of a library may make a few more."""

TENSORS = {name: np.linspace(-1, 1, 4, dtype=np.float32) for name in ("dY", "X")}


class Calls:
    """Counts the calls in all threads that start inside the context."""

    count = 0

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.count += 1


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    with Calls() as calls:
        yield calls


@pytest.fixture(scope="module")
def connection(calls: Calls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """Yield a connection to a server whose store has the buffer b."""
    with serving(store=f"lmdb:{tmp_path_factory.mktemp('store')}") as url:
        httpx.put(f"{url}/v1/buffers/b", json={"shape": [4]}).raise_for_status()
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port)) as connection:
            yield connection


def request_of(path: str, body: bytes, **headers: object) -> bytes:
    """Return a request with the headers that most clients send, and with `headers`."""
    usual = {"Host": "localhost", "User-Agent": "test", "Accept": "*/*", "Content-Length": len(body)}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in {**usual, **headers}.items()]
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode() + body


def infer(_: int) -> bytes:
    form = {"datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}
    inputs = [{"name": name, **form} for name in TENSORS]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    body = b"".join([head, *(tensor.tobytes() for tensor in TENSORS.values())])
    return request_of("/v2/models/ReluGrad/infer", body, Inference_Header_Content_Length=len(head))


def run(_: int) -> bytes:
    body = b"".join(encode(TENSORS, "base64"))
    return request_of("/v1/ops/ReluGrad", body, Content_Type="application/json")


def add(number: int) -> bytes:
    body = b"".join(encode({"gradient": TENSORS["dY"]}, "base64"))
    return request_of("/v1/buffers/b/accumulate", body, Content_Type="application/json", Idempotency_Key=number)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions of Python and its library count otherwise")
@pytest.mark.parametrize(("request_at", "most"), [(infer, 270), (run, 400), (add, 840)])
def test_a_small_request_calls_few_functions(
    connection: socket.socket, calls: Calls, request_at: Callable[[int], bytes], most: int
) -> None:
    counts = list[int]()
    for number in range(WARM_UP + REQUESTS):
        connection.sendall(request_at(number))
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        counts.append(calls.count)
    # The median leaves out what the server does by the clock, beside requests.
    assert statistics.median(after - before for before, after in itertools.pairwise(counts[WARM_UP:])) <= most * ROOM
