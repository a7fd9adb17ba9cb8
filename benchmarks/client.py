"""Calls of the Python client against the bare exchange of the same bytes by http.client: `python -m benchmarks.client`.

Both call one server on loopback by turns. The bare side sends prepared bytes and reads the answer as bytes. The client
encodes the safetensors file, makes a key for each change, and decodes arrays.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from gradserve_client import AsyncClient, BufferSpec, Client
from gradserve_client._wire.tensors import MEDIA_TYPE, encode

from benchmarks.accumulator import accumulator_rows
from benchmarks.servers import Server, gradserve, serving
from benchmarks.timing import alternate, table, verdict, watched
from service.dtypes import Array

SIZES = {"1 KB": 1 << 8, "64 KB": 1 << 14, "4 MB": 1 << 20}
TARGETS = {"1 KB": 2.0, "64 KB": None, "4 MB": 1.25}
MODEL = 200
PARAMETERS = 2000
"""Buffers that a `GradientAccumulator` of a large model creates."""

ALONE = 100
"""Buffers that are created one by one for comparison: all would take many seconds a turn."""

_keys = itertools.count()


def numbers(*shape: int) -> Array:
    """Return integers as float32."""
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


class Bare:
    """A bare connection to the server."""

    def __init__(self, server: Server) -> None:
        self._connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=600)

    def post(self, path: str, body: bytes, *, keyed: bool) -> bytes:
        """Send these bytes and read the answer."""
        headers = {"Content-Type": MEDIA_TYPE, "Accept": "application/json" if keyed else MEDIA_TYPE}
        if keyed:
            headers["Idempotency-Key"] = f"bare-{next(_keys)}"
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200:
            sys.exit(f"{path} answers {response.status}: {answer[:300]!r}")
        return answer


def main() -> None:
    """Print the table."""
    print("Calls of the client, float32, medians by turns\n", flush=True)
    rows: list[list[str]] = []

    def row(
        case: str, bare: bytes, path: str, call: Callable[[], object], *, keyed: bool, target: float | None
    ) -> None:
        times = alternate(
            {"client": call, "bare": lambda: connection.post(path, bare, keyed=keyed)}, seconds=5.0, calls=5
        )
        ratio = times["client"] / times["bare"]
        wanted = ["-", "-"] if target is None else [f"<= {target:g}", verdict(ratio <= target)]
        rows.append([case, f"{times['client'] * 1e3:.3f}", f"{times['bare'] * 1e3:.3f}", f"{ratio:.2f}", *wanted])
        print(f"  {case}: {ratio:.2f}", flush=True)

    with watched(), ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(serving(gradserve(store=f"lmdb:{work}/data"), "/v2/health/ready"))
        client, connection = stack.enter_context(Client(server.url)), Bare(server)
        loop, asynchronous = asyncio.new_event_loop(), AsyncClient(server.url)
        stack.callback(loop.close)
        stack.callback(lambda: loop.run_until_complete(asynchronous.close()))
        for name, size in SIZES.items():
            g = numbers(size)
            buffer = client.buffers[f"g.{size}"]
            buffer.create(size)
            row(
                f"ReluGrad, tensors of {name}, ms",
                b"".join(encode({"dY": g, "X": g})),
                "/v1/ops/ReluGrad",
                lambda g=g: client.ops.relu_grad(g, g),  # type: ignore[misc]
                keyed=False,
                target=TARGETS[name],
            )
            row(
                f"ReluGrad by AsyncClient, {name}, ms",
                b"".join(encode({"dY": g, "X": g})),
                "/v1/ops/ReluGrad",
                lambda g=g: loop.run_until_complete(asynchronous.ops.relu_grad(g, g)),  # type: ignore[misc]
                keyed=False,
                target=None,
            )
            row(
                f"accumulate, {name}, ms",
                b"".join(encode({"gradient": g})),
                f"/v1/buffers/{buffer.name}/accumulate",
                lambda g=g, buffer=buffer: buffer.accumulate(g),  # type: ignore[misc]
                keyed=True,
                target=TARGETS[name],
            )
            row(
                f"accumulate by AsyncClient, {name}, ms",
                b"".join(encode({"gradient": g})),
                f"/v1/buffers/{buffer.name}/accumulate",
                lambda g=g, to=asynchronous.buffers[buffer.name]: loop.run_until_complete(to.accumulate(g)),  # type: ignore[misc]
                keyed=True,
                target=None,
            )
            if not np.array_equal(buffer.value(), g * np.float32(buffer.info().count)):
                sys.exit(f"the sum in {buffer.name} is wrong")
        model = {f"model.{number}": numbers(13107) for number in range(MODEL)}
        for name, g in model.items():
            client.buffers[name].create(g.shape)
        row(
            f"{MODEL} gradients, 10 MB, in one request, ms",
            b"".join(encode(model)),
            "/v1/buffers/accumulate",
            lambda: client.buffers.accumulate(model),
            keyed=True,
            target=None,
        )
        taken = creation(client)
        rows.append([f"{PARAMETERS} new buffers, in one request against one each, ms", *taken])
        sent, peak = (int(one) for one in measured(server.url).split())
        ratio = peak / sent
        rows.append(["peak memory of an add, MB", f"{peak / 1e6:.1f}", f"{sent / 1e6:.1f}", f"{ratio:.2f}", "<= 2", ""])
        rows[-1][-1] = verdict(ratio <= 2)
        print("\n" + table(["case", "client", "bare, bytes", "ratio", "target", "met"], rows) + "\n", flush=True)
        steps = accumulator_rows(client)
        print("\n" + table(["GradientAccumulator", "this", "full, whole or waiting", "ratio"], steps))


def creation(client: Client) -> list[str]:
    """Return the figures of a row: milliseconds to create many buffers at once, and one by one."""
    turns = itertools.count()
    spec: BufferSpec = {"shape": (4, 4), "quorum": 2}

    def names(count: int) -> list[str]:
        turn = next(turns)
        return [f"new.{turn}.{number}" for number in range(count)]

    times = alternate(
        {
            "many": lambda: client.buffers.create_many(dict.fromkeys(names(PARAMETERS), spec)),
            "each": lambda: [client.buffers[name].create(**spec) for name in names(ALONE)],
        },
        seconds=1.0,
        least=5,
    )
    many, each = times["many"], times["each"] * PARAMETERS / ALONE
    ratio = many / each
    return [f"{many * 1e3:.0f}", f"{each * 1e3:.0f}", f"{ratio:.2f}", "<= 0.2", verdict(ratio <= 0.2)]


MEASURE = """
import sys
from pathlib import Path
import numpy as np
from gradserve_client import Client

def memory(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) * 1024

g = np.ones(1 << 24, np.float32)
with Client(sys.argv[1]) as server:
    server.buffers["small"].create(1)
    server.buffers["small"].accumulate(g[:1])
    server.buffers["memory"].create(g.size)
    idle = memory("VmRSS")
    server.buffers["memory"].accumulate(g)
    print(g.nbytes, max(memory("VmHWM") - idle, 0))
"""


def measured(url: str) -> str:
    """Return the bytes of an add, and the growth in bytes of the client's process, which already holds the gradient."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, url]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


if __name__ == "__main__":
    main()
