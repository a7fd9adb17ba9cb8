"""The server under more load than it can take, for minutes: `python -m benchmarks.soak [--seconds 180]`.

Two hundred connections send requests of 1 KB to 16 MB without a pause, and retry after 429. Then clients abandon ten
thousand requests halfway, and five hundred connections send a byte now and then. Then one tenant is greedy in many ways
(`tenants.py`), and another one is timed. The table has the results. The exit status is 1 after a fault: an answer of
5xx, a sum that is not exact, a leak, or a tenant that waits too long.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from gradserve_client import Client
from gradserve_client._wire.tensors import MEDIA_TYPE, encode

from benchmarks.servers import Server, gradserve, serving
from benchmarks.tenants import WANTED, tenants
from benchmarks.timing import table, verdict

SIZES = {256: 0.6, 1 << 14: 0.25, 1 << 18: 0.12, 1 << 22: 0.03}
"""Float32 elements of 1 KB to 16 MB, and the share of each size in the requests."""

AT_CAPACITY = 8
"""Connections at the server's capacity."""

OVERLOADED = 200
"""Connections that overload the server."""

EXPECTED = 1 << 16
"""A body of more bytes waits for 100 Continue, because the server may refuse the request."""

ABANDONED = 10_000
SLOW = 500
_keys = itertools.count()


@dataclass
class Load:
    """The results of a run of many connections."""

    statuses: Counter[int] = field(default_factory=Counter)
    bytes: int = 0
    added: Counter[int] = field(default_factory=Counter)
    probes: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


class Bodies:
    """The bodies of all requests, encoded once."""

    def __init__(self) -> None:
        self.gradients = {size: np.random.default_rng(size).integers(-8, 8, size).astype("f4") for size in SIZES}
        self.add = {size: b"".join(encode({"gradient": g})) for size, g in self.gradients.items()}
        self.relu = {size: b"".join(encode({"dY": g, "X": g})) for size, g in self.gradients.items()}


def head(path: str, body: bytes, key: str | None = None, *, expect: bool = False) -> bytes:
    """Return the head of a POST; with `expect`, the head asks for 100 Continue."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Type: {MEDIA_TYPE}", f"Content-Length: {len(body)}"]
    if expect:
        lines.append("Expect: 100-continue")
    if key is not None:
        lines += [f"Idempotency-Key: {key}", "Accept: application/json"]
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Read an answer; return its status and size in bytes."""
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    left = length
    while left:
        left -= len(await reader.read(min(left, 1 << 20))) or left
    return int(lines[0][9:12]), length


async def worker(port: int, bodies: Bodies, load: Load, end: float, seed: int) -> None:
    """Send requests over one connection until `end`, and retry after 429."""
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    while time.monotonic() < end:
        (size,) = rng.choices([*SIZES], [*SIZES.values()])
        adds = rng.random() < 0.5
        path = f"/v1/buffers/soak.{size}/accumulate" if adds else "/v1/ops/ReluGrad"
        body, key = (bodies.add if adds else bodies.relu)[size], f"soak-{next(_keys)}" if adds else None
        expect = len(body) > EXPECTED
        while True:
            writer.write(head(path, body, key, expect=expect))
            status, length = await answer(reader) if expect else (100, 0)
            if status == 100:
                writer.write(body)
                await writer.drain()
                status, length = await answer(reader)
            load.statuses[status] += 1
            if status != 429:
                break
            if expect:  # the server closes the connection after the refusal
                writer.close()
                reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
            await asyncio.sleep(rng.uniform(1, 1.5))
        if status == 200:
            load.bytes += len(body) + length
            load.added[size] += adds
    writer.close()
    await writer.wait_closed()


