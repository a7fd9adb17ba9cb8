"""Durable adds beside a page that asks for statistics of 100 buffers every 2 s: `python -m benchmarks.dashboard`.

Adds of 4 KB come over sixteen connections, adds of 4 MB over one, to all buffers of the page in turn. Turns with and
without the page alternate. The exit status is 1 if an add takes over 5 % longer beside the page.
"""

from __future__ import annotations

import itertools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.buffers import CONNECTIONS, LARGE, RATE_SECONDS, SMALL, Client, Table, file, numbers, wrk
from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import table, watched

BUFFERS = 100
PAGE_SECONDS = 2.0
TURNS = 7
MOST = 1.05
"""What an add may take beside a page, of what it takes without: the limit of the statistics."""


@contextmanager
def page(server: Server, prefix: str) -> Iterator[list[int]]:
    """Ask for the statistics of the prefix every two seconds meanwhile. Yield how many buffers each answer knew."""
    client, closed, known = Client(server), threading.Event(), list[int]()

    def ask() -> None:
        while True:
            found = json.loads(client.ask("POST", f"/v1/buffers/statistics?prefix={prefix}"))["statistics"]
            known.append(sum(one is not None for one in found.values()))
            if closed.wait(PAGE_SECONDS):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield known
    finally:
        closed.set()
        thread.join()


def large_adds(client: Client, body: bytes, turns: Iterator[int]) -> float:
    """Return adds of 4 MB per second over one connection."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + 2 * RATE_SECONDS:
        client.add(f"/v1/buffers/large.{next(turns) % BUFFERS}/accumulate", body)
        count += 1
    return count / (time.perf_counter() - start)


def compare(rows: Table, case: str, server: Server, prefix: str, rate: Callable[[], float]) -> float:
    """Add a row with the microseconds of an add beside a page and without, and return their ratio."""
    beside, alone = [], []
    for turn in range(2 * TURNS):
        if turn % 4 in (0, 3):
            alone.append(rate())
            continue
        with page(server, prefix) as known:
            beside.append(rate())
        print(f"  {case}: {beside[-1]:.4g} adds/s beside a page that knew {known} buffers", flush=True)
    taken, usual = 1e6 / statistics.median(beside), 1e6 / statistics.median(alone)
    rows.add(f"{case}, beside a page, us", "without a page", taken, usual, "<=", MOST)
    return taken / usual


def main() -> None:
    """Print the table."""
    if shutil.which("wrk") is None:
        sys.exit("This needs wrk; on Debian: apt-get install wrk")
    print("Durable adds beside a page of statistics, float32, medians by turns\n", flush=True)
    rows, turns = Table(), itertools.count()
    with watched(), tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        with serving(gradserve(store=f"lmdb:{work}/data"), "/v2/health/ready") as server:
            client, small, large = Client(server), file(gradient=numbers(SMALL)), file(gradient=numbers(LARGE))
            for number in range(BUFFERS):
                client.create(f"small.{number}", SMALL)
                client.create(f"large.{number}", LARGE)
                client.add(f"/v1/buffers/small.{number}/accumulate", small)
            path = "/v1/buffers/small.%/accumulate"
            ratios = [
                compare(
                    rows,
                    f"add of 4 KB by {CONNECTIONS}",
                    server,
                    "small.",
                    lambda: wrk(server, work, path, small, keys=True),
                ),
                compare(rows, "add of 4 MB", server, "large.", lambda: large_adds(client, large, turns)),
            ]
    print("\n" + table(["case", "against", "ours", "theirs", "ratio", "target", "met"], rows.rows))
    sys.exit(max(ratios) > MOST)


if __name__ == "__main__":
    main()
