"""NVIDIA's perf_analyzer, unmodified: it is written with NVIDIA's client for C++."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import serving

PLACE = Path(sys.prefix) / "perf_analyzer"
TOOL = PLACE / "bin/perf_analyzer"
LIBRARIES = {"LD_LIBRARY_PATH": str(PLACE / "nvidia/cuda_runtime/lib")}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *options], capture_output=True, text=True, timeout=120, env=LIBRARIES)


def works() -> bool:
    """Return whether the program is here and finds its libraries."""
    return TOOL.exists() and "error while loading" not in run("--version").stderr


pytestmark = pytest.mark.skipif(
    not works(), reason="perf_analyzer is missing: make peers installs it, and apt-get install libb64-0d on Debian"
)

RELU = ["-m", "ReluGrad", "--shape", "dY:64", "--shape", "X:64", "--request-count=20"]
SHARED = ["--shared-memory=system", "--output-shared-memory-size=256"]
CASES: dict[str, list[str]] = {
    "over HTTP": RELU,
    "in shared memory": [*RELU, *SHARED],
    "several at a time": [*RELU, *SHARED, "-a", "--concurrency-range", "4"],
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(shared_memory=True) as url:
        yield url.removeprefix("http://")


def test_it_runs_to_its_end(address: str) -> None:
    """One after the other: its regions of shared memory have the same names on the whole machine each time."""
    for case, options in CASES.items():
        done = run("-u", address, *options)
        said = f"{case}: {done.stdout}{done.stderr}"
        assert done.returncode == 0, said
        assert "throughput: " in said, said
        assert "Unable" not in said, said
