"""The worst bodies of 64 KB: small once compressed, tens of megabytes of JSON. Nobody else waits for them for long."""

from __future__ import annotations

import http.client
import os
import threading
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import onnx
import pytest

from service.api.http.admission import SMALL_BYTES
from service.codecs.safetensors import MEDIA_TYPE
from tests.faults.servers import Server
from tests.serving import wait_until

LONGEST_GAP_SECONDS = 5.0
"""Two answers of a health probe may be this far apart. Bodies like these stopped the server for 13 s to 20 s and more;
now the longest gap is about half a second, in which the parser holds the interpreter's lock."""


class Worst(NamedTuple):
    """A body: `head`, `piece` again and again up to `size` bytes, and `tail`."""

    head: bytes
    piece: bytes
    tail: bytes
    size: int = 40 << 20
    media_type: str = "application/json"


@cache
def compressed(worst: Worst) -> bytes:
    count = (worst.size - len(worst.head) - len(worst.tail)) // len(worst.piece)
    stream = zlib.compressobj(9, wbits=31)
    body = stream.compress(worst.head + worst.piece * count) + stream.compress(worst.tail) + stream.flush()
    assert len(body) <= SMALL_BYTES
    return body


def header(piece: bytes, size: int) -> Worst:
    """Return a safetensors file of nothing but a header, `{piece piece ...}`."""
    length = 2 + (size - 10) // len(piece) * len(piece)
    return Worst(length.to_bytes(8, "little") + b"{", piece, b"}", size, MEDIA_TYPE)


NAMES = [
    Worst(b'{"names":["', b"a", b'"]}'),
    Worst(b'{"names":[', b'"",', b'""]}'),
    Worst(b'{"names":[', b"0,", b"0]}", 1 << 18),
    Worst(b"{", b'"":0,', b'"":0}', 1 << 18),
]
"""A long name, and many wrong ones."""

TENSORS = [
    Worst(b'{"gradient":[', b'"",', b'""]}'),
    Worst(b'{"gradient":[', b"0,", b'""]}', 1 << 18),
    Worst(b'{"gradient":[', b"[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]],", b"[]]}", 1 << 24),
    Worst(b'{"gradient":{"data":0,"shape":{', b'"":0,', b'"":0}}}'),
    Worst(b'{"gradient":{"data":1e400,"shape":[', b'"",', b'""]}}', 2 << 20),
    Worst(b'{"gradient":{', b'"":0,', b'"":0}}', 1 << 14),
]
"""Lists of wrong items, lists in lists, and shapes that are none."""


def members(count: int) -> bytes:
    """Return members of an object, each with a comma behind it."""
    return b"".join(b'"%d":0,' % number for number in range(count))


GROUPS = [
    Worst(b'{"weights":[', b"0,", b"0]}"),
    Worst(b'{"weights":[', b"0,", b"0]}", 1 << 15),
    Worst(b'{"weights":[', b"[],", b"[]]}", 1 << 23),
    Worst(b'{"weights":[', b"{},", b"{}]}", 1 << 15),
    Worst(b'{"weights":[', b"{" + members(1000)[:-1] + b"},", b"{}]}", 1 << 22),
    Worst(b'{"weights":{', b'"":0,', b'"":0}}', 1 << 16),
    Worst(b'{"weights":{' + members(4096), b'"":{},', b'"":{}}}', 1 << 16),
]
"""Groups of very many tensors, and of objects that are none."""

OBJECTS = [Worst(b"{", b" ", b"}"), Worst(b"{", b'"":0,', b'"":0}', 1 << 16)]
"""An object of nothing but spaces, and one of wrong members."""

CONTRIBUTORS = Worst(b'{"contributors":[', b'"",', b'""]}', 10 << 20)

