"""The service against NVIDIA's Triton Inference Server, over HTTP: `python -m benchmarks.service`.

Both are processes on the loopback interface and run ReluGrad on float32. Requests go by turns over one keep-alive
connection each, or from wrk over eight. A time runs from sending the prepared request to having read the whole answer.
The floor is the same bytes over a bare socket, by turns with the others. Every answer is compared with NumPy's; the
exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import triton
from benchmarks.servers import Connection, Server, gradserve, serving
from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import Array

INFER = "/v2/models/ReluGrad/infer"
HEADER_LENGTH = "Inference-Header-Content-Length"
SMALL = 256
LARGE = 1 << 20
HUGE = 1 << 24
CALLS = 10
"""Calls in a row at each turn: the figure is the pace of a busy connection."""
CONNECTIONS = 8
RATE_SECONDS = 3
RATE_TURNS = 5
MEMORY_LIMIT = 1.3
"""The limit of memory, as a multiple of the bytes in and out."""


@dataclass(frozen=True)
class Call:
    """A prepared request and the reader of its answer."""

    path: str
    body: bytes
    read: Callable[[Mapping[str, str], bytes], Array]
    headers: dict[str, str] = field(default_factory=dict)

    def ask(self, connection: Connection) -> tuple[Mapping[str, str], bytes]:
        """Send the request; return the answer's headers and body."""
        connection.request("POST", self.path, self.body, self.headers)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            sys.exit(f"{self.path} answers {response.status}: {body[:300]!r}")
        return dict(response.headers.items()), body


def binary(dY: Array, X: Array) -> Call:
    """Return a call of the Open Inference Protocol with binary tensor data."""
    inputs = [
        {"name": name, "shape": [one.size], "datatype": "FP32", "parameters": {"binary_data_size": one.nbytes}}
        for name, one in (("dY", dY), ("X", X))
    ]
    head = json.dumps({"inputs": inputs, "outputs": [{"name": "dX", "parameters": {"binary_data": True}}]}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}

    def read(headers: Mapping[str, str], body: bytes) -> Array:
        return np.frombuffer(body, np.float32, offset=int(headers[HEADER_LENGTH]))

    return Call(INFER, b"".join([head, dY.tobytes(), X.tobytes()]), read, headers)


def lists(dY: Array, X: Array) -> Call:
    """Return a call of the Open Inference Protocol with JSON lists."""
    inputs = [
        {"name": name, "shape": [one.size], "datatype": "FP32", "data": one.tolist()}
        for name, one in (("dY", dY), ("X", X))
    ]

    def read(headers: Mapping[str, str], body: bytes) -> Array:
        return np.array(json.loads(body)["outputs"][0]["data"], np.float32)

    return Call(INFER, json.dumps({"inputs": inputs}).encode(), read, {"Content-Type": "application/json"})


def safetensors(dY: Array, X: Array) -> Call:
    """Return a call of our own API with a safetensors file."""
    ends = {"dY": [0, dY.nbytes], "X": [dY.nbytes, 2 * dY.nbytes]}
    head = json.dumps({name: {"dtype": "F32", "shape": [dY.size], "data_offsets": at} for name, at in ends.items()})
    head += " " * (-len(head) % 8)

    def read(headers: Mapping[str, str], body: bytes) -> Array:
        return np.frombuffer(body, np.float32, offset=8 + struct.unpack_from("<Q", body)[0])

    body = b"".join([struct.pack("<Q", len(head)), head.encode(), dY.tobytes(), X.tobytes()])
    return Call("/v1/ops/ReluGrad", body, read, {"Content-Type": "application/vnd.safetensors"})


def in_base64(dY: Array, X: Array) -> Call:
    """Return a call of our own API with base64."""
    tensors = {
        name: {"dtype": "float32", "shape": [one.size], "base64": base64.b64encode(one.tobytes()).decode()}
        for name, one in (("dY", dY), ("X", X))
    }

    def read(headers: Mapping[str, str], body: bytes) -> Array:
        return np.frombuffer(base64.b64decode(json.loads(body)["dX"]["base64"]), np.float32)

    return Call("/v1/ops/ReluGrad", json.dumps(tensors).encode(), read, {"Content-Type": "application/json"})


