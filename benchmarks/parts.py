"""A push of 8 GB in parts of 64 MiB against the same bytes as adds: `python -m benchmarks.parts [--parts 128]`.

Both run by turns, over HTTP, into buffers in LMDB on the disk (TMPDIR chooses it). Beside them another tenant sends
small adds, one after another. The table has the seconds, the request that completes, the other tenant's 99th
percentile, and the server's peak memory. The sums are compared at the end; the exit status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gradserve_client._wire.tensors import MEDIA_TYPE, encode

from benchmarks.servers import gradserve, serving
from benchmarks.tenants import SCOPES, connect
from benchmarks.timing import table
from service.keys import add

PART_BYTES = 64 << 20
TURNS = 3
Headers = dict[str, str]
_ids = itertools.count()


class Tenant:
    """A connection with a key."""

    def __init__(self, port: int, secret: str) -> None:
        self._connection = connect(port)
        self._head = {"Authorization": f"Bearer {secret}", "Content-Type": MEDIA_TYPE, "Accept": "application/json"}

    def ask(self, method: str, path: str, body: Any = None, head: Headers | None = None, expected: int = 200) -> bytes:
        self._connection.request(method, path, body, {**self._head, **(head or {})})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != expected:
            sys.exit(f"{method} {path} answers {answer.status}, not {expected}: {content[:300]!r}")
        return content

    def create(self, names: list[str], size: int) -> None:
        specs = {"buffers": dict.fromkeys(names, {"shape": [size]})}
        self.ask("POST", "/v1/buffers/create", json.dumps(specs), {"Content-Type": "application/json"})


def in_parts(tenant: Tenant, bodies: list[bytes]) -> float:
    """Send one push. Return the seconds of the request that completes it."""
    push = f"push-{next(_ids)}"
    for number, body in enumerate(bodies):
        path = f"/v1/buffers/accumulate?push={push}&part={number}&parts={len(bodies) + 1}"
        tenant.ask("POST", path, body, expected=202)
    start = time.perf_counter()
    path = f"/v1/buffers/accumulate?push={push}&part={len(bodies)}&parts={len(bodies) + 1}"
    tenant.ask("POST", path, b"".join(encode({})))
    return time.perf_counter() - start


def as_adds(tenant: Tenant, bodies: list[bytes]) -> float:
    """Send the same gradients as adds with keys."""
    for body in bodies:
        tenant.ask("POST", "/v1/buffers/accumulate", body, {"Idempotency-Key": f"add-{next(_ids)}"})
    return 0.0


class Modest:
    """A tenant that adds 4 KB again and again, in a thread of its own; `times` has the seconds of each add."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant, self.times = tenant, list[float]()
        self._body, self._stop = b"".join(encode({"gradient": np.ones(1024, np.float32)})), threading.Event()

    def until(self, done: Callable[[], Any]) -> Any:
        """Add while `done` runs. Return its result."""
        self._stop.clear()
        thread = threading.Thread(target=self._add)
        thread.start()
        try:
            return done()
        finally:
            self._stop.set()
            thread.join()

    def _add(self) -> None:
        self.times = []
        while not self._stop.is_set():
            start = time.perf_counter()
            self._tenant.ask("POST", "/v1/buffers/own/accumulate", self._body)
            self.times.append(time.perf_counter() - start)
            time.sleep(0.002)

    @property
    def p99(self) -> float:
        return float(np.quantile(self.times, 0.99))


def peak_bytes(pid: int) -> int:
    """Return the largest memory that the process had since the last `forget_peak`."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Measured(NamedTuple):
    """What one turn of a way took."""

    seconds: float
    last: float
    """Seconds of the last request."""
    p99: float
    """The other tenant's 99th percentile, in seconds."""
    peak: int
    """The server's largest memory, in bytes."""


Ways = dict[str, list[Measured]]

WAYS = {"adds": as_adds, "parts": in_parts}


def turn(pid: int, modest: Modest, large: Tenant, way: str, bodies: list[bytes]) -> Measured:
    forget_peak(pid)
    began = time.perf_counter()
    last = modest.until(partial(WAYS[way], large, bodies))
    measured = Measured(time.perf_counter() - began, last, modest.p99, peak_bytes(pid))
    time.sleep(2)
    return measured


def measure(parts: int, turns: int) -> tuple[Ways, float, list[str]]:
    """Return the turns of each way, the other tenant's 99th percentile alone, and the buffers with wrong sums."""
    names, size = [f"layer.{number:03}" for number in range(parts)], PART_BYTES // 4
    numbers = np.random.default_rng(0).integers(-8, 8, size).astype(np.float32)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        secrets = [add(work / "keys", name, SCOPES, name) for name in ("modest", "large")]
        start = gradserve(store=f"lmdb:{work}/data", keys=work / "keys", max_body_bytes=PART_BYTES + (1 << 20))
        with serving(start, "/v2/health/ready") as server:
            port = int(server.url.rpartition(":")[2])
            small, large = Tenant(port, secrets[0]), Tenant(port, secrets[1])
            small.create(["own"], 1024)
            large.create(names, size)
            bodies = [b"".join(encode({name: numbers})) for name in names]
            found: Ways = {way: [] for way in WAYS}
            modest, alone = Modest(small), []
            for _ in range(turns):
                modest.until(partial(time.sleep, 5))
                alone.append(modest.p99)
                for way, measured in found.items():
                    measured.append(turn(server.pid, modest, large, way, bodies))
            some = names[:: max(1, parts // 8)]
            wrong = [name for name in some if not _is_right(large, name, 2 * turns * numbers)]
    return found, statistics.median(alone), wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=128)
    parser.add_argument("--turns", type=int, default=TURNS)
    given = parser.parse_args()
    found, alone, wrong = measure(given.parts, given.turns)
    rows, seconds = [], {}
    for way, turns in found.items():
        seconds[way], last, p99, _ = (statistics.median(each) for each in zip(*turns, strict=True))
        peak = max(each.peak for each in turns) >> 20
        rows.append([way, f"{seconds[way]:.1f}", f"{1e3 * last:.0f}", f"{1e3 * p99:.1f}", f"{p99 / alone:.2f}", peak])
    print(
        f"{given.parts} parts of 64 MiB, medians of {given.turns} turns. Alone the other's p99 is {1e3 * alone:.1f} ms."
    )
    print(table(["way", "seconds", "last request, ms", "other's p99, ms", "to alone", "peak, MB"], rows))
    print(f"parts to adds: {seconds['parts'] / seconds['adds']:.2f}")
    sys.exit(f"wrong sums: {wrong}" if wrong else 0)


def _is_right(tenant: Tenant, name: str, expected: Any) -> bool:
    body = tenant.ask("GET", f"/v1/buffers/{name}/value", head={"Accept": MEDIA_TYPE})
    length = int.from_bytes(body[:8], "little")
    return bool((np.frombuffer(body, np.float32, offset=8 + length) == expected).all())


if __name__ == "__main__":
    main()
