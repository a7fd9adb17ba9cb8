"""Ways to a server on the same machine against loopback TCP: `python -m benchmarks.local`.

One server listens on a port and on a UNIX socket, and offers shared memory. The same bytes go by turns over one
connection to each, from one process. The store is in LMDB, in a temporary directory (TMPDIR chooses the disk), and
every add has an Idempotency-Key of its own. Every answer is compared with the numbers sent; the exit status is 1 if one
is wrong.
"""

from __future__ import annotations

import http.client
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import gradserve_client
import numpy as np
from gradserve_client._http.transport import WIDE

from benchmarks.buffers import SAFETENSORS, Client, Table, check, file, numbers
from benchmarks.servers import Server, gradserve, serving
from benchmarks.shared_memory import shared
from benchmarks.timing import alternate, table, watched

SIZES = {"4 KB": 1 << 10, "64 KB": 1 << 14, "4 MB": 1 << 20}
"""Elements of float32 in a tensor."""

RELU_TARGETS = {"4 MB": 0.88}
ADD_TARGETS = {"4 MB": 0.9}
SECONDS = 6.0
CALLS = 10


class OverSocket(Client):
    """A connection to the server's UNIX socket, which holds as many bytes as that of the Python client."""

    def __init__(self, path: Path) -> None:
        self._connection = http.client.HTTPConnection("localhost", timeout=600)
        self._connection.sock = socket.socket(socket.AF_UNIX)
        self._connection.sock.setsockopt(*WIDE)
        self._connection.sock.connect(str(path))


def relu(rows: Table, server: Server, path: Path) -> None:
    """ReluGrad over the UNIX socket against TCP: its tensors are dY and X, and its answer is as large as one."""
    tcp, unix = Client(server), OverSocket(path)
    for title, size in SIZES.items():
        g = numbers(size)
        body = file(dY=g, X=np.ones_like(g))

        def matches(name: str, answer: bytes, g: np.ndarray = g) -> None:
            if answer[-g.nbytes :] != g.tobytes():
                sys.exit(f"the answer over {name} is wrong")

        times = alternate(
            {
                "unix": lambda body=body: unix.ask("POST", "/v1/ops/ReluGrad", body, SAFETENSORS),  # type: ignore[misc]
                "tcp": lambda body=body: tcp.ask("POST", "/v1/ops/ReluGrad", body, SAFETENSORS),  # type: ignore[misc]
            },
            seconds=SECONDS,
            calls=CALLS,
            check=matches,
        )
        case = f"ReluGrad, UNIX socket, tensors of {title}, ms"
        rows.add(case, "TCP", times["unix"] * 1e3, times["tcp"] * 1e3, "<=", RELU_TARGETS.get(title))


def add(rows: Table, server: Server, path: Path) -> None:
    """Durable adds over the UNIX socket against TCP."""
    tcp, unix = Client(server), OverSocket(path)
    for title, size in SIZES.items():
        g, name = numbers(size), f"sum.{size}"
        tcp.create(name, size)
        body = file(gradient=g)
        target = f"/v1/buffers/{name}/accumulate"
        times = alternate(
            {
                "unix": lambda target=target, body=body: unix.add(target, body),  # type: ignore[misc]
                "tcp": lambda target=target, body=body: tcp.add(target, body),  # type: ignore[misc]
            },
            seconds=SECONDS,
            calls=CALLS,
        )
        check(tcp, name, g)
        case = f"durable add, UNIX socket, {title}, ms"
        rows.add(case, "TCP", times["unix"] * 1e3, times["tcp"] * 1e3, "<=", ADD_TARGETS.get(title))


def python_client(rows: Table, server: Server, path: Path) -> None:
    """The same of 4 MB with the Python client, which also encodes and decodes."""
    g = numbers(SIZES["4 MB"])
    with gradserve_client.Client(server.url) as tcp, gradserve_client.Client(f"unix:{path}") as unix:
        tcp.buffers["client"].create(g.shape)
        relu = {"unix": lambda: unix.ops.relu_grad(g, g), "tcp": lambda: tcp.ops.relu_grad(g, g)}
        add = {
            "unix": lambda: unix.buffers["client"].accumulate(g).count,
            "tcp": lambda: tcp.buffers["client"].accumulate(g).count,
        }
        for case, calls, target in (
            ("ReluGrad", relu, RELU_TARGETS["4 MB"]),
            ("durable add", add, ADD_TARGETS["4 MB"]),
        ):
            times = alternate(calls, seconds=SECONDS, calls=CALLS)
            rows.add(f"{case}, Python client, 4 MB, ms", "TCP", times["unix"] * 1e3, times["tcp"] * 1e3, "<=", target)
        check(Client(server), "client", g)


def main() -> None:
    """Print the table."""
    print("Ways to a server on the same machine, float32, medians by turns\n", flush=True)
    rows = Table()
    with watched(), ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = work / "http.sock"
        start = gradserve(store=f"lmdb:{work}/data", socket=path, shared_memory=True)
        server = stack.enter_context(serving(start, "/v2/health/ready"))
        for measure in (relu, add, python_client):
            measure(rows, server, path)
        shared(rows, server)
        print("\n" + table(["case", "against", "ours", "theirs", "ratio", "target", "met"], rows.rows))


if __name__ == "__main__":
    main()
