"""Tensors in shared memory, with NVIDIA's client, against bytes over TCP and against Triton's own shared memory.

A call begins with two NumPy arrays and ends with one. So it copies the inputs into the region, as the client copies
them into the body otherwise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import tritonclient.http as client  # type: ignore[import-untyped]
from tritonclient.utils import shared_memory  # type: ignore[import-untyped]

from benchmarks import triton
from benchmarks.buffers import Table
from benchmarks.servers import Server, serving
from benchmarks.timing import alternate
from service.dtypes import Array

ELEMENTS = 1 << 20
"""Elements of float32 in a tensor: 8 MB go in, 4 MB come out."""

SECONDS = 12.0
CALLS = 10


class Caller:
    """Calls ReluGrad on a server with NVIDIA's client: with bytes, or by a region of shared memory."""

    def __init__(self, server: Server, name: str, elements: int = ELEMENTS) -> None:
        self._client = client.InferenceServerClient(server.url.removeprefix("http://"))
        self._elements, size, key = elements, 4 * elements, f"/gradserve-bench-{os.getpid()}-{name}"
        self._region = shared_memory.create_shared_memory_region(name, key, 3 * size, create_only=True)
        self._client.register_system_shared_memory(name, key, 3 * size)
        self._shared = [client.InferInput(one, [elements], "FP32") for one in ("dY", "X")]
        self._output = client.InferRequestedOutput("dX")
        for number, one in enumerate([*self._shared, self._output]):
            one.set_shared_memory(name, size, number * size)

    def by_region(self, dY: Array, X: Array) -> Array:
        """Return dX, a view of the region."""
        shared_memory.set_shared_memory_region(self._region, [dY, X])
        self._client.infer("ReluGrad", self._shared, outputs=[self._output])
        output: Array = shared_memory.get_contents_as_numpy(
            self._region, np.float32, [self._elements], 8 * self._elements
        )
        return output

    def in_bytes(self, dY: Array, X: Array) -> Array:
        """Return dX, a view of the answer's bytes."""
        given = [client.InferInput(name, one.shape, "FP32") for name, one in (("dY", dY), ("X", X))]
        for one, tensor in zip(given, (dY, X), strict=True):
            one.set_data_from_numpy(tensor)
        output: Array = self._client.infer("ReluGrad", given).as_numpy("dX")
        return output

    def close(self) -> None:
        """Remove the region, and close the connection."""
        self._client.unregister_system_shared_memory()
        shared_memory.destroy_shared_memory_region(self._region)
        self._client.close()


@contextmanager
def calling(server: Server, name: str) -> Iterator[Caller]:
    """Yield a caller, and close it at the end."""
    caller = Caller(server, name)
    try:
        yield caller
    finally:
        caller.close()


def shared(rows: Table, server: Server) -> None:
    """ReluGrad by shared memory against bytes over TCP, and against Triton's shared memory."""
    dY, X = np.random.default_rng(0).standard_normal((2, ELEMENTS), dtype=np.float32)
    expected = np.where(X > 0, dY, np.float32(0))

    def matches(name: str, answer: Array) -> None:
        if not np.array_equal(answer, expected):
            sys.exit(f"the answer to {name} is wrong")

    with ExitStack() as stack:
        peer = stack.enter_context(serving(triton.command, "/v2/models/ReluGrad/ready"))
        ours, theirs = (stack.enter_context(calling(one, name)) for one, name in ((server, "ours"), (peer, "theirs")))
        times = alternate(
            {
                "shared": lambda: ours.by_region(dY, X),
                "bytes": lambda: ours.in_bytes(dY, X),
                "triton": lambda: theirs.by_region(dY, X),
            },
            seconds=SECONDS,
            calls=CALLS,
            check=matches,
        )
    case, milliseconds = "ReluGrad, shared memory, tensors of 4 MB, ms", {name: s * 1e3 for name, s in times.items()}
    rows.add(case, "NVIDIA's client, bytes", milliseconds["shared"], milliseconds["bytes"], "<=", 0.3)
    rows.add(case, "Triton's shared memory", milliseconds["shared"], milliseconds["triton"], "<=", 0.5)