BODIES = {
    "PUT /v1/buffers/{name}": [Worst(b'{"shape":[', b'"",', b'""]}', 10 << 20), *OBJECTS],
    "PATCH /v1/buffers/{name}": [CONTRIBUTORS, *OBJECTS],
    "PATCH /v1/buffers": [Worst(b'{"names":[', b'"",', b'""]}', 10 << 20), CONTRIBUTORS, *OBJECTS],
    "POST /v1/buffers/create": [
        Worst(b'{"buffers":{', b'"":{},', b'"":{}}}', 6 << 20),
        Worst(b'{"buffers":{"a":{"shape":[', b'"",', b'""]}}}', 3 << 20),
        Worst(b'{"buffers":{"a":{"shape":[', b"[[[[[[[[]]]]]]]],", b"[]]}}}", 16 << 20),
        Worst(b'{"buffers":{"a":{', b'"":0,', b'"":0}}}', 5 << 20),
        Worst(b'{"buffers":{"a":{"shape":[', b" ", b"]}}}", 15 << 20),
    ],
    "POST /v1/buffers/zero": NAMES,
    "POST /v1/buffers/take": NAMES,
    "POST /v1/buffers/value": NAMES,
    "POST /v1/buffers/statistics": NAMES,
    "POST /v1/buffers/accumulate": [
        *TENSORS,
        Worst(b'{"', b"a", b'":0}'),
        header(b" ", 40 << 20),
        header(b"[],", 1 << 19),
        header(b"\\", 1 << 24),
    ],
    "POST /v1/buffers/{name}/accumulate": TENSORS,
    "POST /v1/ops/{op}": [*TENSORS, Worst(b'{"X":', b"[", b"")],
    "POST /v1/graphs/{name}": [*TENSORS, Worst(b'{"x":[', b"[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]],", b"[]]}", 1 << 24)],
    "POST /v2/models/{op}/infer": [
        Worst(b'{"inputs":[', b"{},", b"{}]}"),
        Worst(b'{"id":"', b"a", b'","inputs":[{"name":"X","datatype":"FP32","shape":[],"data":[1]}]}'),
        Worst(b'{"inputs":[],"parameters":{"activations":"', b",", b'"}}', 30 << 20),
        Worst(b'{"inputs":[],"parameters":{"from":"', b",", b'"}}', 30 << 20),
        Worst(b"NaN", b'"', b"", 1 << 20),
    ],
    "POST /v1/runs/{run}/join": [
        Worst(b'{"form":{', b'"":0,', b'"":0}}', 3 << 20),
        Worst(b'{"form":{', b'"":[[[[[[[[]]]]]]]],', b'"":0}}', 4 << 20),
        Worst(b'{"worker":"x","token":"t","prefix":"', b"a", b'","buffer":"w"}', 4 << 20),
        *OBJECTS,
    ],
    "POST /v1/runs/{run}/leave": OBJECTS,
    "POST /v1/runs/{run}/finish": [Worst(b'{"error":"', b"a", b'"}'), *OBJECTS],
    "POST /v2/systemsharedmemory/region/{name}/register": [
        Worst(b'{"byte_size":1,"key":"/', b"a", b'"}', 1 << 16),
        Worst(b'{"byte_size":1,"key":[', b'"",', b'""]}', 1 << 16),
        *OBJECTS,
    ],
}
"""The worst bodies that we know, by endpoint."""

MODELS = [Worst(b"", b"\x0a\x00", b"", media_type="application/onnx")]
"""A model of nothing but fields without content."""

OTHERS = {"POST /v1/ops/SGDOptimizerV2": GROUPS, "PUT /v1/graphs/{name}": MODELS}
"""Those of endpoints that OpenAPI gives no JSON, or another name."""

OPERATOR = "GRUTraining"
"""The operator to run: its attributes include lists."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server in a process of its own, which does not wait for this one."""
    with Server(tmp_path_factory.mktemp("bounds") / "store", threads=2, shared_memory=True) as server:
        httpx.put(f"{server.url}/v1/buffers/a", json={"shape": [1]}).raise_for_status()
        graph = '<ir_version: 8, opset_import: ["": 17]> a (float[n] x) => (float[n] y) { y = Relu(x) }'
        content = onnx.parser.parse_model(graph).SerializeToString()
        httpx.put(f"{server.url}/v1/graphs/a", content=content).raise_for_status()
        yield server


class Probe(threading.Thread):
    """Asks a hundred times a second whether the server is alive.

    `longest` is the server's longest work between two answers, in seconds. That is time of its process on a processor,
    since other processes may take the rest.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._address, self._times = urlsplit(server.url).netloc, Path(f"/proc/{server.process.pid}/stat")
        self._stopping = threading.Event()
        self.longest, self.count = 0.0, 0

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._address)
        last = self._worked()
        while not self._stopping.wait(0.01):
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b'{"live":true}'
            now = self._worked()
            self.longest, last, self.count = max(self.longest, now - last), now, self.count + 1
        connection.close()

    def _worked(self) -> float:
        fields = self._times.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Probe:
        self.start()
        wait_until(lambda: self.count > 0)  # a short request may end before the first answer
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join()


@pytest.mark.parametrize("endpoint", [*BODIES, *OTHERS])
def test_no_body_keeps_others_waiting(server: Server, endpoint: str) -> None:
    method, path = endpoint.split()
    place = server.url + path.format(name="a", run="a", op=OPERATOR)
    with httpx.Client(timeout=120) as client:
        for worst in {**BODIES, **OTHERS}[endpoint]:
            content, headers = compressed(worst), {"Content-Type": worst.media_type, "Content-Encoding": "gzip"}
            with Probe(server) as probe:
                answer = client.request(method, place, content=content, headers=headers)
            assert 400 <= answer.status_code < 500, (worst, answer.text)
            assert len(answer.content) < 10_000, worst
            assert probe.longest < LONGEST_GAP_SECONDS, worst


def test_every_endpoint_with_a_json_body_has_worst_bodies(server: Server) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    found = {
        f"{method.upper()} {'/v1/ops/{op}' if path.startswith('/v1/ops/') else path}"
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert found == set(BODIES)
