"""A tenant beside a greedy one: `python -m benchmarks.tenants [--seconds 10] [--only GRUs]`. The soak has this, too.

One tenant lists, adds, reads and computes, one request after another. The other is greedy in one way after another. The
result is the ratio of the first tenant's 99th percentile to its own just before, without the other.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from gradserve_client._wire.tensors import MEDIA_TYPE, encode

from benchmarks.servers import gradserve, serving
from service.buffers.changes import Create
from service.buffers.lmdb import LmdbStore
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.keys import add

LARGE_ELEMENTS = 1 << 26
"""Float32 elements of the buffers that the greedy tenant broadcasts into: 256 MB."""

MANY = 100_000
"""Buffers that the greedy tenant names in one request: as many as a namespace may have."""

PAUSE_SECONDS = 6.0
"""After a greedy way its last requests end, and its namespace does not count as present any more."""

SCOPES = ["ops", "buffers:read", "buffers:write"]
MOST_RATIO = 5.0

Headers = dict[str, str]


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=300)


def ask(connection: http.client.HTTPConnection, path: str, headers: Headers, body: bytes | None = None) -> int:
    """Send a request, read the answer, and return its status. A body makes it a POST."""
    connection.request("GET" if body is None else "POST", path, body, {**headers, "Content-Type": MEDIA_TYPE})
    answer = connection.getresponse()
    answer.read()
    return answer.status


# ----- the tenant that is measured -----


def modest(port: int, headers: Headers, seconds: float, results: Connection) -> None:
    """Send requests one after another, and time them by kind. Runs in its own process."""
    small, large = np.ones(256, np.float32), np.ones(1 << 17, np.float32)
    kinds = {
        "list": ("/v1/buffers", None),
        "small add": ("/v1/buffers/own/accumulate", b"".join(encode({"gradient": small}))),
        "read": ("/v1/buffers/own/value", None),
        "small ReluGrad": ("/v1/ops/ReluGrad", b"".join(encode({"dY": small, "X": small}))),
        "ReluGrad of 1 MB": ("/v1/ops/ReluGrad", b"".join(encode({"dY": large, "X": large}))),
    }
    times: dict[str, list[float]] = defaultdict(list)
    failures: dict[str, list[int]] = defaultdict(list)
    connection, end = connect(port), time.monotonic() + seconds
    while time.monotonic() < end:
        for kind, (path, body) in kinds.items():
            start = time.perf_counter()
            status = ask(connection, path, headers, body)
            times[kind].append(time.perf_counter() - start)
            if status != 200:
                failures[kind].append(status)
    results.send((dict(times), dict(failures)))


# ----- the greedy tenant, in several ways -----


def repeated(connections: int, path: str, headers: Headers, body: bytes) -> Callable[[int, Event], None]:
    """Return a function that sends a request over many connections, again and again."""

    def one(port: int, stop: Event) -> None:
        connection = connect(port)
        while not stop.is_set():
            try:
                if ask(connection, path, headers, body) != 200:
                    time.sleep(0.1)
            except (OSError, http.client.HTTPException):
                connection.close()

    def run(port: int, stop: Event) -> None:
        threads = [threading.Thread(target=one, args=(port, stop), daemon=True) for _ in range(connections)]
        for thread in threads:
            thread.start()
        stop.wait()

    return run


def idle_uploads(port: int, headers: Headers, stop: Event) -> None:
    """Announce four bodies of 256 MB and send nothing."""
    uploads = [connect(port) for _ in range(4)]
    for upload in uploads:
        upload.putrequest("POST", "/v1/buffers/large/accumulate")
        for name, value in {**headers, "Content-Type": MEDIA_TYPE, "Content-Length": str(1 << 28)}.items():
            upload.putheader(name, value)
        upload.endheaders()
    stop.wait()


def grus() -> bytes:
    """Return a body of 50 KB whose GRU takes a tenth of a second and more."""
    steps, hidden = 1000, 16
    shapes = {"X": (steps, 8, 1), "W": (1, 3 * hidden, 1), "R": (1, 3 * hidden, hidden)}
    return b"".join(encode({name: np.ones(shape, np.float32) / hidden for name, shape in shapes.items()}))


def greedy(kind: str, port: int, headers: Headers, stop: Event) -> None:
    """Be greedy until `stop`. Runs in its own process."""
    if kind == "idle uploads":
        idle_uploads(port, headers, stop)
        return
    key = {**headers, "Idempotency-Key": "again"}
    one = b"".join(encode({"gradient": np.ones(1, np.float32)}))
    ways = {
        "GRUs": repeated(200, "/v1/ops/GRUTraining?outputs=HFinal", headers, grus()),
        "broadcasts": repeated(4, "/v1/buffers/large/accumulate", headers, one),
        "takes of many": repeated(4, "/v1/buffers/take?prefix=b", headers, b""),
        "keyed replays": repeated(4, "/v1/buffers/zero?prefix=b", key, b""),
    }
    ways[kind](port, stop)


KINDS = ("idle uploads", "GRUs", "broadcasts", "takes of many", "keyed replays")


# ----- the measurement -----


def prepare(path: Path) -> None:
    """Create the buffers of both tenants."""
    with_all: Sequence[tuple[str, list[str], int]] = (
        ("modest", ["own"], 256),
        ("greedy", ["large"], LARGE_ELEMENTS),
        ("greedy", [f"b{number}" for number in range(MANY - 1)], 1),
    )
    store = LmdbStore(path, max_bytes=64 << 30)
    for namespace, names, size in with_all:
        spec = Spec((size,), np.dtype(np.float32))
        store.within(namespace).submit(Request([Create(name=name, spec=spec) for name in names])).result()
    store.close()


def measured(port: int, headers: Headers, seconds: float) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    results, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=modest, args=(port, headers, seconds, theirs))
    process.start()
    times, failures = results.recv()
    process.join()
    return times, failures


def beside(kind: str, port: int, both: Sequence[Headers], seconds: float) -> Any:
    """Measure the modest tenant beside the greedy one."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=greedy, args=(kind, port, both[1], stop), daemon=True)
    process.start()
    try:
        time.sleep(2.0)
        return measured(port, both[0], seconds)
    finally:
        stop.set()
        process.join()