@contextmanager
def bare_socket(bytes_in: int, bytes_out: int) -> Iterator[Callable[[], object]]:
    """Yield a call that exchanges these numbers of bytes with a process that only counts bytes."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_count, args=(bytes_in, bytes_out, there))
    process.start()
    with socket.create_connection(("127.0.0.1", here.recv())) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body, memory = bytes(bytes_in), memoryview(bytearray(bytes_out))

        def call() -> None:
            connection.sendall(body)
            _fill(connection, memory)

        yield call
    process.join()


def _count(bytes_in: int, bytes_out: int, ready: Pipe) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ready.send(server.getsockname()[1])
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory, answer = memoryview(bytearray(bytes_in)), bytes(bytes_out)
        while _fill(connection, memory):
            connection.sendall(answer)


def _fill(connection: socket.socket, memory: memoryview) -> bool:
    got = 0
    while got < len(memory):
        step = connection.recv_into(memory[got:])
        if not step:
            return False
        got += step
    return True


class Race:
    """Collects the rows of the table."""

    def __init__(self, ours: Server, theirs: Server) -> None:
        self.ours, self.theirs = ours, theirs
        self.rows: list[list[str]] = []

    def between(
        self,
        title: str,
        size: int,
        ours: Callable[[Array, Array], Call],
        theirs: Any,
        target: float,
        floor: Mapping[str, Callable[[], object]] = {},
    ) -> dict[str, float]:
        """Race a call of ours against a call of Triton's and, if given, a `floor`. Return the medians in seconds."""
        dY, X = np.random.default_rng(0).standard_normal((2, size), dtype=np.float32)
        calls = {"ours": (self.ours, ours(dY, X)), "triton": (self.theirs, theirs(dY, X))}
        expected = np.where(X > 0, dY, np.float32(0))
        for name, (server, call) in calls.items():
            server.connection.close()  # possibly idle for too long; the next request opens it again
            if not np.array_equal(call.read(*call.ask(server.connection)), expected):
                sys.exit(f"{title}: the answer of {name} is wrong")
        runs: dict[str, Callable[[], object]] = {
            name: partial(call.ask, server.connection) for name, (server, call) in calls.items()
        }
        medians = alternate({**runs, **floor}, seconds=8.0, least=5, calls=CALLS)
        self.add(title, f"{size:,}", medians["ours"] * 1e3, medians["triton"] * 1e3, "<=", target)
        return medians

    def add(self, title: str, size: str, ours: float, theirs: float, sense: str, target: float) -> None:
        """Add a row: our figure, the peer's figure, and the target of their ratio."""
        ratio = ours / theirs
        met = ratio <= target if sense == "<=" else ratio >= target
        self.rows.append(
            [title, size, f"{ours:.3f}", f"{theirs:.3f}", f"{ratio:.2f}", f"{sense} {target:g}", verdict(met)]
        )


def rate(server: Server, work: Path) -> float:
    """Return wrk's requests per second of a small binary call."""
    call = binary(*np.random.default_rng(0).standard_normal((2, SMALL), dtype=np.float32))
    (work / "body").write_bytes(call.body)
    headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in call.headers.items())
    (work / "post.lua").write_text(
        f'wrk.method = "POST"\nwrk.body = io.open("{work}/body", "rb"):read("*a")\n{headers}'
    )
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{RATE_SECONDS}s", "-s", f"{work}/post.lua", server.url + INFER]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in answer:
        sys.exit(f"wrk met errors:\n{answer}")
    return float(answer.split("Requests/sec:")[1].split()[0])


def rates(race: Race, ours: Server, target: float, title: str) -> None:
    """Add a row of the requests per second of both servers, measured by turns."""
    with tempfile.TemporaryDirectory() as work:
        turns = [(rate(ours, Path(work)), rate(race.theirs, Path(work))) for _ in range(RATE_TURNS)]
    mine, theirs = (statistics.median(one) for one in zip(*turns, strict=True))
    race.add(title, f"{SMALL:,}", mine, theirs, ">=", target)


def memory_row(title: str) -> list[str]:
    """Return a row: the peak memory of a new server during one huge request, above its idle memory."""
    dY, X = np.random.default_rng(0).standard_normal((2, HUGE), dtype=np.float32)
    call = binary(dY, X)
    with serving(gradserve(), "/v2/health/ready") as server:
        idle = _memory(server.pid, "VmRSS")
        call.ask(server.connection)
        peak = _memory(server.pid, "VmHWM") - idle
    moved = len(call.body) + dY.nbytes
    ratio = peak / moved
    figures = [f"{peak / 1e6:.0f} MB", f"{moved / 1e6:.0f} MB", f"{ratio:.2f}", f"<= {MEMORY_LIMIT:g}"]
    return [title, f"{HUGE:,}", *figures, verdict(ratio <= MEMORY_LIMIT)]


def _memory(pid: int, what: str) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print the table."""
    if shutil.which("wrk") is None:
        sys.exit("This needs wrk; on Debian: apt-get install wrk")
    print("ReluGrad over HTTP, float32, ours against Triton, medians of requests by turns\n", flush=True)
    with watched(), ExitStack() as stack:
        theirs = stack.enter_context(serving(triton.command, "/v2/models/ReluGrad/ready"))
        ours = stack.enter_context(serving(gradserve(), "/v2/health/ready"))
        race = Race(ours, theirs)
        with bare_socket(8 * LARGE, 4 * LARGE) as floor:
            medians = race.between("binary", LARGE, binary, binary, 0.4, {"floor": floor})
        large = medians["ours"]
        race.add("binary / bare socket", f"{LARGE:,}", large * 1e3, medians["floor"] * 1e3, "<=", 2.0)
        race.between("safetensors / binary", LARGE, safetensors, binary, 0.45)
        race.between("base64 / binary", LARGE, in_base64, binary, 1.0)
        race.between("JSON lists", LARGE, lists, lists, 0.35)
        for size, target in ((1 << 18, 0.4), (1 << 14, 0.8), (SMALL, 1.0)):
            race.between("binary", size, binary, binary, target)
        huge = race.between("binary", HUGE, binary, binary, 0.5)["ours"]
        per_byte = huge / (HUGE / LARGE)
        race.add("binary, time per 1,048,576", f"{HUGE:,}", per_byte * 1e3, large * 1e3, "<=", 2.0)
        rates(race, ours, 1.0, "requests/s, 8 connections")
        store = stack.enter_context(tempfile.TemporaryDirectory())
        with serving(gradserve(workers=2, store=f"lmdb:{store}"), "/v2/health/ready") as both:
            rates(race, both, 1.5, "requests/s, 2 workers")
        race.rows.append(memory_row("peak memory / bytes"))
        print(table(["request", "elements", "ours", "peer", "ours / peer", "target", "met"], race.rows))


if __name__ == "__main__":
    main()