def probe(port: int, pid: int, seconds: float, results: Connection) -> None:
    """Time a health request ten times a second, and read the server's memory once a second. Runs in its own process."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    times, held, end = [], [], time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > end:
            break
        start = time.perf_counter()
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()
        times.append(time.perf_counter() - start)
        if number % 10 == 0:
            held.append(memory(pid))
        time.sleep(0.1)
    results.send((times, held))


def memory(pid: int) -> int:
    """Return the private bytes of a process: the system can take back those of mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def state(pid: int) -> tuple[int, int]:
    """Return the numbers of threads and open files of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir())), len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def run(port: int, pid: int, bodies: Bodies, connections: int, seconds: float) -> Load:
    """Run the load of `connections` connections for `seconds`."""
    load, end = Load(), time.monotonic() + seconds
    results, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=probe, args=(port, pid, seconds, theirs))
    other.start()
    await asyncio.gather(*(worker(port, bodies, load, end, seed) for seed in range(connections)))
    load.probes, load.memory = results.recv()
    other.join()
    return load


async def abandon(port: int, bodies: Bodies) -> None:
    """Abandon requests: half within the body, half within the answer."""
    size = 1 << 18

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = bodies.relu[size] if number % 20 == 0 else bodies.relu[1 << 14]
        writer.write(head("/v1/ops/ReluGrad", body))
        if number % 2:
            writer.write(body[: len(body) // 2])
        else:
            writer.write(body)
            await reader.read(100)
        writer.transport.abort()

    for start in range(0, ABANDONED, 50):
        await asyncio.gather(*(one(number) for number in range(start, start + 50)))


async def slowly(port: int, bodies: Bodies) -> list[float]:
    """Return the times of requests while five hundred connections each send a byte a second."""
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(SLOW)]
    times = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for letter in b"POST /v1":
        for _, one in slow:
            one.write(bytes([letter]))
        for _ in range(20):
            start = time.perf_counter()
            writer.write(head("/v1/ops/ReluGrad", bodies.relu[256]) + bodies.relu[256])
            status, _ = await answer(reader)
            times.append(time.perf_counter() - start)
            if status != 200:
                sys.exit(f"a request beside slow ones got {status}")
        await asyncio.sleep(0.5)
    for _, one in (*slow, (reader, writer)):
        one.close()
    return times


def starts(work: Path) -> Iterator[tuple[str, float]]:
    """Yield the seconds until a server is ready, with an empty store and with a store of 2 GB."""
    for name in ("an empty store", "the same with 2 GB"):
        begun = time.perf_counter()
        with serving(gradserve(store=f"lmdb:{work}/started", max_body_bytes=1 << 29), "/v2/health/ready") as server:
            yield name, time.perf_counter() - begun
            with Client(server.url) as client:
                g = np.ones(1 << 25, np.float32)
                for number in range(16):
                    client.buffers[f"large.{number}"].create(g.size)
                    client.buffers[f"large.{number}"].accumulate(g)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    seconds = parser.parse_args().seconds
    rows: list[list[str]] = []

    def row(what: str, figure: str, wanted: str, met: bool) -> None:
        rows.append([what, wanted, figure, verdict(met)])
        print(f"  {what}: {figure}", flush=True)

    bodies = Bodies()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        settings: dict[str, object] = {"store": f"lmdb:{work}/data", "max_bytes_in_flight": 128 << 20}
        with serving(gradserve(**settings), "/v2/health/ready") as server, Client(server.url) as client:
            measure(server, client, bodies, seconds, row)
        for name, taken in starts(work):
            limit = 1.5 if name == "an empty store" else 3.0
            row(f"start to ready, {name}", f"{taken:.2f} s", f"< {limit:g} s", taken < limit)
    for result in tenants(max(seconds / 6, 5)):
        print(f"  {result.kind}: {result.details}")
        row(f"99th percentile beside another tenant's {result.kind}", result.figures, WANTED, result.is_met)
    print("\n" + table(["what", "wanted", "is", "met"], rows))
    sys.exit(any(one[3] == "no" for one in rows))


def measure(server: Server, client: Client, bodies: Bodies, seconds: float, row: Any) -> None:
    """Run every part of the soak that shares one server."""
    port, added = int(server.url.rpartition(":")[2]), Counter[int]()
    for size in SIZES:
        client.buffers[f"soak.{size}"].create(size)
    calm = asyncio.run(run(port, server.pid, bodies, AT_CAPACITY, max(seconds / 6, 5)))
    before = state(server.pid)
    load = asyncio.run(run(port, server.pid, bodies, OVERLOADED, seconds))
    capacity, throughput = calm.bytes / max(seconds / 6, 5), load.bytes / seconds
    added = calm.added + load.added
    failed = {status: count for status, count in load.statuses.items() if status not in (200, 429)}
    row(f"answers to {OVERLOADED} connections", str(dict(load.statuses)), "200 and 429", not failed)
    exact = all(
        client.buffers[f"soak.{size}"].info().count == added[size]
        and np.array_equal(client.buffers[f"soak.{size}"].value(), g * np.float32(added[size]))
        for size, g in bodies.gradients.items()
    )
    row(f"sums of {sum(added.values())} adds", "exact" if exact else "wrong", "exact", exact)
    slowest = float(np.quantile(load.probes, 0.99))
    row("live, 99th percentile", f"{slowest * 1e3:.0f} ms", "< 100 ms", slowest < 0.1)
    ratio = throughput / capacity
    row("throughput against that of 8 connections", f"{ratio:.2f}", ">= 0.8", ratio >= 0.8)
    minute = max(len(load.memory) // 3, 1)
    # Means: memory changes by whole requests of 33 MB, and a median would jump by as much.
    first, last = statistics.fmean(load.memory[:minute]), statistics.fmean(load.memory[-minute:])
    row("memory, last third against first", f"{last / first:.3f}, {last / 1e6:.0f} MB", "<= 1.05", last <= 1.05 * first)
    idle = memory(server.pid)
    asyncio.run(abandon(port, bodies))
    for _ in range(100):
        if state(server.pid)[1] <= before[1] + 5:
            break
        time.sleep(0.1)
    after, grown = state(server.pid), memory(server.pid) / idle
    leaks = after[0] > before[0] + 2 or after[1] > before[1] + 5 or grown > 1.05
    figure = f"threads {before[0]} -> {after[0]}, files {before[1]} -> {after[1]}, memory x {grown:.3f}"
    row(f"after {ABANDONED} requests that were given up", figure, "no more", not leaks)
    times = asyncio.run(slowly(port, bodies))
    row(f"a request beside {SLOW} slow ones", f"{statistics.median(times) * 1e3:.2f} ms", "answered", True)


if __name__ == "__main__":
    main()
