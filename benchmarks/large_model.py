"""A model of 8 GB through `GradientAccumulator` in requests of 64 MiB: `python -m benchmarks.large_model`.

It prints the seconds of a push and of a pull, and the server's peak memory beside its limits. The store is on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from gradserve_client import Client
from gradserve_client.torch import GradientAccumulator

from benchmarks.servers import gradserve, serving

MIB = 1 << 20
REQUEST_BYTES = 64 * MIB
ELEMENTS = REQUEST_BYTES // 8
"""Elements of a parameter: two float32 parameters fit into a request."""


def model_of(gigabytes: float) -> torch.nn.ParameterList:
    """Return a model of this size whose parameters share one element, so that this machine can hold it."""
    count = round(gigabytes * 1024 * MIB / (4 * ELEMENTS))
    return torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1).expand(ELEMENTS)) for _ in range(count)])


def peak_megabytes(pid: int) -> float:
    """Return the most memory that the process has had, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8, help="the size of the model")
    arguments = parser.parse_args()
    model = model_of(arguments.gigabytes)
    with (
        tempfile.TemporaryDirectory() as work,
        serving(gradserve(store=f"lmdb:{work}/data"), "/v2/health/ready") as server,
        Client(server.url) as client,
    ):
        gradients = GradientAccumulator(model, client, run="large", worker="0", quorum=1, request_bytes=REQUEST_BYTES)
        for number, parameter in enumerate(model):
            parameter.grad = torch.full((1,), float(number)).expand(ELEMENTS)
        print(f"started with {peak_megabytes(server.pid):.0f} MB", flush=True)
        begun = time.perf_counter()
        gradients.push()
        pushed = time.perf_counter()
        print(f"push: {pushed - begun:.1f} s, server's peak {peak_megabytes(server.pid):.0f} MB", flush=True)
        gradients.pull()
        pulled = time.perf_counter()
        print(f"pull: {pulled - pushed:.1f} s, server's peak {peak_megabytes(server.pid):.0f} MB", flush=True)
        for number, parameter in enumerate(model):
            assert parameter.grad is not None
            assert bool((parameter.grad == number).all()), number
        print(f"all {len(model)} gradients are right", flush=True)


if __name__ == "__main__":
    main()