def p99(times: dict[str, list[float]]) -> float:
    return float(np.quantile([one for some in times.values() for one in some], 0.99))


def tenants(seconds: float, kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, float, str]]:
    """Yield for each greedy way its name, the ratio of the modest tenant's 99th percentiles, and details."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        prepare(work / "data")
        secrets = [add(work / "keys", name, SCOPES, name) for name in ("modest", "greedy")]
        both = [{"Authorization": f"Bearer {secret}"} for secret in secrets]
        with serving(gradserve(store=f"lmdb:{work}/data", keys=work / "keys"), "/v2/health/ready") as server:
            port = int(server.url.rpartition(":")[2])
            for kind in kinds:
                alone, _ = measured(port, both[0], seconds)
                times, failures = beside(kind, port, both, seconds)
                details = ", ".join(
                    f"{name} {1e3 * np.quantile(times[name], 0.99):.1f} ms, alone"
                    f" {1e3 * np.quantile(alone[name], 0.99):.1f} (median {1e3 * statistics.median(times[name]):.2f},"
                    f" {1e3 * statistics.median(alone[name]):.2f}; {len(times[name])})"
                    for name in alone
                )
                yield kind, p99(times) / p99(alone), details + (f", refused: {failures}" if failures else "")
                time.sleep(PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    given = parser.parse_args()
    for kind, ratio, details in tenants(given.seconds, given.only):
        print(f"{kind}: {ratio:.2f}\n  {details}", flush=True)


if __name__ == "__main__":
    main()
