"""Examples run as users run them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradserve_client import Client

from tests.serving import serving
from tests.zygote import Forked

EXAMPLES = Path(__file__).parents[2] / "examples"

PRELOADED = ("gradserve_client.torch", "torch._dynamo", "sklearn.datasets")
"""What the examples import, which takes longer than all else in a short run."""


def run(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the example in a process that has imported PyTorch and scikit-learn. A warning fails the run."""
    path = str(EXAMPLES / f"{example}.py")
    with tempfile.TemporaryDirectory() as directory:
        out, log = Path(directory) / "out", Path(directory) / "log"
        running = Forked(path, os.environ, log, arguments=options, out=str(out), preloaded=PRELOADED)
        try:
            status = running.wait(100)
        finally:
            running.kill()
        return subprocess.CompletedProcess([path, *options], status, out.read_text(), log.read_text())


@contextmanager
def shared(name: str) -> Iterator[str]:
    """Yield the URL of a server with somebody else's buffer of this name. Nothing may change it, or stay beside it."""
    with serving() as url, Client(url) as server:
        server.buffers[name].create(3)
        yield url
        assert [(one.name, one.version) for one in server.buffers.list()] == [(name, 0)]
