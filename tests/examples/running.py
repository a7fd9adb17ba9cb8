"""Examples run as users run them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradserve_client import Client

from tests.serving import serving

ROOT = Path(__file__).parents[2]


def run(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", f"examples/{example}.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@contextmanager
def shared(name: str) -> Iterator[str]:
    """Yield the URL of a server with somebody else's buffer of this name. Nothing may change it, or stay beside it."""
    with serving() as url, Client(url) as server:
        server.buffers[name].create(3)
        yield url
        assert [(one.name, one.version) for one in server.buffers.list()] == [(name, 0)]
