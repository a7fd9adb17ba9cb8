"""A tenant beside a greedy one: `python -m benchmarks.tenants [--seconds 10] [--only GRUs] [--store URL]`.

One tenant lists, adds, reads and computes, one request after another. The other is greedy in one way after another. The
results are the ratio of the first tenant's 99th percentile to that of the same requests before anything greedy, and the
longest wait of an add. The exit status is 1 if a result is not met. The soak has this, too.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from gradserve_client._wire.tensors import MEDIA_TYPE, encode

from benchmarks.servers import gradserve, serving
from benchmarks.timing import verdict
from service.buffers.changes import Add, Change, Create, Take
from service.buffers.perform import Request
from service.buffers.record import Spec
from service.buffers.steps import MAX_CONTRIBUTOR_CHARACTERS, MAX_CONTRIBUTORS_BYTES, MAX_KEEP
from service.buffers.store import KEY_SECONDS
from service.buffers.url import open_store
from service.keys import add
from service.settings import Settings

LARGE_ELEMENTS = 1 << 26
"""Float32 elements of the buffers that the greedy tenant broadcasts into: 256 MB."""

MANY = 98_304
"""Plain buffers of the greedy tenant: nearly as many as a namespace may have."""

AT_ONCE = Settings.model_fields["max_tensors"].default
"""As many of them as a request may change: they share a prefix."""

HEAVY = [f"heavy.{number}" for number in range(300)]
"""Buffers that expect as many contributors as they may, and have them all."""

OLD = [f"old.{number}" for number in range(50)]
"""Buffers that keep as many steps as they may."""

CROWD = [
    f"{number:0{MAX_CONTRIBUTOR_CHARACTERS}}" for number in range(MAX_CONTRIBUTORS_BYTES // MAX_CONTRIBUTOR_CHARACTERS)
]
"""The longest names of contributors, as many as fit."""

FLOAT32 = np.dtype(np.float32)

LEAVE_SECONDS = 0.05
"""How long a client waits that leaves before it has its answer."""

PAUSE_SECONDS = 6.0
"""After a greedy way its last requests end, and its namespace does not count as present any more."""

SCOPES = ["ops", "buffers:read", "buffers:write"]

LEAST_RATIO, MOST_RATIO = 0.5, 5.0
"""A ratio below the first says that the tenant was not alone when it was measured alone."""

MOST_SECONDS = 1.0
"""The longest wait of an add."""

Headers = dict[str, str]
JSON = {"Content-Type": "application/json"}


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=300)


def ask(
    connection: http.client.HTTPConnection, path: str, headers: Headers, body: bytes | None = None, method: str = ""
) -> int:
    """Send a request, read the answer, and return its status. A body makes it a POST."""
    method = method or ("GET" if body is None else "POST")
    connection.request(method, path, body, {"Content-Type": MEDIA_TYPE, **headers})
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


class Wanted(NamedTuple):
    """A request of the greedy tenant."""

    path: str
    body: bytes | None = b""
    method: str = ""
    headers: Headers = {}


def repeated(connections: int, wanted: Sequence[Wanted], own: Headers, patience: float = 300.0) -> Callable[..., None]:
    """Return a function that sends these requests over many connections, again and again, each with `patience`."""

    def one(port: int, stop: Event, number: int) -> None:
        connection = connect(port)
        connection.timeout = patience
        for path, body, method, headers in itertools.islice(itertools.cycle(wanted), number, None):
            if stop.is_set():
                break
            try:
                if ask(connection, path, {**own, **headers}, body, method) != 200:
                    time.sleep(0.1)
            except (OSError, http.client.HTTPException):
                connection.close()

    def run(port: int, stop: Event) -> None:
        threads = [
            threading.Thread(target=one, args=(port, stop, number), daemon=True) for number in range(connections)
        ]
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
    one = b"".join(encode({"gradient": np.ones(1, np.float32)}))
    rules = [orjson.dumps({"quorum": 100 + more, "contributors": CROWD[more:]}) for more in (0, 1)]
    groups = [f"{number}." for number in range(MANY // AT_ONCE)]
    quorums = [b'{"quorum": %d}' % quorum for quorum in (7, 8)]
    takes = [Wanted(f"/v1/buffers/take?prefix={group}") for group in groups]
    ways = {
        "GRUs": repeated(200, [Wanted("/v1/ops/GRUTraining?outputs=HFinal", grus())], headers),
        "broadcasts": repeated(4, [Wanted("/v1/buffers/large/accumulate", one)], headers),
        "takes of many": repeated(4, takes, headers),
        "takes of all": repeated(4, [Wanted("/v1/buffers/take?prefix=")], headers),
        "takes that nobody awaits": repeated(3, takes, headers, LEAVE_SECONDS),
        "rules of many": repeated(
            3,
            [Wanted(f"/v1/buffers?prefix={group}", body, "PATCH", JSON) for body in quorums for group in groups],
            headers,
        ),
        "keyed replays": repeated(
            4, [Wanted("/v1/buffers/zero?prefix=0.", headers={"Idempotency-Key": "again"})], headers
        ),
        "records at their limits": repeated(
            6,
            [
                *(Wanted("/v1/buffers?prefix=heavy", body, "PATCH", JSON) for body in rules),
                Wanted("/v1/buffers?limit=1000&prefix=heavy", None),
                Wanted("/v1/buffers?limit=1000&prefix=old", None),
                Wanted("/v1/buffers/zero?prefix=old"),
                Wanted("/v1/buffers/take?prefix=heavy&return=receipt", headers={"Idempotency-Key": "heavy"}),
                Wanted("/v1/buffers/statistics?prefix=heavy"),
                Wanted("/v1/buffers/value?prefix=heavy"),
            ],
            headers,
        ),
    }
    ways[kind](port, stop)


KINDS = (
    "idle uploads",
    "GRUs",
    "broadcasts",
    "takes of many",
    "takes of all",
    "takes that nobody awaits",
    "rules of many",
    "keyed replays",
    "records at their limits",
)


# ----- the measurement -----


def prepare(url: str) -> None:
    """Create the buffers of both tenants."""
    plain = [f"{number // AT_ONCE}.{number}" for number in range(MANY)]
    with_all: Sequence[tuple[str, list[str], Spec]] = (
        ("modest", ["own"], Spec((256,), FLOAT32)),
        ("greedy", ["large"], Spec((LARGE_ELEMENTS,), FLOAT32)),
        *(("greedy", plain[start : start + AT_ONCE], Spec((1,), FLOAT32)) for start in range(0, MANY, AT_ONCE)),
        ("greedy", HEAVY, Spec((1,), FLOAT32, contributors=tuple(CROWD))),
        ("greedy", OLD, Spec((1,), FLOAT32, keep=MAX_KEEP)),
    )
    store = open_store(url, max_bytes=64 << 30, key_seconds=KEY_SECONDS)
    for namespace, names, spec in with_all:
        store.within(namespace).submit(Request([Create(name=name, spec=spec) for name in names])).result()
    greedy, one = store.within("greedy"), np.ones(1, np.float32)
    adds: Iterator[list[Change]] = (
        [Add(name=name, gradient=one, contributor=each) for name in HEAVY] for each in CROWD
    )
    takes: Iterator[list[Change]] = ([Take(name=name, want_value=False) for name in OLD] for _ in range(MAX_KEEP))
    for done in [greedy.submit(Request(changes)) for changes in itertools.chain(adds, takes)]:
        done.result()
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


class Result(NamedTuple):
    """How a tenant fares beside a greedy one: the ratio of 99th percentiles, and the longest seconds of an add."""

    kind: str
    ratio: float
    longest: float
    details: str

    @property
    def figures(self) -> str:
        return f"{self.ratio:.2f} times, an add waits {self.longest:.2f} s at most"

    @property
    def is_met(self) -> bool:
        return LEAST_RATIO <= self.ratio <= MOST_RATIO and self.longest <= MOST_SECONDS


WANTED = f"{LEAST_RATIO:g} to {MOST_RATIO:g} times, {MOST_SECONDS:g} s"


def tenants(seconds: float, kinds: Sequence[str] = KINDS, url: str = "") -> Iterator[Result]:
    """Yield the result for each greedy way, over the empty store at `url`, by default a new one of LMDB."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        url = url or f"lmdb:{work}/data"
        prepare(url)
        secrets = [add(work / "keys", name, SCOPES, name) for name in ("modest", "greedy")]
        both = [{"Authorization": f"Bearer {secret}"} for secret in secrets]
        with serving(gradserve(store=url, keys=work / "keys"), "/v2/health/ready") as server:
            port = int(server.url.rpartition(":")[2])
            alone, _ = measured(port, both[0], seconds)
            for kind in kinds:
                times, failures = beside(kind, port, both, seconds)
                details = ", ".join(
                    f"{name} {1e3 * np.quantile(times[name], 0.99):.1f} ms, alone"
                    f" {1e3 * np.quantile(alone[name], 0.99):.1f} (median {1e3 * statistics.median(times[name]):.2f},"
                    f" {1e3 * statistics.median(alone[name]):.2f}; {len(times[name])})"
                    for name in alone
                )
                refused = f", refused: {failures}" if failures else ""
                yield Result(kind, p99(times) / p99(alone), max(times["small add"]), details + refused)
                time.sleep(PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--only", choices=KINDS, nargs="*", default=KINDS)
    parser.add_argument("--store", default="", help="the URL of an empty store, by default of a new one of LMDB")
    given, met = parser.parse_args(), True
    for result in tenants(given.seconds, given.only, given.store):
        met = met and result.is_met
        print(f"{result.kind}: {result.figures}: {verdict(result.is_met)}\n  {result.details}", flush=True)
    sys.exit(not met)


if __name__ == "__main__":
    main()
