"""Memory is counted before it is there: bodies as they are decompressed and parsed, values, outputs, and answers."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from onnx import helper, numpy_helper

from service.codecs.safetensors import MEDIA_TYPE
from tests.api.calls import add, as_file, create, metadata
from tests.api.models import model
from tests.faults.servers import Server
from tests.serving import assert_problem, in_flight, serving, wait_until

IN_FLIGHT_BYTES = 48 << 20
MORE_BYTES = 32 << 20
"""Bytes that may come before they are counted: 16 MB of a compressed body, and what small objects take."""

JSON = {"Content-Type": "application/json"}
GZIP = {**JSON, "Content-Encoding": "gzip"}

LARGE = 1 << 25
"""Elements of the tensors here: none fits beside another request, at least not in the form of the answer."""

SIZE = LARGE // 4
"""Elements of a buffer of float16 that takes 16 MB."""


class Memory:
    """The memory of a process."""

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")

    def _read(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (self._process / "status").read_text())
        assert found is not None
        return int(found[1]) << 10

    def growth(self, work: Callable[[], None]) -> int:
        """Return by how many bytes the memory grows at most during `work`."""
        (self._process / "clear_refs").write_text("5")  # sets the peak to what there is
        before = self._read("VmRSS")
        work()
        return self._read("VmHWM") - before


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server in a process of its own that may hold 48 MB. It has a buffer of 16 MB."""
    store = tmp_path_factory.mktemp("memory") / "store"
    with (
        Server(store, max_bytes_in_flight=IN_FLIGHT_BYTES, reuse_bytes=0, threads=2) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        create(client, "half", (SIZE,), dtype="float16")
        yield server


def gather(client: httpx.Client, **more: str) -> httpx.Response:
    content = b'{"shape":[%d],"indices":[0],"grad":[1]}' % LARGE
    return client.post("/v1/ops/GatherGrad", content=content, headers={**JSON, **more})


def outputs_as_lists(client: httpx.Client) -> httpx.Response:
    content = b'{"shape":[%d],"indices":[0],"grad":{"dtype":"bfloat16","data":[1]}}' % (SIZE // 2)
    return client.post("/v1/ops/GatherGrad", content=content, headers=JSON)


def deep_lists(client: httpx.Client) -> httpx.Response:
    """Ask for an output of 2 MB. As lists 64 deep it takes 100 MB."""
    shape = [LARGE // 64, *[1] * 63]
    content = b'{"shape":%b,"indices":0,"grad":{"shape":%b,"base64":"AAAAAA=="}}'
    content %= str(shape).encode(), str(shape[1:]).encode()
    return client.post("/v1/ops/GatherGrad?encoding=list", content=content, headers=JSON)


def inference(client: httpx.Client) -> httpx.Response:
    tensors = {"shape": ("INT64", [SIZE // 2]), "indices": ("INT64", [0]), "grad": ("FP64", [1])}
    inputs = [
        {"name": name, "datatype": datatype, "shape": [1], "data": data} for name, (datatype, data) in tensors.items()
    ]
    return client.post("/v2/models/GatherGrad/infer", json={"inputs": inputs})


def numbers(client: httpx.Client) -> httpx.Response:
    content = gzip.compress(b'{"gradient":[' + b"1," * (LARGE // 8) + b"1]}", 1)
    return client.post("/v1/buffers/half/accumulate", content=content, headers=GZIP)


def spaces(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/buffers/half/zero", content=gzip.compress(b" " * (4 * LARGE), 1), headers=GZIP)


def value(client: httpx.Client, query: str = "", **headers: str) -> httpx.Response:
    return client.get(f"/v1/buffers/half/value{query}", headers=headers)


def places_of_rows(client: httpx.Client) -> httpx.Response:
    """Add a million rows of one number each. Their places take 16 MB, and the body 6 MB."""
    grad = np.zeros(1 << 20, np.float16)
    tensors = {"shape": np.array([SIZE], np.int32), "indices": np.zeros(grad.size, np.int32), "grad": grad}
    return client.post("/v1/ops/GatherGrad?into=output:half", **as_file(tensors))


@contextmanager
def unfinished(url: str, size: int) -> Iterator[None]:
    """Hold `size` bytes of memory: the last byte of such a body does not come."""
    head = f"POST /v1/ops/ReluGrad HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 0), timeout=30) as connection:
        connection.sendall(head.encode() + bytes(size - 1))
        wait_until(lambda: in_flight(url, "_bytes") >= size - (1 << 18))
        yield


class Case(NamedTuple):
    """A request that needs more memory than there is beside `held` megabytes."""

    ask: Callable[[httpx.Client], httpx.Response]
    held: int = 2


CASES = {
    "an output": Case(gather),
    "an output as safetensors": Case(lambda client: gather(client, Accept=MEDIA_TYPE)),
    "an output as lists": Case(outputs_as_lists),
    "an output as deep lists": Case(deep_lists),
    "an output on /v2": Case(inference),
    "a list of numbers": Case(numbers),
    "a body of spaces": Case(spaces),
    "a value as lists": Case(value),
    "values as lists": Case(lambda client: client.post("/v1/buffers/value", json={"names": ["half"]})),
    "a value as base64 in float32": Case(lambda client: value(client, "?encoding=base64&dtype=float32")),
    "a value in float64": Case(lambda client: value(client, "?dtype=float64", Accept=MEDIA_TYPE)),
    "a value as lists, compressed": Case(lambda client: value(client, **{"Accept-Encoding": "gzip"})),
    "a sum as lists": Case(lambda client: add(client, "half", 1, **{"return": "value"})),
    "a taken value as lists": Case(lambda client: client.post("/v1/buffers/half/take")),
    "a taken value in float64": Case(lambda client: client.post("/v1/buffers/half/take?dtype=float64")),
    "places of rows": Case(places_of_rows, 36),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_is_reserved_before_it_is_allocated(server: Server, case: str) -> None:
    def ask() -> None:
        answer = CASES[case].ask(client)
        assert answer.status_code == 429
        assert "GRADSERVE_MAX_BYTES_IN_FLIGHT" in answer.text

    headers = {"Accept-Encoding": "identity"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        wait_until(lambda: in_flight(server.url, "_bytes") == 0)
        before = metadata(client, "half")
        with unfinished(server.url, CASES[case].held << 20):
            assert Memory(server.process.pid).growth(ask) < IN_FLIGHT_BYTES + MORE_BYTES
        assert metadata(client, "half") == before


def test_a_request_alone_has_a_limit(tmp_path: Path) -> None:
    with (
        serving(max_bytes_in_flight=1 << 20, max_tensor_bytes=1 << 20) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        content = b'{"shape":[%d],"indices":[0],"grad":[1]}' % (1 << 18)
        answer = client.post("/v1/ops/GatherGrad", content=content, headers=JSON)
        problem = assert_problem(answer, 413, "tensor_too_large", "GRADSERVE_MAX_TENSOR_BYTES")
        assert problem["limit"] == 4 << 20
        assert client.post("/v1/ops/GatherGrad?encoding=base64", content=content, headers=JSON).status_code == 200
        create(client, "a", (1 << 18,))
        assert_problem(client.post("/v1/buffers/a/take"), 413, "tensor_too_large")
        assert metadata(client, "a")["step"] == 0


VIEWS = {"Slice": (["first", "last"], 1), "Split": (["lengths"], 2)}


@pytest.mark.parametrize("op", VIEWS)
def test_a_graph_holds_no_more_than_is_counted(tmp_path: Path, op: str) -> None:
    """Of each of a hundred tensors of 8 MB, a few numbers are kept."""
    others, count = VIEWS[op]
    nodes = []
    for k in range(100):
        nodes.append(helper.make_node("ConstantOfShape", ["size"], [f"b{k}"]))
        nodes.append(helper.make_node(op, [f"b{k}", *others], [f"v{k}", f"w{k}"][:count]))
    nodes.append(helper.make_node("Concat", [f"v{k}" for k in range(100)], ["y"], axis=0))
    numbers = {"size": [1 << 21], "first": [0], "last": [4], "lengths": [4, (1 << 21) - 4]}
    values = [numpy_helper.from_array(np.array(value), name) for name, value in numbers.items()]
    content = model(*nodes, outputs=["y"], initializers=values)

    def ask() -> None:
        assert client.post("/v1/graphs/g", content=b"{}", headers=JSON).status_code in (200, 413)

    limits: dict[str, Any] = {
        "max_bytes_in_flight": IN_FLIGHT_BYTES,
        "max_tensor_bytes": IN_FLIGHT_BYTES // 4,
        "reuse_bytes": 0,
    }
    with Server(tmp_path / "store", **limits) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.put("/v1/graphs/g", content=content).raise_for_status()
        assert Memory(server.process.pid).growth(ask) < IN_FLIGHT_BYTES + MORE_BYTES
