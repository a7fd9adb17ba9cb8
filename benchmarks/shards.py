"""Adds of 64 MB to several servers at once: `python -m benchmarks.shards`.

The servers keep their buffers in LMDB on tmpfs. One client adds to three buffers in one call, which goes to one, two
or three servers. Contenders run by turns in one run. At the end every sum is compared with the adds; the exit status is
1 if a sum is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from functools import partial

import numpy as np
from gradserve_client import Client

from benchmarks.buffers import Table, numbers
from benchmarks.servers import gradserve, serving
from benchmarks.timing import alternate, table, watched
from service.dtypes import Array

ELEMENTS = 1 << 24
"""Elements of 64 MB of float32."""

SERVERS = 3

TMPFS = "/dev/shm"
"""A directory in memory, so that no disk limits the servers: their cores and the client's do."""


def shards(rows: Table) -> None:
    """Add rows for three adds of 64 MB over two and over three servers, against one server."""
    gradient = numbers(ELEMENTS)
    with ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory(dir=TMPFS))
        starts = [gradserve(store=f"lmdb:{work}/{number}", max_body_bytes=1 << 30) for number in range(SERVERS)]
        urls = [stack.enter_context(serving(start, "/v2/health/ready")).url for start in starts]
        clients = {count: stack.enter_context(Client(urls[:count])) for count in range(1, SERVERS + 1)}
        names = {count: [f"over.{count}.{number}" for number in range(SERVERS)] for count in clients}
        for count, client in clients.items():
            client.place({name: urls[number % count] for number, name in enumerate(names[count])})
            for name in names[count]:
                client.buffers[name].create(ELEMENTS)
        adds = {
            str(count): partial(client.buffers.accumulate, dict.fromkeys(names[count], gradient))
            for count, client in clients.items()
        }
        times = alternate(adds, seconds=20.0, least=7)
        for count, client in clients.items():
            _check(client, names[count], gradient)
    for count in range(2, SERVERS + 1):
        ours, theirs = times[str(count)] * 1e3, times["1"] * 1e3
        rows.add(f"three adds of 64 MB to {count} shards on tmpfs, ms", "one server", ours, theirs, "<=", None)


def _check(client: Client, names: list[str], gradient: Array) -> None:
    """Exit unless each buffer holds `gradient` as many times as it counts."""
    for name in names:
        count = client.buffers[name].info().count
        if not np.array_equal(client.buffers[name].value(), gradient * np.float32(count)):
            sys.exit(f"the sum in {name} is wrong")


def main() -> None:
    """Print the table."""
    print("Shards, float32, medians by turns\n", flush=True)
    rows = Table()
    with watched():
        shards(rows)
    print("\n" + table(["case", "against", "ours", "theirs", "ratio", "target", "met"], rows.rows))


if __name__ == "__main__":
    main()
